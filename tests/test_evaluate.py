"""Held-out loss and bits per byte: against a computation from the text itself, token by token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import valuepath as vp
from valuepath.data.corpus import Corpus
from valuepath.data.prepare import prepare
from valuepath.evaluate.loss import Nats, held_out_nats, summary, windows

SAMPLES = {
    "zh": "注意力决定读哪里，值决定读到什么。第一层的值只取决于词元本身。",
    "ar": "القيمة تحدد ما يُقرأ، والاستعلام والمفتاح يحددان أين.",
    "hi": "मान यह तय करता है कि क्या पढ़ा जाए।",
    "emoji": "👩‍👩‍👧‍👦 reads 🏳️‍🌈 and 🧑🏽‍🚀; é is not é",
    "eos": "a text may say <|endoftext|> and mean it\r\nwith two line ends\n",
    "code": "def f(x):\n\treturn x * 2  # naïve\u2028\n",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, dict[str, str], Path]:
    """Many documents of each sample, all different, in two domains; what was written, by its content."""
    root = tmp_path_factory.mktemp("many languages")
    written = {}
    for domain in ("first", "second"):
        (root / domain).mkdir()
        for language, sample in SAMPLES.items():
            for n in range(6):
                text = f"{domain} {n}: " + sample * (1 + n)
                (root / domain / f"{language}-{n}.txt").write_bytes(text.encode())
                written[text] = domain
    prepare([str(root / "first"), str(root / "second")], root / "out", tokenizer="train:400", block=32, holdout=0.3)
    return Corpus.load(root / "out"), written, root


def model_for(corpus: Corpus, variant: str) -> vp.ValuePathForCausalLM:
    torch.manual_seed(11)
    config = vp.ValuePathConfig(
        variant=variant, vocab_size=corpus.vocab_size, hidden_size=20, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=23, initializer_range=0.3,
    )  # fmt: skip
    return vp.ValuePathForCausalLM(config).double()


@pytest.mark.parametrize("variant", ["transformer", "bov"])
def test_bits_per_byte_are_those_of_the_text(texts, variant: str):
    corpus, written, root = texts
    model = model_for(corpus, variant)
    length = 23
    found = held_out_nats(model, corpus, length, sequences=3)
    # independent: the tokenizer's file, the files on disk, one window and one token after the other
    raw = Tokenizer.from_file(str(root / "out" / "tokenizer" / "tokenizer.json"))
    raw.encode_special_tokens = True
    eos = raw.token_to_id("<|endoftext|>")
    for name, domain in corpus.domains.items():
        ids = domain.validation.read(0, len(domain.validation)).tolist()
        documents: list[list[int]] = []
        for token in ids:
            if token == eos:
                documents.append([])
            else:
                documents[-1].append(token)
        held = [raw.decode(document, skip_special_tokens=False) for document in documents[:-1]]
        assert len(held) > 3 and all(written[text] == name for text in held)
        stream = [eos]
        for text in held:
            stream += [*raw.encode(text, add_special_tokens=False).ids, eos]
        assert stream == ids
        nats = text_nats = 0.0
        for start in range(0, len(stream) - 1, length):
            window = stream[start : start + length + 1]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([window[:-1]])).logits[0]
            for position, target in enumerate(window[1:]):
                row = logits[position].tolist()
                top = max(row)
                cost = top + math.log(sum(math.exp(value - top) for value in row)) - row[target]
                nats += cost
                text_nats += cost if target != eos else 0.0
        size = sum(len(text.encode("utf-8")) for text in held)
        assert found[name].bytes == size
        assert found[name].tokens == len(stream) - 1
        assert found[name].loss == pytest.approx(nats / (len(stream) - 1), rel=1e-12)
        assert found[name].bpb == pytest.approx(text_nats / math.log(2) / size, rel=1e-12)


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary(texts):
    corpus, _, _ = texts
    model = model_for(corpus, "transformer")
    torch.nn.init.zeros_(model.lm_head.weight)
    for name, nats in held_out_nats(model, corpus, 31).items():
        domain = corpus.domains[name]
        assert nats.loss == pytest.approx(math.log(400), rel=1e-12)
        assert nats.bpb == pytest.approx(domain.validation_tokens * math.log2(400) / domain.validation_bytes, rel=1e-12)


@pytest.mark.parametrize("length", [2, 7, 100, 100_000])
def test_every_token_but_the_first_is_predicted_once_at_any_length(texts, length: int):
    corpus, _, _ = texts
    stream = next(iter(corpus.domains.values())).validation
    seen: list[int] = []
    for inputs, targets in windows(stream, length, 5, corpus.eos):
        assert inputs.shape == targets.shape and inputs.shape[1] == length and inputs.shape[0] <= 5
        seen += targets[targets != -100].tolist()
    assert seen == stream.read(1, len(stream)).tolist()


def test_the_two_means_are_what_they_are_called():
    parts = {"a": Nats(10.0, 8.0, 5, 20), "b": Nats(90.0, 81.0, 30, 100)}
    found = summary(parts)
    assert found["loss"] == {"mean": 2.5, "token_weighted": 100 / 35, "domains": {"a": 2.0, "b": 3.0}}
    bits = 1 / math.log(2)
    assert found["bpb"]["mean"] == pytest.approx((0.4 + 0.81) / 2 * bits)
    assert found["bpb"]["token_weighted"] == pytest.approx(89 / 120 * bits)
