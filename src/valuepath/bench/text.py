"""Token ids of real text for measurements: how many distinct tokens a context has decides what pooling saves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from valuepath.data.corpus import Corpus

VOCABULARY = 32768
"""Of the tokenizer that is trained if no prepared text is given."""


@dataclass(frozen=True)
class TextIds:
    """Ids of several texts.

    Attributes:
        source: where they come from, for reports.
        streams: one array of ids a text.
    """

    source: str
    vocab_size: int
    streams: tuple[np.ndarray, ...]

    def batch(self, sequences: int, length: int) -> Tensor:
        """(B, T) ids: sequence b comes from text b modulo their number, behind those taken from it before.

        Raises:
            ValueError: if there is not enough text.
        """
        rows: list[np.ndarray] = []
        taken = [0] * len(self.streams)
        for wanted in range(sequences):
            first = wanted % len(self.streams)
            order = [*range(first, len(self.streams)), *range(first)]
            at = next((n for n in order if taken[n] + length <= len(self.streams[n])), None)
            if at is None:
                total = sum(len(stream) for stream in self.streams)
                raise ValueError(f"{self.source} has {total:,} tokens: not enough for {sequences} pieces of {length:,}")
            rows.append(self.streams[at][taken[at] : taken[at] + length])
            taken[at] += length
        return torch.from_numpy(np.stack(rows))


def load(folder: Path | None, tell: Callable[[str], None]) -> TextIds:
    """Ids of a folder that ``valuepath data prepare`` made, or of Python's own sources with a tokenizer trained on them."""
    if folder is not None:
        return _of(Corpus.load(folder), str(folder))
    from valuepath.data.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="valuepath-") as scratch:
        made = Path(scratch) / "text"
        prepare(["builtin:stdlib"], made, tokenizer=f"train:{VOCABULARY}", tell=tell)
        return _of(Corpus.load(made), "builtin:stdlib")


def _of(corpus: Corpus, source: str) -> TextIds:
    streams = tuple(domain.train.read(0, len(domain.train)) for domain in corpus.domains.values())
    return TextIds(source, corpus.vocab_size, streams)
