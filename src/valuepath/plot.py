"""Cache bytes over the context length, drawn to a file. Computed from the plan, not measured.

Left: bytes of keys, values and ids that grow with the sequences, the same with the shared tables, and the ordinary
Transformer. Right: the percentage of the Transformer's whole K+V cache that is saved. For m layers that read trained tables
and one sequence without windows the right curve is ``m / 2N (1 - |V| / T)``, apart from the ids (4 bytes a token).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valuepath import counts
from valuepath.counts import Comparison
from valuepath.describe import Description

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
POINTS = 257


@dataclass(frozen=True)
class Curves:
    """Figures over the context: bytes of all sequences, and percentages saved of the reference's K+V cache."""

    contexts: tuple[int, ...]
    growing: tuple[int, ...]
    with_tables: tuple[int, ...]
    with_rows: tuple[int, ...] | None
    reference: tuple[int, ...]
    saved_growing: tuple[float, ...]
    saved_with_tables: tuple[float, ...]
    saved_with_rows: tuple[float, ...] | None


def curves(description: Description, contexts: Sequence[int]) -> Curves:
    """The figures of a description's plan at each of ``contexts``, with its batch, precision and distinct tokens.

    A context of T tokens in B sequences cannot have more than B T distinct ones, so fewer rows are in use there."""
    size, batch, distinct = description.bytes_per_element, description.batch, description.distinct
    found: list[Comparison] = [counts.compare_cache(description.plan, t, batch, size) for t in contexts]
    rows = None if distinct is None else [min(distinct, batch * t) for t in contexts]
    both = None if rows is None else list(zip(found, rows, strict=True))
    return Curves(
        contexts=tuple(contexts),
        growing=tuple(c.cache.growing_bytes for c in found),
        with_tables=tuple(c.cache.held_bytes(tables=True) for c in found),
        with_rows=None if both is None else tuple(c.cache.held_bytes(tables=True, distinct=u) for c, u in both),
        reference=tuple(c.reference.growing_bytes for c in found),
        saved_growing=tuple(c.saved().value for c in found),
        saved_with_tables=tuple(c.saved(tables=True).value for c in found),
        saved_with_rows=None if both is None else tuple(c.saved(tables=True, distinct=u).value for c, u in both),
    )


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path, if a plot can be written there.

    Raises:
        ValueError: for another suffix than png, svg or pdf, or a folder that does not exist.
    """
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot file {str(file)!r}: the suffix decides the format; expected {', '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ValueError(f"plot file {str(file)!r}: the folder {str(file.parent)!r} does not exist; make it first")
    if file.is_dir():
        raise ValueError(f"plot file {str(file)!r} is a folder; name a file")
    return file


def save_plot(description: Description, path: str | os.PathLike[str]) -> Path:
    """Draw a description's cache over the context and write it atomically.

    Raises:
        ValueError: for a path that cannot be written (see ``checked_path``) or a plan without a cache.
        OSError: if the disk refuses.
    """
    file = checked_path(path)
    if description.plan.generation_refusal:
        raise ValueError(f"there is no cache to plot: {description.plan.generation_refusal}")
    return save_figure(draw(description), file)


def save_figure(figure: Figure, file: Path) -> Path:
    """Write a figure to a path that ``checked_path`` has accepted: atomically, and the same bytes for the same figure."""
    from matplotlib import rc_context

    partial = file.with_name(f".{file.stem}.{os.getpid()}{file.suffix}")
    kind = file.suffix.lower()[1:]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # equal input, equal file
    try:
        with rc_context({"svg.hashsalt": "valuepath"}):
            figure.savefig(partial, format=kind, metadata=undated)
        partial.replace(file)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return file


def draw(description: Description) -> Figure:
    """The figure, on no screen: two panels over the context."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = _end(description)
    found = curves(description, sorted({max(1, round(end * i / (POINTS - 1))) for i in range(POINTS)}))
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_bytes(left, description, found)
    _draw_saved(right, description, found)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        _draw_context(axes, description, end)
    figure.suptitle(_title(description), x=0.01, ha="left", fontsize=11, parse_math=False)
    heads = description.caches[0].reference_name
    about = f"Computed, not measured: {description.dtype}, logical bytes. The {heads} has the same shape and windows."
    figure.supxlabel(about, x=0.01, ha="left", fontsize=8, color="0.4")
    return figure


