"""The results of ``valuepath bench decode`` for people: tables of 80 columns, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from valuepath.bench.whole import BASELINE
from valuepath.plot import save_figure
from valuepath.render import size

COLOURS = ("#374151", "#c2410c", "#1f6feb", "#7c3aed", "#15803d", "#9ca3af")
NOTICE = "Measured on this machine alone. A small CPU run is no evidence about a GPU or a large model."


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def show(result: dict[str, Any], console: Console) -> None:
    """Print every cell, and the summary."""
    machine, text = result["machine"], result["text"]
    where = machine.get("device", machine["processor"])
    console.print(Text(f"{where}, {machine['threads']} threads, torch {machine['torch']}"))
    rounds = result["settings"]["rounds"]
    console.print(Text(f"token ids of {text['source']}, vocabulary {text['vocab_size']:,}; medians of {rounds}"))
    if result["kernel"]:
        _kernels(result, console)
    for cell in result["whole"]:
        _whole(cell, console)
    console.print(Text(NOTICE, style="dim"))


def _kernels(result: dict[str, Any], console: Console) -> None:
    heads = result["settings"]["heads"]
    console.print()
    table = _table(
        f"Attention of one layer, one query, {heads} heads, milliseconds",
        "dtype", "width", "batch", "context", "U/T", "stored", "gathered", "pooled", "keys", "pooled/stored",
    )  # fmt: skip
    for cell in result["kernel"]:
        labels = [cell["dtype"], str(cell["head_dim"]), str(cell["batch"]), f"{cell['context']:,}"]
        if "skipped" in cell:
            table.add_row(*labels, "skipped", *[""] * 5)
            continue
        times = [f"{cell[f'{name}_ms']:.2f}" for name in ("stored", "gathered", "pooled", "keys")]
        table.add_row(
            *labels, f"{cell['distinct_by_sequence'] / cell['context']:.3f}", *times, f"{cell['pooled_over_stored']:.2f}"
        )
    console.print(table)
    for reason in dict.fromkeys(cell["skipped"] for cell in result["kernel"] if "skipped" in cell):
        console.print(Text(f"skipped: {reason}", style="dim"))
    if result["summary"]:
        console.print()
        table = _table("Contexts of 16,384 and more", "pooled over", "geometric mean", "largest", "cells")
        for name, found in result["summary"].items():
            word = {"stored": "stored values, the faster way", "gathered": "every position gathered", "keys": "keys alone"}
            label = word[name.removeprefix("pooled_over_")]
            table.add_row(label, f"{found['geometric_mean']:.2f}", f"{found['largest']:.2f}", str(found["cells"]))
        console.print(table)


def _whole(cell: dict[str, Any], console: Console) -> None:
    console.print()
    title = f"Whole model: {cell['dtype']}, batch {cell['batch']}, context {cell['context']:,}"
    if "skipped" in cell:
        console.print(Text(f"{title}: skipped, {cell['skipped']}"))
        return
    table = _table(
        f"{title}, {cell['distinct']:,} distinct tokens",
        "", "tokens/s", "speed", "grows", "share", "rows", "tables", "pays from",
    )  # fmt: skip
    for name, found in cell["contestants"].items():
        even = found["break_even_tokens"] if found["table_bytes"] else None
        table.add_row(
            Text(name),
            f"{found['tokens_per_second']:.2f}",
            f"{found['speed_over_transformer']:.2f}",
            size(found["growing_bytes"]),
            f"{found['growing_over_transformer']:.3f}",
            size(found["row_bytes"]) if found["table_bytes"] else "",
            size(found["table_bytes"]) if found["table_bytes"] else "",
            "" if even is None else f"{even:,}",
        )
    console.print(table)


# ---------------------------------------------------------------------------------------------------------------- plot
def plot(result: dict[str, Any], path: Path) -> Path:
    """Time and bytes of whole models over the context for each precision and batch; without whole models the time of kernels.

    ``path`` was accepted by ``valuepath.plot.checked_path``.

    Raises:
        ValueError: if every cell was skipped.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in result["whole"] or result["kernel"] if "skipped" not in cell]
    if not cells:
        raise ValueError("nothing to plot: every cell was skipped")
    keys = ("dtype", "batch") if result["whole"] else ("dtype", "batch", "head_dim")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell[key] for key in keys), []).append(cell)
    rows = len(groups) if result["whole"] else -(-len(groups) // 2)  # two panels a group, or two groups a row
    figure = Figure(figsize=(11, 3.4 * rows + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, squeeze=False)
    for number, (key, found) in enumerate(groups.items()):
        row = panels[number] if result["whole"] else [panels[number // 2][number % 2]]
        found.sort(key=lambda cell: cell["context"])
        title = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in zip(keys, key, strict=True))
        if result["whole"]:
            names = [*found[0]["contestants"]]
            times = {name: [cell["contestants"][name]["ms_per_step"] for cell in found] for name in names}
            held = {
                name: [cell["contestants"][name]["growing_bytes"] / 2**20 for cell in found]
                for name in names
                if name != "keys alone"
            }
            _lines(row[0], found, times, f"{title}: milliseconds a step")
            _lines(row[1], found, held, f"{title}: cache that grows, MiB")
        else:
            names = ["stored", "gathered", "pooled", "keys"]
            _lines(row[0], found, {name: [cell[f"{name}_ms"] for cell in found] for name in names}, f"{title}: milliseconds")
    if not result["whole"] and len(groups) % 2:
        panels[-1][1].set_axis_off()
    source = f"Token ids of {result['text']['source']}."
    figure.supxlabel(f"{source} {NOTICE}", x=0.01, ha="left", fontsize=8, color="0.4", parse_math=False)
    return save_figure(figure, path)


def _lines(axes: Any, cells: list[dict[str, Any]], lines: dict[str, list[float]], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    contexts = [cell["context"] for cell in cells]
    for number, (name, values) in enumerate(lines.items()):
        style = "--" if name in (BASELINE, "stored") else ":" if name.startswith("keys") else "-"
        axes.plot(contexts, values, style, marker="o", markersize=3.5, color=COLOURS[number % len(COLOURS)], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("context, tokens", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False)
