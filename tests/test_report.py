"""What is shown of a study is what is in its results, on every kind of paper."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from synthetic import DOMAINS, study
from valuepath.report import words
from valuepath.report.export import SEED_COLUMNS, csv, markdown, rows, seed_rows
from valuepath.report.page import html
from valuepath.report.table import table
from valuepath.report.write import write_all
from valuepath.study.results import StudyResults

HOSTILE = "</script><script>alert(1)</script> \"'\\ <!-- & \u2028 | `x` [a](http://b)"


def terminal(results: StudyResults, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table(results))
    return out.getvalue()


class Page(HTMLParser):
    """The text, tables, plots and references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.plots: dict[str, str] = {}
        self.scripts = 0
        self.words: list[str] = []
        self.into: str | None = None
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.into = tag
        if tag == "script":
            self.scripts += 1
            self.plot = given.get("data-plot")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self.into = None
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.into == "script":
            if self.plot:
                self.plots[self.plot] = self.plots.get(self.plot, "") + data
        elif self.into != "style":
            self.words.append(data)
            if self.cell:
                self.tables[-1][-1][-1] += data.strip()


def number(text: str) -> float:
    return float(text.replace("−", "-"))


# --------------------------------------------------------------------------------------------------------- terminal
@pytest.mark.parametrize(
    "names", [("transformer", "svformer", "bov"), ("a" * 90, "v[1:] = learn(1)*own + " * 4, "resformer_learnable")]
)
def test_the_terminal_s_table_fits_80_columns(names):
    text = terminal(study(names=names, points=({}, {"optimiser.lr": 0.001}), failures={names[2]: [0]}))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut off


def test_the_terminal_says_what_the_seeds_support():
    flat = " ".join(terminal(study()).split())
    assert "Lower loss than transformer, with the whole 95 % interval below 0: svformer." in flat
    assert "The 3 seeds do not support a conclusion about bov: the interval [" in flat
    assert "no evidence about a large model" in flat
    assert "the 2 of the loss shown here are not corrected for that" in flat


def test_one_seed_gets_no_interval_and_is_told_so():
    flat = " ".join(terminal(study(seeds=1)).split())
    assert "One seed supports no conclusion about svformer, bov" in flat
    assert "[" not in flat.split("FLOPs")[0].split("interval", 1)[1]


def test_failed_and_missing_runs_are_named():
    flat = " ".join(terminal(study(failures={"bov": [1]}, missing={"svformer": [0, 2]})).split())
    assert "svformer: not finished yet with seed 0, 2." in flat
    assert "bov, seed 1: failed at step 17: the training loss is NaN or infinite. What to try: lower optimiser.lr." in flat


def test_a_study_without_any_result_can_be_shown():
    empty = study(missing={name: [0, 1, 2] for name in ("transformer", "svformer", "bov")})
    assert "No seed is finished" in " ".join(terminal(empty).split())
    assert "No seed is finished" in html(empty)
    assert len(pd.read_csv(io.StringIO(csv(rows(empty))))) == 3 and markdown(empty)
    assert list(pd.read_csv(io.StringIO(csv(seed_rows(empty), SEED_COLUMNS)))) == list(SEED_COLUMNS)


def test_a_difference_over_fewer_seeds_than_asked_for_says_so():
    for text in (terminal(study(failures={"svformer": [2]})), html(study(failures={"svformer": [2]}))):
        assert "svformer is compared on seed 0, 1 only" in " ".join(text.split())
    assert "is compared on seed" not in terminal(study())


def test_a_baseline_without_results_leaves_the_others_domains_in_place():
    results = study(missing={"transformer": [0, 1, 2]})
    assert list(DOMAINS) in [rows[0][1:] for rows in Page(html(results)).tables]
    assert "loss by domain | books | code" in markdown(results)


