"""Models on the hub, through its own clients: by id and revision, and every revision that is a step of training."""

import json
from types import SimpleNamespace

import hub
import pandas as pd
import pytest
import torch
import transformers
import zoo
from huggingface_hub.errors import HfHubHTTPError

from normgeo import load_model, load_tokenizer, load_tokens, measure_angles
from normgeo.errors import ModelError
from normgeo.models import weights_digest
from normgeo.training import checkpoints
from normgeo.training.checkpoints import find_checkpoints

NAMES = ("main", "stage1-step2-tokens1B", "stage1-step10-tokens5B", "stage2-step10-tokens6B")


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory):
    """What the revisions of a repository hold: a tiny GPT-NeoX on its way."""
    folder, tokenizer = tmp_path_factory.mktemp("checkouts"), load_tokenizer("embedded-layernorm")
    model = zoo.tiny("gpt_neox")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for part in (model, tokenizer):
            part.save_pretrained(folder / name)
    return {name: folder / name for name in NAMES}


def rows(frame):
    return frame.drop(columns=["model", "step"], errors="ignore").reset_index(drop=True)


def test_models_of_the_hub_by_revision_and_all_of_its_steps(checkouts, tmp_path):
    on = "--data sample --tokens 400 --null 8 --device cpu"
    few = f"{on} --rounds 0"
    with hub.served({"org/tiny": checkouts}, tmp_path / "home") as environment:
        statuses, said = hub.asked(
            environment, tmp_path,
            f"angles --checkpoints org/tiny --revision stage1-* {on} --out steps",
            f"angles org/tiny --revision stage2-step10-tokens6B {on} --out one",
            "convert org/tiny converted --revision stage2-step10-tokens6B --tokens 128",
            f"compare org/tiny converted --revision stage2-step10-tokens6B {few} --out beside",
            f"compare org/tiny converted {few} --out apart",
            f"angles --checkpoints org/tiny {on} --out both",
            f"angles --checkpoints org/tiny --revision main {on} --out head",
            f"angles --checkpoints org/none {on} --out none",
            f"angles org/tiny --revision step3 {on} --out third",
        )  # fmt: skip
    assert statuses == [0, 0, 0, 0, 0, 1, 1, 1, 1], said
    assert "org/tiny@stage2-step10-tokens6B and org/tiny@stage1-step10-tokens5B have the same name and step" in said[5]
    assert "no revision of org/tiny that is 'main' is named as a step" in said[6]
    assert "there is no directory 'org/none', and the hub has no model of that name" in said[7]
    assert "step3 is not a valid git identifier" in said[8]
    assert not any((tmp_path / name).exists() for name in ("both", "head", "none", "third"))

    frame = pd.read_parquet(tmp_path / "steps/angles.parquet")
    assert frame[["model", "step"]].drop_duplicates().to_numpy().tolist() == [["org/tiny", 2], ["org/tiny", 10]]
    tokens = load_tokens("sample", load_tokenizer("embedded-layernorm"), 64)
    for step, name in ((2, NAMES[1]), (10, NAMES[2])):
        there = measure_angles(load_model(checkouts[name]), tokens, n_tokens=400, null=8, progress=False)
        pd.testing.assert_frame_equal(rows(frame[frame.step == step]), rows(there.frame), check_exact=False, rtol=1e-6)
    record = json.loads((tmp_path / "steps/run.json").read_text())
    assert {about["revision"] for about in record["models"].values()} == {
        hub.commit_of("org/tiny", name) for name in NAMES[1:3]
    }
    original = json.loads((tmp_path / "converted/conversion.json").read_text())["original"]
    assert original == {
        "name": "org/tiny", "revision": hub.commit_of("org/tiny", NAMES[3]),
        "weights_sha256": weights_digest(load_model(checkouts[NAMES[3]])),
    }  # fmt: skip

    compared = {name: json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("beside", "apart")}
    assert compared["beside"]["revisions"] == {"org/tiny": hub.commit_of("org/tiny", NAMES[3]), "converted": None}
    assert [compared[name]["models"][1]["error_rms_rel"] < 1e-5 for name in compared] == [True, False]

    def unloadable():
        """What is done is not loaded again, of which there may be hundreds."""
        (snapshot,) = tmp_path.glob(f"home/**/snapshots/{hub.commit_of('org/tiny', NAMES[1])}")
        (snapshot / "model.safetensors").unlink()
        (part,) = tmp_path.glob("steps/parts/*-00000010.parquet")
        part.unlink()
        (tmp_path / "steps/run.json").write_text(json.dumps(record | {"status": "running"}))
        (tmp_path / "steps/angles.parquet").unlink()

    statuses, said = hub.asked(  # with what is in the cache
        {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}, tmp_path,
        f"angles --checkpoints org/tiny --revision stage1-* {on} --out again",
        f"angles --checkpoints org/other {on} --out other",
        unloadable,
        "angles --resume steps",
    )  # fmt: skip
    assert statuses == [0, 1, 0], said
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "again/angles.parquet"), frame)
    assert said[1] == (
        "error: there is no directory 'org/other', and the hub's cache has no revision of such a model, which is all "
        "that there is offline"
    )
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "steps/angles.parquet"), frame)


