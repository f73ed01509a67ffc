"""Angles: from a model and tokens to a tidy table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from normgeo import figures
from normgeo.angles.statistics import BIN_DEGREES, ENERGY_UNIT, GROUPS, PHASES, UNIT, AngleStatistics
from normgeo.angles.verdict import summary, verdict
from normgeo.errors import ActivationError, DataError
from normgeo.geometry import NAMES, Directions
from normgeo.models import memory_explained, on_cpu
from normgeo.numbers import check_numbers
from normgeo.rows import with_rest
from normgeo.sites import NormSite, sites_of
from normgeo.stream import check_context, check_pass, check_sites, stream
from normgeo.system.files import check_folder, read_table, unwritable, write_whole
from normgeo.system.progress import progress_bar
from normgeo.tokens import TokenBatch, TokenStream, load_tokens
from normgeo.wrapping import called

__all__ = ["AngleTable", "check_seen", "directions_of", "measure_angles", "new_statistics"]

QUANTILES = {"q01": 0.01, "q05": 0.05, "q25": 0.25, "median_deg": 0.5, "q75": 0.75, "q95": 0.95, "q99": 0.99}


class AngleTable:
    """The tidy result of a measurement: a thin wrapper of two pandas DataFrames.

    Attributes:
        frame: one row per (model, site, layer, role, phase, direction). Angles are in degrees over tokens, except in
            the rows with direction `null`, whose distribution is that of the mean angles of the K random directions
            (`within_deg` is the spread over tokens, pooled over directions). `energy_share` is the mean of
            cos^2(theta), `mean_norm` the mean of |x|. The uniform rows carry `null_percentile` and `null_z`: where
            their mean angle lies among those of the random directions on the same tokens, and `energy_percentile`:
            the same for the energy share. The standardized uniform rows carry the rotation between the site's input
            and its standardized output.
        sinks: the same statistics, without quantiles, apart for the first token of every context (`first`), BOS
            tokens elsewhere (`bos`) and all others (`rest`), in the column `tokens`.
    """

    def __init__(self, frame: pd.DataFrame, sinks: pd.DataFrame | None = None) -> None:
        self.frame = _all_columns(frame)
        self.sinks = pd.DataFrame() if sinks is None else _all_columns(sinks)

    def __repr__(self) -> str:
        rows = self.summary().to_string(index=False, float_format="{:.5g}".format)
        return f"AngleTable: angles to the uniform vector, means over sites (all are in .frame)\n{rows}"

    def _repr_html_(self) -> str:
        return self.summary().to_html(index=False, float_format="{:.5g}".format)

    def summary(self) -> pd.DataFrame:
        """The angles to the uniform vector, a row per model, role and kind of norm; see `verdict.summary`."""
        return summary(self.frame)

    def plot(self, kind: str = "angles", model: str | None = None) -> matplotlib.figure.Figure:
        """A figure: `angles` (of one model), `energy`, `norms` or `rotation`.

        Raises:
            DataError: there is no such figure or model, or nothing to draw it of; or several steps of training.
        """
        return figures.draw(with_rest(self.frame, self.sinks), kind, model)

    def verdict(self) -> str:
        """What the numbers say of *Geometry*'s two scenarios, in Markdown.

        Raises:
            DataError: there are several steps of training, or no angles to the uniform vector before or after norms.
        """
        return verdict(self.frame, self.sinks)

    def save(self, folder: str | Path) -> None:
        """Write `angles.parquet` and `sinks.parquet` to a directory, which is made where there is none; each whole.

        Raises:
            RunError: it cannot be written.
        """
        check_folder(folder := Path(folder))
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in (("angles", self.frame), ("sinks", self.sinks)):
            path = folder / f"{name}.parquet"
            try:
                write_whole(path, frame.to_parquet(None, index=False))
            except IsADirectoryError as error:  # of a full disk whoever knows how to go on tells
                raise unwritable(path, error, "directory") from error

    @classmethod
    def load(cls, folder: str | Path) -> AngleTable:
        """Read what `save` wrote.

        Raises:
            DataError: it is not there.
            RunError: it is damaged.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"there is no directory {folder}; give that of a finished run")
        for name in ("angles.parquet", "sinks.parquet"):
            if not (folder / name).is_file():
                raise DataError(f"{folder} holds no {name}; give the directory of a finished run of one step")
        frame, sinks = (read_table(folder / f"{name}.parquet") for name in ("angles", "sinks"))
        return cls(frame, sinks)

    @classmethod
    def concatenated(cls, tables: Sequence[AngleTable]) -> AngleTable:
        """The rows of several tables, in order.

        Raises:
            DataError: there is none, or two have a model of one name, whose rows could not be told apart.
        """
        if not tables:
            raise DataError("there are no tables to put together")
        names = [name for table in tables for name in table.frame.model.unique()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"two tables are of a model called {twice[0]!r}; measure with name=... to tell them apart")
        return cls(
            pd.concat([t.frame for t in tables], ignore_index=True),
            pd.concat([t.sinks for t in tables], ignore_index=True),
        )

    @classmethod
    def from_statistics(cls, statistics: AngleStatistics, model: str) -> AngleTable:
        """The table of what an `AngleStatistics` has accumulated.

        Raises:
            ActivationError: a site has seen no vector with an angle.
        """
        check_seen(statistics)
        state = {name: value.numpy() for name, value in statistics.totals().items()}
        everything, groups = _moments(state, whole=True), _moments(state, whole=False)
        null, against = _null_moments(state)
        rows, sinks = [], []
        for i, site in enumerate(statistics.sites):
            about = {"model": model, "site": site.key, "layer": site.layer, "role": site.role, "kind": site.kind,
                     "stack": site.stack, "d": site.d, "heads": site.heads, "eps": site.eps,
                     "dtype": site.dtype}  # fmt: skip
            for p, phase in enumerate(PHASES):
                key = about | {"phase": phase}
                rows += [key | row for row in _named_rows(state, everything, against, i, p)]
                if statistics.k:
                    others = {column: everything[column][0, i, p, 0] for column in ("mean_norm", "n_excluded")}
                    values = {column: value[i, p] for column, value in null.items()}
                    rows += [key | {"direction": "null"} | others | values | {"n_directions": statistics.k}]
                sinks += [key | row for row in _sink_rows(groups, i, p)]
        frame = pd.DataFrame(rows)
        absent = [c for c in ("within_deg", "energy_q95", "n_directions") if c not in frame]  # no null ensemble
        return cls(frame.reindex(columns=[*frame, *absent]), pd.DataFrame(sinks))


