from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from normgeo import convert, decompress, find_gauge, optimize
from normgeo.angles.measure import measure_angles
from normgeo.errors import DataError, ModelError
from normgeo.sites import find_sites
from normgeo.stream import check_context, hooked, observe, stream
from normgeo.tokens import TokenStream


class Recorder:
    """A sink that copies everything."""

    def __init__(self):
        self.batches, self.seen, self.ends = [], [], 0

    def begin(self, batch):
        self.batches.append(batch)

    def take(self, site, phase, hidden):
        self.seen.append((site, phase, hidden.clone()))

    def end(self):
        self.ends += 1


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def batches(ids, rows=4, limit=None):
    return TokenStream.from_array(ids).batches(limit, rows)


def run(model, ids, sites=None, rows=4):
    recorder = Recorder()
    for _ in stream(model, find_sites(model) if sites is None else sites, batches(ids, rows), [recorder]):
        pass
    return recorder


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "albert", "t5", "falcon"])
def test_every_site_hands_over_input_and_output_once_a_batch_one_vector_a_token(tiny, name, ids):
    model = tiny(name)
    sites = find_sites(model)
    recorder = run(model, ids)
    assert recorder.ends == len(recorder.batches) == 2
    assert [b.start for b in recorder.batches] == [0, 4 * 37]
    assert len(recorder.seen) == 2 * 2 * len(sites)
    assert sorted((i, p) for i, p, _ in recorder.seen) == sorted(
        2 * [(i, p) for i in range(len(sites)) for p in ("pre", "post")]
    )
    assert {tuple(h.shape) for _, _, h in recorder.seen} == {(4 * 37, 32), (3 * 37, 32)}


@pytest.mark.parametrize("name", ["gpt2", "opt", "t5"])
def test_outputs_are_the_module_applied_to_the_inputs(tiny, name, ids):
    model = tiny(name)
    modules, sites = dict(model.named_modules()), find_sites(model)
    seen = run(model, ids, sites, rows=7).seen
    for i, site in enumerate(sites):
        pre, post = (next(h for k, p, h in seen if (k, p) == (i, phase)) for phase in ("pre", "post"))
        with torch.no_grad():
            torch.testing.assert_close(modules[site.name](pre), post, rtol=1e-5, atol=1e-5)


def test_rows_are_in_the_order_of_the_tokens_also_where_the_model_flattens(tiny, ids):
    for name in ("gpt2", "opt"):
        model = tiny(name)
        first = next(h for i, p, h in run(model, ids, rows=7).seen if (i, p) == (0, "pre"))
        alone = next(h for i, p, h in run(model, ids[3:4], rows=1).seen if (i, p) == (0, "pre"))
        torch.testing.assert_close(first[3 * 37 : 4 * 37], alone)


@pytest.mark.parametrize("model_type", ["xlnet", "fsmt", "gpt2"])
def test_rows_are_in_the_order_of_the_tokens_also_where_time_comes_first(model_type):
    model = zoo.by_type(model_type)
    sites = find_sites(model)
    assert all(site.time_major == (model_type != "gpt2") for site in sites)
    ids = np.random.default_rng(0).integers(5, 90, (3, 8))
    together = {(i, p): h for i, p, h in run(model, ids, sites, rows=3).seen}
    for row in range(3):
        for i, phase, alone in run(model, ids[row : row + 1], sites, rows=1).seen:
            torch.testing.assert_close(together[i, phase][8 * row : 8 * row + 8], alone, rtol=1e-4, atol=1e-5)


def skipping(model):
    """A GPT-2 that leaves its second layer's MLP out where a batch has token 7 in it."""
    base, block = model.transformer, model.transformer.h[1]
    whole, layer = base.forward, block.forward

    def forward(input_ids, **options):
        skips = bool((input_ids == 7).any())
        block.forward = (lambda x, *_, **__: x + block.attn(block.ln_1(x))[0]) if skips else layer
        return whole(input_ids=input_ids, **options)

    base.forward = forward
    return model


