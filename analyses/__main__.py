"""Run an analysis: `python -m analyses NAME [--run DIR | --model MODEL ...] [--out DIR]`; without a name, list them."""

from __future__ import annotations

import argparse
import ast
import atexit
import gc
import importlib
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import analyses
from normgeo.errors import DataError, NormGeoError, RunError
from normgeo.system.files import check_folder
from normgeo.system.progress import plain, printing

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 60
"""Characters of a run's directory that tell it apart."""

FLAGS = {
    "run": "--run", "model": "--model", "models": "--model", "data": "--data", "n_tokens": "--tokens",
    "context": "--context",
}  # fmt: skip
"""What the command line gives of the arguments of `compute`; `--model` is for one that takes one, or several."""


def names() -> list[str]:
    """The analyses there are: the public modules of this package."""
    return [m.name for m in pkgutil.iter_modules(analyses.__path__) if not m.name.startswith("_")]


def title(name: str) -> str:
    """What an analysis is of: its module's first line."""
    return (ast.get_docstring(_read(name)) or "").partition("\n")[0]


def options_of(name: str) -> dict[str, str]:
    """The options that an analysis depends on, and what its `compute` says of them."""
    code = next(node for node in _read(name).body if isinstance(node, ast.FunctionDef) and node.name == "compute")
    said = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", ast.get_docstring(code) or "", re.MULTILINE)
    said = {option: re.sub(r"; None is (.*)\.$", r" [default: \1]", " ".join(text.split())) for option, text in said}
    return {a.arg: said.get(a.arg, "") for a in (*code.args.args, *code.args.kwonlyargs) if a.arg in FLAGS}


def _read(name: str) -> ast.Module:
    """An analysis's code, which is not imported: that would load torch and the rest."""
    return ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))


def check(name: str, options: dict[str, Any]) -> None:
    """Refuse what is no analysis, an option that it does not depend on, and several of what it takes one of.

    Raises:
        DataError: that.
    """
    if name not in names():
        raise DataError(f"no analysis {name!r}; there are {', '.join(names())}")
    known = options_of(name)
    if unknown := {FLAGS[o] for o in options} - {FLAGS[o] for o in known}:
        of_angles = known.get("run") == ""  # others say of what their runs are
        hint = "measure it with `normgeo angles MODEL --out DIR`, and give --run DIR" if of_angles else "leave it out"
        raise DataError(f"{name} does not depend on {', '.join(sorted(unknown))}; {hint}")
    if len(runs := options.get("run", ())) > 1 and (kind := known["run"]):
        raise DataError(f"{name} takes one --run, {kind.partition(' [')[0]}; received {len(runs)}")
    if len(models := options.get("models", ())) > 1 and "model" in known:
        raise DataError(f"{name} takes one --model; received {len(models)}")


def run(name: str, options: dict[str, object], out: Path) -> None:
    """Compute an analysis, write NAME.parquet, NAME.png and NAME.svg (NAME.md where it has one), print the first rows.

    Raises:
        RunError: nothing can be written to `out`.
    """
    check_folder(out)
    module = importlib.import_module(f"analyses.{name}")
    import transformers  # by now the analysis has

    transformers.utils.logging.set_verbosity_error()  # the terminal is for the result and for one line of error
    transformers.utils.logging.disable_progress_bar()
    frame = module.compute(**options)
    try:
        _write(name, module, frame, out)
    except OSError as error:
        raise RunError(f"cannot write {out / name}.*: {error.strerror or error}; give another --out") from error
    finally:
        with printing():
            print(plain(shown(frame)))
    with printing():
        print(f"{len(frame)} rows; {out / name}.parquet, .png, .svg")


def shown(frame: pd.DataFrame, rows: int = 12) -> str:
    """The first rows as text, with every column: what is the same in all rows is said once, above."""
    width = shutil.get_terminal_size((120, 24)).columns
    same = [c for c in frame if len(frame) > 1 and frame[c].map(repr).nunique() == 1]
    said = ", ".join(f"{c} {_number(frame[c].iloc[0])}" for c in same if not frame[c].isna().all())
    head = textwrap.fill(f"In all rows: {said}", width) + "\n" if said else ""
    table = (frame.drop(columns=same) if len(same) < frame.shape[1] else frame).head(rows)
    whole: dict[Any, Any] = dict.fromkeys(table.select_dtypes("integer"), _number)
    return head + table.to_string(index=False, line_width=width, float_format=_number, formatters=whole)


