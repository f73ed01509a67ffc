"""Damage and mixtures are named and refused."""

import json
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from stores import a_chunk, captured, content, unfinished
from transformers import PreTrainedTokenizerFast
from zoo import tiny

from normgeo import HiddenStateStore
from normgeo.angles.job import check_same
from normgeo.errors import RunError, StoreError
from normgeo.models import tokenizer_digest
from normgeo.store import capture
from normgeo.store.capture import resume_capture
from normgeo.store.check import verify
from normgeo.store.records import read_record, write_record
from normgeo.store.scan import angles_from_store
from normgeo.store.storage import Disk
from normgeo.tokens import load_tokens


def test_a_flipped_bit_is_named_wherever_it_is(copy):
    metadata = sorted((copy / "hidden.zarr").rglob("zarr.json"))[3]
    for file in (a_chunk(copy), metadata, copy / "commits/00000003.json", next((copy / "state").iterdir())):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        _, problems = verify(copy)
        assert len(problems) == 1
        assert str(file) in problems[0]
        if file == a_chunk(copy):
            with pytest.raises(StoreError, match=rf"{file.name} is damaged"):
                angles_from_store(copy, null=4, progress=False)
            store, given = HiddenStateStore(copy), []
            with pytest.raises(StoreError, match=rf"{file.name} is damaged"):
                given.extend(store.open(file.parent.parent.name).batches(1))
            assert len(given) == store.commit_log[1].stop  # none of the third chunk
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    assert verify(copy)[1] == []


def test_truncated_and_missing_chunks_and_commits_are_named(copy):
    file, commit = a_chunk(copy), copy / "commits/00000004.json"
    file.write_bytes(file.read_bytes()[:-100])
    commit.unlink()
    a_chunk(copy, 1).unlink()
    problems = " ".join(verify(copy)[1])
    assert f"{file} has" in problems
    assert f"{commit} is missing" in problems
    assert "c.1.0 is missing" in problems
    for use in (HiddenStateStore, lambda path: angles_from_store(path, progress=False)):
        with pytest.raises(StoreError, match=rf"lacks records of rows; normgeo capture --resume {copy} mends it"):
            use(copy)
    unfinished(copy)
    assert HiddenStateStore(copy).n_tokens == HiddenStateStore(copy).commit_log[3].stop


