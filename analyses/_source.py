"""Where the numbers come from: a finished run or benchmark, or else the embedded pair, or a kept benchmark."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype
from transformers import PreTrainedModel

from normgeo import rows
from normgeo.angles.measure import AngleTable, measure_angles
from normgeo.angles.runs import RunConfig, safe_name, start_run
from normgeo.angles.scalars import ScalarStore
from normgeo.cards import EMBEDDED
from normgeo.errors import DataError, RunError
from normgeo.examples import max_context
from normgeo.loading import label_of, load_model, load_tokenizer
from normgeo.sites import NormSite
from normgeo.stream import check_context
from normgeo.system.files import read_table
from normgeo.tokens import TokenStream, holds_ids, load_tokens

ScalarStores = dict[str, ScalarStore]

KEPT = Path(__file__).parent / "data"
CONTEXT = 256
"""The context that the embedded pair was trained with."""


COMMON = ("model", "site", "layer", "role", "kind", "stack", "phase", "direction", "mean_deg", "std_deg", "mean_norm",
          "energy_share", "n_tokens")  # fmt: skip
COLUMNS = {
    "angles": (*COMMON, "d", "min_deg", "max_deg", "q05", "q95", "null_z", "null_percentile", "energy_percentile",
               "energy_q95", "n_directions", "rotation_deg", "rotation_std_deg"),
    "sinks": (*COMMON, "tokens"),
}  # fmt: skip
"""What analyses read of a run's tables."""

WORDS = {"model", "site", "role", "kind", "stack", "phase", "direction", "tokens"}
"""Of these what are no numbers."""

KEYS = ["model", "site", "phase", "direction"]
"""What tells rows apart, those of sinks by their tokens as well."""


def finished(run: Path) -> AngleTable:
    """The table of a finished run of `normgeo angles`.

    Raises:
        DataError: the directory holds none, or one without angles to the uniform vector or columns that analyses read,
            or with words for numbers, or with more than one row of the same.
        RunError: it is damaged.
    """
    found, hint = AngleTable.load(run), "give the directory of a finished run of `normgeo angles`"
    for name, frame in (("angles", found.frame), ("sinks", found.sinks)):
        absent = [column for column in COLUMNS[name] if column not in frame]
        if absent and not frame.empty:
            raise DataError(f"{run / name}.parquet has no column {', '.join(absent)}; {hint}, or measure again")
        words = [c for c in COLUMNS[name] if c in frame and c not in WORDS and not is_numeric_dtype(frame[c])]
        if words and not frame.empty:
            raise DataError(f"{run / name}.parquet holds no numbers in {', '.join(words)}; {hint}")
        if frame.duplicated([*KEYS, *(["tokens"] if name == "sinks" else [])]).any():
            raise DataError(f"{run / name}.parquet holds more than one row of a site, phase and direction; {hint}")
    if found.frame.empty or not found.frame.direction.eq("uniform").any():
        raise DataError(f"{run / 'angles.parquet'} has no angles to the uniform vector; {hint}")
    return found


def table(run: Path | None = None, n_tokens: int | None = None) -> AngleTable:
    """The table of a finished run of `normgeo angles`; without one, the embedded pair is measured.

    Args:
        run: the run's directory.
        n_tokens: tokens of the embedded sample to measure; None is all of them. A run has its own number.

    Raises:
        DataError: the directory holds no finished run, or it is asked for a number of tokens.
    """
    if n_tokens is not None and n_tokens < 1:
        raise DataError(f"a number of tokens is at least 1; received {n_tokens}")
    if n_tokens is not None and run is not None:
        raise DataError(f"{run} has its own tokens; leave out the number of tokens")
    if run is not None:
        return finished(run)
    tables = []
    for name in EMBEDDED:
        tokens = load_tokens("sample", load_tokenizer(name), context=CONTEXT)
        tables.append(measure_angles(load_model(name), tokens, n_tokens=n_tokens, name=name, progress=False))
    return AngleTable.concatenated(tables)


Named = str | Path | PreTrainedModel
"""A model: what `load_model` takes, or itself."""


def opened(model: Named, data: Any = "sample", context: int | None = None) -> tuple[str, PreTrainedModel, TokenStream]:
    """What a model is called, itself, and the tokens that it is to be given.

    Args:
        model: a model, or the name or directory of one.
        data: what `load_tokens` takes; for a model itself, which brings no tokenizer, token ids.
        context: tokens that it sees together; None is up to 256.

    Raises:
        NormGeoError: whatever is wrong with them.
    """
    if isinstance(model, PreTrainedModel):
        name, loaded, tokenizer = type(model).__name__, model, None
    else:
        name, loaded = label_of(str(model)), load_model(model)
        tokenizer = None if holds_ids(data) else load_tokenizer(model)
    context = min(CONTEXT, max_context(loaded) or CONTEXT) if context is None else context
    check_context(loaded, context)
    return name, loaded, load_tokens(data, tokenizer, context)