def _number(value: object) -> str:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def _told_apart(runs: list[Path]) -> list[str]:
    """What directories are called: by their names, or else paths; by the parts that differ where long ones end alike.

    Where even these are alike once they are cut, each is numbered as it was given.
    """
    from normgeo.angles.runs import safe_name

    short = lambda text: text if len(text) < LONGEST else f"...{text[-LONGEST:]}"  # noqa: E731
    names = Counter(run.resolve().name for run in runs)
    called = [short(run.resolve().name if names[run.resolve().name] == 1 else str(run)) for run in runs]
    for label in [label for label, n in Counter(called).items() if n > 1]:
        alike = [i for i, other in enumerate(called) if other == label]
        parts = [runs[i].absolute().parts for i in alike]
        for end, rest in ((0, slice(1, None)), (-1, slice(-1))):
            while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
                parts = [part[rest] for part in parts]
        for i, part in zip(alike, parts, strict=True):
            called[i] = short("/".join(part))
    n = Counter(map(safe_name, called))
    return [f"{label}, run {i}" if n[safe_name(label)] > 1 else label for i, label in enumerate(called, start=1)]


def together(runs: list[Path], folder: Path) -> Path:
    """One directory with the tables, and links to the scalars, of several finished runs of `normgeo angles`.

    A model that several of them have measured is told apart by the run's directory.

    Raises:
        DataError: one is no finished run, or is given twice.
    """
    from analyses._source import finished
    from normgeo.angles.measure import AngleTable
    from normgeo.angles.runs import safe_name

    if twice := [str(run) for run, n in Counter(run.resolve() for run in runs).items() if n > 1]:
        raise DataError(f"the run {twice[0]} is given twice; give each once")
    tables = [finished(run) for run in runs]
    models = [list(map(str, table.frame.model.unique())) for table in tables]
    measured = Counter(safe_name(model) for found in models for model in found)
    renamed = []
    for run, where, table, found in zip(runs, _told_apart(runs), tables, models, strict=True):
        names = {model: f"{model} ({where})" if measured[safe_name(model)] > 1 else model for model in found}
        parts = (part.assign(model=part.model.map(names)) for part in (table.frame, table.sinks))
        renamed.append(AngleTable(*parts))
        for model, name in names.items():
            if (kept := run / "scalars.zarr" / safe_name(model)).is_dir():
                (folder / "scalars.zarr").mkdir(exist_ok=True)
                (folder / "scalars.zarr" / safe_name(name)).symlink_to(kept.resolve(), target_is_directory=True)
    AngleTable.concatenated(renamed).save(folder)
    return folder


def _parser(name: str | None, helps: bool = True) -> argparse.ArgumentParser:
    """The command line, of one analysis with what it depends on."""
    about = __doc__ if name is None else f"{name}: {title(name)}"
    parser = argparse.ArgumentParser(prog="python -m analyses", description=about, add_help=helps)
    parser.add_argument("name", nargs="?", help="the analysis; without it, list them")
    said = {
        "run": "a finished run of `normgeo angles`; of several their models side by side [default: the embedded pair]",
        "models": "a model: a hub id or a directory, for analyses that take one",
        "data": "what `normgeo angles` takes [default: sample]",
        "n_tokens": "tokens to measure without --run [default: all]",
        "context": "tokens that a model sees together [default: up to 256]",
    }
    known = {FLAGS[k]: text for k, text in ({} if name is None else options_of(name)).items()}
    depends = said if name is None else {k: known[FLAGS[k]] or text for k, text in said.items() if FLAGS[k] in known}
    if "run" not in depends and "n_tokens" in depends:
        depends["n_tokens"] = depends["n_tokens"].replace(" without --run", "")
    told = {option: depends.get(option, argparse.SUPPRESS) for option in said}  # given all the same it is refused
    parser.add_argument("--run", type=Path, action="append", metavar="PATH", help=told["run"])
    parser.add_argument("--model", action="append", dest="models", metavar="MODEL", help=told["models"])
    parser.add_argument("--data", metavar="DATA", help=told["data"])
    parser.add_argument("--tokens", type=int, dest="n_tokens", metavar="N", help=told["n_tokens"])
    parser.add_argument("--context", type=int, metavar="N", help=told["context"])
    parser.add_argument("--out", type=Path, default=Path("runs/analyses"), help="where to write [default: %(default)s]")
    return parser


def main() -> int:
    """The command line; an error that normgeo raises on purpose is one line, and the exit status is 1."""
    named = _parser(None, helps=False).parse_known_args()[0].name
    given = {k: v for k, v in vars(_parser(named if named in names() else None).parse_args()).items() if v is not None}
    name, out = given.pop("name", None), given.pop("out")
    try:
        if name is None:
            width = max(map(len, names()))
            with printing():
                for each in names():
                    print(f"{each:{width}}  {title(each)}")
        else:
            with tempfile.TemporaryDirectory() as folder:
                check(name, given)
                if "model" in options_of(name) and "models" in given:
                    (given["model"],) = given.pop("models")
                if runs := given.get("run"):
                    given["run"] = together(runs, Path(folder)) if len(runs) > 1 else runs[0]
                run(name, given, out)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as `head` leaves it; what Python flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NormGeoError as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    atexit.register(gc.freeze)  # to look for garbage in all that is imported takes a second
    sys.exit(main())
