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
from valuepath.report.export import csv, markdown, rows, seed_rows
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
    assert "these 2 are not corrected for that" in flat


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


def test_the_page_s_tables_show_the_results():
    results = study()
    losses, bpb, domains, costs, equations = Page(html(results)).tables
    for row, variant in zip(losses[1:], results.groups[0].variants, strict=True):
        assert row[0] == variant.name and number(row[1]) == pytest.approx(variant.loss.mean.mean, abs=5e-5)
        if difference := variant.loss.mean.difference:
            low, high = map(number, row[4].strip("[]").split(", "))
            assert (low, high) == pytest.approx((difference.low, difference.high), abs=5e-5)
            assert number(row[3]) == pytest.approx(difference.mean, abs=5e-5)
    assert [row[6] for row in losses[1:]] == ["baseline", "lower", "undecided"]
    assert number(bpb[2][1]) == pytest.approx(results.groups[0].variants[1].bpb.mean.mean, abs=5e-5)
    assert domains[0][1:] == list(DOMAINS)
    assert [row[1] for row in costs[1:]] == ["123,456", "123,457", "123,458"]
    assert [row[1] for row in equations[1:]] == ["v[1:] = 1*own", "v[1:] = 2*own", "v[1:] = 3*own"]


def test_the_plots_hold_the_results():
    results = study()
    plots = {name: json.loads(text) for name, text in Page(html(results)).plots.items()}
    _, svformer, bov = results.groups[0].variants
    for over in ("tokens", "flops"):
        lines = [trace for trace in plots[f"curves-{over}-0"]["data"] if "name" in trace]
        assert [line["name"] for line in lines] == ["transformer", "svformer", "bov"]
        assert lines[1]["x"] == getattr(svformer.curve, over)
        mean = [sum(svformer.curve.loss[seed][i] for seed in range(3)) / 3 for i in range(5)]
        assert lines[1]["y"] == pytest.approx(mean)
    filled = [trace for trace in plots["differences-0"]["data"] if "error_x" in trace]
    for trace, variant in zip(filled, (svformer, bov), strict=True):
        difference = variant.loss.mean.difference
        assert trace["x"][0] + trace["error_x"]["array"][0] == pytest.approx(difference.high)
        assert trace["x"][0] - trace["error_x"]["arrayminus"][0] == pytest.approx(difference.low)
    assert "coefficients-0-0" not in plots
    weights = [trace for trace in plots["coefficients-0-1"]["data"] if "name" in trace]
    assert [trace["name"] for trace in weights] == ["v: tap(0)", "v: tap(1)"]
    assert weights[0]["y"] == pytest.approx(
        [sum(svformer.coefficients[0].values[seed][i] for seed in range(3)) / 3 for i in range(3)]
    )


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
    assert "<h2>optimiser.lr = 0.001</h2>" in text and "<h2>optimiser.lr = 0.002</h2>" in text
    assert len([name for name in Page(text).plots if name.startswith("differences-")]) == 2