def test_variants_that_are_the_same_runs_are_no_finding():
    results = study(names=("transformer", "again"))
    group = results.groups[0]
    twin = group.variants[1].model_copy(update={"run_ids": group.variants[0].run_ids})
    same = results.model_copy(update={"groups": [group.model_copy(update={"variants": [group.variants[0], twin]})]})
    assert "so the same runs and not others: again." in " ".join(terminal(same).split())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999_499, "999k"), (999_600, "1M"), (999_999_999, "1G"), (1.5e12, "1.5T"), (2.34e16, "2.34e+04T")],
)
def test_counts_change_their_unit_after_rounding(value: float, text: str):
    assert words.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.25, "−0.2500"), (1e-4, "+0.0001"), (-1e-5, "−1.0e−05"), (4.9e-5, "+4.9e−05"), (5.1e-5, "+0.0001")],
)
def test_a_difference_is_never_shown_as_nothing_unless_it_is(value: float, text: str):
    assert words.signed(value) == text


# ------------------------------------------------------------------------------------------------------------- files
def test_the_csv_has_every_bit_of_every_number():
    results = study(points=({"optimiser.lr": 0.001}, {"optimiser.lr": 0.002}))
    found = pd.read_csv(io.StringIO(csv(rows(results))))
    assert len(found) == 6 and list(found["optimiser.lr"]) == [0.001] * 3 + [0.002] * 3
    variants = [variant for group in results.groups for variant in group.variants]
    assert list(found["loss"]) == [variant.loss.mean.mean for variant in variants]
    assert list(found["bpb_token_weighted"]) == [variant.bpb.token_weighted.mean for variant in variants]
    for low, variant in zip(found["loss_low"], variants, strict=True):
        difference = variant.loss.mean.difference
        assert pd.isna(low) if difference is None else low == difference.low


def test_the_csv_by_seed_recomputes_the_means_and_differences():
    results = study()
    found = pd.read_csv(io.StringIO(csv(seed_rows(results))))
    assert len(found) == 3 * 3 * 2 * (2 + len(DOMAINS))
    loss = found[(found.metric == "loss") & (found["of"] == "mean")].pivot(index="seed", columns="variant", values="value")
    variant = results.groups[0].variants[1]
    assert loss["svformer"].mean() == pytest.approx(variant.loss.mean.mean, rel=1e-14)
    assert (loss["svformer"] - loss["transformer"]).mean() == pytest.approx(variant.loss.mean.difference.mean, rel=1e-12)


def test_markdown_tables_have_equal_columns_and_hostile_names_stay_text():
    text = markdown(study(names=("transformer", HOSTILE, "bov")))
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert "\\<script\\>" in text and "<script>" not in text


def test_everything_is_written_and_reads_back(tmp_path: Path):
    results = study()
    paths = write_all(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert StudyResults.model_validate(json.loads((tmp_path / "results.json").read_text())) == results
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# -------------------------------------------------------------------------------------------------------------- page
def test_the_page_needs_nothing_else():
    text = html(study())
    page = Page(text)
    assert page.references == ["data:,"]
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1))


def close(text: str, value: float) -> bool:
    return number(text) == pytest.approx(value, abs=5.1e-5)


def expected_losses(results: StudyResults, metric: str) -> list[tuple]:
    """Name, mean, token-weighted mean, difference, interval, pairs, for every variant of the first group."""
    rows = []
    for variant in results.groups[0].variants:
        scores = getattr(variant, metric)
        mine = list(scores.mean.per_seed.values())
        weighted = list(scores.token_weighted.per_seed.values())
        difference = scores.mean.difference
        rows.append((
            variant.name, sum(mine) / len(mine), sum(weighted) / len(weighted),
            None if difference is None else (difference.mean, difference.low, difference.high),
            len(mine) if difference is None else len(difference.per_seed),
        ))  # fmt: skip
    return rows


def check_losses(rows: list[list[str]], results: StudyResults, metric: str) -> None:
    """Rows of name, mean, token-weighted mean, difference, interval, seeds, finding."""
    for row, (name, mean, weighted, difference, pairs) in zip(rows, expected_losses(results, metric), strict=True):
        assert row[0] == name and close(row[1], mean) and close(row[2], weighted) and row[5] == str(pairs)
        if difference is None:
            assert row[3] == row[4] == ""
        else:
            low, high = row[4].strip("[]").split(", ")
            assert close(row[3], difference[0]) and close(low, difference[1]) and close(high, difference[2])


