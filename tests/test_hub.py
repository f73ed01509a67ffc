"""Text from the hub: what is asked of it, and what is said where it cannot be read."""

import datasets
import huggingface_hub
import numpy as np
import pytest

from normgeo import load_tokens
from normgeo.errors import DataError
from normgeo.hub import HubText
from normgeo.training.corpus import open_corpus

TEXTS = ["The first document is about rivers.", "A second one."]


def test_wikipedia_is_streamed_through_datasets(monkeypatch, tokenizer):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return ({"id": i, "text": t} for i, t in enumerate(TEXTS))

    monkeypatch.setattr("normgeo.hub.HubText.pinned", lambda data, revision=None: data)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    stream = load_tokens("wikipedia", tokenizer, 8)
    packed = [id for text in TEXTS for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert np.concatenate([ids for ids, _ in stream.contexts(0)]).tolist() == packed
    assert set(map(repr, asked)) == {
        "(('wikimedia/wikipedia', '20231101.en'), {'split': 'train', 'revision': None, 'streaming': True})"
    }
    assert "wikimedia/wikipedia" in stream.source


@pytest.mark.parametrize("while_reading", [False, True])
def test_wikipedia_without_a_network_says_what_to_do(monkeypatch, tokenizer, while_reading):
    def rows():
        yield {"text": TEXTS[0]}
        raise ConnectionError("no route to host")

    def load_dataset(*_args, **_kwargs):
        if while_reading:
            return rows()
        raise ConnectionError("no route to host")

    monkeypatch.setattr("normgeo.hub.HubText.pinned", lambda data, revision=None: data)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"ConnectionError: no route to host.*--data sample"):
        list(load_tokens("wikipedia", tokenizer, 8).contexts(0))


def test_without_a_network_the_hub_is_one_quick_error(normgeo, tmp_path, monkeypatch):
    """Offline by setting, and by a hub that refuses connections, which clients would otherwise try again and again."""
    for setting in ("offline", "refused"):
        with monkeypatch.context() as patch:
            if setting == "refused":
                patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
                patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
                patch.setattr(huggingface_hub.hf_api, "ENDPOINT", "http://127.0.0.1:9", raising=False)
            patch.setattr(huggingface_hub.HfApi, "dataset_info", counted := Counted(huggingface_hub.HfApi.dataset_info))
            patch.setattr(datasets, "load_dataset", None)  # not reached
            status, _, error = normgeo("train", "--size", "70m", "--out", tmp_path / "new")
        said = " ".join(error.split())
        assert status == 1
        assert said.startswith("error: could not stream Skylion007/openwebtext: ")
        assert said.endswith("Without a network, give --data a file of text, or --data sample")
        assert counted.times == 1
        assert not (tmp_path / "new").exists()


class Counted:
    def __init__(self, function):
        self.function, self.times = function, 0

    def __call__(self, *args, **kwargs):
        self.times += 1
        return self.function(huggingface_hub.HfApi(), *args, **kwargs)


def test_a_row_has_text_or_none():
    data = HubText("org/texts", "some", column="body")
    assert [data.of({"body": text}) for text in ("A fox.", None)] == ["A fox.", ""]
    with pytest.raises(DataError, match=r"^the column 'body' of org/texts@some:body should hold strings, received 3$"):
        data.of({"body": 3})
    with pytest.raises(DataError, match=r"has no column 'body'; its columns are id, text: give --data org/texts@some:"):
        data.of({"id": 3, "text": "A fox."})


def test_the_hub_is_read_where_its_text_is(tokenizer, monkeypatch):
    """What is asked of the hub, and the column that is read; what else a row holds is left aside."""
    asked, documents = [], [{"text": "A fox.", "title": "no"}, {"text": "A dog.", "title": "no"}]

    def load_dataset(*names, **options):
        asked.append((names, options))
        return datasets.IterableDataset.from_generator(lambda: iter(documents))

    monkeypatch.setattr("normgeo.hub.HubText.pinned", lambda data, revision=None: data)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    ids = open_corpus("openwebtext", tokenizer, 8, 0).take(1)[0].tolist()
    assert tokenizer.decode(ids) == "A fox.<|endoftext|>A dog."
    assert asked[0] == (("Skylion007/openwebtext",), {"split": "train", "revision": None, "streaming": True})
