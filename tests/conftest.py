"""Offline, one thread, no logging from transformers, and hypothesis that gives the same examples every time."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)  # fmt: skip

import pytest
import torch
import zoo
from hypothesis import settings

settings.register_profile("normgeo", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("normgeo")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors are tiny: threads only wait for each other, on a busy machine for 50 times as long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ids():
    """Seven sequences of 37 random ids; 7 * 37 times any quantile in use is no whole number."""
    return torch.randint(3, 96, (7, 37), generator=torch.Generator().manual_seed(5)).numpy()


@pytest.fixture(scope="session")
def tiny():
    """`zoo.tiny`, each model built once; for tests that leave models as they are."""
    built = {}

    def get(name):
        if name not in built:
            built[name] = zoo.tiny(name)
        return built[name]

    return get


@pytest.fixture(scope="session")
def tokenizer():
    from normgeo import load_tokenizer

    tokenizer = load_tokenizer("embedded-layernorm")
    tokenizer.eos_token = "<|endoftext|>"  # id 0, which is an id like any other
    return tokenizer


@pytest.fixture(scope="module", params=["compiled", "torch"])
def passes(request):
    """Both ways to pass over hidden states on a CPU, for modules that ask for them."""
    from normgeo import kernels

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels.cpu, "library", lambda: kernels.cpu.Library(None, "not in this test"))
        elif not kernels.status().compiled:
            pytest.skip(f"needs a compiler: {kernels.status().reason}")
        yield request.param