def test_the_page_s_tables_show_the_results():
    results = study()
    losses, bpb, domains, costs, equations = Page(html(results)).tables
    for shown, metric in ((losses[1:], "loss"), (bpb[1:], "bpb")):  # name, mean, difference, finding, interval, seeds, weighted
        check_losses([[row[0], row[1], row[6], row[2], row[4], row[5]] for row in shown], results, metric)
    variants = results.groups[0].variants
    assert [row[3] for row in losses[1:]] == ["baseline", "lower", "undecided"]
    assert bpb[1][3] == "baseline" and bpb[2][3] == variants[1].bpb.mean.difference.verdict
    assert domains[0][1:] == list(DOMAINS)
    for row, variant in zip(domains[1:], variants, strict=True):
        for text, name in zip(row[1:], DOMAINS, strict=True):
            score = variant.loss.domains[name]
            assert close(text[:6], score.mean)
            assert text[6:] == "" if score.difference is None else close(text[6:], score.difference.mean)
    shared = ["–", "4 KiB", "8 KiB"]
    for n, row in enumerate(costs[1:]):
        flops, cache, step = f"{1.5e12 + n:.3g}", f"{1536 - n:,}", f"{130 + 10 * n} ms"
        assert row == [variants[n].name, f"{123_456 + n:,}", "5,000", flops, cache, shared[n], step]
    assert [row[1] for row in equations[1:]] == ["v[1:] = 1*own", "v[1:] = 2*own", "v[1:] = 3*own"]


def test_the_terminal_s_tables_show_the_results():
    results = study()
    lines = [line.split() for line in terminal(results).splitlines()]
    rows = [line for line in lines if line[:1] in (["transformer"], ["svformer"], ["bov"])]
    bpb = {name: mean for name, mean, *_ in expected_losses(results, "bpb")}
    for row, (name, mean, _, difference, pairs) in zip(rows, expected_losses(results, "loss"), strict=False):
        assert row[0] == name and close(row[1], mean) and close(row[2], bpb[name])
        if difference is not None:
            assert close(row[3], difference[0]) and row[6] == str(pairs)
            assert close(row[4].strip("[,"), difference[1]) and close(row[5].strip("]"), difference[2])
    for n, row in enumerate(rows[3:6]):
        assert row[1:4] == [f"{123_456 + n:,}", "1.5e+12", f"{1536 - n:,}"] and row[-2:] == [f"{130 + 10 * n}", "ms"]


def test_markdown_shows_the_results():
    results = study()
    blocks = re.findall(r"(?:^\|.*\n)+", markdown(results), flags=re.MULTILINE)
    tables = [
        [[cell.strip().replace("\\", "") for cell in line.strip("|\n").split("|")] for line in block.splitlines()[2:]]
        for block in blocks
    ]
    losses, domains, costs = tables
    bpb = {name: mean for name, mean, *_ in expected_losses(results, "bpb")}
    check_losses([[*row[:3], *row[4:]] for row in losses], results, "loss")
    assert all(close(row[3], bpb[row[0]]) for row in losses)
    for row, variant in zip(domains, results.groups[0].variants, strict=True):
        assert all(close(text, variant.loss.domains[name].mean) for text, name in zip(row[1:], DOMAINS, strict=True))
    assert [row[4] for row in costs] == ["1,536", "1,535", "1,534"] and [row[2] for row in costs] == ["5,000"] * 3