def each_opened(
    models: Sequence[Named], data: Any, context: int | None
) -> Iterator[tuple[str, PreTrainedModel, TokenStream]]:
    """`opened` for one model after the other.

    Raises:
        NormGeoError: whatever is wrong with them, or two are called alike, whose rows could not be told apart.
    """
    called: set[str] = set()
    for model in models:
        name, loaded, tokens = opened(model, data, context)
        if name in called:
            raise DataError(
                f"two of the models would be called {name!r}; give each once, or rename the directory of one"
            )
        called.add(name)
        yield name, loaded, tokens


def on_stream(model: PreTrainedModel, tokens: TokenStream, sites: Sequence[NormSite]) -> set[str]:
    """Keys of the norms that read the residual stream; of norms behind branches only numbers tell, of one context."""
    frame = pd.DataFrame([{"model": "", "site": s.key, "role": s.role, "stack": s.stack} for s in sites])
    if frame.role.str.startswith("post_").any() and frame.role.eq("final").any():
        ids, _ = next(iter(tokens.contexts(0)))
        frame = measure_angles(model, ids[None], sites=sites, null=0, name="", progress=False).frame
    return set(rows.on_stream(frame).site)


@contextmanager
def scalars(run: Path | None = None, n_tokens: int | None = None) -> Iterator[tuple[pd.DataFrame, ScalarStores]]:
    """The sites of a run that kept its tokens' scalars, and each model's; without a run, of the embedded pair.

    Raises:
        RunError: the run kept no scalars.
        DataError: there is no finished run, or it is asked for a number of tokens.
    """
    if run is not None and n_tokens is not None:
        raise DataError(f"{run} has its own tokens; leave out the number of tokens")
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "run"
            start_run(RunConfig(tokens=n_tokens, keep="scalars"), run, progress=False)
        frame = finished(run).frame
        sites = frame[["model", "site", "layer", "role", "kind", "stack"]].drop_duplicates()
        paths = {name: run / "scalars.zarr" / safe_name(name) for name in map(str, sites.model.unique())}
        if without := [name for name, path in paths.items() if not path.is_dir()]:
            raise RunError(
                f"the run of {without[0]} kept no scalars; measure again, or scan its store again, with --keep scalars"
            )
        yield sites, {name: ScalarStore(path) for name, path in paths.items()}


def raw(run: Path | None, kept: str, keys: set[str], values: set[str], command: str) -> pd.DataFrame:
    """The times that a benchmark wrote.

    Args:
        run: the file; None is the kept one.
        kept: its name in `analyses/data`.
        keys: columns by which a time is told from all others.
        values: the other columns that are read.
        command: what writes such a table.

    Raises:
        DataError: the file is no such table, or an empty one, or several that were put together and are not told apart.
    """
    path = KEPT / kept if run is None else run
    try:
        frame = read_table(path) if path.is_file() else pd.DataFrame()
    except RunError:  # no parquet at all
        frame = pd.DataFrame()
    if not path.exists():
        raise DataError(f"there is no file {path}; give one that `{command} --out` wrote")
    if frame.empty or not keys | values <= set(frame):
        raise DataError(f"{path} is no table that `{command} --out` wrote")
    if frame.duplicated([*keys]).any():
        raise DataError(f"{path} holds more than one time of the same, as of two devices; give the table of each alone")
    return frame


def stacks(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each stack of layers, by what it is called: its model, and of several its own name below that.

    They have the column `depth`, too.
    """
    found, frame = {}, frame.assign(depth=depth(frame))
    for model, part in frame.groupby("model", sort=False):
        several = part["stack"].nunique() > 1
        found |= {
            f"{model}\n{stack}" if several else str(model): rows for stack, rows in part.groupby("stack", sort=False)
        }
    return found


def depth(frame: pd.DataFrame) -> pd.Series:
    """A coordinate along a stack for each row: its layer, plus a fraction for the sites behind the layer's first.

    With two norms in a layer, the first is at l and the second at l + 1/2.
    """
    sites = frame[["model", "stack", "layer", "site"]].drop_duplicates()
    layer = sites.groupby(["model", "stack", "layer"]).site
    sites["depth"] = sites.layer + layer.cumcount() / layer.transform("size")
    return frame[["model", "site"]].merge(sites, on=["model", "site"], how="left").depth.set_axis(frame.index)
