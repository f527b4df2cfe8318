"""Rows as documents: JSONL (also gzipped), Parquet, and datasets of the hub, streamed.

Whatever is wrong with a row is said with its file and line or row, counted from 1.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from valuepath.equations import nearest

EMPTY = "empty"
NOT_TEXT = "not valid UTF-8"
_JSONL = (".jsonl", ".jsonl.gz")
_PARQUET = (".parquet",)


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its domain."""

    domain: str
    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A document that was left out: why, and where it stands."""

    domain: str
    reason: str
    where: str


@dataclass(frozen=True)
class Columns:
    """Which columns to read; ``name`` is the domain where no column decides."""

    text: str
    domain: str | None
    name: str

    def document(self, row: Mapping[str, Any], where: str) -> Document | Skip:
        """A row as a document.

        Raises:
            ValueError: for a missing column or one that is no text.
        """
        name = self.name
        if self.domain is not None:
            value = self._value(row, self.domain, "--domain-column", where)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{where}: {self.domain!r} is {_shown(value)}; expected the name of a domain")
            name = value.strip()
        value = self._value(row, self.text, "--text-column", where)
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as wrong:
                return Skip(name, NOT_TEXT, f"{where}, byte {wrong.start} of the text")
        if value is None:
            return Skip(name, EMPTY, where)
        if not isinstance(value, str):
            raise ValueError(f"{where}: {self.text!r} is {_shown(value)}; expected text")
        if not value.strip():
            return Skip(name, EMPTY, where)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as wrong:  # JSON can say half of a surrogate pair
            return Skip(name, NOT_TEXT, f"{where}, character {wrong.start} of the text")
        return Document(name, value)

    @staticmethod
    def _value(row: Mapping[str, Any], column: str, flag: str, where: str) -> Any:
        if column not in row:
            raise no_column(column, list(row), flag, where)
        return row[column]


def no_column(column: str, columns: list[str], flag: str, where: str) -> ValueError:
    there = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "") if columns else "none"
    return ValueError(f"{where}: no column {column!r}{nearest(column, columns)}; columns: {there}. Choose one with {flag}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({type(value).__name__})"


def is_table(path: Path) -> bool:
    return path.name.lower().endswith(_JSONL + _PARQUET)


def stem(path: Path) -> str:
    """``books`` for ``books.txt``, ``books.jsonl.gz`` and ``books.parquet``."""
    for suffix in sorted(_JSONL + _PARQUET, key=len, reverse=True):
        if path.name.lower().endswith(suffix) and len(path.name) > len(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def file_rows(path: Path, shown: str, columns: Columns) -> Iterator[Document | Skip]:
    """The rows of one JSONL or Parquet file."""
    rows = _parquet if path.name.lower().endswith(_PARQUET) else _jsonl
    try:
        yield from rows(path, shown, columns)
    except (OSError, EOFError, zlib.error) as wrong:
        said = (getattr(wrong, "strerror", None) or str(wrong)).partition("\n")[0]
        raise ValueError(f"{shown}: cannot be read ({said})") from None


def _jsonl(path: Path, shown: str, columns: Columns) -> Iterator[Document | Skip]:
    opened = cast("Callable[[Path, str], IO[bytes]]", gzip.open if path.name.lower().endswith(".gz") else open)
    with opened(path, "rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{shown}, line {number}"
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no part of the JSON
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8").rstrip()
            except UnicodeDecodeError as wrong:
                yield Skip(columns.name, NOT_TEXT, f"{where}, byte {wrong.start}")
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as wrong:
                raise ValueError(f"{where}, column {wrong.colno}: not JSON ({wrong.msg}); expected one object a line") from None
            except (ValueError, RecursionError):  # a number of thousands of digits; brackets without end
                raise ValueError(f"{where}: JSON that cannot be read; expected one object a line") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {_shown(row)}; expected one JSON object a line, such as {{\"text\": \"...\"}}")
            yield columns.document(row, where)


def _parquet(path: Path, shown: str, columns: Columns) -> Iterator[Document | Skip]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            wanted = {columns.text: "--text-column"} | ({columns.domain: "--domain-column"} if columns.domain else {})
            for column, flag in wanted.items():
                if column not in file.schema_arrow.names:
                    raise no_column(column, file.schema_arrow.names, flag, shown)
                kind = file.schema_arrow.field(column).type
                plain = kind.value_type if pa.types.is_dictionary(kind) else kind
                if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
                    raise ValueError(f"{shown}: the column {column!r} holds {kind}; expected text. Choose another with {flag}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=list(wanted)):
                # as bytes: a writer may have put text in there that is no UTF-8
                values = {
                    name: batch.column(name).cast(pa.large_string()).cast(pa.large_binary()).to_pylist() for name in wanted
                }
                for each in zip(*values.values(), strict=True):
                    row += 1
                    where = f"{shown}, row {row}"
                    found = dict(zip(values, each, strict=True))
                    if columns.domain and isinstance(found[columns.domain], bytes):
                        found[columns.domain] = found[columns.domain].decode("utf-8", "replace")
                    yield columns.document(found, where)
    except pa.ArrowException as wrong:
        raise ValueError(f"{shown}: not a Parquet file that can be read ({str(wrong).partition(chr(10))[0]})") from None


def hub_rows(where: str, config: str | None, split: str, given: str, columns: Columns) -> Iterator[Document | Skip]:
    """The rows of a dataset that ``datasets`` knows how to load, streamed: only what is used is fetched."""
    import datasets

    row = 0
    try:
        rows = iter(datasets.load_dataset(where, config, split=split, streaming=True))
    except Exception as wrong:  # each loader has errors of its own
        raise _unloadable(wrong, where, split, given) from None
    while True:
        try:
            found = next(rows)
        except StopIteration:
            return
        except Exception as wrong:
            raise _unloadable(wrong, where, split, given, row) from None
        row += 1
        yield columns.document(found, f"{given}, row {row}")


def _unloadable(wrong: Exception, where: str, split: str, given: str, row: int = 0) -> ValueError:
    said = f"{type(wrong).__name__}: {str(wrong).strip().partition(chr(10))[0]}"
    at = f" after row {row}" if row else ""
    exists = "" if Path(where).exists() else f"there is no file or folder {where}, and "
    return ValueError(
        f"{given}{at}: {exists}the dataset cannot be loaded, split {split!r} ({said}); expected hub:OWNER/NAME[:CONFIG][:SPLIT]"
    )
