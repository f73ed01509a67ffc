"""Files of others may be damaged or meant to harm: nothing elsewhere is written, and no code of theirs runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from forked import NORMGEO, Forked
from stores import captured
from zoo import tiny

from analyses import __main__ as command
from normgeo import convert, decompress, load_model
from normgeo.angles.runs import RunConfig, resume_run, start_run
from normgeo.conversion.checkpoint import save
from normgeo.conversion.sharded import convert_sharded
from normgeo.errors import ConversionError, ModelError, NormGeoError, RunError, StoreError
from normgeo.store.capture import resume_capture
from normgeo.store.check import verify
from normgeo.store.objects import storage_at
from normgeo.store.records import read_record, write_record
from normgeo.store.scan import angles_from_store
from normgeo.store.storage import Disk
from normgeo.system.files import write_json
from normgeo.system.folders import whole_directory
from normgeo.system.progress import printer
from normgeo.training.state import save_state


@pytest.mark.parametrize("where", ["../victim.safetensors", "weights/model.safetensors", "absolute"])
def test_an_index_writes_nowhere_else(where, tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path / "in", max_shard_size="20KB")
    index = tmp_path / "in" / "model.safetensors.index.json"
    shard = min(tmp_path.glob("in/*.safetensors"))
    victim = tmp_path / "in" / where if where != "absolute" else tmp_path / "absolute.safetensors"
    victim.parent.mkdir(exist_ok=True)
    shard.rename(victim)
    name = where if where != "absolute" else str(victim)
    index.write_text(index.read_text().replace(shard.name, name))
    before = victim.read_bytes()
    with pytest.raises(ConversionError, match="no file right in that directory; convert it in memory"):
        convert_sharded(tmp_path / "in", tmp_path / "out")
    assert victim.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} - {victim.name} == {"in"}


EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import GPT2Config, GPT2LMHeadModel
class Config(GPT2Config): pass
class Model(GPT2LMHeadModel):
    config_class = Config
"""


def with_code(folder):
    """A model that becomes one with code of its own."""
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "evil.py").write_text(EVIL)


@pytest.fixture
def local(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 90, (30, 32)))
    return tmp_path


def test_a_run_that_is_handed_over_does_not_say_that_code_may_run(local):
    config = RunConfig((str(local / "model"),), str(local / "ids.npy"), 900, null=8, keep="none")
    start_run(config, local / "run", progress=False)
    record = json.loads((local / "run" / "run.json").read_text())
    record["status"], record["config"]["trust_remote_code"] = "running", True
    (local / "run" / "run.json").write_text(json.dumps(record))
    with_code(local / "model")
    with pytest.raises(RunError, match=r"says to run the code of .* resume it with --trust-remote-code"):
        resume_run(local / "run", progress=False)
    assert not (local / "model" / "ran").exists()


def test_a_store_that_is_handed_over_does_not_either(home, tmp_path):
    captured(home, tmp_path / "s")
    storage = Disk(tmp_path / "s")
    record = read_record(storage, "store.json")
    record["status"], record["capture"]["run"]["trust_remote_code"] = "running", True
    write_record(lambda _, content: (tmp_path / "s" / "store.json").write_bytes(content), "store.json", record)
    with pytest.raises(RunError, match="says to run the code of"):
        resume_capture(tmp_path / "s", progress=False)


@pytest.mark.parametrize("named_by", ["index", "config"])
def test_what_a_checkpoint_names_itself_is_not_unpickled_either(named_by, tmp_path):
    """What transformers does not take for safetensors by its name it unpickles, if only what is no code."""
    model = tiny("gpt2")
    model.save_pretrained(tmp_path)
    if named_by == "index":
        (tmp_path / "model.safetensors.index.json").write_text("of an earlier model {")
        load_model(tmp_path)  # one file has all weights, and no index is read
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "adapter_model.bin")
    if named_by == "index":
        weights = dict.fromkeys(model.state_dict(), "adapter_model.bin")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    else:
        raw = json.loads((tmp_path / "config.json").read_text()) | {"transformers_weights": "adapter_model.bin"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"pickled weights are not read: .*adapter_model\.bin, which it names"):
        load_model(tmp_path)