def _all_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with a plain index: columns that somebody made its index become columns again."""
    named = [name for name in frame.index.names if name is not None]
    hidden = [name for name in named if name not in frame]
    return frame.reset_index(hidden).reset_index(drop=True) if named else frame


def check_seen(statistics: AngleStatistics) -> None:
    """Refuse a site at which no vector had an angle.

    Raises:
        ActivationError: there is one.
    """
    seen, excluded = (value.sum(0).tolist() for value in statistics.totals("count", "excluded").values())
    for site, counts, others in zip(statistics.sites, seen, excluded, strict=True):
        for phase, n, left in zip(PHASES, counts, others, strict=True):
            if not n:
                raise ActivationError(
                    f"no vector at {site.key} ({phase}) has an angle: all {left:.0f} are zero or not finite. Are the "
                    "model's weights finite, and do its numbers fit its dtype? --dtype float32 has the most room; a "
                    "norm that only ever sees zeros can be left out by --sites (sites=)"
                )


def _moments(state: dict[str, np.ndarray], whole: bool) -> dict[str, np.ndarray]:
    """Mean, spread and extremes of the angles to the named directions, [groups of tokens, sites, phases, directions].

    Args:
        state: of the statistics.
        whole: of all tokens, as one group; else of each group, NaN where a group is empty.
    """
    gather = (lambda a, f=np.sum: f(a, axis=0, keepdims=True)) if whole else (lambda a, f=np.sum: a)
    shape = gather(state["deviation"]).shape
    count, excluded, norm = (
        np.broadcast_to(gather(state[name])[..., None], shape) for name in ("count", "excluded", "norm")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, square = (gather(state[name]) / UNIT / count for name in ("deviation", "square"))
        least, most = gather(state["least"], np.min), gather(state["most"], np.max)
        variance = np.where(least == most, 0.0, square - mean * mean)  # of one angle it would be rounding
        return {
            "mean_deg": 90 - mean,
            "std_deg": np.sqrt(np.maximum(0.0, variance)),
            "min_deg": 90 - most / UNIT,
            "max_deg": 90 - least / UNIT,
            "n_tokens": count.astype(np.int64),
            "n_excluded": excluded.astype(np.int64),
            "mean_norm": norm / UNIT / count,
            "energy_share": gather(state["energy"]) / ENERGY_UNIT / count,
        }


def _named_rows(
    state: dict[str, np.ndarray], moments: dict[str, np.ndarray], against: dict[str, np.ndarray], i: int, p: int
) -> Iterator[dict[str, Any]]:
    for k, name in enumerate(NAMES):
        row = {"direction": name} | {column: value[0, i, p, k] for column, value in moments.items()}
        row |= _quantiles(state["histogram"][i, p, k], float(row["min_deg"]), float(row["max_deg"]))
        if name == "uniform":
            row |= {column: value[i, p] for column, value in against.items()}
            if PHASES[p] == "standardized":
                n = state["count"][:, i, 0].sum()  # vectors of equal components count, turned by 90 degrees
                mean = state["rotation"][:, i].sum() / UNIT / n
                square = state["rotation_square"][:, i].sum() / UNIT / n
                spread = moments["std_deg"][0, i, 0, k] > 0  # of one angle to û, from which it is computed, it has none
                variance = square - mean * mean if spread else 0.0
                row |= {"rotation_deg": mean, "rotation_std_deg": float(np.sqrt(max(0.0, variance)))}
        yield row


def _quantiles(histogram: np.ndarray, least: float, most: float) -> dict[str, float]:
    """Quantiles of a histogram of degrees, linear within a bin, never outside the extremes seen."""
    total = np.concatenate([[0], np.cumsum(histogram)])
    target = np.array([*QUANTILES.values()]) * total[-1]
    j = np.maximum(np.searchsorted(total, target, side="left"), 1)
    inside = (target - total[j - 1]) / np.maximum(1, total[j] - total[j - 1])
    degrees = np.clip((j - 1 + inside) * BIN_DEGREES, least, most)
    return dict(zip(QUANTILES, degrees.tolist(), strict=True))


def _null_moments(state: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The moments of the random directions, and the uniform vector's place among them, [sites, phases].

    Both are over the same tokens. They are NaN where no token was chosen, since few came, and of too few directions.
    """
    count = state["null_count"]
    if not state["null_deviation"].shape[-1] > 1:
        return {}, {name: np.full(count.shape, np.nan) for name in ("null_percentile", "null_z", "energy_percentile")}
    n = np.where(count, count, np.nan)[..., None]
    deviation, energy = state["null_deviation"] / UNIT / n, state["null_energy"] / ENERGY_UNIT / n
    (first, means), (own, others) = ((a[..., 0], a[..., 1:]) for a in (90 - deviation, energy))
    within = (state["null_square"] / UNIT / n - deviation**2)[..., 1:].mean(-1)
    middle, spread = means.mean(-1), means.std(-1, ddof=min(1, means.shape[-1] - 1))
    null = {
        "mean_deg": middle,
        "std_deg": spread,
        "min_deg": means.min(-1),
        "max_deg": means.max(-1),
        "within_deg": np.sqrt(np.maximum(0.0, within)),
        "n_tokens": count.astype(np.int64),
        "energy_share": others.mean(-1),
        "energy_q95": np.quantile(others, 0.95, axis=-1),
    } | dict(zip(QUANTILES, np.quantile(means, [*QUANTILES.values()], axis=-1), strict=True))
    below = (means < first[..., None]).mean(-1) + 0.5 * (means == first[..., None]).mean(-1)
    known = (count > 0) & (means.shape[-1] > 1)
    against = {
        "null_percentile": np.where(known, 100 * below, np.nan),
        "null_z": np.divide(first - middle, spread, out=np.full_like(spread, np.nan), where=known & (spread > 0)),
        "energy_percentile": np.where(known, 100 * (others < own[..., None]).mean(-1), np.nan),
    }
    return null, against