def test_a_norm_that_some_batch_does_not_reach_is_refused(ids):
    """Its vectors would be taken for those of other tokens."""
    model = skipping(zoo.tiny("gpt2"))
    sites, ids = find_sites(model), ids.copy()
    ids[ids == 7] = 8
    assert measure_angles(model, ids, sites=sites, batch=4, null=0, progress=False).frame.n_tokens.min() == ids.size
    ids[5, 3] = 7
    says = "ln_2 sees 0 vectors when GPT2LMHeadModel is given 111 token ids alone, from token 148 on, not 1"
    with pytest.raises(ModelError, match=says):
        measure_angles(model, ids, sites=sites, batch=4, null=0, progress=False)
    rest = [site for site in sites if site.name != "transformer.h.1.ln_2"]
    assert measure_angles(model, ids, sites=rest, batch=4, null=0, progress=False).frame.n_tokens.min() == ids.size
    recorder = Recorder()
    observe(model, ids, [recorder], batch=4)  # what a sink of one's own does with it is its own
    assert len(recorder.seen) == 2 * (2 * len(sites) - 1)


def test_overwriting_hidden_states_in_place_after_the_norm_changes_nothing(ids):
    """Statistics are taken while the hook runs: a model may add the residual in place afterwards."""

    def overwrite(module, args, output):
        args[0].zero_()

    model = zoo.tiny("gpt2")
    sites = find_sites(model)
    expected = measure_angles(model, ids, sites=sites, progress=False).frame
    model.transformer.ln_f.register_forward_hook(overwrite)
    found = measure_angles(model, ids, sites=sites, progress=False).frame
    np.testing.assert_array_equal(found.mean_deg, expected.mean_deg)
    np.testing.assert_array_equal(found.mean_norm, expected.mean_norm)


# --- what stays behind ---------------------------------------------------------------------------------------------


def test_no_hook_stays_after_the_stream_ends_breaks_off_or_fails(tiny, ids):
    model = tiny("llama")
    sites = find_sites(model)
    run(model, ids, sites)
    assert hooks(model) == 0
    for _ in stream(model, sites, batches(ids), [Recorder()]):
        assert hooks(model) > 0
        break
    assert hooks(model) == 0

    class Failing(Recorder):
        def take(self, site, phase, hidden):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(stream(model, sites, batches(ids), [Failing()]))
    assert hooks(model) == 0
    with pytest.raises(KeyError), hooked(model, sites, []):
        raise KeyError
    assert hooks(model) == 0


def test_neither_inference_mode_nor_evaluation_mode_reaches_the_callers_code(ids):
    model = zoo.tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.lm_head.eval()
    modes = [m.training for m in model.modules()]
    iterator = stream(model, find_sites(model), batches(ids), [Recorder()])
    next(iterator)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    iterator.close()
    assert [m.training for m in model.modules()] == modes


def test_dropout_of_a_model_in_training_mode_is_off(ids):
    model = zoo.tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = measure_angles(model, ids, progress=False).frame
    found = measure_angles(model.train(), ids, progress=False).frame
    np.testing.assert_array_equal(found.mean_deg, expected.mean_deg)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_ids_beyond_the_vocabulary_are_refused(tiny):
    for name in ("gpt2", "t5"):
        with pytest.raises(DataError, match="token id 96 is beyond the model's vocabulary of 96"):
            run(tiny(name), [[5, 96]])
        run(tiny(name), [[5, 95]])


def test_contexts_longer_than_the_model_has_positions_for_are_refused(tiny):
    with pytest.raises(DataError, match="contexts of 65 tokens are longer than the model's 64; give --context 64"):
        check_context(tiny("gpt2"), 65)
    check_context(tiny("gpt2"), 64)
    with pytest.raises(DataError, match="give --context 64"):
        measure_angles(tiny("llama"), np.full((1, 65), 5), progress=False)


