"""What is held out: whole documents, by their content; a text is on one side only."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_texts import decoded_documents, plain, write_jsonl
from valuepath.data.corpus import Corpus
from valuepath.data.prepare import prepare
from valuepath.data.split import COPIES, choose
from valuepath.data.spool import SpooledDomain


def spooled(texts: list[str], folder: Path) -> SpooledDomain:
    domain = SpooledDomain("x", folder / "x.parquet")
    for text in texts:
        domain.add(text, text.encode())
    return domain


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=40), min_size=2, max_size=30),
    st.floats(0.01, 0.5),
    st.integers(1, 300),
)
def test_the_split_is_by_content_and_leaves_both_sides_something(texts, holdout, most):
    domain = spooled(texts, Path("unused"))
    if len(set(texts)) < 2:
        with pytest.raises(ValueError, match=r"all the same text|one document"):
            choose(domain, holdout, most)
        return
    split = choose(domain, holdout, most)
    held = {texts[n] for n in split.held}
    assert len(held) == len(split.held) >= 1 and held < set(texts)
    backwards = choose(spooled(texts[::-1], Path("unused")), holdout, most)
    assert {texts[::-1][n] for n in backwards.held} == held, "the order of documents does not matter"
    total = sum(len(text) for text in texts)
    enough = min(holdout * total, most)
    size = sum(map(len, held))
    assert size <= min(2 * enough, total / 2) or size == min(map(len, set(texts)))
    assert split.copies == len(texts) - len(set(texts))
    # by the definition: in the order of hashes, all that fit until there is enough
    by_hash = sorted(set(texts), key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    expected: list[str] = []
    for text in by_hash:
        have = sum(map(len, expected))
        if have < enough and len(expected) < len(by_hash) - 1 and have + len(text) <= min(2 * enough, total / 2):
            expected.append(text)
    assert held == set(expected) or (not expected and size == min(map(len, by_hash)))


def test_equal_texts_are_on_one_side_within_a_domain_and_across_domains(tmp_path):
    common, own = plain(40, seed=1), plain(40, seed=2)
    a = write_jsonl(tmp_path / "a.jsonl", [*common, *common[:20]])
    b = write_jsonl(tmp_path / "b.jsonl", [*own, *common])
    meta = prepare([str(a), str(b)], tmp_path / "out", tokenizer="train:300", block=32, holdout=0.2)
    corpus = Corpus.load(tmp_path / "out")
    held = set(decoded_documents(corpus, "a", "validation")) | set(decoded_documents(corpus, "b", "validation"))
    for name, size in (("a", 60), ("b", 80)):
        assert not held & set(decoded_documents(corpus, name, "train"))
        validation = decoded_documents(corpus, name, "validation")
        assert len(set(validation)) == len(validation)
        left_out = sum(each.documents for each in meta.domains[name].skipped if each.reason == COPIES)
        assert meta.domains[name].train.documents + len(validation) + left_out == size
    assert meta.domains["a"].copies == 20
    assert any(each.reason == COPIES for each in meta.domains["b"].skipped)


def test_one_long_document_is_trained_on_and_does_not_become_the_held_out_text(tmp_path):
    long = " ".join(plain(1000, seed=3))
    file = write_jsonl(tmp_path / "a.jsonl", [*plain(30), long])
    meta = prepare([str(file)], tmp_path / "out", tokenizer="train:300", block=32, holdout=0.01, max_holdout_bytes=1000)
    assert meta.domains["a"].validation.bytes <= 2000
    assert long not in decoded_documents(Corpus.load(tmp_path / "out"), "a", "validation")
    assert meta.domains["a"].train.bytes > len(long)


def test_two_documents_give_the_shorter_to_hold_out(tmp_path):
    short, long = plain(1)[0], " ".join(plain(20, seed=4))
    file = write_jsonl(tmp_path / "a.jsonl", [long, short])
    prepare([str(file)], tmp_path / "out", tokenizer="train:280", block=32, holdout=0.01)
    assert decoded_documents(Corpus.load(tmp_path / "out"), "a", "validation") == [short]


@pytest.mark.parametrize("texts", [["only one"], ["twice", "twice"]], ids=["one", "copies"])
def test_a_domain_of_one_text_says_what_to_do(tmp_path, texts):
    file = write_jsonl(tmp_path / "lonely.jsonl", texts)
    with pytest.raises(ValueError, match=r"'lonely' has .*cut the text up"):
        prepare([str(file)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
