"""Sources to a prepared folder: read, split, tokenise, write; all of it or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray

from valuepath import files
from valuepath.data.layout import (
    FORMAT,
    META,
    SPLITS,
    TOKENIZER,
    DomainMeta,
    Meta,
    SkippedMeta,
    SplitMeta,
    StreamWriter,
    check_weights,
    domain_folder,
    is_prepared,
)
from valuepath.data.sources import Source, parse_sources
from valuepath.data.split import COPIES, Split, choose, held_digests
from valuepath.data.spool import Skipped, SpooledDomain, spool
from valuepath.data.tokenizer import Encoder, load_tokenizer, train_tokenizer, vocabulary_of

DEFAULT_TOKENIZER = "train:4096"
DEFAULT_BLOCK = 256
DEFAULT_HOLDOUT = 0.05
DEFAULT_HOLDOUT_BYTES = 200_000


def _nothing(_: str) -> None:
    pass


def prepare(
    sources: list[str],
    out: Path | str,
    *,
    tokenizer: str = DEFAULT_TOKENIZER,
    block: int = DEFAULT_BLOCK,
    text_column: str = "text",
    domain_column: str | None = None,
    weights: Mapping[str, float] | None = None,
    holdout: float = DEFAULT_HOLDOUT,
    max_holdout_bytes: int = DEFAULT_HOLDOUT_BYTES,
    max_bytes: int | None = None,
    overwrite: bool = False,
    tell: Callable[[str], None] = _nothing,
) -> Meta:
    """Prepare text for training. An interrupted call leaves nothing at ``out``.

    Args:
        sources: ``[NAME=]WHERE`` each; see ``valuepath.data.sources``.
        out: the folder to make.
        tokenizer: ``train:SIZE``, a folder, or a name on the hub.
        block: ids of a stored row; training may use any other length.
        text_column, domain_column: of tables.
        weights: how often each domain is drawn, in any unit, for every domain or none; by default by their sizes.
        holdout: share of each domain's bytes to hold out.
        max_holdout_bytes: and at most so many.
        max_bytes: of each domain to read.
        overwrite: replace a folder that ``prepare`` made before.
        tell: told what is being done.

    Raises:
        ValueError: for whatever is wrong with the sources, their text or an option.
    """
    out = Path(out).resolve()
    parsed = parse_sources(sources)
    wanted = vocabulary_of(tokenizer)
    _check_numbers(block, holdout, max_holdout_bytes, max_bytes)
    _check_out(out, parsed, overwrite)
    if domain_column is None:  # else the names are known after reading only
        check_weights(weights, list(dict.fromkeys(source.name for source in parsed)), "--weight")
    loaded = load_tokenizer(tokenizer) if wanted is None else None
    with files.new_folder(out) as building, _no_progress_bars():
        scratch = building / "spool"
        scratch.mkdir()
        tell("reading")
        domains = spool(parsed, scratch, text_column, domain_column, max_bytes)
        given = check_weights(weights, list(domains), "--weight")
        splits = {name: choose(domain, holdout, max_holdout_bytes) for name, domain in domains.items()}
        banned = held_digests(domains, splits)
        if loaded is None:
            assert wanted is not None
            tell(f"training a tokenizer of {wanted:,} ids")
            loaded = train_tokenizer(_training_texts(domains, banned), wanted)
        loaded.save_pretrained(building / TOKENIZER)
        encoder = Encoder(loaded)
        found: dict[str, DomainMeta] = {}
        whole = blake2b(digest_size=16)
        header = [FORMAT, block, encoder.sha256, encoder.eos, {name: given.get(name) for name in domains}]
        whole.update(json.dumps(header, ensure_ascii=True).encode())
        for index, (name, domain) in enumerate(domains.items()):
            tell(f"encoding {name}")
            writing = _Writing(building, scratch, domain_folder(index, name), domain, splits[name], banned, encoder, block)
            found[name] = writing.run(given.get(name))
            held = found[name].validation
            # besides the ids: where the text ends in its last row, and the bytes that bits per byte are of
            whole.update(json.dumps([*writing.fingerprints, found[name].train.stream, held.stream, held.bytes]).encode())
        shutil.rmtree(scratch)
        meta = Meta(
            format=FORMAT,
            fingerprint=whole.hexdigest(),
            block=block,
            tokenizer=tokenizer,
            tokenizer_sha256=encoder.sha256,
            vocab_size=encoder.vocab_size,
            eos=encoder.eos,
            sources=list(sources),
            domains=found,
        )
        files.write_json(building / META, meta.model_dump(mode="json"))
    return meta


def _check_numbers(block: int, holdout: float, max_holdout_bytes: int, max_bytes: int | None) -> None:
    if block < 2:
        raise ValueError(f"--block {block}: expected at least 2 ids a row")
    if not 0 < holdout <= 0.5:
        raise ValueError(f"--holdout {holdout}: expected a share of the text above 0 and at most 0.5")
    if max_holdout_bytes < 1:
        raise ValueError(f"--max-holdout-bytes {max_holdout_bytes}: expected at least 1")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"--max-bytes {max_bytes}: expected at least 1")


def _check_out(out: Path, sources: list[Source], overwrite: bool) -> None:
    """Refuse to replace what is not ours, and to read what is being written."""
    for source in sources:
        if source.kind == "folder" and out.is_relative_to(Path(source.where).resolve()):
            raise ValueError(f"--out {out} lies inside the source {source.given}; choose a folder outside of it")
        if source.kind in ("folder", "file") and Path(source.where).resolve().is_relative_to(out):
            raise ValueError(f"--out {out} holds the source {source.given}; choose another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_prepared(out):
        raise ValueError(f"--out {out}: there already, and not made by `valuepath data prepare`; choose another folder")
    own = {META, TOKENIZER, *SPLITS}
    if foreign := sorted(entry.name for entry in out.iterdir() if entry.name not in own and not entry.name.startswith(".")):
        raise ValueError(f"--out {out}: holds {foreign[0]!r} too, which is not prepared text; choose another folder")
    if not overwrite:
        raise ValueError(f"--out {out}: prepared before; give --overwrite to replace it, or choose another folder")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without the bars that ``datasets`` shows while it saves."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _training_texts(domains: Mapping[str, SpooledDomain], banned: frozenset[bytes]) -> Iterator[list[str]]:
    for domain in domains.values():
        n = 0
        for texts in domain.texts():
            yield [text for i, text in enumerate(texts, n) if domain.digest_of(i) not in banned]
            n += len(texts)


class _Tally:
    """Of one domain and split, while it is written."""

    def __init__(self, writer: StreamWriter, eos: int) -> None:
        self.writer, self.eos = writer, np.array([eos], dtype=np.int32)
        self.documents = self.tokens = self.bytes = self.unknown = self.inexact = 0
        writer.add(self.eos)

    def add(self, ids: NDArray[np.int32], size: int, unknown: int | None) -> None:
        self.documents += 1
        self.tokens += len(ids)
        self.bytes += size
        self.unknown += 0 if unknown is None else int((ids == unknown).sum())
        self.writer.add(ids)
        self.writer.add(self.eos)

    def meta(self, cut: NDArray[np.int32]) -> SplitMeta:
        """``cut``: ids at the end that are not stored."""
        eos = int((cut == self.eos[0]).sum())
        return SplitMeta(
            documents=self.documents,
            tokens=self.tokens - (len(cut) - eos),
            eos=self.documents + 1 - eos,
            stream=self.tokens + self.documents + 1 - len(cut),
            bytes=self.bytes,
            unknown=self.unknown,
            inexact=self.inexact,
        )


class _Writing:
    """One domain from the spool to its two streams."""

    def __init__(
        self,
        building: Path,
        scratch: Path,
        folder: str,
        domain: SpooledDomain,
        split: Split,
        banned: frozenset[bytes],
        encoder: Encoder,
        block: int,
    ) -> None:
        self.building, self.folder = building, folder
        self.domain, self.split, self.banned, self.encoder, self.block = domain, split, banned, encoder, block
        self.train_writer = StreamWriter(scratch / "train.arrow", block, fill=None)
        self.held_writer = StreamWriter(scratch / "validation.arrow", block, fill=encoder.eos)
        self.fingerprints: list[str] = []

    def run(self, weight: float | None) -> DomainMeta:
        try:
            return self._run(weight)
        finally:
            self.train_writer.close()
            self.held_writer.close()

    def _run(self, weight: float | None) -> DomainMeta:
        domain, encoder = self.domain, self.encoder
        train = _Tally(self.train_writer, encoder.eos)
        held = _Tally(self.held_writer, encoder.eos)
        n = 0
        for texts in domain.texts():
            for i, (text, ids) in enumerate(zip(texts, encoder.encode(texts), strict=True), n):
                if (ids == encoder.eos).any():
                    raise ValueError(
                        f"the domain {domain.name!r}, document {i + 1} of those kept: the tokenizer turns text in it into "
                        f"its end token {encoder.eos_text!r}, which must stand between documents only; use another tokenizer"
                    )
                if i in self.split.held:
                    held.add(ids, domain.sizes[i], encoder.unknown)
                    held.inexact += not encoder.says(text, ids)
                elif domain.digest_of(i) in self.banned:
                    domain.skip(COPIES, f"document {i + 1} of those kept")
                else:
                    train.add(ids, domain.sizes[i], encoder.unknown)
            n += len(texts)
        cut = self.train_writer.tail()
        if not self.train_writer.rows:
            raise ValueError(
                f"the domain {domain.name!r}: {len(cut)} training tokens are less than one row of --block {self.block}; "
                f"give it more text, or --block {len(cut)} or less"
            )
        for split, writer in (("train", self.train_writer), ("validation", self.held_writer)):
            self.fingerprints.append(writer.finish(self.building / split / self.folder))
        return DomainMeta(
            weight=weight,
            train=train.meta(cut),
            validation=held.meta(np.empty(0, dtype=np.int32)),
            wanted=self.split.wanted,
            copies=self.split.copies,
            limited=domain.limited,
            dropped=len(cut),
            skipped=[_skipped(reason, each) for reason, each in domain.skipped.items()],
        )


def _skipped(reason: str, each: Skipped) -> SkippedMeta:
    return SkippedMeta(reason=reason, documents=each.documents, first=each.first)
