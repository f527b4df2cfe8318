"""The page's plots. Each is plain data for plotly.js; names are escaped, because plotly reads markup in them."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from valuepath.report import words
from valuepath.study.results import Coefficients, Group, StudyResults, VariantResult

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, told apart with any colour vision; dashes and markers tell them apart in print."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")

GRID = "#e4e4e0"


@dataclass(frozen=True)
class Plot:
    """One plot of the page.

    Attributes:
        id: of its element.
        title: what it shows.
        caption: how to read it.
        height: pixels.
        spec: ``{"data": [...], "layout": {...}}`` as JSON that is safe inside a script element.
        traces: how many traces are in it.
    """

    id: str
    title: str
    caption: str
    height: int
    spec: str
    traces: int


def _plot(name: str, title: str, caption: str, figure: Any, height: int) -> Plot:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 62, "r": 16, "t": 12, "b": 48},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        legend={"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0, "xanchor": "left"},
        hovermode="closest",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True, title_standoff=6)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    # an end tag, a comment or a line separator in a name must not end the script element that holds this
    text = figure.to_json()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Plot(name, title, caption, height, text, len(json.loads(text)["data"]))


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]


def _faint(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _line(n: int) -> dict[str, Any]:
    return {"color": _colour(n), "dash": DASHES[n % len(DASHES)], "width": 2}


def _range(by_seed: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From the smallest to the largest seed, for a line of one point, whose band has no width."""
    values = [seed[0] for seed in by_seed]
    mean = sum(values) / len(values)
    return {"type": "data", "symmetric": False, "array": [max(values) - mean], "arrayminus": [mean - min(values)], "width": 6}


def _add_band(figure: Any, n: int, name: str, x: Sequence[float], by_seed: Sequence[Sequence[float]]) -> None:
    """A mean line, with a band from the smallest to the largest seed behind it."""
    import plotly.graph_objects as go

    columns = list(zip(*by_seed, strict=True))
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    if len(by_seed) > 1:
        figure.add_trace(
            go.Scatter(
                x=[*x, *reversed(x)],
                y=[*high, *reversed(low)],
                fill="toself",
                fillcolor=_faint(_colour(n), 0.15),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
            )
        )
    figure.add_trace(
        go.Scatter(
            x=list(x),
            y=[sum(column) / len(column) for column in columns],
            name=html.escape(name),
            legendgroup=name,
            mode="lines+markers",
            error_y=_range(by_seed) if len(x) == 1 and len(by_seed) > 1 else None,
            line=_line(n),
            marker={"symbol": MARKERS[n % len(MARKERS)], "size": 6},
        )
    )


def curves(group: Group, g: int, over: str) -> Plot | None:
    """Held-out loss over trained tokens (``over="tokens"``) or over training FLOPs (``"flops"``)."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for n, variant in enumerate(group.variants):
        if variant.curve.loss:
            _add_band(figure, n, variant.name, getattr(variant.curve, over), list(variant.curve.loss.values()))
    if not figure.data:
        return None
    unit = "trained tokens" if over == "tokens" else "training FLOPs"
    figure.update_xaxes(title=unit, exponentformat="SI" if over == "tokens" else "power")
    figure.update_yaxes(title="loss (nats a token)")
    caption = "Lines: mean over seeds; bands: from the smallest to the largest seed. Lower is better."
    return _plot(f"curves-{over}-{g}", f"Held-out loss over {unit}", caption, figure, 440)


def difference_curves(results: StudyResults, group: Group, g: int) -> Plot | None:
    """Loss minus the baseline's during training, paired by seed."""
    import plotly.graph_objects as go

    baseline = next(variant for variant in group.variants if variant.baseline)
    figure = go.Figure()
    for n, variant in enumerate(group.variants):
        seeds = variant.curve.loss.keys() & baseline.curve.loss.keys()
        if variant.baseline or not seeds or variant.curve.tokens != baseline.curve.tokens:
            continue
        by_seed = [
            [a - b for a, b in zip(variant.curve.loss[seed], baseline.curve.loss[seed], strict=True)] for seed in sorted(seeds)
        ]
        _add_band(figure, n, variant.name, variant.curve.tokens, by_seed)
    if not figure.data:
        return None
    figure.add_hline(y=0, line={"color": "#222", "width": 1})
    figure.update_xaxes(title="trained tokens")
    figure.update_yaxes(title="loss minus baseline's")
    caption = (
        f"Loss minus that of {results.baseline} with the same seed, at the same step. Lines: mean; bands: smallest to largest "
        "seed. A difference that still moves at the end has not settled."
    )
    return _plot(f"difference-curves-{g}", "Difference during training", caption, figure, 400)


