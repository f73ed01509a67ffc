"""The command line: one clear line for each thing a user can get wrong, and what goes right."""

import json
import re
import shutil
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from forked import NORMGEO, Forked
from stores import unfinished
from zoo import tiny

from normgeo import AngleTable, find_sites
from normgeo.cards import TABLE_1
from normgeo.cli.app import Terminated
from normgeo.errors import ModelError


def saved(name, where=None, **changes):
    tiny(name, **changes).save_pretrained(where or name)
    return where or name


def test_angles_of_a_local_model(normgeo, tmp_path):
    status, out, said = normgeo("angles", saved("gpt2"), "--data", "ids.npy", "--null", 8, "--out", "here")
    assert status == 0
    assert "128 tokens" in said
    assert "128 tokens" not in out  # which may be piped on
    assert (tmp_path / "here/angles.parquet").exists()
    written = (tmp_path / "here/verdict.md").read_text().replace("**", "").splitlines()
    assert next(line for line in written if line.startswith("Scenario 1")) in out  # what one asked, below the table


def test_names_are_printed_and_drawn_as_they_are(normgeo):
    name, data = "my[v2]$x_$:dog:", "d[/x].npy"
    saved("gpt2", name)
    saved("gpt2", name + "2")
    Path(data).parent.mkdir()
    shutil.copy("ids.npy", data)
    for words in (("angles", name), ("compare", name, name + "2", "--rounds", 0)):
        status, out, err = normgeo(*words, "--data", data, "--null", 4, "--out", f"{words[0]}[/tmp]")
        assert (status, err.count("Traceback")) == (0, 0)
        assert out.count(name)
        assert data in err
        assert f"{words[0]}[/tmp]: " in out


def test_models_lists_table_1_and_the_pair(normgeo):
    status, out, _ = normgeo("models")
    assert status == 0
    assert all(card.hub_id in out for card in TABLE_1)
    assert "embedded-rmsnorm" in out


