"""The page in a real browser: the plots are drawn, nothing is fetched, nothing sticks out of a phone."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import browser
from synthetic import study
from valuepath.report.write import write_all

NAMES = ("transformer", "</script><b>bov", "a_rather_long_name_of_a_variant_without_any_space_in_it")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    results = study(names=NAMES, points=({}, {"optimiser.lr": 0.001}), failures={NAMES[2]: [0]})
    write_all(results, folder)
    return folder / "report.html"


def open_page(session, page: Path) -> None:
    session.get(page.as_uri())
    # plotly draws in the next frame
    WebDriverWait(session, 60).until(lambda s: len(s.find_elements(By.CSS_SELECTOR, ".plot .main-svg")) >= 3 * plots(s))


def plots(session) -> int:
    return len(session.find_elements(By.CSS_SELECTOR, ".plot"))


def test_every_plot_is_drawn_and_nothing_is_fetched(page: Path, tmp_path: Path):
    with browser(tmp_path) as session:
        open_page(session, page)
        assert session.title == "synthetic – value pathways compared"
        # per point of the axes: differences, two curves, the difference's curve, coefficients of two variants
        found = session.find_elements(By.CSS_SELECTOR, ".plot")
        assert len(found) == 2 * 6
        for plot in found:
            drawn = plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace")
            assert len(drawn) == int(plot.get_attribute("data-traces")) > 0, plot.get_attribute("id")
            assert plot.size["width"] > 300 and plot.size["height"] > 150
        bars = session.find_elements(By.CSS_SELECTOR, "#differences-0 .errorbars path")
        assert len([bar for bar in bars if bar.get_attribute("d")]) == 2
        legend = [each.text for each in session.find_elements(By.CSS_SELECTOR, "#curves-tokens-0 .legendtext")]
        assert legend == list(NAMES)
        assert "no evidence about a large model" in session.find_element(By.TAG_NAME, "main").text
        fetched = session.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert [name for name in fetched if not name.startswith("data:")] == []
        assert [entry for entry in session.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_nothing_sticks_out_of_a_phone_and_plots_follow_its_width(page: Path, tmp_path: Path):
    with browser(tmp_path) as session:
        session.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 812, "deviceScaleFactor": 2, "mobile": True}
        )
        open_page(session, page)
        inner, scroll = session.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
        assert inner == scroll == 375
        for svg in session.find_elements(By.CSS_SELECTOR, ".plot .main-svg"):
            assert svg.size["width"] <= 375
        sizes = session.execute_script(
            "return [...document.querySelectorAll('p, td, figcaption')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 12


def test_it_prints_on_paper_with_its_plots(page: Path, tmp_path: Path):
    with browser(tmp_path) as session:
        open_page(session, page)
        paper = {"paperWidth": 8.27, "paperHeight": 11.7}
        printed = base64.b64decode(session.execute_cdp_cmd("Page.printToPDF", paper)["data"])
        assert printed.startswith(b"%PDF") and len(printed) > 50_000
        session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        for plot in session.find_elements(By.CSS_SELECTOR, "figure"):
            assert plot.value_of_css_property("break-inside") == "avoid"
