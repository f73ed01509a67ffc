"""The compiled norms are the norms, wherever they are used."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from forked import Forked
from hypothesis import given
from hypothesis import strategies as st
from test_norms import by_definition, random_norm
from torch import nn

from normgeo import convert
from normgeo.kernels import norm_ops
from normgeo.norms import CRMSNorm, RMSNorm

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
NAMES = {"rmsnorm": (RMSNorm, {}), "crmsnorm": (CRMSNorm, {}), "crmsnorm-padded": (CRMSNorm, {"padded": True})}
WIDTHS = (1, 3, 15, 16, 17, 48, 63, 64, 65, 130, 768)

pytestmark = pytest.mark.skipif(not norm_ops.loaded().compiled, reason="needs a compiler")


def drawn(shape, dtype, seed=0, offset=0.3):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + offset).to(dtype)


def truth(norm, x):
    """The definition in float64, of the numbers that the norm was given."""
    exact = random_norm(type(norm), x.shape[-1], norm.eps, torch.float64, bias=norm.bias is not None,
                        **({"padded": norm.padded} if isinstance(norm, CRMSNorm) else {}))  # fmt: skip
    exact.offset = norm.offset
    exact.load_state_dict({k: v.double() for k, v in norm.state_dict().items()})
    with torch.no_grad():
        return exact.plain(x.double())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", NAMES)
@given(d=st.sampled_from(WIDTHS), rows=st.integers(0, 5), seed=st.integers(0, 99), wide=st.booleans(),
       bias=st.booleans(), offset=st.sampled_from([0.0, 1.0]))  # fmt: skip
def test_they_give_what_the_definition_gives(dtype, name, d, rows, seed, wide, bias, offset):
    cls, options = NAMES[name]
    norm = random_norm(cls, d, 1e-5, torch.float32 if wide else dtype, bias=bias, **options)
    norm.offset = offset
    x = drawn((2, rows, d), dtype, seed)
    if name == "crmsnorm-padded":
        x[..., -1] = 0
    with torch.no_grad():
        z = norm_ops.norm(x, norm.weight, norm.bias, norm.eps, offset, name)
        assert torch.equal(norm(x), z)  # the module uses it
    assert z.dtype == dtype
    assert z.shape == x.shape
    expected = truth(norm, x)
    if x.numel():
        torch.testing.assert_close(z.double(), expected, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_layernorm_the_control_is_torchs(dtype):
    x, weight, bias = drawn((3, 5, 77), dtype, 1), drawn(77, dtype, 2), drawn(77, dtype, 3)
    with torch.no_grad():
        z = norm_ops.norm(x, weight, bias, 1e-5, 0.0, "layernorm")
    exact = nn.functional.layer_norm(x.double(), (77,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(z.double(), exact, rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("affine", [True, False])
def test_added_to_in_place_they_are_the_sum_and_its_norm(dtype, name, affine):
    for d in WIDTHS:
        residual, x = drawn((2, 3, d), dtype, 4), drawn((2, 3, d), dtype, 5)
        weight, bias = (drawn(d, dtype, 6), drawn(d, dtype, 7)) if affine else (None, None)
        with torch.no_grad():
            expected = residual + x
            z = norm_ops.norm(expected, weight, bias, 1e-6, 0.0, name)
            found = norm_ops.add_norm_(residual, x, weight, bias, 1e-6, 0.0, name)
        assert torch.equal(residual, expected)
        assert torch.equal(found, z)
        assert torch.equal(x, drawn((2, 3, d), dtype, 5))


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("stream", [None, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_norms_are_written_over_what_was_added_and_in_its_dtype(dtype, stream, name):
    for d in WIDTHS:
        residual, x = drawn((2, 3, d), stream or dtype, 4), drawn((2, 3, d), dtype, 5)
        weight, bias = drawn(d, residual.dtype, 6), drawn(d, residual.dtype, 7)
        expected = residual + x
        z = norm_ops.norm(expected, weight, bias, 1e-6, 0.0, name)
        found = norm_ops.add_norm_(residual, x, weight, bias, 1e-6, 0.0, name, over=True)
        assert found is x
        assert torch.equal(residual, expected)
        assert torch.equal(x, z.to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_added_to_a_float32_stream_and_never_the_other_way(narrow):
    residual, x = drawn((3, 5, 77), torch.float32, 4), drawn((3, 5, 77), narrow, 5)
    weight, expected = drawn(77, torch.float32, 6), residual + x
    z = norm_ops.add_norm_(residual, x, weight, None, 1e-5, 1.0, "rmsnorm")
    assert torch.equal(residual, expected)
    assert torch.equal(z, norm_ops.norm(expected, weight, None, 1e-5, 1.0, "rmsnorm"))
    assert norm_ops.add_norm_(x, residual, None, None, 1e-5, 0.0, "rmsnorm") is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_not_a_number_infinity_zero_and_the_smallest_numbers_come_through(dtype):
    norm = RMSNorm(20, 1e-5, dtype=dtype)
    x = torch.zeros(5, 20, dtype=dtype)
    x[1, 3], x[2, 4], x[3] = torch.nan, torch.inf, torch.finfo(dtype).tiny
    x[4] = torch.finfo(dtype).max / 1e20 if dtype != torch.float16 else 60000.0
    z = norm(x)
    assert (z[0] == 0).all()
    assert z[1].isnan().all()
    assert z[2, 4].isnan()
    assert (z[3].float() <= 2 * torch.finfo(dtype).tiny / 1e-5**0.5).all()
    torch.testing.assert_close(z[4], torch.ones(20, dtype=dtype))


@torch.no_grad()
def test_strided_inputs_are_taken_as_they_read():
    norm, x = random_norm(RMSNorm, 24), drawn((4, 6, 48), torch.float32)
    for view in (x[..., ::2], x.transpose(0, 1)[..., :24], x[:, 1:2, 24:].expand(4, 3, 24)):
        torch.testing.assert_close(norm(view), norm(view.clone()))
    residual = x[..., ::2].transpose(0, 1)
    assert norm_ops.add_norm_(residual, residual.clone(), norm.weight, None, 1e-5, 0.0, "rmsnorm") is None


def test_converted_norms_know_that_they_are_centered_and_naive_ones_do_not(tiny):
    for to, centered in (("rmsnorm", True), ("naive-rmsnorm", False)):
        model = convert(tiny("gpt2"), to=to).model
        assert {m.centered for m in model.modules() if isinstance(m, RMSNorm)} == {centered}


def run(code, tmp_path, **environment):
    return Forked(code, **{"XDG_CACHE_HOME": str(tmp_path)} | environment).ended()


def test_without_a_compiler_the_reason_is_said_once_and_results_are_the_same(tmp_path):
    code = """
