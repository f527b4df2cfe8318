"""What the documents say of settings, recipes and results is what the code reads and writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from valuepath.data.corpus import Corpus
from valuepath.settings import parse_yaml, read_yaml
from valuepath.study import results
from valuepath.study.recipe import Recipe, expand
from valuepath.train import settings
from valuepath.train.settings import RunSettings

ROOT = Path(__file__).parents[1]
STUDIES = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
YAML = re.findall(r"^```yaml\n(.*?)^```$", STUDIES, flags=re.MULTILINE | re.DOTALL)


def test_every_field_of_the_results_is_documented_and_no_other():
    text = (ROOT / "docs" / "results_schema.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`(\w+)`", text))
    models = [each for each in vars(results).values() if isinstance(each, type) and issubclass(each, BaseModel)]
    fields = {name for model in models for name in model.model_fields}
    assert fields - words == set()
    assert words - fields == {"lower", "higher", "equal", "undecided"}
    assert f"| {results.SCHEMA}; raised" in text


def test_the_run_shown_is_read():
    run = RunSettings.of(parse_yaml(YAML[0], "docs/studies.md"))
    assert run.batch.tokens == 16384 and run.model["variant"] == "bov"


def test_the_recipe_shown_expands(text_folder: Path):
    plan = expand(parse_yaml(YAML[1].replace("data/mine", str(text_folder)), "docs/studies.md"), Corpus.load)
    assert len(plan.points) == 2 and len(plan.variants) == 7 and len(plan.runs) == 2 * 7 * 3


@pytest.mark.parametrize("section", ["Data", "Batch", "Optimiser", "Budget", "Evaluation", "Compute"])
def test_every_setting_is_documented(section: str):
    for name in getattr(settings, section).model_fields:
        assert re.search(rf"`(\w+\.)?{name}\b", STUDIES), name
    for name in RunSettings.model_fields:
        assert f"`{name}" in STUDIES, name


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(path: Path, text_folder: Path):
    document = read_yaml(path)
    assert document.check(Recipe).name
    plan = expand(document.with_value("base.data.path", str(text_folder), "test"), Corpus.load)
    assert plan.baseline == "transformer" and len(plan.recipe.seeds) == 3
    if path.name == "demo.yaml":
        assert plan.variants == ("transformer", "resformer_learnable", "svformer", "bov")
        assert all(each.run.tokens >= 400_000 for each in plan.runs)


@pytest.mark.parametrize("recipe", ["demo.yaml", "seven_domains.yaml"])
def test_the_commands_in_a_recipe_are_those_of_its_documents(recipe: str):
    """The Makefile and the results page run what the recipe says."""
    lines = (ROOT / "recipes" / recipe).read_text(encoding="utf-8").replace("\\\n#      ", "").splitlines()
    commands = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    assert len(commands) >= 2
    where = "Makefile" if recipe == "demo.yaml" else "docs/results/seven_domains.md"
    text = " ".join((ROOT / where).read_text(encoding="utf-8").replace("\\\n", "").replace("$(VENV)/bin/", "").split())
    for command in commands:
        assert " ".join(command.split()) in text, command
