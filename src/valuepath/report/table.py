"""The answer in a terminal, at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from valuepath.report import words

if TYPE_CHECKING:
    from rich.console import Group as Lines
    from rich.console import RenderableType

    from valuepath.study.results import Group, StudyResults

COLOURS = {"lower": "green", "higher": "red", "equal": "cyan", "baseline": "dim"}


def table(results: StudyResults) -> Lines:
    """Everything a person needs to judge the study, for ``console.print``."""
    from rich.console import Group as Lines

    parts: list[RenderableType] = [Text(words.heading(results), style="bold"), Text()]
    if len(results.groups) > 1:
        parts += [_overview(results), Text()]
    for g, group in enumerate(results.groups):
        if group.point:
            parts += [Text(words.point(group), style="bold cyan"), Text()]
        parts += [_losses(results, group), Text(), _costs(results, g)]
        sentences = [*words.answer(results, group), *words.unfinished(group)]
        parts += [Text(), *(Text(sentence) for sentence in sentences), Text()]
    if (chance := words.chance(results)) is not None:
        parts += [Text(chance), Text()]
    parts.append(Text(words.held_out(results), style="dim"))
    parts += [Text(note, style="dim") for note in results.notes]
    parts.append(Text(words.CAVEAT, style="dim"))
    return Lines(*parts)


def _empty(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.add_column(columns[0], overflow="fold", min_width=11)
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def _overview(results: StudyResults) -> Table:
    """Every point of the axes at a glance."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("at", "variant"):
        made.add_column(column, overflow="fold")
    for column in ("loss", "difference", ""):
        made.add_column(column, justify="right", no_wrap=True)
    for group in results.groups:
        for n, variant in enumerate(group.variants):
            difference = variant.loss.mean.difference
            word = words.verdict(variant)
            made.add_row(
                Text("" if n else words.point(group)),
                Text(variant.name),
                words.loss(variant.loss.mean.mean),
                "" if difference is None else words.signed(difference.mean),
                Text(word, style=COLOURS.get(word, "yellow")),
            )
    return made


def _losses(results: StudyResults, group: Group) -> Table:
    made = _empty("variant", "loss", "BPB", "difference", "95 % interval", "n", "")
    for variant in group.variants:
        difference = variant.loss.mean.difference
        word = words.verdict(variant)
        made.add_row(
            Text(variant.name),
            words.loss(variant.loss.mean.mean),
            words.loss(variant.bpb.mean.mean),
            "" if difference is None else words.signed(difference.mean),
            words.interval(difference),
            str(len(variant.seeds) if difference is None else len(difference.per_seed)),
            Text(word, style=COLOURS.get(word, "yellow")),
        )
    return made


def _costs(results: StudyResults, g: int) -> Table:
    made = _empty("variant", "parameters", "FLOPs", "cache B/token", "shared", "step")
    for variant in results.groups[g].variants:
        made.add_row(
            Text(variant.name),
            f"{variant.parameters:,}",
            f"{variant.training_flops:.3g}",
            f"{variant.cache.growing_bytes_per_token:,.0f}",
            words.shared(variant),
            words.seconds(results.measured.step_seconds[g].get(variant.name)),
        )
    made.caption = (
        f"FLOPs: of one training. Cache: {words.cache_heading(results)}; shared: tables of all sequences. "
        f"{words.STEP}"
    )
    made.caption_justify = "left"
    return made
