"""What runs wrote, compared to the last bit."""

import numpy as np
import pandas as pd
import safetensors.torch
import torch
import zarr

from normgeo import AngleTable


def assert_same(one, other):
    """Two runs, by their directories, wrote the same numbers: tables, scalars and states."""
    a, b = (AngleTable.load(out) for out in (one, other))
    pd.testing.assert_frame_equal(a.frame, b.frame, check_exact=True)
    pd.testing.assert_frame_equal(a.sinks, b.sinks, check_exact=True)
    a, b = (_scalars(out) for out in (one, other))
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)
    a, b = (_states(out) for out in (one, other))
    assert a.keys() == b.keys()
    for name, state in a.items():
        assert state.keys() == b[name].keys()
        assert all(torch.equal(value, b[name][key]) for key, value in state.items())


def _scalars(out):
    found = zarr.open_group(out / "scalars.zarr", mode="r").members(max_depth=None)
    return {name: array[:] for name, array in found if isinstance(array, zarr.Array)}


def _states(out):
    return {path.name: safetensors.torch.load_file(path) for path in (out / "state").glob("*.safetensors")}
