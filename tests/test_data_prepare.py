"""Preparing text: what comes back by decoding is what went in, to the byte; what cannot be prepared is one clear error."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_texts import AWKWARD, ROOT, decoded_documents, plain, run_python, write_jsonl
from valuepath.data.corpus import Corpus
from valuepath.data.prepare import prepare
from valuepath.data.tokenizer import Encoder, train_tokenizer


def error(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        prepare(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tree(folder: Path) -> dict[str, str]:
    """Every file's hash, except for where the sources stood."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            raw = path.read_bytes()
            if path.name == "meta.json":
                raw = json.dumps({key: value for key, value in json.loads(raw).items() if key != "sources"}).encode()
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(raw).hexdigest()
    return found


# ------------------------------------------------------------------------------------------------------ round trip
def test_held_out_text_decodes_to_its_documents_and_their_bytes_are_exact(tmp_path):
    texts = [*AWKWARD, *plain(30)]
    file = write_jsonl(tmp_path / "mixed.jsonl", texts)
    prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=16, holdout=0.5)
    corpus = Corpus.load(tmp_path / "out")
    raw = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").split("\n") if line]
    held = decoded_documents(corpus, "mixed", "validation")
    trained = decoded_documents(corpus, "mixed", "train")
    assert held == [text for text in raw if text in set(held)], "input order, each exactly as it was"
    assert set(held) & set(AWKWARD), "the sample must hold out some of the awkward ones"
    assert trained == [text for text in raw if text not in set(held)][: len(trained)]
    assert len(held) + corpus.domains["mixed"].meta.train.documents == len(raw)
    assert corpus.domains["mixed"].validation_bytes == sum(len(text.encode()) for text in held)
    assert corpus.domains["mixed"].meta.train.bytes == sum(len(text.encode()) for text in raw) - sum(
        len(text.encode()) for text in held
    )


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_every_awkward_text_can_be_held_out(tmp_path, text):
    for n, each in enumerate([text, *plain(12)]):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{n:02d}").write_bytes(each.encode())
    prepare(["x=" + str(tmp_path / "texts")], tmp_path / "out", tokenizer="train:257", block=8, max_holdout_bytes=1)
    corpus = Corpus.load(tmp_path / "out")
    held, trained = decoded_documents(corpus, "x", "validation"), decoded_documents(corpus, "x", "train")
    assert held == [min([text, *plain(12)], key=lambda each: len(each.encode()))], "the shortest: all are longer than a byte"
    assert (text in trained) != (text in held)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(train_tokenizer([AWKWARD * 2, plain(50)], 400))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_unicode_comes_back_and_never_holds_the_end_token(encoder, texts):
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert encoder.eos not in ids
        assert encoder.says(text, ids)
        assert not encoder.says(text + "x", ids)


def test_stream_and_counts_agree_with_the_stored_rows(tmp_path):
    import datasets

    file = write_jsonl(tmp_path / "a.jsonl", plain(50))
    meta = prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=64)
    corpus = Corpus.load(tmp_path / "out")
    for split in ("train", "validation"):
        (folder,) = (tmp_path / "out" / split).iterdir()
        rows = np.concatenate([np.array(row) for row in datasets.load_from_disk(str(folder))["input_ids"]])
        stream, counted = getattr(corpus.domains["a"], split), getattr(meta.domains["a"], split)
        assert len(rows) % 64 == 0 and rows.dtype.kind == "i"
        assert np.array_equal(stream.read(0, len(stream)), rows[: len(stream)])
        assert counted.stream == len(stream) == counted.tokens + counted.eos
        assert counted.eos == (rows[: len(stream)] == corpus.eos).sum()
        assert (rows[len(stream) :] == corpus.eos).all() and len(rows) - len(stream) < 64
    held_out = corpus.domains["a"].validation.read(0, len(corpus.domains["a"].validation))
    assert held_out[0] == held_out[-1] == corpus.eos
    tokenizer = corpus.tokenizer()
    held = decoded_documents(corpus, "a", "validation")
    trained = [text for text in plain(50) if text not in held]
    whole = 1 + sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in trained)
    assert meta.domains["a"].dropped == whole % 64 == whole - meta.domains["a"].train.stream
    assert corpus.vocab_size == 300 and tokenizer.eos_token_id == corpus.eos