def _sink_rows(moments: dict[str, np.ndarray], i: int, p: int) -> Iterator[dict[str, Any]]:
    for g, group in enumerate(GROUPS):
        if moments["n_tokens"][g, i, p, 0]:
            for k, name in enumerate(NAMES):
                yield {"direction": name, "tokens": group} | {
                    column: value[g, i, p, k] for column, value in moments.items()
                }


@on_cpu
def new_statistics(
    model: PreTrainedModel,
    sites: Sequence[NormSite],
    *,
    null: int,
    seed: int,
    null_every: int,
    bos: int | None,
) -> AngleStatistics:
    """Empty statistics for these sites of a model, with the directions of a seed.

    Raises:
        DataError: there are no sites, or not the model's, a number is too small, or `bos` is no token id.
    """
    if not sites:
        raise DataError("there are no sites to measure at; norms on heads are found with --qk (qk=True)")
    check_sites(model, sites)
    check_numbers(null=null, null_every=null_every, seed=seed)
    if bos is not None and not isinstance(bos, Integral):
        raise DataError(f"bos is one token id, received {bos!r}; give the one that begins a document")
    directions = directions_of(sites, null, seed)
    return AngleStatistics(sites, directions, device=model.device, bos=bos, null_every=null_every)


def directions_of(sites: Iterable[NormSite], null: int, seed: int) -> dict[int, Directions]:
    """The directions of a seed, for every width that these sites have.

    Raises:
        ModelError: so many do not fit into memory.
    """
    with memory_explained(f"an ensemble of {null:,} random directions", "give a smaller --null", counted=True):
        return {d: Directions.seeded(d, null, seed) for d in sorted({site.d for site in sites})}