def test_a_chunk_whose_own_checksum_is_wrong_is_named(copy):
    """zarr alone would refuse to read it."""
    raw = bytearray(a_chunk(copy).read_bytes())
    raw[-2] ^= 1
    a_chunk(copy).write_bytes(raw)
    whole, found = verify(copy)
    assert found == [f"{a_chunk(copy)} is damaged: its checksum is wrong"]
    unfinished(copy)
    (copy / "commits/00000000.json").unlink()
    rows = HiddenStateStore(copy).layout.rows
    assert verify(copy) == (whole - whole // rows, found)  # of what is committed, where that is not all yet


def damaged(path, start):
    """A store's record after a flipped bit somewhere behind these words."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(start.encode()) + len(start)] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("words", ['"seed": ', '"status": "', '"width": ', '"provenance', '"sha256": "', '"batch": '])
def test_a_damaged_record_of_the_store_is_refused_by_all(copy, words):
    unfinished(copy)
    damaged(copy / "store.json", words)
    for use in (verify, HiddenStateStore, lambda path: resume_capture(path, progress=False)):
        with pytest.raises(StoreError, match=r"store\.json is damaged"):
            use(copy)


def test_a_damaged_list_of_checksums_is_named_itself(copy):
    damaged(copy / "manifest.json", '"files":{"')
    assert [problem.split(" is ")[0] for problem in verify(copy)[1]] == [str(copy / "manifest.json")]


def test_damaged_results_are_named(copy):
    for name in ("angles.parquet", "sinks.parquet", "verdict.md", "report.html"):
        raw = bytearray((copy / name).read_bytes())
        raw[9] ^= 4
        (copy / name).write_bytes(raw)
        assert [problem.split(" is ")[0] for problem in verify(copy)[1]] == [str(copy / name)]
        raw[9] ^= 4
        (copy / name).write_bytes(raw)


def test_what_cannot_be_read_is_named_and_the_rest_is_checked(copy):
    wrong, gone = (a_chunk(copy), next((copy / "state").iterdir())), a_chunk(copy, 4)
    for file in wrong:
        file.unlink()
        file.mkdir()
    gone.unlink()
    (copy / "commits/copy of 00000001.json").write_text("{}")
    found = verify(copy)[1]
    for line in (f"{wrong[0]} cannot be read: Is a directory", f"{wrong[1]} cannot be read: Is a directory"):
        assert line in found
    assert f"{gone} is missing" in found
    assert len(found) == 3


def ways_to_read(states):
    heads = states.spec.heads
    return [
        lambda: states[64 * heads : 70 * heads], lambda: states[64 * heads], lambda: states.torch(60, 70),
        lambda: np.asarray(states), lambda: states[::-1], lambda: list(states), lambda: list(states.batches(50)),
        lambda: states.dask().compute(scheduler="synchronous"),
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["missing", "elsewhere", "flipped", "longer"])
def test_no_way_of_reading_gives_what_was_not_committed(copy, damage):
    states = HiddenStateStore(copy).open(HiddenStateStore(copy).sites[1].key)
    files = [copy / f"hidden.zarr/{states.spec.chunk_file(row)}" for row in (0, 1)]
    if damage == "missing":
        files[1].unlink()
    elif damage == "elsewhere":
        shutil.copy(*files)
    elif damage == "longer":
        files[1].write_bytes(files[1].read_bytes() + b"0")
        assert [f"{files[1]} has" in problem for problem in verify(copy)[1]] == [True]
    else:
        raw = bytearray(files[1].read_bytes())
        raw[5] ^= 8
        files[1].write_bytes(raw)
    for read in ways_to_read(states):
        with pytest.raises(StoreError, match=r"c\.1\.0 (is damaged|cannot be read)"):
            read()
    assert np.isfinite(states[:64]).all()
    last = HiddenStateStore(copy).layout.rows - 1
    (copy / f"hidden.zarr/tokens/id/c.{last}").unlink()
    with pytest.raises(StoreError, match=rf"tokens/id/c\.{last} cannot be read"):
        HiddenStateStore(copy).tokens("id")
    unfinished(copy)
    with pytest.raises(StoreError, match=rf"tokens/id/c\.{last} is missing, and is committed; put it back, or remove "):
        resume_capture(copy, progress=False)


def test_what_cannot_be_removed_does_not_hide_why_a_capture_failed(home, tmp_path, monkeypatch):
    monkeypatch.setattr(capture._Capture, "write", lambda *_: (_ for _ in ()).throw(StoreError("the reason")))
    monkeypatch.setattr(Disk, "discard", lambda self: (_ for _ in ()).throw(PermissionError("no")))
    with pytest.raises(StoreError, match="the reason"):
        captured(home, tmp_path / "s")


@pytest.mark.parametrize("damage", ["gain/c.0", "gain/zarr.json", "zarr.json", "another's", "gone", "an offset"])
def test_a_damaged_norm_is_one_line(copy, damage):
    """What comes out of a norm follows from them: a gain that is missing is not one that never was."""
    home, other = (copy / f"hidden.zarr/sites/{site.key}" for site in HiddenStateStore(copy).sites[1:3])
    file = home / (damage if damage.endswith(("c.0", "json")) else "zarr.json" if damage == "an offset" else "gain/c.0")
    raw = bytearray(file.read_bytes())
    raw[3] ^= 1
    if damage == "another's":
        shutil.copy(other / "gain/c.0", file)
    elif damage == "gone":
        shutil.rmtree(home / "gain")
    else:
        file.write_bytes(file.read_bytes().replace(b'"offset": 0.0', b'"offset": 1.0') if "offset" in damage else raw)
    with pytest.raises(StoreError, match=rf"{home}/.* is (missing|damaged.*); normgeo verify names all"):
        angles_from_store(copy, null=4, progress=False)
    assert str(file) in " ".join(verify(copy)[1])


def test_stores_and_their_rows_are_never_mixed(home, copy, tmp_path):
    other = captured(home, tmp_path / "other", "other")
    shutil.copy(other / "commits/00000002.json", copy / "commits/00000002.json")
    with pytest.raises(StoreError, match="belongs to another store"):
        HiddenStateStore(copy)
    shutil.copy(copy / "commits/00000003.json", copy / "commits/00000002.json")
    with pytest.raises(StoreError, match=r"commits/00000002\.json belongs to another store, or to another row of it"):
        HiddenStateStore(copy)
    assert any("00000002.json belongs to another" in problem for problem in verify(copy)[1])
    unfinished(other)
    shutil.copytree(home / "gpt2", home / "other", dirs_exist_ok=True)
    with pytest.raises(RunError, match="another weights sha256"):
        resume_capture(other, progress=False)
    tiny("gpt2", seed=1).save_pretrained(home / "other")


def test_a_damaged_row_of_a_complete_store_is_captured_again_without_its_record(store, copy, monkeypatch, normgeo):
    raw = bytearray(a_chunk(copy).read_bytes())
    raw[9] ^= 1
    a_chunk(copy).write_bytes(raw)
    status, out, said = normgeo("verify", copy)
    assert (status, str(a_chunk(copy)) in out) == (1, True)
    assert "1 file is missing or damaged; remove the records of damaged rows" in said.replace("\n", " ")
    (copy / "commits/00000002.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(capture._Capture, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resume_capture(copy, progress=False)
    assert HiddenStateStore(copy).n_tokens == HiddenStateStore(store).commit_log[1].stop
    before = read_record(Disk(store), "store.json")
    monkeypatch.setattr("normgeo.angles.runs._draw", lambda table, folder: None)  # the store's results have no figures
    resume_capture(copy, progress=False)
    assert content(copy) == content(store)
    assert verify(copy) == verify(store)
    after = read_record(Disk(copy), "store.json")
    assert {name for name in before if before[name] != after[name]} <= {"finished"}
    with pytest.raises(StoreError, match="is complete"):
        resume_capture(copy, progress=False)


@pytest.mark.parametrize("what", ["missing", "short", "state"])
def test_a_committed_row_that_is_not_whole_is_refused_and_without_its_record_captured_again(
    store, copy, monkeypatch, what
):
    unfinished(copy)
    (copy / "commits/00000004.json").unlink()
    file, record = copy / "state/00000002.safetensors" if what == "state" else a_chunk(copy), "commits/00000002.json"
    os.truncate(file, file.stat().st_size - 1) if what == "short" else file.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(capture._Capture, "write", lambda *args: pytest.fail("computed"))
        with pytest.raises(StoreError, match=f"{file} (is|has) .*; put it back, or remove {copy / record}, "):
            resume_capture(copy, progress=False)
    (copy / record).unlink()
    resume_capture(copy, progress=False)
    assert content(copy) == content(store)


@pytest.mark.parametrize("change", [{"activation_function": "relu"}, {"n_head": 1}, {"layer_norm_epsilon": 1e-3}])
def test_a_model_of_the_same_weights_and_another_configuration_is_refused(home, copy, change):
    unfinished(copy)
    file = home / "gpt2/config.json"
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | change))
    try:
        with pytest.raises(RunError, match=f"another config {next(iter(change)).replace('_', ' ')}: .*, now "):
            resume_capture(copy, progress=False)
    finally:
        file.write_text(before)


def test_a_later_library_may_know_more_options():
    then, now = {"config": {"a": 1, "b": {"c": 2}}}, {"config": {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}}
    check_same(then, now, "here", ("config",))
    with pytest.raises(RunError, match="here was started with another config b c: 5, now 2; start a new run"):
        check_same({"config": {"a": 1, "b": {"c": 5}}}, now, "here", ("config",))


def test_a_later_version_may_say_more_of_a_site():
    then, now = [{"name": "a"}, {"name": "b"}], [{"name": "a", "dtype": "float16"}, {"name": "b", "dtype": "float32"}]
    check_same({"sites": then}, {"sites": now}, "here", ("sites",))
    for others in (now[:1], [now[0], now[0]]):
        with pytest.raises(RunError, match="another sites"):
            check_same({"sites": then}, {"sites": others}, "here", ("sites",))


@pytest.mark.parametrize("last", [False, True])
def test_other_tokens_are_refused_on_resume(home, copy, monkeypatch, last):
    """Of the same bytes, as by another version of a tokenizer's library."""
    real, layout, ids = capture.prepare, HiddenStateStore(copy).layout, np.load(home / "ids.npy")
    ids.flat[layout.n_tokens - 1 if last else 0] ^= 1
    others, row = load_tokens(ids), layout.rows - 1 if last else 0
    monkeypatch.setattr(capture, "prepare", lambda *args, **how: replace(real(*args, **how), tokens=others))
    unfinished(copy)
    (copy / "commits/00000002.json").unlink()
    with pytest.raises(StoreError, match=f"holds other tokens in row {row}: another tokenizer or other data"):
        resume_capture(copy, progress=False)


def test_a_second_writer_is_refused(home, copy):
    unfinished(copy)
    for write in (lambda: resume_capture(copy, progress=False), lambda: captured(home, copy)):
        with Disk(copy).writing(), pytest.raises(StoreError, match="another process writes"):
            write()


# --- tokenizers -------------------------------------------------------------------------------------------------------

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then"]


def word_tokenizer(words):
    """Words are ids from 3 on, in this order."""
    vocabulary = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2} | {word: i for i, word in enumerate(words, 3)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", bos_token="[BOS]", eos_token="[EOS]")


def test_another_tokenizer_is_refused(home, tmp_path):
    model, text = shutil.copytree(home / "gpt2", tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=300)))
    word_tokenizer(WORDS).save_pretrained(model)
    path = captured(home, tmp_path / "s", model, data=str(text), n=200, context=20)
    unfinished(path)
    (path / "commits/00000001.json").unlink()
    word_tokenizer(WORDS[::-1]).save_pretrained(model)  # as many words, with other ids
    with pytest.raises(RunError, match="another tokenizer sha256"):
        resume_capture(path, progress=False)
    word_tokenizer(WORDS).save_pretrained(model)
    resume_capture(path, progress=False)
    assert HiddenStateStore(path).complete