def test_a_model_that_takes_no_token_ids_is_refused(tiny):
    for name in ("vit", "whisper"):
        with pytest.raises(ModelError, match="not token ids"):
            measure_angles(tiny(name), [[5, 6]], progress=False)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda model: "embedded-layernorm", "received a str, which is no model of transformers; give what load_model"),
        (lambda model: model.lm_head, "received a Linear, .*load_model"),
        (lambda model: torch.nn.Sequential(torch.nn.Sequential(model)), r"within, its \.get_submodule\('0\.0'\), or"),
        (torch.nn.DataParallel, r"received a DataParallel, .*give the model within, its \.module"),
        (torch.compile, r"received a OptimizedModule, .*give the model within, its \._orig_mod"),
    ],
)
def test_what_is_no_model_is_refused(tiny, ids, given, says):
    model = given(tiny("gpt2"))
    for do in (partial(measure_angles, tokens=ids, progress=False), find_sites, find_gauge, convert, decompress):
        with pytest.raises(ModelError, match=says):
            do(model)


class Adapted(torch.nn.Module):
    """What stands around a model with adapters, as of peft: it hands its attributes on."""

    def __init__(self, model, *, soft):
        super().__init__()
        self.base_model, self.peft_config = model, {"default": SimpleNamespace(is_prompt_learning=soft)}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("soft", "says"), [(True, "soft prompts of this Adapted"), (False, r"Adapted, which does not tell.*get_base_model")]
)
def test_adapters_that_the_model_within_does_without_or_that_hide_it_are_refused(tiny, ids, soft, says):
    model = Adapted(tiny("gpt2"), soft=soft)
    measured = partial(measure_angles, tokens=ids, progress=False)
    for do in (measured, find_sites, find_gauge, convert, decompress, optimize):
        with pytest.raises(ModelError, match=says):
            do(model)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda sites, others: [sites[0].name], r"'transformer\.h\.0\.ln_1' is no site; .*find_sites.* in one string"),
        (lambda sites, others: others, r"GPT2LMHeadModel has no module model\.layers\.0.*another model"),
        (lambda sites, others: [*sites, sites[1]], r"the site transformer\.h\.0\.ln_2 is there twice"),
    ],
)
def test_what_are_no_sites_of_the_model_is_refused(tiny, ids, given, says):
    model = tiny("gpt2")
    sites = given(find_sites(model), find_sites(tiny("llama")))
    with pytest.raises(DataError, match=says):
        measure_angles(model, ids, sites=sites, progress=False)
    with pytest.raises(DataError, match=says):
        run(model, ids, sites)


@pytest.mark.usefixtures("untyped")
def test_one_site_needs_no_list(tiny, ids):
    model = tiny("gpt2")
    site = find_sites(model)[1]
    table = measure_angles(model, ids, sites=site, null=4, progress=False)
    assert set(table.frame.site) == {site.key}


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory: 9 bytes")]
)
def test_out_of_memory_says_which_batch_would_fit(monkeypatch, ids, error):
    model = zoo.tiny("gpt2")

    def full(*_args, **_kwargs):
        raise error

    sites = find_sites(model)
    monkeypatch.setattr(model.transformer.h[1].mlp, "forward", full)
    with pytest.raises(ModelError, match=r"37 tokens on cpu does not fit into memory; .*--batch \(try 2\)"):
        run(model, ids, sites)
    assert hooks(model) == 0


@pytest.mark.parametrize(
    "error", ["mat1 and mat2 shapes cannot be multiplied", "CUDA error: an illegal memory access was encountered"]
)
def test_other_runtime_errors_are_not_called_out_of_memory(monkeypatch, ids, error):
    model = zoo.tiny("gpt2")

    def broken(*_args, **_kwargs):
        raise RuntimeError(error)

    sites = find_sites(model)
    monkeypatch.setattr(model.transformer.h[1].mlp, "forward", broken)
    with pytest.raises(RuntimeError, match=error):
        run(model, ids, sites)