def test_the_list_of_models_comes_at_once():
    """torch and transformers take seconds to load."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import normgeo.cli.main as m; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "openai-community/gpt2-xl" in done.stdout


def test_several_models_are_measured_in_one_run(normgeo, tmp_path):
    names, options = [saved("gpt2"), saved("llama"), saved("opt")], ("--data", "ids.npy", "--null", 4)
    status, _, said = normgeo("angles", *names, "nowhere", *options, "--out", "all")
    assert (status, "cannot load the model 'nowhere'" in said) == (1, True)
    assert not (tmp_path / "all").exists()  # what is measured before it, nothing would finish
    status, out, _ = normgeo("angles", *names, *options)
    assert status == 0
    (folder,) = (tmp_path / "runs").glob("gpt2-and-2-more-*")
    assert all(name in out for name in names)
    assert normgeo("angles", names[1], *options, "--out", "one")[0] == 0
    frame, alone = (AngleTable.load(path).frame for path in (folder, tmp_path / "one"))
    assert frame.model.unique().tolist() == names
    pd.testing.assert_frame_equal(frame[frame.model == names[1]].reset_index(drop=True), alone)
    status, _, said = normgeo("angles", names[0], Path(names[0]).absolute(), *options)
    assert (status, "two models of the run would be called 'gpt2'" in said) == (1, True)


def test_default_directories_do_not_collide(normgeo, tmp_path):
    words = ("angles", saved("gpt2"), "--data", "ids.npy", "--null", 4, "--keep", "none")
    assert normgeo(*words)[0] == 0
    assert normgeo(*words)[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere/model"], "cannot load the model 'nowhere/model'"),
        (["gpt2", "--data", "wikipedia"], "has no tokenizer"),
        (
            ["gpt2", "--data", "text.doc"],
            "no such data file: text.doc; give the path of one, or sample, openwebtext, wikipedia",
        ),
        (["gpt2", "--data", ""], "the name of the data is empty; give the path of some, or sample"),
        (["", "--data", "ids.npy"], "the name of the model is empty; give a hub id"),
        (["gpt2", "--data", "ids.npy:text"], "ids.npy holds token ids, which have no columns; leave out what is"),
        (["gpt2", "--data", "gpt2"], "gpt2 is a directory with no texts in it; they are .jsonl or .txt"),
        (["gpt2", "--data", "ids.npy", "--tokens", "129"], "ends after 128 tokens, 129 were asked for"),
        (["gpt2", "--data", "ids.npy", "--context", "65"], "longer than the model's 64"),
        (["gpt2", "--data", "beyond.npy"], "beyond the model's vocabulary of 96"),
        (["gpt2", "--data", "ids.npy", "--dtype", "int8"], "no dtype 'int8'"),
        (["gpt2", "--data", "ids.npy", "--tokens", "0"], "--tokens must be at least 1"),
        (["gpt2", "--data", "ids.npy", "--seed", "-1"], "--seed must be at least 0, received -1"),
        (["gpt2", "--data", "ids.npy", "--sites", "mlp,nothing"], "no site matches 'nothing'"),
        (["gpt2", "--data", "unsigned.npy"], "integers >= 0; received shape (2, 8), dtype uint64"),
        (["gpt_neox", "--data", "sample"], "the model has no tokenizer"),
        (["gpt2", "--data", "ids.npy", "--keep", "all"], "--keep takes scalars or none"),
        (["gpt2", "--data", "ids.npy", "--sites", "nothing"], "no site matches 'nothing'"),
        (["gpt2", "--data", "ids.npy", "--out", "gpt2"], "exists and is no run"),
        (["gpt2", "--data", "ids.npy", "--device", "cuda:99"], "cannot use the device 'cuda:99'"),
        (["gpt2", "--data", "ids.npy", "--device", "meta"], "cannot use the device 'meta'"),
        (["--resume", "gpt2"], "nothing to resume"),
        (["--checkpoints", ""], "no checkpoints in .: directories named step-N"),
        (["embedded-layernorm", "--data", "empty.txt"], "has no text in it"),
        (["embedded-layernorm", "--data", "odd.jsonl"], "line 2"),
        (["embedded-layernorm", "--data", "odd.csv"], "unknown data format '.csv'"),
        (["embedded-layernorm", "--data", "wikipedia"], "could not stream"),
        (["pickled", "--data", "ids.npy"], "no safetensors weights"),
        (["empty", "--data", "ids.npy"], "empty': the directory has no config.json"),
        (["./nowhere", "--data", "ids.npy"], "cannot load the model './nowhere': there is no such directory"),
        (["odd.csv", "--data", "ids.npy"], "odd.csv': it is a file"),
        (["vit", "--data", "ids.npy"], "takes pixel_values, not token ids"),
    ],
)
def test_each_mistake_is_one_clear_line(normgeo, tmp_path, words, says):
    if {"gpt2", "pickled"} & set(words):
        model = tiny("gpt2")
        model.save_pretrained("gpt2")
        model.config.save_pretrained("pickled")
        torch.save(model.state_dict(), "pickled/pytorch_model.bin")
    for name in {"vit", "gpt_neox"} & set(words):
        saved(name)
    np.save("unsigned.npy", np.full((2, 8), 2**63 + 5, np.uint64))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("  \n ")
    (tmp_path / "odd.csv").write_text("text\nhello")
    (tmp_path / "odd.jsonl").write_text('{"text": "fine"}\n{"title": "no text"}\n')
    np.save("beyond.npy", np.array([[1, 2, 96]]))
    before = {p for p in tmp_path.rglob("*") if "pickled" not in p.parts}
    status, _, err = normgeo("angles", *words)
    assert status == 1
    assert "error: " in err
    assert says in err
    assert "Traceback" not in err
    assert {p for p in tmp_path.rglob("*") if "pickled" not in p.parts} - {tmp_path / "runs"} == before


TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
VISION = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 8}
FUNNEL = {"vocab_size": 96, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1],
          "num_decoder_layers": 1}  # fmt: skip
BEYOND_TOKENS = {
    "needs images": (hf.CLIPModel, hf.CLIPConfig(text_config=TEXT, vision_config=VISION), "no table of token embed"),
    "with images": (
        hf.GitForCausalLM,
        hf.GitConfig(**TEXT, vision_config=VISION),
        "git.image_encoder.* sees 0 vectors",
    ),
    "shortens": (hf.FunnelForMaskedLM, hf.FunnelConfig(**FUNNEL), "sees 8 vectors when FunnelForMaskedLM is given 16"),
    "needs labels": (hf.CanineModel, hf.CanineConfig(**TEXT), "CanineModel"),
}


@pytest.mark.parametrize("case", BEYOND_TOKENS)
def test_a_model_that_tokens_alone_do_not_run_is_one_line_and_leaves_nothing(normgeo, tmp_path, case):
    model, config, says = BEYOND_TOKENS[case]
    model(config).save_pretrained("m")
    status, _, err = normgeo("angles", "m", "--data", "ids.npy", "--null", 4, "--out", "here")
    assert status == 1
    assert re.search(says, err)
    assert "Traceback" not in err
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bench", "store", "--folder", "afile"), "afile is no directory"),
        (("bench", "store", "--folder", "s3://b/x"), "there is no directory s3:/b/x; give --folder one on the disk"),
        (("train", "--data", "sample", "--out", "afile/x"), "afile is no directory"),
        (("convert", "embedded-layernorm", "afile/x"), "afile: it is no directory; nothing was written"),
        (("compare", "embedded-layernorm", "embedded-rmsnorm", "--device", "meta"), "cannot use the device 'meta'"),
        (("angles", "embedded-layernorm", "--out", "a" * 300), "File name too long"),
        (("compare", "embedded-layernorm", "embedded-rmsnorm", "--seed", -1), "--seed must be at least 0"),
        (("angles", "embedded-layernorm", "--device-map", "cuda"), "(device_map=) takes auto, received 'cuda'"),
        (("convert", "embedded-layernorm", "out", "--outputs", ""), "--outputs takes one or more"),
        (("angles", "embedded-layernrom"), "there is no such directory; did you mean embedded-layernorm?"),
        (("angles", "a", "--resume", "b"), "leave out MODEL: beside --resume only --trust-remote-code may be given"),
        (("convert", "embedded-rmsnorm", "c"), "has no LayerNorm: all its norms are RMSNorm already"),
        (("capture", "embedded-layernorm"), "give a --store to write, or --resume a store"),
        (("train", "--lr", -1), "--lr, the learning rate, must be finite and above 0, received -1.0"),
        (("convert", "embedded-layernorm", "c", "--context", 100_000), "give --context 256"),
        (("convert", "embedded-layernorm", "c", "--context", 1), "--context must be at least 2, received 1"),
        (("convert", "embedded-layernorm", "c", "--dtype", "foo"), "no dtype 'foo'"),
        (("convert", "embedded-layernorm", "c", "--device", "bar"), "there is no device 'bar'; give auto, cpu, cuda"),
        (("angles", "--resume", "odd"), "run.json is no record of a run"),
    ],
)
def test_places_and_devices_that_are_none_are_one_line(normgeo, tmp_path, words, says):
    (tmp_path / "afile").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/run.json").write_text("{}")
    status, _, err = normgeo(*words)
    assert status == 1
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "c").exists()


def test_a_few_tokens_take_no_more_room_than_they_need(normgeo, tmp_path):
    words = ("angles", "embedded-layernorm", "--data", "sample", "--tokens", 100, "--batch", 20_000, "--null", 2)
    assert normgeo(*words, "--out", "run")[0] == 0
    assert sum(path.stat().st_size for path in (tmp_path / "run/scalars.zarr").rglob("*")) < 1e6


def test_debug_shows_the_traceback(normgeo):
    with pytest.raises(ModelError):
        normgeo("angles", "nowhere/model", "--debug")


def test_a_centered_model_is_called_one(normgeo):
    model = tiny("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")):
                parameter -= parameter.mean(-1, keepdim=True)
    model.save_pretrained("centered")
    status, _, said = normgeo("angles", "centered", "--data", "ids.npy", "--null", 8)
    assert status == 0
    assert "centered is already centered" in said


@pytest.mark.parametrize("where", ["transformers.GPT2Model.forward", "normgeo.angles.statistics.AngleStatistics.end"])
def test_out_of_memory_suggests_a_smaller_batch(normgeo, monkeypatch, where):
    name, sites = saved("gpt2"), find_sites(tiny("gpt2"))

    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(where, full)
    monkeypatch.setattr("normgeo.angles.job.find_sites", lambda model, qk: sites)
    monkeypatch.setattr("normgeo.angles.job.check_pass", lambda *_: None)
    status, _, err = normgeo("angles", name, "--data", "ids.npy")
    assert status == 1
    assert "smaller --batch (try 4)" in err


def test_an_interrupt_says_how_to_go_on(normgeo, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("normgeo.angles.runs._measure", interrupted)
    status, _, said = normgeo("angles", saved("gpt2"), "--data", "ids.npy", "--out", "run")
    assert status == 130
    assert said.endswith("normgeo angles --resume run")


@pytest.mark.parametrize(
    ("words", "place"),
    [(("angles",), "normgeo.angles.runs.prepare"), (("capture", "--store", "run"), "normgeo.store.capture.prepare")],
)
def test_an_interrupt_before_there_is_anything_does_not_say_how_to_go_on(normgeo, monkeypatch, tmp_path, words, place):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    status, _, said = normgeo(words[0], saved("gpt2"), "--data", "ids.npy", *words[1:])
    assert status == 130
    assert said.strip().endswith("interrupted")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("interrupt", "expected"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_command_that_leaves_nothing_to_finish_ends_with_the_signals_status(
    normgeo, monkeypatch, interrupt, expected
):
    def interrupted(*args, **kwargs):
        raise interrupt

    monkeypatch.setattr("normgeo.conversion.runs.load_model", interrupted)
    status, _, said = normgeo("convert", saved("gpt2"), "out")
    assert (status, said.strip()) == (expected, "interrupted")


def test_commands_of_the_store(normgeo, home, tmp_path):
    words = ("capture", home / "gpt2", "--store", "s", "--data", home / "ids.npy", "--tokens", 300, "--null", 4)
    status, _, said = normgeo(*words)
    assert status == 0, said
    assert "exactly" in said
    status, _, said = normgeo("verify", "s")
    assert (status, "300/300" in said) == (0, True)  # how far it is
    assert normgeo("angles", "--store", "s", "--null", 4, "--out", "a")[0] == 0
    assert json.loads((tmp_path / "a/run.json").read_text())["status"] == "complete"
    assert (tmp_path / "a/figures/energy.svg").exists()
    (tmp_path / "afile").write_text("")
    for command, message in (
        (words, "already holds a store (complete)"),
        (("capture", "--resume", "s"), "is complete"),
        (("capture", "--resume", "a"), "nothing to resume"),
        (("capture", home / "gpt2"), "--store to write"),
        ((*words[:2], "--store", "a", *words[4:]), "is no store"),
        ((*words[:2], "--store", "b", *words[4:], "--phases", "before"), "--phases takes some of"),
        ((*words[:2], "--store", "b", *words[4:], "--chunk-mib", 0), "--chunk-mib must be at least 1, received 0"),
        ((*words[:2], "--store", "b", *words[4:6], "--tokens", 801), "ends after 800 tokens, 801 were asked for"),
        ((*words[:2], "--store", "afile/b", *words[4:]), "afile is no directory; give another --store"),
        (
            ("capture", home / "gpt2", "--resume", "s", "--tokens", 3, "--dtype", "float16"),
            "leave out MODEL, --tokens, --dtype: beside --resume only --trust-remote-code may be given",
        ),
        (("angles", home / "gpt2", "--store", "s"), "leave out MODEL: beside --store only --null, "),
        (("angles", "--store", "s", "--batch", 8, "--qk"), "leave out --batch, --qk: beside --store only --null, "),
        (("angles", "--resume", "a", "--tokens", 3), "leave out --tokens: beside --resume"),
        (("train", "--resume", "a", "--lr", 3), "leave out --lr: beside --resume only --tensorboard may be given"),
        (("angles", "--store", "s", "--sites", "nothing", "--out", "c"), "no site matches 'nothing'"),
        (("angles", "--store", "s", "--null", -1, "--out", "c"), "--null must be at least 0, received -1"),
        (("angles", "--store", "s", "--null-every", 0, "--out", "c"), "--null-every must be at least 1, received 0"),
        (("angles", "--store", "s", "--out", "afile/c"), "cannot write to afile/c: afile is no directory"),
        (("angles", home / "gpt2", *words[4:], "--out", "afile/c"), "cannot write to afile/c: afile is no directory"),
        (("angles", "--store", "a"), "is no store"),
        (("verify", "a"), "is no store"),
    ):
        status, _, err = normgeo(*command)
        assert status == 1
        assert message in err
        assert "Traceback" not in err
        assert "%" not in err  # no progress bar before it
    assert not {"b", "c"} & {path.name for path in tmp_path.iterdir()}
    (tmp_path / "s/commits/00000000.json").unlink()
    assert "00000000.json is missing" in normgeo("verify", "s")[1]
    unfinished("s")
    assert "s is incomplete: 0 of 300 tokens are committed; normgeo capture --resume s" in normgeo("verify", "s")[1]
    assert "tokens are committed; normgeo capture --resume s" in normgeo("angles", "--store", "s")[2]
    assert normgeo("capture", home / "gpt2", "--store", "o", *words[4:], "--phases", "post")[0] == 0
    assert "without the inputs of" in normgeo("angles", "--store", "o", "--out", "c")[2]
    next((tmp_path / "o/hidden.zarr").rglob("post/c.0.0")).write_bytes(b"")
    status, out, err = normgeo("verify", "o")
    assert status == 1
    assert "bytes instead of" in out


def test_an_interrupt_while_libraries_are_loaded_ends_without_a_word():
    """These cannot be interrupted halfway; nothing is begun yet."""
    code = (
        "import os, signal, sys, normgeo.cli.main as m; sys.argv = ['normgeo', 'angles']\n"
        "class Loading:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'normgeo.models': os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what a script starts beside itself ignores it
        "sys.meta_path.insert(0, Loading()); m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_results_are_printed_where_the_terminal_has_no_such_characters(tmp_path):
    code = f"import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict'); {NORMGEO}"
    done = Forked(code, "angles", "embedded-layernorm", "--sites", "final", "--tokens", 64, "--out", tmp_path / "run")
    assert (done.ended().returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "embedded-layernorm" in done.stdout


def test_the_directory_to_resume_can_be_pasted(normgeo, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("normgeo.angles.runs._measure", interrupted)
    _, _, said = normgeo("angles", saved("gpt2"), "--data", "ids.npy", "--out", "my run", "--trust-remote-code")
    assert said.endswith("--resume 'my run' --trust-remote-code")


def test_a_process_without_standard_error(tmp_path):
    """As services are started."""
    done = subprocess.run(["bash", "-c", f"exec 2>&-; {sys.executable} -m normgeo --version"], capture_output=True)
    assert done.returncode == 0
    assert done.stdout.startswith(b"normgeo ")


def test_a_source_tree_that_is_not_installed_runs(normgeo, monkeypatch):
    def absent(name):
        if name == "normgeo":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("normgeo.system.versions.version", absent)
    assert normgeo("--version") == (0, "normgeo (not installed)", "")
    assert normgeo("angles", saved("gpt2"), "--data", "ids.npy", "--null", 2, "--out", "run")[0] == 0
    assert json.loads(Path("run/run.json").read_text())["versions"]["normgeo"] == ""
