"""Documents on the disk between the passes: read once from their sources, then by domain as often as needed.

In memory a document is its hash and its size only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from valuepath.data.sources import Source
from valuepath.data.tables import Skip

MOST_DOMAINS = 256
DIGEST = 16
_CHUNK = 1 << 20
"""Bytes of text that are written, read and encoded at once."""
_SCHEMA = pa.schema([("text", pa.large_string())])


@dataclass
class Skipped:
    """Documents left out for one reason; ``first`` says where the first of them stands."""

    documents: int
    first: str


def reasons(skipped: Mapping[str, Skipped]) -> str:
    return "; ".join(f"{each.documents} {reason} (first: {each.first})" for reason, each in skipped.items())


@dataclass
class SpooledDomain:
    """The documents of one domain in their order.

    Attributes:
        digests: DIGEST bytes a document.
        sizes: UTF-8 bytes of each document.
        skipped: reason -> what was left out for it.
        size: UTF-8 bytes of them all.
        limited: reading ended at --max-bytes.
    """

    name: str
    file: Path
    digests: bytearray = field(default_factory=bytearray)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    skipped: dict[str, Skipped] = field(default_factory=dict)
    size: int = 0
    limited: bool = False
    _pending: list[str] = field(default_factory=list)
    _pending_bytes: int = 0
    _writer: pq.ParquetWriter | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, text: str, raw: bytes) -> None:
        """Append a document; ``raw`` is its text in UTF-8."""
        self.digests += blake2b(raw, digest_size=DIGEST).digest()
        self.sizes.append(len(raw))
        self.size += len(raw)
        self._pending.append(text)
        self._pending_bytes += len(raw)
        if self._pending_bytes >= _CHUNK:
            self._write()

    def skip(self, reason: str, where: str) -> None:
        self.skipped.setdefault(reason, Skipped(0, where)).documents += 1

    def _write(self) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.file, _SCHEMA, compression="zstd", use_dictionary=False)
        self._writer.write_table(pa.table([pa.array(self._pending, pa.large_string())], schema=_SCHEMA))
        self._pending, self._pending_bytes = [], 0

    def close(self) -> None:
        if self._pending:
            self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def digest_of(self, n: int) -> bytes:
        return bytes(self.digests[n * DIGEST : (n + 1) * DIGEST])

    def distinct(self) -> tuple[list[int], int]:
        """The first document of each distinct text, sorted by hash, and the number of documents that are copies."""
        halves = np.frombuffer(bytes(self.digests), dtype=">u8").reshape(-1, 2)
        order = np.lexsort((np.arange(len(halves)), halves[:, 1], halves[:, 0]))
        ordered = halves[order]
        new: NDArray[np.bool_] = np.ones(len(order), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        return [int(n) for n in order[new]], int((~new).sum())

    def texts(self) -> Iterator[list[str]]:
        """All documents in their order, about a megabyte at a time."""
        with pq.ParquetFile(self.file) as stored:
            for group in range(stored.num_row_groups):
                yield stored.read_row_group(group).column("text").to_pylist()


def spool(
    sources: list[Source], folder: Path, text_column: str, domain_column: str | None, max_bytes: int | None
) -> dict[str, SpooledDomain]:
    """Read every source into files in ``folder``; domains in the order in which they first appear.

    Args:
        max_bytes: of a domain. Reading it ends before the document that would exceed them.

    Raises:
        ValueError: for whatever a source cannot read, a source without any document, too many domains.
    """
    domains: dict[str, SpooledDomain] = {}

    def domain(name: str, source: Source) -> SpooledDomain:
        if name not in domains:
            if len(domains) == MOST_DOMAINS:
                raise ValueError(
                    f"{source.given}: more than {MOST_DOMAINS} domains, {name!r} is one more; a domain is a kind of text with "
                    "many documents: choose another --domain-column or none"
                )
            domains[name] = SpooledDomain(name, folder / f"{len(domains):03d}.parquet")
        return domains[name]

    try:
        for source in sources:
            seen = kept = 0
            skips: dict[str, Skipped] = {}
            for item in source.documents(text_column, domain_column):
                into = domain(item.domain, source)
                if into.limited:
                    kept += 1  # by another source of this domain, or by rows before this one
                    if domain_column is None:
                        break
                    continue
                seen += 1
                if isinstance(item, Skip):
                    into.skip(item.reason, item.where)
                    skips.setdefault(item.reason, Skipped(0, item.where)).documents += 1
                    continue
                kept += 1
                raw = item.text.encode("utf-8")
                if max_bytes is not None and into.size + len(raw) > max_bytes:
                    if not len(into):
                        raise ValueError(
                            f"--max-bytes {max_bytes}: the first document of the domain {into.name!r} has {len(raw)} bytes; "
                            "allow more, or cut the documents up"
                        )
                    into.limited = True
                    if domain_column is None:
                        break
                    continue
                into.add(item.text, raw)
            if not kept:
                what = f"is left: {reasons(skips)}" if seen else "in it"
                raise ValueError(f"{source.given}: no document {what}; expected text")
        for each in domains.values():
            each.close()
    finally:
        for each in domains.values():
            if each._writer is not None:  # an error is on its way: only let go of the file
                each._writer.close()
    return domains
