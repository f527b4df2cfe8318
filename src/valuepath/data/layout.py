"""What a prepared folder holds.

::

    DIR/meta.json                     this file's ``Meta``; written last
    DIR/tokenizer/                    of transformers
    DIR/train/000-NAME/               a datasets.Dataset: input_ids, int32[block] a row
    DIR/validation/000-NAME/          the same; the last row is filled up with EOS

A stream is ``EOS doc EOS doc EOS``, cut into rows of ``block`` ids: the rows one after another are the stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from valuepath import files
from valuepath.equations import nearest
from valuepath.settings import Document, Settings

FORMAT = 1
"""Of the folder; raised when an older reader would read it wrongly."""
META = "meta.json"
TOKENIZER = "tokenizer"
SPLITS = ("train", "validation")
_WRITTEN_AT_ONCE = 1 << 20  # ids


class SplitMeta(Settings):
    """Of one domain's training or held-out text.

    Attributes:
        documents: how many.
        tokens: ids of their text, without EOS.
        eos: EOS in the stream, one more than documents unless the tail was cut off.
        stream: ids in the stream, EOS included.
        bytes: UTF-8 bytes of the documents.
        unknown: tokens that stand for text which the tokenizer cannot say.
        inexact: documents that do not come back by decoding; counted in held-out text only.
    """

    documents: PositiveInt
    tokens: NonNegativeInt
    eos: PositiveInt
    stream: PositiveInt
    bytes: PositiveInt
    unknown: NonNegativeInt = 0
    inexact: NonNegativeInt = 0


class SkippedMeta(Settings):
    """Documents that were left out."""

    reason: str
    documents: PositiveInt
    first: str = Field(description="where the first of them stands")


class DomainMeta(Settings):
    """One domain.

    Attributes:
        weight: how often it is drawn; None: by its size.
        wanted: held-out bytes that were asked for.
        copies: documents that repeat an earlier one.
        limited: reading ended at --max-bytes.
        dropped: ids at the end of the training text that fill no row.
    """

    weight: PositiveFloat | None
    train: SplitMeta
    validation: SplitMeta
    wanted: NonNegativeInt
    copies: NonNegativeInt
    limited: bool
    dropped: NonNegativeInt
    skipped: list[SkippedMeta]


class Meta(Settings):
    """``meta.json``. The fingerprint depends on token ids and weights only: not on paths, times or the order of hashing."""

    format: int
    fingerprint: str
    block: PositiveInt
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: PositiveInt
    eos: NonNegativeInt
    sources: list[str]
    domains: dict[str, DomainMeta]


def domain_folder(index: int, name: str) -> str:
    """``003-c`` for ``C++``: a name that every file system takes."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return f"{index:03d}-{slug}" if slug else f"{index:03d}"


def is_prepared(folder: Path) -> bool:
    """Whether a folder was made by ``prepare``, in whatever version."""
    try:
        found = files.read_json(folder / META)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "fingerprint", "domains"} <= found.keys()


def read_meta(folder: Path) -> Meta:
    """``meta.json`` of a prepared folder.

    Raises:
        ValueError: if there is none, it has another format, or is damaged.
    """
    file = folder / META
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; make it with `valuepath data prepare SOURCE... --out {folder}`")
    if not file.is_file():
        raise ValueError(f"{folder}: no prepared text (there is no {META}); make it with `valuepath data prepare`")
    found = files.read_json(file)
    if not isinstance(found, dict):
        raise ValueError(f"{file}: damaged (expected keys and values); prepare the text again")
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format {found.get('format')!r}, this version of valuepath reads format {FORMAT}; prepare the text again"
        )
    try:
        return Document(found, str(file)).check(Meta)
    except ValueError as wrong:
        raise ValueError(f"{wrong}; the file is damaged: prepare the text again") from None


def check_weights(weights: Mapping[str, float] | None, names: list[str], what: str) -> dict[str, float]:
    """Weights of all domains, or of none.

    Raises:
        ValueError: for an unknown domain, a weight that is not above 0, or one for some domains only.
    """
    given = dict(weights or {})
    for name, weight in given.items():
        if name not in names:
            raise ValueError(f"{what} {name}: no such domain{nearest(name, names)}; domains: {', '.join(names)}")
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
            raise ValueError(f"{what} {name}={weight!r}: expected a number above 0")
    if given and (missing := [name for name in names if name not in given]):
        raise ValueError(f"{what}: nothing is said about {', '.join(missing)}; give every domain a weight, or none")
    return {name: float(weight) for name, weight in given.items()}


class StreamWriter:
    """One stream into a folder of ``datasets``, row by row.

    Args:
        scratch: a file to write first; removed when done.
        fill: id to fill the last row up with, or None to leave a tail that fills no row out.
    """

    def __init__(self, scratch: Path, block: int, fill: int | None) -> None:
        from datasets import Features, List, Value

        self.block, self.fill, self.scratch = block, fill, scratch
        self.length = 0
        self.rows = 0
        self.hash = blake2b(digest_size=16)
        self._schema = Features({"input_ids": List(Value("int32"), length=block)}).arrow_schema
        self._sink = pa.OSFile(str(scratch), "wb")
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._pending: list[NDArray[np.int32]] = []
        self._count = 0

    def add(self, ids: NDArray[np.int32]) -> None:
        self._pending.append(ids)
        self._count += len(ids)
        self.length += len(ids)
        if self._count >= max(_WRITTEN_AT_ONCE, self.block):
            self._write()

    def _write(self) -> None:
        """Whole rows of what is pending."""
        whole = np.concatenate(self._pending) if self._pending else np.empty(0, dtype=np.int32)
        rows = len(whole) // self.block
        taken, left = whole[: rows * self.block], whole[rows * self.block :]
        if rows:
            self.hash.update(taken.astype("<i4", copy=False).tobytes())
            values = pa.FixedSizeListArray.from_arrays(pa.array(taken, pa.int32()), self.block)
            self._writer.write_batch(pa.record_batch([values], schema=self._schema))
        self.rows += rows
        self._pending, self._count = [left], len(left)

    def tail(self) -> NDArray[np.int32]:
        """Ids that fill no row, after which nothing may be added."""
        self._write()
        return self._pending[0]

    def finish(self, folder: Path) -> str:
        """Save to ``folder``.

        Returns:
            A fingerprint of the rows.
        """
        from datasets import Dataset
        from datasets.table import MemoryMappedTable

        tail = self.tail()
        if len(tail) and self.fill is not None:
            self._pending = [tail, np.full(self.block - len(tail), self.fill, dtype=np.int32)]
            self._write()
        elif len(tail):
            self.length -= len(tail)
        self.close()
        fingerprint = self.hash.hexdigest()
        stored = Dataset(MemoryMappedTable.from_file(str(self.scratch)), fingerprint=fingerprint)
        stored.save_to_disk(str(folder))
        del stored
        self.scratch.unlink()
        return fingerprint

    def close(self) -> None:
        if not self._sink.closed:
            self._writer.close()
            self._sink.close()
