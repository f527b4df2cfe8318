"""Text to ids and nothing lost: a byte-level BPE trained here, or a tokenizer loaded with transformers.

A text that spells a special token is ordinary text, so that the end token stands between documents and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
SMALLEST = 257
"""Ids of a byte-level vocabulary: each byte and the end token."""
_MIN_FREQUENCY = 2  # a merge seen once is a memory of one place in the text


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Tokenizers in one thread, unless the user's environment says otherwise: up to version 0.22 its thread pool warns whenever
    a process that has used it forks, as data loaders do later."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def vocabulary_of(spec: str) -> int | None:
    """4096 for ``train:4096``; None for a tokenizer to load.

    Raises:
        ValueError: if the number is none, or smaller than the bytes and the end token need.
    """
    if not spec.startswith("train:"):
        return None
    text = spec.removeprefix("train:")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"--tokenizer {spec}: expected a number of ids, e.g. train:4096")
    if int(text) < SMALLEST:
        raise ValueError(f"--tokenizer {spec}: at least {SMALLEST} ids are needed, for 256 bytes and {EOS}")
    if int(text) > 2**31 - 1:
        raise ValueError(f"--tokenizer {spec}: ids are stored in 32 bits")
    return int(text)


def train_tokenizer(texts: Iterable[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with exactly ``vocab_size`` ids; the end token is id 0. The same texts give the same merges.

    Raises:
        ValueError: if the texts do not support that many ids, with the number that they do.
    """
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with quiet_threads():
        backend.train_from_iterator(texts, trainer)
    found = backend.get_vocab_size()
    if found < vocab_size:
        raise ValueError(
            f"--tokenizer train:{vocab_size}: the training text supports {found} ids (no pair of tokens is left that occurs "
            f"twice); use train:{found} or fewer, or more text"
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, clean_up_tokenization_spaces=False)


def load_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a folder, of a prepared corpus, or of the hub.

    Raises:
        ValueError: if it cannot be loaded, is not a fast one, or has no end token.
    """
    from transformers import AutoTokenizer

    where = f"--tokenizer {spec}"
    inner = Path(spec) / "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(inner) if inner.is_dir() else spec, trust_remote_code=False)
    except Exception as wrong:  # missing files, network, foreign formats: each with an error of its own
        said = str(wrong).strip().partition("\n")[0]
        raise ValueError(
            f"{where}: cannot be loaded ({type(wrong).__name__}: {said}); expected train:4096, a folder with tokenizer.json, "
            "or the name of a model on the hub"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{where}: {type(tokenizer).__name__} is not a fast tokenizer (one with a tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{where}: it has no end token, which separates documents; set eos_token in its tokenizer_config.json")
    return cast("PreTrainedTokenizerFast", tokenizer)


class Encoder:
    """Documents to ids.

    Attributes:
        eos: id of the end token.
        unknown: id of the token for text that the vocabulary cannot say, if there is one.
        vocab_size: largest id plus one.
        sha256: of the tokenizer's own JSON.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend: Backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())  # its own copy: settings stay here
        self.backend.no_truncation()
        self.backend.no_padding()
        self.sha256 = sha256(self.backend.to_str().encode("utf-8")).hexdigest()
        self.backend.encode_special_tokens = True
        assert isinstance(tokenizer.eos_token_id, int)
        self.eos = tokenizer.eos_token_id
        self.eos_text = str(tokenizer.eos_token)
        unknown = tokenizer.unk_token_id
        self.unknown = unknown if isinstance(unknown, int) and unknown != self.eos else None
        self.vocab_size = max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of each text, without special tokens."""
        with quiet_threads():
            found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def says(self, text: str, ids: NDArray[np.int32]) -> bool:
        """Whether the ids decode to exactly the text."""
        return self.backend.decode(ids.tolist(), skip_special_tokens=False) == text