@on_cpu
def measure_angles(
    model: PreTrainedModel,
    tokens: TokenStream | Any,
    *,
    n_tokens: int | None = None,
    batch: int = 8,
    null: int = 256,
    null_every: int = 16,
    seed: int = 0,
    sites: str | Sequence[NormSite] | None = None,
    qk: bool = False,
    bos: int | None = None,
    name: str | None = None,
    progress: bool = True,
    on_batch: Callable[[TokenBatch], None] = lambda batch: None,
) -> AngleTable:
    """Measure the angles at every norm of a model, before and after it.

    Args:
        model: any transformers model that takes token ids.
        tokens: a stream, or an array of token ids whose rows are sequences.
        n_tokens: exactly so many tokens; None takes all.
        batch: contexts that go through the model together.
        null: number of random directions in the null ensemble.
        null_every: the null ensemble meets about one token in so many (1: all of them).
        seed: of the random directions.
        sites: roles or patterns of names, comma-separated (`mlp`, `*ln_1`), or sites from `find_sites`; None is every
            site.
        qk: also the norms on the heads of queries and keys, where `sites` are not given themselves.
        bos: token id reported apart as BOS; None is the model configuration's.
        name: the model's name in the table.
        progress: show a progress bar.
        on_batch: called after every batch.

    Raises:
        DataError: ids beyond the vocabulary, contexts too long for the model, too few tokens, sites of another model,
            a number out of range, or a name that is no string.
        ActivationError: hidden states without an angle.
        ModelError: what is no model of transformers, takes no tokens or has no norms.

    >>> from normgeo import load_model, load_tokenizer, load_tokens, measure_angles
    >>> tokenizer = load_tokenizer("embedded-layernorm")
    >>> tokens = load_tokens("sample", tokenizer, context=64)
    >>> table = measure_angles(load_model("embedded-layernorm"), tokens, n_tokens=500, progress=False)
    >>> int(table.frame.n_tokens.max())
    500
    """
    check_numbers(tokens=n_tokens, batch=batch)
    if name is not None and not isinstance(name, str):
        raise DataError(f"name is what the table calls the model, a string; received {name!r}")
    source = tokens if isinstance(tokens, TokenStream) else load_tokens(tokens)
    check_context(model, source.context)
    chosen = sites_of(model, sites, qk=qk)
    for length in source.lengths(n_tokens):
        check_pass(model, chosen, length)
    bos = getattr(model.config.get_text_config(), "bos_token_id", None) if bos is None else bos
    statistics = new_statistics(model, chosen, null=null, seed=seed, null_every=null_every, bos=bos)
    batches = source.batches(n_tokens, batch)
    with progress_bar("measuring", n_tokens or source.n_tokens or 0, enabled=progress) as advance:
        for done in stream(model, chosen, batches, [statistics]):
            advance(done.n_tokens)
            on_batch(done)
    return AngleTable.from_statistics(statistics, name or called(model))
