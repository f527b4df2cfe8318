"""The page: one file that needs nothing else, for a screen of any width and for paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from valuepath.report import figures, words
from valuepath.report.figures import Plot
from valuepath.study.results import Group, StudyResults


@dataclass(frozen=True)
class Section:
    """One point of the axes, as the template shows it."""

    heading: str
    group: Group
    sentences: list[str]
    unfinished: list[str]
    plots: list[Plot]
    coefficients: list[Plot]
    domains: list[str]
    step_seconds: dict[str, float | None]


def _section(results: StudyResults, g: int) -> Section:
    group = results.groups[g]
    plots = (
        figures.differences(results, group, g),
        figures.curves(group, g, "tokens"),
        figures.curves(group, g, "flops"),
        figures.difference_curves(results, group, g),
    )
    learned = (figures.coefficients(variant, g, n) for n, variant in enumerate(group.variants))
    return Section(
        heading=words.point(group),
        group=group,
        sentences=list(words.answer(results, group)),
        unfinished=list(words.unfinished(group)),
        plots=[plot for plot in plots if plot is not None],
        coefficients=[plot for plot in learned if plot is not None],
        domains=words.domains(group),
        step_seconds=results.measured.step_seconds[g],
    )


def html(results: StudyResults) -> str:
    """The whole page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("valuepath.report", "."),
        autoescape=True,  # names come from recipes
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "loss": words.loss,
        "signed": words.signed,
        "interval": words.interval,
        "verdict": words.verdict,
        "shared": words.shared,
        "seconds": words.seconds,
        "count": words.count,
    }
    environment.filters.update(filters)
    sections = [_section(results, g) for g in range(len(results.groups))]
    return environment.get_template("page.html.j2").render(
        results=results, sections=sections, words=words, plotly=get_plotlyjs()
    )
