"""The versions that run are versions that the package says it supports, and the ones that the caller meant."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def requirements() -> dict[str, Requirement]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        found = [Requirement(line) for line in tomllib.load(file)["project"]["dependencies"]]
    return {requirement.name: requirement for requirement in found}


def pins(file: str) -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {canonicalize_name(name): Version(number) for name, number in (line.split("==") for line in lines if line)}


def test_the_imported_transformers_is_the_one_that_was_meant():
    meant = os.environ.get("EXPECTED_TRANSFORMERS")
    if not meant:
        pytest.skip("EXPECTED_TRANSFORMERS is not set")
    assert transformers.__version__ == version("transformers") == meant


@pytest.mark.parametrize("module", [torch, transformers], ids=["torch", "transformers"])
def test_the_imported_version_is_in_the_supported_range(module):
    assert Version(module.__version__).public in requirements()[module.__name__].specifier


@pytest.mark.parametrize("name", requirements())
def test_every_requirement_is_pinned_within_its_own_range(name):
    assert pins("constraints.txt")[canonicalize_name(name)] in requirements()[name].specifier


def test_the_pinned_transformers_are_the_two_ends_of_the_supported_range():
    oldest, newest = pins("constraints-oldest.txt")["transformers"], pins("constraints.txt")["transformers"]
    bounds = {part.operator: Version(part.version) for part in requirements()["transformers"].specifier}
    assert bounds[">="].release[:2] == oldest.release[:2]
    assert (bounds["<"].major, bounds["<"].minor) == (newest.major, newest.minor + 1)