# ----------------------------------------------------------------------------------------------------- same again
CODE = """
import sys
from valuepath.data.prepare import prepare
prepare(sys.argv[2:], sys.argv[1], tokenizer="train:320", block=32, weights={"b": 2.0, "texts": 1.0})
"""


def test_two_processes_and_a_moved_folder_give_the_same_bytes(tmp_path):
    for place in ("first", "second/deeper"):
        write_jsonl(tmp_path / place / "texts" / "a.jsonl", plain(40))
        (tmp_path / place / "texts" / "z.txt").write_text(AWKWARD[0], encoding="utf-8")
        write_jsonl(tmp_path / place / "b.jsonl", [*AWKWARD, *plain(30, seed=2)])
    for place, seed in (("first", "1"), ("second/deeper", "4242")):
        where = tmp_path / place
        done = run_python(CODE, str(where / "out"), str(where / "texts"), str(where / "b.jsonl"), PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "valuepath" not in done.stderr
    first, second = tree(tmp_path / "first" / "out"), tree(tmp_path / "second" / "deeper" / "out")
    assert first == second and len(first) > 10


def test_the_fingerprint_follows_text_block_weights_and_tokenizer(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    other = write_jsonl(tmp_path / "other" / "a.jsonl", ["!" + plain(1)[0], *plain(40)[1:]])
    usual = {"tokenizer": "train:300", "block": 32}
    changes = [{}, {"block": 16}, {"weights": {"a": 1.0}}, {"tokenizer": "train:299"}]
    prints = [
        prepare([str(source)], tmp_path / f"out{n}", **(usual | changed)).fingerprint
        for n, (source, changed) in enumerate([*((file, each) for each in changes), (other, {})])
    ]
    assert len(set(prints)) == 5
    again = prepare([str(file)], tmp_path / "out0", **usual, overwrite=True)
    assert again.fingerprint == prints[0] == Corpus.load(tmp_path / "out0").fingerprint
    saved = prepare([str(file)], tmp_path / "reused", tokenizer=str(tmp_path / "out0"), block=32)
    assert saved.fingerprint == prints[0], "the tokenizer of a prepared folder is the same tokenizer"


# ------------------------------------------------------------------------------------------------------- all or nothing
class Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["reading", "training", "encoding"])
def test_an_interrupted_call_leaves_nothing_and_keeps_what_was_there(tmp_path, stage):
    file = write_jsonl(tmp_path / "in" / "a.jsonl", plain(40))
    before = prepare([str(file)], tmp_path / "place" / "out", tokenizer="train:300", block=32)

    def tell(what: str) -> None:
        if what.startswith(stage):
            raise Stop

    for out, expected in (("out", ["out"]), ("new", ["out"])):
        with pytest.raises(Stop):
            prepare([str(file)], tmp_path / "place" / out, tokenizer="train:290", block=32, overwrite=True, tell=tell)
        assert sorted(os.listdir(tmp_path / "place")) == expected
    assert Corpus.load(tmp_path / "place" / "out").fingerprint == before.fingerprint


def test_a_killed_process_leaves_no_folder_that_looks_finished(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    code = (
        "import sys, time\nfrom valuepath.data.prepare import prepare\n"
        "def tell(what):\n    print(what, flush=True)\n    time.sleep(600 if what.startswith('encoding') else 0)\n"
        "prepare([sys.argv[1]], sys.argv[2], tokenizer='train:300', block=32, tell=tell)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("encoding"):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no such folder"):
        Corpus.load(tmp_path / "out")
    prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=32)
    Corpus.load(tmp_path / "out")


def test_folders_that_are_not_ours_are_refused(tmp_path):
    file = write_jsonl(tmp_path / "in" / "a.jsonl", plain(40))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    (foreign / "meta.json").write_text('{"title": "thesis"}')
    for overwrite in (False, True):
        assert "not made by" in error([str(file)], foreign, overwrite=overwrite)
    (tmp_path / "file").write_text("more years")
    assert "not made by" in error([str(file)], tmp_path / "file", overwrite=True)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    prepare([str(file)], tmp_path / "empty", tokenizer="train:300", block=32)
    assert "--overwrite" in error([str(file)], tmp_path / "empty", tokenizer="train:300", block=32)
    assert "inside the source" in error([str(tmp_path / "in")], tmp_path / "in" / "out")
    assert "holds the source" in error([str(file)], tmp_path / "in", overwrite=True)


@pytest.mark.parametrize("set_by_user", [None, "true"])
def test_no_thread_pool_is_started_unless_the_user_asks_for_it(monkeypatch, set_by_user):
    """tokenizers 0.22 warns whenever a process forks that has used its pool, as every data loader with workers does."""
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if set_by_user is not None:
        monkeypatch.setenv(name, set_by_user)
    seen = []

    def texts():
        seen.append(os.environ.get(name))
        yield plain(50)

    train_tokenizer(texts(), 280)
    assert seen == [set_by_user or "false"] and os.environ.get(name) == set_by_user


# ------------------------------------------------------------------------------------------------------- tokenizers
def test_a_vocabulary_beyond_the_text_names_what_it_supports(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    message = error([str(file)], tmp_path / "out", tokenizer="train:50000", block=32)
    supported = int(message.partition("supports ")[2].split()[0])
    assert f"train:{supported}" in message
    assert prepare([str(file)], tmp_path / "out", tokenizer=f"train:{supported}", block=32).vocab_size == supported
    assert "supports" in error([str(file)], tmp_path / "no", tokenizer=f"train:{supported + 1}", block=32)


@pytest.mark.parametrize(
    "spec, expected",
    [("train:256", "at least 257"), ("train:", "train:4096"), ("train:4k", "train:4096"), ("train:-5", "train:4096")],
)
def test_a_vocabulary_that_is_none_is_refused_before_anything_is_read(tmp_path, spec, expected):
    assert expected in error([str(write_jsonl(tmp_path / "a.jsonl", ["x"]))], tmp_path / "out", tokenizer=spec)


def saved_tokenizer(folder: Path, vocabulary: list[str], *, truncation: int | None = None, **special: str) -> str:
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if truncation:
        backend.enable_truncation(truncation)
        backend.enable_padding(length=truncation, pad_id=0, pad_token="[UNK]")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_that_loses_text_is_used_and_its_unknown_tokens_are_counted(tmp_path):
    texts = [f"known {n % 3} {'strange' if n % 2 else 'known'} word {n}" for n in range(60)]
    vocabulary = ["[UNK]", "<eos>", "known", "word", "0", "1", "2"]
    spec = saved_tokenizer(tmp_path / "words", vocabulary, truncation=2, unk_token="[UNK]", eos_token="<eos>")
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    meta = prepare([str(file)], tmp_path / "out", tokenizer=spec, block=8, holdout=0.3)
    domain = meta.domains["a"]
    per_document = [[word if word in vocabulary else "[UNK]" for word in text.split()] for text in texts]
    assert domain.train.unknown + domain.validation.unknown == sum(words.count("[UNK]") for words in per_document)
    assert domain.validation.tokens == 5 * domain.validation.documents, "the tokenizer's truncation is not ours"
    assert domain.validation.inexact >= domain.validation.documents - 3
    assert meta.eos == 1 and meta.vocab_size == 7


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    spec = saved_tokenizer(tmp_path / "words", ["[UNK]", "the"], unk_token="[UNK]")
    assert "no end token" in error([str(file)], tmp_path / "out", tokenizer=spec)


def test_a_tokenizer_that_makes_its_end_token_out_of_text_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [*plain(40), "here is </s> again"])
    spec = saved_tokenizer(tmp_path / "words", ["[UNK]", "</s>", "the"], unk_token="[UNK]", eos_token="</s>")
    message = error([str(file)], tmp_path / "out", tokenizer=spec, block=8)
    assert "'a'" in message and "document 41" in message and "'</s>'" in message


def test_a_tokenizer_that_is_not_there_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    message = error([str(file)], tmp_path / "out", tokenizer=str(tmp_path / "absent"))
    assert "absent" in message and "train:4096" in message


# ---------------------------------------------------------------------------------------------------------- options
def test_a_block_longer_than_the_training_text_names_one_that_fits(tmp_path):
    file = write_jsonl(tmp_path / "tiny.jsonl", plain(3, words=4))
    message = error([str(file)], tmp_path / "out", tokenizer="train:260", block=5000)
    fits = int(message.rpartition("--block ")[2].split()[0])
    assert "'tiny'" in message
    meta = prepare([str(file)], tmp_path / "out", tokenizer="train:260", block=fits)
    assert meta.domains["tiny"].train.stream == fits and meta.domains["tiny"].dropped == 0
    assert "one row" in error([str(file)], tmp_path / "no", tokenizer="train:260", block=fits + 1)


def test_max_bytes_ends_reading_by_domain(tmp_path):
    texts = [letter * 100 + f"{n:03d}" for n in range(50) for letter in "ab"]
    file = write_jsonl(tmp_path / "t.jsonl", texts, kind=[text[0] * 2 for text in texts])
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "c" * 50, "kind": "cc"}) + "\n" + '{"text":"d","kind":"cc"}\n')
    meta = prepare(
        [str(file), str(tmp_path / "more.jsonl")],
        tmp_path / "out",
        tokenizer="train:257",
        block=8,
        domain_column="kind",
        max_bytes=1500,
    )
    assert list(meta.domains) == ["aa", "bb", "cc"]
    for name in ("aa", "bb"):
        assert meta.domains[name].limited
        assert meta.domains[name].train.bytes + meta.domains[name].validation.bytes == 14 * 103
    assert not meta.domains["cc"].limited
    assert "--max-bytes 20" in error([str(file)], tmp_path / "no", tokenizer="train:257", max_bytes=20)