def test_the_plots_hold_the_results():
    results = study()
    plots = {name: json.loads(text) for name, text in Page(html(results)).plots.items()}
    transformer, svformer, bov = results.groups[0].variants

    def check_band(plot: str, name: str, x: list, by_seed: list[list[float]]) -> None:
        data = plots[plot]["data"]
        at = next(n for n, trace in enumerate(data) if trace.get("name") == name)
        line, band = data[at], data[at - 1]
        columns = list(zip(*by_seed, strict=True))
        assert line["x"] == x and line["y"] == pytest.approx([sum(column) / 3 for column in columns], abs=1e-12)
        assert band["x"] == [*x, *reversed(x)] and band["fill"] == "toself"
        edge = [*map(max, columns), *reversed([*map(min, columns)])]
        assert band["y"] == pytest.approx(edge, abs=1e-12)

    for variant in (transformer, svformer, bov):
        for over in ("tokens", "flops"):
            check_band(f"curves-{over}-0", variant.name, getattr(variant.curve, over), list(variant.curve.loss.values()))
    for variant in (svformer, bov):
        apart = [[a - b for a, b in zip(variant.curve.loss[s], transformer.curve.loss[s], strict=True)] for s in range(3)]
        check_band("difference-curves-0", variant.name, variant.curve.tokens, apart)
        for each in variant.coefficients:
            plot = "coefficients-0-1" if variant is svformer else "coefficients-0-2"
            check_band(plot, each.label, each.layers, list(each.values.values()))
    traces = plots["coefficients-0-1"]["data"]
    starts = [trace for trace in traces if trace.get("marker", {}).get("symbol") == "line-ew-open"]
    assert [trace["y"] for trace in starts] == [[0.5, 0.5, 0.5]] * 2
    assert "coefficients-0-0" not in plots
    data = plots["differences-0"]["data"]
    filled = [trace for trace in data if "error_x" in trace]
    seeds = [trace for trace in data if "error_x" not in trace]
    for trace, dots, variant in zip(filled, seeds, (svformer, bov), strict=True):
        difference = variant.loss.mean.difference
        assert trace["x"] == [difference.mean] and trace["y"] == [variant.name]
        assert trace["x"][0] + trace["error_x"]["array"][0] == pytest.approx(difference.high)
        assert trace["x"][0] - trace["error_x"]["arrayminus"][0] == pytest.approx(difference.low)
        assert dots["x"] == list(difference.per_seed.values())


def test_many_coefficients_become_a_map():
    plots = {name: json.loads(text) for name, text in Page(html(study(learned=9))).plots.items()}
    (heat,) = plots["coefficients-0-1"]["data"]
    assert heat["type"] == "heatmap" and len(heat["z"]) == 9


def test_names_from_a_recipe_are_harmless_on_the_page():
    plain, hostile = (Page(html(study(names=("transformer", name, "bov")))) for name in ("svformer", HOSTILE))
    assert hostile.scripts == plain.scripts
    assert HOSTILE.split("\u2028")[0].strip() in "".join(hostile.words)
    for text in hostile.plots.values():
        assert "<" not in text and json.loads(text)


def test_each_point_of_the_axes_has_its_section():
    text = html(study(points=({"optimiser.lr": 0.001}, {"optimiser.lr": 0.002})))
    assert '<h2 id="point-0">optimiser.lr = 0.001</h2>' in text and '<h2 id="point-1">optimiser.lr = 0.002</h2>' in text
    overview = Page(text).tables[0][1:]
    results = study(points=({"optimiser.lr": 0.001}, {"optimiser.lr": 0.002}))
    variants = [variant for group in results.groups for variant in group.variants]
    assert [row[1] for row in overview] == [variant.name for variant in variants] and len(overview) == 6
    assert all(close(row[2], variant.loss.mean.mean) for row, variant in zip(overview, variants, strict=True))
    assert [row[0] for row in overview] == ["optimiser.lr = 0.001", "", "", "optimiser.lr = 0.002", "", ""]
    lines = [line.split() for line in terminal(results).splitlines()[2:9]]
    assert close(lines[2][1], variants[1].loss.mean.mean) and lines[2][0] == "svformer" and lines[2][3] == "lower"
    assert len([name for name in Page(text).plots if name.startswith("differences-")]) == 2