def test_what_a_link_leads_to_is_not_removed_with_what_it_stands_for(tmp_path):
    """As in a training that is handed over, whose curve or next state leads to a directory of one's own."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "letters").touch()
    for name in ("curve", "state-00000001", "state-00000002"):
        (tmp_path / name).symlink_to("own")
    with whole_directory(tmp_path / "curve", replace=True) as scratch:
        (scratch / "new").touch()
    save_state(tmp_path, 2, {}, {})
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["letters"]
    assert [path.name for path in (tmp_path / "curve").iterdir()] == ["new"]
    assert [*tmp_path.glob("state-*")] == [tmp_path / "state-00000002"]
    assert not (tmp_path / "curve").is_symlink()


def test_links_in_the_place_of_what_is_written_for_a_while_lead_nowhere(tmp_path):
    """In a store or a run that is handed over, or in a directory that others write to as well."""
    (tmp_path / "own").write_text("letters")
    (tmp_path / "s" / "elsewhere").mkdir(parents=True)
    for link, to in {"s/lock": "../own", "s/scratch": "elsewhere", "run.json.partial": "own"}.items():
        (tmp_path / link).symlink_to(to)
    write_json(tmp_path / "run.json", {})
    with Disk(tmp_path / "s").writing():
        Disk(tmp_path / "s").put("a", b"1")
    assert (tmp_path / "own").read_text() == "letters"
    assert (tmp_path / "run.json").lstat().st_size == 3
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["a", "commits", "elsewhere", "lock", "state"]


RECORDS = {
    "store.json": [
        lambda record: record["layout"]["arrays"][0].update(new=1), lambda record: record["layout"].update(chunk=0),
        lambda record: record["provenance"].pop("identity"),
    ],
    "manifest.json": [lambda record: record.pop("files")],
    "commits/00000001.json": [lambda record: record.update(new=1), lambda record: record["chunks"].update(a=5)],
}  # fmt: skip


def test_records_of_a_store_by_another_version_are_one_line_each(home, tmp_path):
    """Or by anybody, with a checksum that is right."""
    storage = Disk(captured(home, tmp_path / "s", n=100))
    put = lambda name, content: (storage.path / name).write_bytes(content)  # noqa: E731
    for name, changes in RECORDS.items():
        whole = storage.read(name)
        for change in changes:
            change(record := read_record(storage, name))
            write_record(put, name, record)
            with pytest.raises(StoreError, match=rf"{name} is damaged, or of another version's store"):
                angles_from_store(tmp_path / "s", null=4, progress=False)
            with suppress(StoreError):
                verify(tmp_path / "s", progress=False)
            (tmp_path / "s" / name).write_bytes(whole)
    record = read_record(storage, "store.json")
    record["provenance"]["identity"]["about"]["sites"][0]["new"] = 1
    write_record(put, "store.json", record | {"status": "running"})
    shutil.rmtree(tmp_path / "s" / "commits")  # which are of the store as it was
    with pytest.raises(StoreError, match=r"store\.json is damaged, or of another version's store"):
        angles_from_store(tmp_path / "s", progress=False)


@pytest.mark.parametrize("end", ["", "/prefix"])
def test_a_key_in_a_url_is_not_repeated(end):
    """In a message, or in the record of a run, which is handed on."""
    with pytest.raises(StoreError, match="takes no user and no key") as refused:
        storage_at(f"s3://key:secret@bucket{end}")
    assert "secret" not in str(refused.value)


def test_what_others_say_does_not_control_the_terminal(capsys):
    printer().print("\x1b]0;owned\x07\x1b[31mred\x9b1m, [kept], \u202eback")
    assert capsys.readouterr().out == "�]0;owned�[31mred�1m, [kept], �back\n"


def test_nor_does_what_an_analysis_prints(tmp_path, monkeypatch, capsys):
    made = SimpleNamespace(compute=lambda: pd.DataFrame({"model": ["a\x1b[31m"]}), plot=lambda frame: plt.figure())
    monkeypatch.setattr(command, "importlib", SimpleNamespace(import_module=lambda name: made))
    command.run("rotation", {}, tmp_path)
    assert "a�[31m" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["analyses", "rotation", "--run", "b\x1b[31m"])
    assert command.main() == 1
    assert "b�[31m" in capsys.readouterr().err


DAMAGED = {
    "no class": ({"architectures": []}, "architectures name no class of transformers"),
    "another thing": ({"architectures": ["GPT2Config"]}, "architectures name no class of transformers"),
    "a wrong type": ({"vocab_size": "many"}, "cannot load the model"),
    "another recipe": ({"normgeo": [1]}, "cannot load the model"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_configuration_is_one_line(damage, tmp_path):
    save(convert(tiny("gpt2")), tmp_path / "m")
    changes, says = DAMAGED[damage]
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError, match=says):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda recipe: recipe["norms"]["transformer.ln_f"].pop("padded"), "KeyError: 'padded'"),
        (lambda recipe: recipe["readers"].append(["nope.weight", 0]), "has no attribute `nope`"),
        (lambda recipe: recipe.pop("recenter"), "KeyError: 'recenter'"),
        (lambda recipe: recipe["writers"].append(["lm_head.weight"]), "ValueError"),
    ],
)
def test_a_damaged_recipe_is_said_to_be(damage, says):
    model = convert(tiny("gpt2"), to="crmsnorm").model
    damage(model.config.normgeo)
    with pytest.raises(ConversionError, match=rf"\('normgeo'\) does not fit GPT2LMHeadModel: .*{says}.*; take"):
        decompress(model)


def test_a_damaged_recipe_that_fits_gives_no_other_model():
    """Padded, a writer that it does not name has the width of the others, and a zero for its last number."""
    model = convert(tiny("gpt2"), to="crmsnorm", padded=True).model
    model.config.normgeo["writers"].pop()
    with pytest.raises(ConversionError, match="the model is not equal to the compressed one"):
        decompress(model)


@pytest.mark.parametrize("command", [["-m", "normgeo", "models"], ["-m", "analyses", "models_table", "--out", "{}"]])
def test_a_terminal_that_takes_no_more_is_one_line(command, tmp_path):
    """As a pipe into a file on a full disk; the files of an analysis are written."""
    words = [sys.executable, *(word.format(tmp_path / "out") for word in command)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "error: results could not be printed: No space left on device" in done.stderr
    assert (tmp_path / "out").exists() == ("analyses" in command)


def test_a_name_that_python_cannot_pass_on_is_refused_before_the_work(tmp_path):
    """In a locale without it."""
    out = os.fsencode(tmp_path / "out-é")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "normgeo", "convert", "embedded-layernorm", out]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | locale)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Python takes file names to be ascii here" in done.stderr
    assert "set PYTHONUTF8=1, or give another directory" in done.stderr
    with pytest.raises(RunError, match="Python takes file names to be"), whole_directory(tmp_path / "out-\udce9"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("architectures", [[], ["Unknown"], ["GPT2Config"], ["PreTrainedModel"]])
def test_a_head_that_no_configuration_names_is_said_to_be_left_out(architectures, tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"architectures": architectures}))
    with pytest.warns(UserWarning, match="loaded as GPTNeoXModel.* embed_out.weight is left out"):
        load_model(tmp_path / "m")
    with pytest.warns(UserWarning, match="loaded as GPTNeoXModel.* embed_out.weight is left out"):
        convert_sharded(tmp_path / "m", tmp_path / "out")


def test_a_class_without_a_forward_pass_of_its_own_is_one_that_a_configuration_names(tmp_path, recwarn):
    model = transformers.LlamaForSequenceClassification(tiny("llama").config)
    state = model.state_dict() | {"lm_head.weight": torch.zeros(3)}
    model.save_pretrained(tmp_path, state_dict=state)
    load_model(tmp_path)
    assert not [str(warning.message) for warning in recwarn if "architectures" in str(warning.message)]


WAITS = """
from forked import wait_before
from normgeo.conversion import sharded
wait_before(sharded, "_check_written")
""" + NORMGEO  # fmt: skip


def test_a_conversion_that_is_terminated_leaves_nothing(tmp_path):
    model = tiny("gpt_neox", num_hidden_layers=24, hidden_size=256, intermediate_size=1024)
    model.save_pretrained(tmp_path / "in", max_shard_size="1MB")
    del model
    running = Forked(WAITS, "convert", tmp_path / "in", tmp_path / "out", "--by-shard")
    running.until(lambda: [*tmp_path.glob(".out-*.partial/*.safetensors")])
    os.kill(running.pid, signal.SIGTERM)
    assert running.ended().returncode > 0
    assert "Traceback" not in running.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_certificate_of_a_model_with_huge_losses(tmp_path):
    model = tiny("gpt_neox")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e5)
    ids = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    conversion = convert(model, certify_on=[{"input_ids": ids}])
    assert conversion.certificate.perplexity_original == float("inf")


def test_by_shard_too_a_model_with_nan_is_refused(tmp_path):
    """In layers that are certified and in others."""
    for layer in (0, 4):
        model = tiny("gpt2", n_layer=6)
        model.transformer.h[layer].mlp.c_fc.weight.data[3, 5] = torch.nan
        model.save_pretrained(tmp_path / f"in{layer}", max_shard_size="20KB")
        with pytest.raises((ConversionError, ModelError), match=r"NaN"):
            convert_sharded(tmp_path / f"in{layer}", tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("load", [load_model, lambda name: convert_sharded(name, name.with_name("out"))])
def test_a_dtype_that_no_model_is_loaded_in_is_one_line(load, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    for dtype in ("int8", "float8_e4m3fn"):
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"dtype": dtype}))
        with pytest.raises(ModelError, match="cannot load the model"):
            load(tmp_path / "m")


@pytest.mark.parametrize("raised", [ValueError, NormGeoError])
@pytest.mark.parametrize("words", [("convert", "out"), ("angles", "--data", "ids.npy")])
def test_a_signal_whose_exception_compiled_code_makes_an_error_is_an_interruption(words, raised, monkeypatch, normgeo):
    """As safetensors does."""

    def compiled(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            raise raised("could not determine the shape") from None

    tiny("gpt2").save_pretrained("gpt2")
    np.save("ids.npy", np.arange(64))
    monkeypatch.setattr("normgeo.cli.app._came", [])
    for place in ("conversion.runs.load_model", "angles.runs._measure"):
        monkeypatch.setattr(f"normgeo.{place}", compiled)
    status, _, said = normgeo(words[0], "gpt2", *words[1:])
    assert (status, "interrupted" in said, "could not" in said) == (143, True, False)
    assert ("--resume" in said) == (words[0] == "angles" and raised is ValueError)  # a refusal leaves no run