def test_a_tokenizers_hash_is_of_all_that_decides_and_of_nothing_else():
    one, digest = word_tokenizer(WORDS), tokenizer_digest(word_tokenizer(WORDS))
    one("the cat sat", max_length=1, truncation=True)
    assert tokenizer_digest(one) == digest
    one.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    assert tokenizer_digest(one) != digest
    another = word_tokenizer(WORDS)
    another.eos_token = "the"
    assert tokenizer_digest(another) != digest


@pytest.mark.parametrize("lost", ["zarr.json", "sites/transformer.ln_f/pre/zarr.json"])
def test_a_resumed_store_whose_metadata_is_lost_keeps_its_chunks(copy, lost):
    unfinished(copy)
    (copy / "commits/00000004.json").unlink()
    file = copy / "hidden.zarr" / lost
    kept = file.read_bytes()
    file.unlink()
    chunks = sorted((copy / "hidden.zarr").rglob("c.*"))
    with pytest.raises(StoreError, match=rf"{lost} is missing; what is committed stays as it is: restore that file"):
        resume_capture(copy, progress=False)
    assert sorted((copy / "hidden.zarr").rglob("c.*")) == chunks
    file.write_bytes(kept)
    resume_capture(copy, progress=False)
    assert verify(copy)[1] == []


