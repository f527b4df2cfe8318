"""A prepared folder, read: token streams that are mapped into memory, of which a piece of any length can be taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from valuepath.data.layout import TOKENIZER, DomainMeta, Meta, domain_folder, read_meta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TokenStream:
    """``EOS doc EOS doc EOS``: token ids on the disk, read where they are asked for.

    Args:
        folder: of a ``datasets.Dataset`` with rows of ``block`` ids.
        length: ids in the stream; the last row may hold more.

    Raises:
        ValueError: if the files are missing, damaged, or hold less than that.
    """

    def __init__(self, folder: Path, length: int, block: int) -> None:
        self.folder, self.length, self.block = folder, length, block
        self._parts = _mapped(folder, block)
        self._ends = list(accumulate(len(part) for part in self._parts))
        rows = -(-length // block)
        if (self._ends[-1] if self._ends else 0) != rows * block:
            raise ValueError(f"{folder}: damaged ({rows} rows of {block} ids expected); prepare the text again")

    def __len__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[Callable[..., TokenStream], tuple[Path, int, int]]:
        return TokenStream, (self.folder, self.length, self.block)  # a worker maps the files itself instead of getting a copy

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ids ``start`` to ``stop - 1``, shape (stop - start,).

        Raises:
            ValueError: outside of the stream.
        """
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"{self.folder}: ids {start} to {stop} of a stream of {self.length}")
        out = np.empty(stop - start, dtype=np.int64)
        part = bisect_right(self._ends, start)
        at = start
        while at < stop:
            begins = self._ends[part] - len(self._parts[part])
            upto = min(stop, self._ends[part])
            out[at - start : upto - start] = self._parts[part][at - begins : upto - begins]
            at, part = upto, part + 1
        return out


def _mapped(folder: Path, block: int) -> list[NDArray[np.int32]]:
    """The rows as flat arrays without a copy, one for each record batch."""
    import pyarrow as pa
    from datasets import Dataset

    try:
        stored = Dataset.load_from_disk(str(folder), keep_in_memory=False)
        chunks = stored.data.column("input_ids").chunks
    except (OSError, ValueError, KeyError, pa.ArrowException) as wrong:
        said = str(wrong).strip().partition("\n")[0]
        raise ValueError(f"{folder}: damaged ({said}); prepare the text again") from None
    if any(chunk.type != pa.list_(pa.int32(), block) for chunk in chunks):
        raise ValueError(f"{folder}: damaged (rows of {block} ids expected); prepare the text again")
    return [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks if len(chunk)]


@dataclass(frozen=True)
class Domain:
    """One kind of text.

    Attributes:
        weight: how often it is drawn in training, in any unit; None: by its size.
        validation: its held-out text, whole.
        validation_bytes: exact UTF-8 bytes of the held-out documents.
        validation_tokens: ids of the held-out text that are not EOS.
        meta: everything else that was counted.
    """

    name: str
    weight: float | None
    train: TokenStream
    validation: TokenStream
    validation_bytes: int
    validation_tokens: int
    meta: DomainMeta = field(repr=False)


@dataclass(frozen=True)
class Corpus:
    """A prepared folder.

    Attributes:
        fingerprint: of token ids and weights; equal for equal text and settings, wherever the folder stands.
        vocab_size: largest id plus one.
        eos: id of the end token, which stands before, between and behind documents and nowhere else.
        domains: by name, in the order of the sources.
    """

    path: Path
    meta: Meta = field(repr=False)
    domains: dict[str, Domain]

    @classmethod
    def load(cls, path: Path | str) -> Corpus:
        """Open a folder that ``valuepath data prepare`` made.

        Raises:
            ValueError: if it is none, of another format version, or damaged.
        """
        path = Path(path)
        meta = read_meta(path)
        domains: dict[str, Domain] = {}
        for index, (name, each) in enumerate(meta.domains.items()):
            folder = domain_folder(index, name)
            domains[name] = Domain(
                name=name,
                weight=each.weight,
                train=TokenStream(path / "train" / folder, each.train.stream, meta.block),
                validation=TokenStream(path / "validation" / folder, each.validation.stream, meta.block),
                validation_bytes=each.validation.bytes,
                validation_tokens=each.validation.tokens,
                meta=each,
            )
        return cls(path, meta, domains)

    @property
    def fingerprint(self) -> str:
        return self.meta.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    @property
    def eos(self) -> int:
        return self.meta.eos

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, loaded at the first call.

        Raises:
            ValueError: if its files are missing or damaged.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import AutoTokenizer

        folder = self.path / TOKENIZER
        try:
            found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as wrong:
            said = str(wrong).strip().partition("\n")[0]
            raise ValueError(f"{folder}: damaged ({said}); prepare the text again") from None
        return cast("PreTrainedTokenizerFast", found)
