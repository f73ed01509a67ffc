"""The kernels in Triton are built for GPUs that need not be there, from the project's own calls."""

import collections
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs a CUDA device, or Triton")


def test_kernels_are_built_and_keep_rows_in_registers(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("triton_built.py")
    done = subprocess.run(
        [sys.executable, str(script), "80", "90"], capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()]
    counts = collections.Counter((capability, name) for capability, name, *_ in built)
    each = {"_forward": 15, "_backward": 5, "_project": 5, "_gather": 5, "_tally": 2, "_moments": 4}
    assert counts == {(capability, name): n for capability in ("80", "90") for name, n in each.items()}
    for capability, name, d, spilled in built:
        assert int(spilled) <= (16 if int(d) <= 8192 or name != "_backward" else 256), (capability, name, d)