def differences(results: StudyResults, group: Group, g: int) -> Plot | None:
    """Final paired differences with their intervals, one row a variant."""
    import plotly.graph_objects as go

    figure = go.Figure()
    shown = [
        (n, variant, variant.loss.mean.difference)
        for n, variant in enumerate(group.variants)
        if variant.loss.mean.difference is not None
    ]
    if not shown:
        return None
    for n, variant, difference in shown:
        assert difference is not None
        # the name above its row leaves the whole width to the plot
        figure.add_annotation(
            {"x": 0, "xref": "paper", "xanchor": "left", "y": variant.name, "yref": "y", "yshift": 18, "showarrow": False},
            text=html.escape(variant.name),
        )
        row = variant.name
        if len(difference.per_seed) > 1:
            figure.add_trace(
                go.Scatter(
                    x=list(difference.per_seed.values()),
                    y=[row] * len(difference.per_seed),
                    text=[f"seed {seed}" for seed in difference.per_seed],
                    mode="markers",
                    marker={"symbol": "circle-open", "size": 7, "color": _faint(_colour(n), 0.6)},
                    showlegend=False,
                    hovertemplate="%{text}: %{x:+.4f}<extra></extra>",
                )
            )
        error = None
        if difference.low is not None and difference.high is not None:
            error = {
                "type": "data",
                "symmetric": False,
                "array": [difference.high - difference.mean],
                "arrayminus": [difference.mean - difference.low],
                "thickness": 2,
                "width": 6,
                "color": _colour(n),
            }
        figure.add_trace(
            go.Scatter(
                x=[difference.mean],
                y=[row],
                error_x=error,
                mode="markers",
                marker={"symbol": MARKERS[n % len(MARKERS)], "size": 10, "color": _colour(n)},
                showlegend=False,
                hovertemplate=f"mean %{{x:+.4f}} {words.interval(difference)}<extra></extra>",
            )
        )
    figure.add_vline(x=0, line={"color": "#222", "width": 1})
    figure.update_yaxes(autorange="reversed", type="category", showticklabels=False)
    figure.update_xaxes(title="difference (nats a token)", nticks=7)
    caption = (
        f"Filled: mean over seeds with its 95 % interval; open: each seed. Left of the line is better than {results.baseline}. "
        "An interval that crosses the line supports no conclusion."
    )
    return _plot(f"differences-{g}", f"Difference from {results.baseline}", caption, figure, 110 + 56 * len(shown))


def coefficients(variant: VariantResult, g: int, n: int) -> Plot | None:
    """What the equation's learned numbers became: lines over layers, or a map where there are many."""
    import plotly.graph_objects as go

    found = variant.coefficients
    if not found:
        return None
    figure = go.Figure()
    if len(found) > len(DASHES):
        _map(figure, found)
        caption = "Mean over seeds. Empty: the layer has no such weight."
        height = 140 + 24 * len(found)
    else:
        for k, each in enumerate(found):
            _add_band(figure, k, each.label, each.layers, list(each.values.values()))
            figure.add_trace(
                go.Scatter(
                    x=each.layers,
                    y=each.start,
                    mode="markers",
                    marker={"symbol": "line-ew-open", "size": 12, "color": _colour(k)},
                    showlegend=False,
                    hovertemplate="start %{y:.3f}<extra></extra>",
                )
            )
        caption = "Lines: mean over seeds; bands: smallest to largest seed; dashes: where the weight started."
        height = 380
        figure.update_yaxes(title="weight")
    last = max(max(each.layers) for each in found)
    figure.update_xaxes(title="layer", dtick=1 if last < 26 else None, range=[-0.5, last + 0.5])
    return _plot(f"coefficients-{g}-{n}", variant.name, caption, figure, height)


def _map(figure: Any, found: Sequence[Coefficients]) -> None:
    import plotly.graph_objects as go

    layers = sorted({layer for each in found for layer in each.layers})
    rows = []
    for each in found:
        seeds = list(each.values.values())
        mean = {layer: sum(seed[i] for seed in seeds) / len(seeds) for i, layer in enumerate(each.layers)}
        rows.append([mean.get(layer) for layer in layers])
    bound = max(abs(value) for row in rows for value in row if value is not None)
    figure.add_trace(
        go.Heatmap(
            z=rows,
            x=layers,
            y=[html.escape(each.label) for each in found],
            zmin=-bound,
            zmax=bound,
            colorscale=[[0, COLOURS[1]], [0.5, "#f7f7f5"], [1, COLOURS[0]]],
            colorbar={"thickness": 12},
            hoverongaps=False,
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