@pytest.mark.parametrize(
    "weights, expected",
    [
        ({"book": 1.0}, "Did you mean 'books'?"),
        ({"books": 0.0, "code": 1.0}, "above 0"),
        ({"books": -1.0, "code": 1.0}, "above 0"),
        ({"books": float("nan"), "code": 1.0}, "above 0"),
        ({"books": float("inf"), "code": 1.0}, "above 0"),
        ({"books": 1.0}, "nothing is said about code"),
    ],
    ids=["unknown", "zero", "negative", "nan", "infinite", "some"],
)
def test_wrong_weights_are_one_error(tmp_path, weights, expected):
    sources = [str(write_jsonl(tmp_path / f"{name}.jsonl", plain(20))) for name in ("books", "code")]
    assert expected in error(sources, tmp_path / "out", tokenizer="train:260", block=16, weights=weights)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"block": 1}, "--block"),
        ({"holdout": 0.0}, "--holdout"),
        ({"holdout": 0.6}, "--holdout"),
        ({"holdout": float("nan")}, "--holdout"),
        ({"max_holdout_bytes": 0}, "--max-holdout-bytes"),
        ({"max_bytes": 0}, "--max-bytes"),
    ],
    ids=str,
)
def test_numbers_out_of_range_name_their_option(tmp_path, options, expected):
    assert expected in error([str(write_jsonl(tmp_path / "a.jsonl", plain(3)))], tmp_path / "out", **options)


def test_a_folder_that_holds_more_than_prepared_text_is_not_replaced(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", plain(40))
    prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=16)
    (tmp_path / "out" / "study.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds 'study.json' too"):
        prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=16, overwrite=True)
    assert (tmp_path / "out" / "study.json").exists() and Corpus.load(tmp_path / "out")
