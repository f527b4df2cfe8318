"""Everything that a study's folder shows to people and programs."""

from __future__ import annotations

from pathlib import Path

from valuepath import files
from valuepath.report.export import SEED_COLUMNS, csv, markdown, rows, seed_rows
from valuepath.report.page import html
from valuepath.study.results import StudyResults


def write_all(results: StudyResults, folder: Path) -> list[Path]:
    """``results.json``, ``results.csv``, ``results-by-seed.csv``, ``results.md`` and ``report.html``, each whole or absent."""
    files.write_json(folder / "results.json", results.model_dump(mode="json"))
    texts = {
        "results.csv": csv(rows(results)),
        "results-by-seed.csv": csv(seed_rows(results), SEED_COLUMNS),
        "results.md": markdown(results),
        "report.html": html(results),
    }
    for name, text in texts.items():
        files.write_text(folder / name, text)
    return [folder / name for name in ("results.json", *texts)]
