"""Standard errors by documents: the formula term by term, resampled documents, and what cannot be told."""

import numpy as np
import pandas as pd
import pytest

from analyses import uncertainty
from normgeo import ScalarStore
from normgeo.angles.runs import RunConfig, start_run
from normgeo.errors import DataError, RunError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("uncertainty") / "run"
    config = RunConfig(("embedded-layernorm",), tokens=30_000, context=64, null=0, sites="attention", keep="scalars")
    start_run(config, out, progress=False)
    return out


@pytest.fixture(scope="module")
def frame(run):
    return uncertainty.compute(run)


def angles_of(run, row):
    store = ScalarStore(run / "scalars.zarr/embedded-layernorm")
    return store.angles(row.site, row.phase, row.direction).astype(float), np.asarray(store.document)


def test_both_errors_are_those_of_the_formula(run, frame):
    assert len(frame) == 6 * 2 * 3
    for row in frame.iloc[::7].itertuples():
        angles, documents = angles_of(run, row)
        mean, squares = angles.sum() / len(angles), 0.0
        for document in set(documents):
            squares += sum(angle - mean for angle in angles[documents == document]) ** 2
        d = len(set(documents))
        assert (row.n_documents, row.n_tokens) == (d, 30_000)
        assert d >= 5
        assert row.mean_deg == pytest.approx(mean)
        assert row.se_deg == pytest.approx(np.sqrt(d / (d - 1) * squares) / len(angles), rel=1e-9)
        assert row.se_tokens_deg == pytest.approx(np.std(angles, ddof=1) / np.sqrt(len(angles)), rel=1e-9)


def test_resampled_documents_have_means_that_far_apart(run, frame):
    row = frame[(frame.direction == "uniform") & (frame.phase == "pre")].iloc[3]
    angles, documents = angles_of(run, row)
    sums, counts = (np.bincount(documents, weights) for weights in (angles, np.ones_like(angles)))
    drawn = np.random.default_rng(0).integers(len(sums), size=(4000, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    assert row.se_deg == pytest.approx(means.std(), rel=0.25)  # with so few documents they differ by that much
    assert row.se_deg > 3 * row.se_tokens_deg


def test_angles_that_do_not_depend_on_their_document_are_known_as_well_as_if_drawn_apart():
    class Store:
        document = np.repeat(np.arange(400), 50)

        def angles(self, site, phase, direction):
            return np.random.default_rng(1).normal(90, 2, 2 * len(self.document)).astype(np.float32)  # of two heads

        def norms(self, site, phase):
            return np.ones(2 * len(self.document), np.float32)

    row = next(uncertainty._rows(Store(), "site"))
    assert row["se_deg"] == pytest.approx(row["se_tokens_deg"], rel=0.1)
    assert (row["n_documents"], row["n_tokens"]) == (400, 40_000)


def test_what_cannot_be_told_is_refused(tmp_path):
    config = RunConfig(("embedded-layernorm",), tokens=300, context=64, null=0, keep="scalars")
    start_run(config, tmp_path / "one", progress=False)
    with pytest.raises(DataError, match="300 tokens are of one document, which tells nothing of how documents differ"):
        uncertainty.compute(tmp_path / "one")
    with pytest.raises(DataError, match="has its own tokens"):
        uncertainty.compute(tmp_path / "one", n_tokens=5)
    start_run(RunConfig(("embedded-layernorm",), tokens=300, null=0, keep="none"), tmp_path / "none", progress=False)
    with pytest.raises(RunError, match="kept no scalars"):
        uncertainty.compute(tmp_path / "none")


def test_every_error_is_drawn_in_its_row(frame):
    axes = uncertainty.plot(frame).axes
    for panel, phase in zip(axes, ("pre", "post"), strict=True):
        rows = frame[(frame.phase == phase) & (frame.direction == "uniform")]
        for line, column in zip(panel.lines, uncertainty.LABELS, strict=True):
            assert line.get_label() == uncertainty.LABELS[column]
            assert line.get_ydata() == pytest.approx(rows[column].to_numpy())
        shown = panel.get_ylim()
        errors = rows[list(uncertainty.LABELS)]
        assert panel.get_yscale() == "log"  # of models whose errors are far from each other all are seen
        assert shown[0] < errors.min().min() < errors.max().max() < shown[1]
    assert axes[0].get_title().endswith(f"\n{frame.n_documents.min()} documents")


def test_panels_of_two_models_show_all_of_both(frame):
    other = frame.assign(model="other", se_deg=10 * frame.se_deg)
    figure = uncertainty.plot(pd.concat([frame, other]))
    assert figure.axes[0].get_ylim()[1] > other[(other.phase == "pre") & (other.direction == "uniform")].se_deg.max()
