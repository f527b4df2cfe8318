"""Published numbers as data: what the papers report, and under which settings.

Each file holds one paper: ``paper`` (metadata), ``definitions`` (how the paper defines each of its variants), ``models`` and
``training`` (sizes and protocols), ``tables`` (title, location, metric, unit, direction, decimals, baseline, setting, rows),
``claims`` (single figures) and ``open`` (what the paper leaves open or says in two ways). Facts and figures only; ``null`` is
not given, ``kind: derived`` marks arithmetic that the paper does not print, ``source: earlier version`` what only an earlier
version of the paper has.

A table row is named by ``file/table/variant``, e.g. ``resformer/table3_variants_82m/resformer_plus``; rows of one variant
that differ in their task share that name. ``valuepath.variants`` says which preset reaches which row.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import yaml


def names() -> tuple[str, ...]:
    """The files that can be loaded, in alphabetical order."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load(name: str) -> dict[str, Any]:
    """The content of the file ``name`` ("bov" or "resformer"); a copy that the caller may change.

    Raises:
        ValueError: for an unknown name, with the names there are.
    """
    if name not in names():
        close = difflib.get_close_matches(str(name), names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no published file {name!r}; there are: {', '.join(names())}.{hint}")
    return copy.deepcopy(_read(name))


def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every row of every result table as (file, table, row); tables of settings are left out."""
    for name in names():
        for table, content in load(name)["tables"].items():
            if content["kind"] == "result":
                for row in content["rows"]:
                    yield name, table, row


@cache
def _read(name: str) -> dict[str, Any]:
    text = resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content
