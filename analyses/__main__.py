"""Run an analysis: `python -m analyses NAME [--run DIR ...] [--out DIR]`; without a name, list them."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import analyses
from normgeo.errors import DataError, NormGeoError, RunError
from normgeo.system.files import check_folder

if TYPE_CHECKING:
    import pandas as pd

FLAGS = {"run": "--run", "n_tokens": "--tokens"}


def names() -> list[str]:
    """The analyses there are: the public modules of this package."""
    return [m.name for m in pkgutil.iter_modules(analyses.__path__) if not m.name.startswith("_")]


def title(name: str) -> str:
    """What an analysis is of: its module's first line, read and not imported, which would load torch and the rest."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run(name: str, options: dict[str, object], out: Path) -> None:
    """Compute an analysis, write NAME.parquet, NAME.png and NAME.svg (NAME.md where it has one), print the first rows.

    Raises:
        DataError: there is no such analysis, or it does not take an option that was given.
        RunError: nothing can be written to `out`.
    """
    if name not in names():
        raise DataError(f"no analysis {name!r}; there are {', '.join(names())}")
    module = importlib.import_module(f"analyses.{name}")
    if unknown := options.keys() - inspect.signature(module.compute).parameters.keys():
        raise DataError(f"{name} does not depend on {', '.join(FLAGS[o] for o in sorted(unknown))}; leave it out")
    check_folder(out)
    import transformers  # by now the analysis has

    transformers.utils.logging.set_verbosity_error()  # the terminal is for the result and for one line of error
    transformers.utils.logging.disable_progress_bar()
    frame = module.compute(**options)
    print(frame.head(12).to_string(index=False, max_cols=12, float_format="{:.4g}".format))
    try:
        _write(name, module, frame, out)
    except OSError as error:
        raise RunError(f"cannot write {out / name}.*: {error.strerror or error}; give another --out") from error
    print(f"{len(frame)} rows; {out / name}.parquet, .png, .svg")


def _write(name: str, module: ModuleType, frame: pd.DataFrame, out: Path) -> None:
    """Put an analysis's files into place once all of them are made: a table beside another's figure would mislead."""
    from normgeo import figures

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as scratch:
        stem = Path(scratch) / name
        frame.to_parquet(stem.with_suffix(".parquet"), index=False)
        figures.save(module.plot(frame), stem)
        if hasattr(module, "markdown"):
            stem.with_suffix(".md").write_text(module.markdown(frame))
        for file in Path(scratch).iterdir():
            file.replace(out / file.name)


def together(runs: list[Path], folder: Path) -> Path:
    """One directory with the tables, and links to the scalars, of several finished runs of `normgeo angles`.

    Of one run it is its own.

    Raises:
        DataError: one is no finished run, or two are of models of one name.
    """
    from normgeo.angles.measure import AngleTable

    if len(runs) == 1:
        return runs[0]
    AngleTable.concatenated([AngleTable.load(run) for run in runs]).save(folder)
    if all((run / "scalars.zarr").is_dir() for run in runs):
        (folder / "scalars.zarr").mkdir()
        for model in [path for run in runs for path in (run / "scalars.zarr").iterdir() if path.is_dir()]:
            (folder / "scalars.zarr" / model.name).symlink_to(model.resolve(), target_is_directory=True)
    return folder


def main() -> int:
    """The command line; an error that normgeo raises on purpose is one line, and the exit status is 1."""
    parser = argparse.ArgumentParser(prog="python -m analyses", description=__doc__)
    parser.add_argument("name", nargs="?", help="the analysis; without it, list them")
    parser.add_argument(
        "--run", type=Path, action="append",
        help="a finished run of `normgeo angles`; of several their models side by side [default: the embedded pair]",
    )  # fmt: skip
    parser.add_argument("--tokens", dest="n_tokens", type=int, help="tokens to measure without --run [default: all]")
    parser.add_argument("--out", type=Path, default=Path("runs/analyses"), help="where to write [default: %(default)s]")
    given = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    name, out = given.pop("name", None), given.pop("out")
    try:
        if name is None:
            width = max(map(len, names()))
            for each in names():
                print(f"{each:{width}}  {title(each)}")
        else:
            with tempfile.TemporaryDirectory() as folder:
                if "run" in given:
                    given["run"] = together(given["run"], Path(folder))
                run(name, given, out)
        sys.stdout.flush()
    except BrokenPipeError:  # as `head` leaves it; what Python flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NormGeoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