import torch
from normgeo.norms import RMSNorm
x = torch.arange(12.0).view(3, 4)
with torch.no_grad():
    for _ in range(2):
        print(RMSNorm(4)(x).sum().item())
x.requires_grad_()
RMSNorm(4)(x).square().sum().backward()
print(x.grad[0, 0].item() * 1e6)
"""
    (tmp_path / "empty").mkdir()
    without = run(code, tmp_path, PATH=str(tmp_path / "empty"), CXX="")
    assert without.stderr.count("normgeo computes norms in torch, which is slower: no C++ compiler") == 1, without
    off = run(code, tmp_path, NORMGEO_KERNELS="0")
    assert off.stderr == ""
    if "direct" in (direct := Path(norm_ops.loaded().reason)).name:  # which takes long to build, and is no other there
        (tmp_path / "normgeo").mkdir(exist_ok=True)
        shutil.copy(direct, tmp_path / "normgeo")
    built = run(code, tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    assert {p.name.split("-")[0] for p in (tmp_path / "normgeo").iterdir()} >= {"norms", "norm_gradients"}
    a, b, c = (list(map(float, r.stdout.split())) for r in (without, off, built))
    assert a == b == pytest.approx(c, rel=1e-6)


FIRST = {
    "a conversion": "normgeo.convert(normgeo.load_model('embedded-layernorm'))",
    "another default": "torch.set_default_dtype(torch.bfloat16); norm(x)",
    "what is watched": "exec('with FlopCounterMode(display=False): norm_ops.loaded()')",
    "what is transformed": "torch.func.vmap(lambda row: row if norm_ops.loaded() else row)(x)",
    "another device": "torch.set_default_device('meta'); norm_ops.loaded()",
    "statistics by another default": "torch.set_default_dtype(torch.bfloat16); kernels.status()",
    "statistics on another device": "torch.set_default_device('meta'); kernels.status()",
    "training": "norm(x).sum().backward()",
}


@pytest.mark.parametrize("first", FIRST)
def test_whatever_comes_first_kernels_are_there_after_it(first, tmp_path):
    code = f"""
import torch, normgeo
from normgeo.norms import RMSNorm
from torch.utils.flop_counter import FlopCounterMode
from normgeo import kernels
from normgeo.kernels import norm_ops
norm, x = RMSNorm(4), torch.ones(3, 4)
with torch.set_grad_enabled({first == "training"}):
    {FIRST[first]}
print(norm_ops._loaded is None, norm_ops.loaded().compiled and kernels.status().compiled)
"""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    done = run(code, tmp_path, XDG_CACHE_HOME=cache, HF_HUB_OFFLINE="1")
    assert done.stdout.split()[1:] == ["True"], done.stderr
    assert "slower" not in done.stderr
    assert first != "training" or done.stdout.split()[0] == "True"  # which needs none


def test_a_compiled_module_gives_the_same(tiny):
    norm, x = random_norm(RMSNorm, 16), drawn((4, 16), torch.float32)
    with torch.no_grad():
        graph = torch.compile(norm, backend="eager", fullgraph=True)
        torch.testing.assert_close(graph(x), norm(x))
    assert by_definition(RMSNorm, x.double(), 1e-5).shape == (4, 16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the operators are built once for all that do not build the direct way."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("compiler", ["exit 1", "touch $OUT"], ids=["fails", "builds nothing of use"])
def test_without_the_direct_way_the_operators_do_the_same(compiler, tmp_path, cache):
    picky = tmp_path / "picky"
    find = 'while [ "$1" != -o ]; do shift; done; OUT=$2'
    picky.write_text(f'#!/bin/sh\ncase "$*" in *norms_direct.cpp*) {find}; {compiler};; *) exec g++ "$@";; esac\n')
    picky.chmod(0o755)
    code = """
import torch
from normgeo.kernels import norm_ops
ops = norm_ops.loaded()
x = torch.ones(2, 8)
with torch.no_grad():
    z = norm_ops.add_norm_(x, x.clone(), None, None, 0.0, 0.0, "rmsnorm", True)
print(ops.compiled, type(ops.norm).__name__, x.mean().item(), z.mean().item())
"""
    done = run(code, cache, CXX=str(picky))
    assert done.stdout.split() == ["True", "function", "2.0", "1.0"], done.stderr


def test_a_process_that_is_forked_while_others_load_them_does_not_wait_for_those():
    with norm_ops._loading, warnings.catch_warnings(action="ignore"):  # from Python 3.12 on: there are threads
        if not (child := os.fork()):
            os._exit(0 if norm_ops._loading.acquire(timeout=5) else 1)
        assert os.waitpid(child, 0)[1] == 0