# ------------------------------------------------------------------------------------------------------------ parts
LEGEND: dict[str, Any] = {"fontsize": 8, "facecolor": "white", "edgecolor": "none", "framealpha": 0.9}
MINE, TABLES, ROWS, REFERENCE = "#1f6feb", "#c2410c", "#15803d", "0.25"


def _end(description: Description) -> int:
    """How far the axis goes: past the context and well past the break-even."""
    even = description.break_even_context or 0
    return max(2 * description.context, 8 * even, 64)


def _title(description: Description) -> str:
    equation = " ; ".join(line.strip() for line in description.equation.splitlines() if line.strip()) or "ordinary Transformer"
    name = f"{description.about.name}:  " if description.about.name else ""
    shown = name + equation
    shape = description.plan.shape
    sizes = (
        f"{shape.num_layers} layers, {shape.num_kv_heads} x {shape.head_dim} key/value width, vocabulary {shape.vocab_size:,}"
    )
    return (shown if len(shown) <= 110 else shown[:107] + "...") + "\n" + sizes


def _draw_bytes(axes: Axes, description: Description, found: Curves) -> None:
    top = max(found.reference[-1], found.with_tables[-1])
    power = max(0, min(4, (top.bit_length() - 1) // 10))
    scale = 1024**power

    def line(values: Sequence[int], **style: object) -> None:
        axes.plot(found.contexts, [value / scale for value in values], **style)  # type: ignore[arg-type]

    line(found.reference, color=REFERENCE, linestyle="--", zorder=3, label="Transformer: keys and values")
    cache = description.caches[0].cache
    parts = ["keys"] + (["values"] if cache.value_elements else []) + (["ids"] if cache.ids else [])
    words = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    line(found.growing, color=MINE, label=f"this model: {words}")
    if cache.tables:
        line(found.with_tables, color=TABLES, label="with the tables that all sequences share")
        if found.with_rows is not None:
            line(found.with_rows, color=ROWS, linestyle="-.", label=f"with {description.distinct:,} rows in use")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"cache in {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}")
    axes.set_title("What the cache holds", fontsize=10, loc="left")
    axes.legend(loc="upper left", **LEGEND)


def _draw_saved(axes: Axes, description: Description, found: Curves) -> None:
    axes.axhline(0, color=REFERENCE, linewidth=0.8)
    axes.plot(found.contexts, found.saved_growing, color=MINE, label="growing bytes only")
    highest = max(found.saved_growing)
    lowest = min(0.0, *found.saved_growing)
    if description.caches[0].cache.tables:
        axes.plot(found.contexts, found.saved_with_tables, color=TABLES, label="with the shared tables")
        if found.saved_with_rows is not None:
            axes.plot(
                found.contexts,
                found.saved_with_rows,
                color=ROWS,
                linestyle="-.",
                label=f"with {description.distinct:,} rows in use",
            )
        highest = max(highest, *found.saved_with_tables)
        lowest = min(lowest, *found.saved_with_tables)
    # short contexts lose without bound: cut there, the crossing is what matters
    room = max(highest, 10.0)
    axes.set_ylim(max(lowest, -1.2 * room) - 0.05 * room, 1.15 * room)
    axes.set_ylabel("% saved of the Transformer's K+V cache")
    axes.set_title("What is saved, of keys and values together", fontsize=10, loc="left")
    axes.legend(loc="best", **LEGEND)


def _draw_context(axes: Axes, description: Description, end: int) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    step = 1
    while end / step > 6:
        step *= 2
    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _tokens(round(tokens))))
    batch = description.batch
    axes.set_xlabel("context, tokens" if batch == 1 else f"context, tokens in each of {batch:,} sequences")
    axes.grid(alpha=0.25)
    even = description.break_even_context
    if even is not None and even > 1:
        axes.axvline(even, color=TABLES, linewidth=0.9, linestyle=":")
        axes.annotate(
            f"break-even: {even:,} tokens{' each' if batch > 1 else ''}",
            (even, 0),
            xycoords=("data", "axes fraction"),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=8,
            color=TABLES,
        )


def _tokens(count: int) -> str:
    """32k for 32,768: contexts come in powers of two."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if count >= size and count % (size // 4 or 1) == 0:
            return f"{count / size:g}{unit}"
    return f"{count:,}"