def test_a_store_that_another_run_made_meanwhile_is_left_alone(home, tmp_path, monkeypatch):
    real = capture.prepare

    def overtaken(*args, **kwargs):
        monkeypatch.setattr(capture, "prepare", real)
        captured(home, tmp_path / "s", "llama")
        return real(*args, **kwargs)

    monkeypatch.setattr(capture, "prepare", overtaken)
    with pytest.raises(StoreError, match=r"already holds a store \(complete\); give another --store"):
        captured(home, tmp_path / "s")
    assert verify(tmp_path / "s")[1] == []
    assert not (tmp_path / "s/scratch").exists()


def test_a_store_that_another_run_finished_meanwhile_is_not_resumed(home, tmp_path, monkeypatch, copy):
    real = capture.prepare

    def overtaken(*args, **kwargs):
        monkeypatch.setattr(capture, "prepare", real)
        resume_capture(copy, progress=False)
        return real(*args, **kwargs)

    unfinished(copy)
    monkeypatch.setattr(capture, "prepare", overtaken)
    with pytest.raises(StoreError, match="is complete"):
        resume_capture(copy, progress=False)
    assert verify(copy)[1] == []


def test_a_store_that_another_run_began_anew_meanwhile_is_not_resumed(copy, monkeypatch):
    real = capture.prepare

    def overtaken(*args, **kwargs):
        record = read_record(Disk(copy), "store.json")
        record["capture"]["chunk_bytes"] += 1
        write_record(lambda name, raw: (copy / name).write_bytes(raw), "store.json", record)
        return real(*args, **kwargs)

    unfinished(copy)
    monkeypatch.setattr(capture, "prepare", overtaken)
    with pytest.raises(StoreError, match=r"was written by another run meanwhile; give --resume .* again"):
        resume_capture(copy, progress=False)


def test_a_store_is_read_from_another_directory(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(copy.parent)
    states = HiddenStateStore(copy.name).open("transformer.ln_f", "pre")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert states[:3].shape == (3, 32)