# --- batch size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "t5"])
def test_the_table_does_not_depend_on_the_batch_size(tiny, name, ids):
    one, many = (
        measure_angles(tiny(name), ids, batch=batch, null=16, null_every=3, progress=False).frame for batch in (1, 5)
    )
    for column in ("mean_deg", "std_deg", "min_deg", "max_deg"):
        np.testing.assert_allclose(one[column], many[column], rtol=0, atol=1e-4, err_msg=column)
    assert (one.n_tokens == many.n_tokens).all()


def test_a_compiled_model_is_looked_at_as_it_is_written():
    """Hooks are no code to compile: one that counts up without an end was unrolled without an end."""
    plain, compiled = zoo.tiny("gpt2"), zoo.tiny("gpt2")
    compiled.compile(backend="eager")
    compiled.transformer.h[0].compile(backend="eager")
    ids = np.random.default_rng(0).integers(3, 96, (4, 8))
    assert find_sites(compiled) == find_sites(plain)
    tables = [measure_angles(model, ids, null=4, progress=False).frame for model in (plain, compiled)]
    pd.testing.assert_frame_equal(*tables)
    assert convert(compiled).certificate.passed


# --- observe: a sink of one's own -------------------------------------------------------------------------------------


def test_a_sink_of_ones_own_sees_every_norm(tiny, ids):
    model = tiny("gpt2")
    sites, recorder = find_sites(model), Recorder()
    assert observe(model, ids, [recorder], batch=3) == ids.size
    assert recorder.ends == len(recorder.batches) == 3
    wanted = Recorder()
    list(stream(model, sites, batches(ids, rows=3), [wanted]))
    assert [(s, p) for s, p, _ in recorder.seen] == [(s, p) for s, p, _ in wanted.seen]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(recorder.seen, wanted.seen, strict=True))
    recorder = Recorder()
    assert observe(model, ids, [recorder], sites=sites[2:3], n_tokens=20) == 20
    assert {site for site, _, _ in recorder.seen} == {0}
    assert hooks(model) == 0


def test_a_sink_is_not_tried_on_what_is_no_text(tiny, ids):
    with pytest.raises(ModelError, match="takes pixel_values, not token ids"):
        observe(tiny("vit"), ids, [Recorder()])


@pytest.mark.parametrize("end", [slice(None, 3), slice(-4, None)], ids=["left", "right"])
def test_padding_is_told(tiny, ids, end):
    model, padded = tiny("opt"), ids.copy()
    assert model.config.pad_token_id not in (None, model.config.eos_token_id)
    padded[1, end] = model.config.pad_token_id
    with pytest.warns(UserWarning, match="rows begin or end with the padding token 1") as told:
        observe(model, np.concatenate([padded, padded]), [], batch=2)
    assert len(told) == 1


def test_a_token_that_ends_documents_is_no_padding(ids):
    model, ended = zoo.tiny("gpt2"), ids.copy()
    model.config.pad_token_id, ended[:, -4:] = 5, 5
    for ends in (5, [2, 5]):
        model.config.eos_token_id = ends
        assert observe(model, ended, []) == ids.size


def test_contexts_of_two_tokens_are_no_padding(tiny):
    assert observe(tiny("opt"), [[1, 1]], []) == 2


def test_no_cache_is_filled(tiny, ids):
    base, given = tiny("gpt2").transformer, []
    with base.register_forward_pre_hook(lambda _, args, named: given.append(named["use_cache"]), with_kwargs=True):
        observe(tiny("gpt2"), ids, [], sites="final")
    assert given[-1] is False


@pytest.mark.parametrize("error", [OverflowError("too large to convert to C long"), RuntimeError("stack overflow")])
def test_what_a_sink_raises_is_not_called_a_lack_of_memory(tiny, error):
    class Failing(Recorder):
        def take(self, site, phase, hidden):
            raise error

    with pytest.raises(type(error), match=r"overflow|too large to convert"):
        observe(tiny("gpt2"), [[5, 6, 7]], [Failing()])