def test_steps_among_revisions(monkeypatch, tmp_path):
    names = ["main", "step0", "step512", "step143000", "v1.0", "global_step7", "checkpoint-9/extra", "footstep-x"]
    monkeypatch.setattr(checkpoints, "revisions", lambda repository: names)
    found = find_checkpoints("org/model")
    assert [(p.step, p.revision) for p in found] == [
        (0, "step0"), (7, "global_step7"), (9, "checkpoint-9/extra"), (512, "step512"), (143000, "step143000"),
    ]  # fmt: skip
    assert {(p.model, str(p.path)) for p in found} == {("org/model", "org/model")}
    assert [p.step for p in find_checkpoints("org/model", "step5*, step0")] == [0, 512]
    with pytest.raises(
        ModelError, match=r"no revision of org/model that is 'v1.0' .*v1.0 is a revision without a step"
    ):
        find_checkpoints("org/model", "step0,v1.0")
    with pytest.raises(ModelError, match="on this machine, where it has no revision 'step0'"):
        find_checkpoints(tmp_path, "step0")


def test_a_hub_out_of_reach_is_one_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)

    def refused(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_refs", refused)
    with pytest.raises(
        ModelError, match=r"no directory 'org/model', and the hub .* ConnectionError: no route to host. "
    ):
        find_checkpoints("org/model")


def test_a_tokenizer_that_the_hub_does_not_give_is_said_to_be_left_out(monkeypatch):
    def failing(*_, **__):
        raise HfHubHTTPError("503 Service Unavailable", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", failing)
    with pytest.warns(UserWarning, match="org/model goes without its tokenizer: the hub does not give it .503 Service"):
        assert load_tokenizer("org/model") is None


class OwnConfig(transformers.GPT2Config):
    model_type = "own"


class OwnModel(transformers.GPT2Model):
    config_class = OwnConfig


class OwnLM(transformers.GPT2LMHeadModel):
    config_class = OwnConfig


def test_a_class_of_one_s_own_that_transformers_was_told_of_has_its_head(tmp_path, monkeypatch):
    """It was loaded without, and without a word where the head is tied, so that its checkpoint has no weights of it."""
    model = OwnLM(OwnConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=96)).eval()
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "own", OwnConfig)
    for auto, cls in ((transformers.AutoModel, OwnModel), (transformers.AutoModelForCausalLM, OwnLM)):
        monkeypatch.setitem(auto._model_mapping._extra_content, OwnConfig, cls)
    read, ids = load_model(tmp_path), torch.arange(3, 13)[None]
    torch.testing.assert_close(read(ids)["logits"], model(ids).logits)
