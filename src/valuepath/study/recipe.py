"""A recipe names a base run, variants, axes, seeds; expanded, it is a list of runs that are paired by construction.

Pairing: only ``model`` and ``optimiser`` may differ between variants, so that with one seed all see the same batches in the
same order, and a parameter's start depends on the seed and its name alone. Comparisons stay inside one point of the axes.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from valuepath.data.order import TrainingOrder
from valuepath.equations import nearest
from valuepath.settings import Document, Settings
from valuepath.train.settings import Run, RunSettings

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus

Point = dict[str, Any]
"""Dotted setting -> value, one for each axis."""

MAY_DIFFER = ("model", "optimiser")
"""Sections in which variants may differ."""

SECTIONS = frozenset(
    name for name, field in RunSettings.model_fields.items() if name == "model" or isinstance(field.annotation, type(Settings))
)
"""Settings of a run that have settings of their own."""

_AXIS = "a list of values, e.g. [0.001, 0.002]"


class VariantEntry(Settings):
    """One thing to compare: a preset or an equation.

    In a recipe, plain text stands for it: a preset's name, or an equation (which has a '=').
    """

    name: str | None = None
    variant: str | None = Field(default=None, description="a preset, see `valuepath variants`")
    wiring: str | None = Field(default=None, description="an equation")
    options: dict[str, Any] = Field(default_factory=dict, description="of the preset")
    set: dict[str, Any] = Field(default_factory=dict, description="settings of its own, dotted, in model or optimiser")
    axes: dict[str, list[Any]] = Field(default_factory=dict, description="one variant for every value of these settings")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.variant is None) == (self.wiring is None):
            raise ValueError("expected exactly one of variant (a preset) and wiring (an equation)")
        if self.wiring is not None and self.options:
            raise ValueError("options belong to a preset; write the numbers into the equation instead")
        for path in (*self.set, *self.axes):
            section, _, key = path.partition(".")
            if section in MAY_DIFFER and not key:
                raise ValueError(f"{path} is a whole section; name a setting in it, e.g. optimiser.lr")
            if section not in MAY_DIFFER:
                raise ValueError(
                    f"{path}: a variant may differ from the others in {' and '.join(MAY_DIFFER)} only, so that the "
                    "comparison stays paired; change it in base for all, or make it an axis of the recipe"
                )
        for path in self.set:
            if path.split(".")[1] in ("variant", "wiring", "variant_options"):
                raise ValueError(f"set: {path}: give it as variant, wiring or options of this entry")
        _check_axes(self.axes)
        _check_apart([*self.set, *self.axes])
        return self

    @property
    def label(self) -> str:
        return self.name or self.variant or " ".join((self.wiring or "").split())


def _check_apart(paths: list[str]) -> None:
    """No setting twice, and none inside another."""
    for one, other in itertools.permutations(paths, 2):
        if one == other or other.startswith(one + "."):
            raise ValueError(f"{one} and {other} set the same thing; keep one")


def _check_axes(axes: dict[str, list[Any]]) -> None:
    for path, values in axes.items():
        if not values:
            raise ValueError(f"{path} has no values; expected {_AXIS}")
        texts = [json.dumps(value, sort_keys=True) for value in values]
        if len(set(texts)) < len(texts):
            raise ValueError(f"{path} lists a value twice; keep one")


class Reported(Settings):
    """What the cache column of the report assumes."""

    context: PositiveInt = Field(default=4096, description="tokens of a sequence")
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"


class Recipe(Settings):
    """A study.

    ``base`` has the keys of a run but the seed; ``axes`` maps dotted settings of a run to lists of values, and every
    combination of them is a point at which all variants are compared.
    """

    name: str = Field(min_length=1)
    base: dict[str, Any]
    variants: list[VariantEntry] = Field(min_length=1)
    baseline: str | None = Field(default=None, description="what the others are compared with; the first if omitted")
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    report: Reported = Reported()

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_or_list(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= 10_000:
                raise ValueError(f"expected a number of seeds of at least 1, or a list of seeds, not {value}")
            return list(range(value))
        return value

    @field_validator("seeds")
    @classmethod
    def _different(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("a seed is listed twice; keep one")
        return value

    @field_validator("variants", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"wiring" if "=" in each else "variant": each} if isinstance(each, str) else each for each in value]

    @field_validator("axes", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        for path, values in value.items() if isinstance(value, dict) else ():
            if isinstance(values, dict):
                raise ValueError(f"{path} has keys; write a dotted setting, e.g. optimiser.lr: [0.001, 0.002]")
            if not isinstance(values, list):
                raise ValueError(f"{path}: expected {_AXIS}, not {values!r}")
        return value

    @field_validator("axes")
    @classmethod
    def _axes(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for path in value:
            if path == "seed":
                raise ValueError("seed is no axis; list the seeds in seeds")
            if path in ("model.variant", "model.wiring"):
                raise ValueError(f"{path} is no axis; list the variants in variants")
            if path in SECTIONS:
                raise ValueError(f"{path} is a whole section; name a setting in it, e.g. optimiser.lr")
        _check_axes(value)
        _check_apart(list(value))
        return value

    @model_validator(mode="after")
    def _base_is_shared(self) -> Self:
        if "seed" in self.base:
            raise ValueError("base.seed: the seeds of a study stand in seeds")
        for key in ("variant", "wiring", "variant_options"):
            if isinstance(model := self.base.get("model"), dict) and key in model:
                raise ValueError(f"base.model.{key}: what is compared stands in variants")
        return self


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: at which point of the axes, of which variant, with which seed."""

    group: int
    variant: str
    seed: int
    run: Run


@dataclass(frozen=True)
class StudyPlan:
    """A recipe with its text: all runs, seeds outermost, so that an unfinished study has whole pairs early.

    Attributes:
        baseline: name of the variant that the others are compared with.
        variants: names, in the recipe's order; the values of a variant's own axes are part of its name.
        own: variant -> settings of its ``set``.
        points: of the axes; [{}] without axes.
        corpora: the texts of the runs.
    """

    recipe: Recipe
    baseline: str
    variants: tuple[str, ...]
    own: dict[str, Point]
    points: tuple[Point, ...]
    runs: tuple[PlannedRun, ...]
    corpora: tuple[Corpus, ...]

    @property
    def distinct(self) -> dict[str, PlannedRun]:
        """Run id -> a planned run with it, in order; two variants that amount to the same settings are trained once."""
        found: dict[str, PlannedRun] = {}
        for planned in self.runs:
            found.setdefault(planned.run.id, planned)
        return found


def _combinations(axes: dict[str, list[Any]]) -> list[Point]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _expanded(recipe: Recipe) -> list[tuple[str, int, VariantEntry, Point]]:
    """Variants with the values of their own axes: name, place in the recipe, entry, own settings."""
    found = []
    for n, entry in enumerate(recipe.variants):
        for point in _combinations(entry.axes):
            short = [f"{path.rsplit('.', 1)[-1]}={value}" for path, value in point.items()]
            name = " ".join([entry.label, *short])
            found.append((name, n, entry, {**entry.set, **point}))
    return found


def expand(document: Document, load: Any) -> StudyPlan:
    """Every run of a recipe.

    Args:
        document: the recipe as read.
        load: folder -> ``Corpus``, called once a folder.

    Raises:
        ValueError: for anything wrong in the recipe or in a run that it amounts to, with file, line and key.
    """
    if "variants" not in document.data and {"model", "data", "budget"} & document.data.keys():
        raise ValueError(f"{document.name}: is one run, not the recipe of a study; use `valuepath train`")
    recipe = document.check(Recipe)
    variants = _expanded(recipe)
    names = [name for name, *_ in variants]
    for name, n, *_ in variants:
        if names.count(name) > 1:
            raise document.error(("variants", n), f"two variants are called {name!r}; give one of them another name")
    for name, n, _, own in variants:
        try:
            _check_apart([*own, *recipe.axes])
        except ValueError as wrong:
            raise document.error(("variants", n), f"{name} and the recipe's axes: {wrong}") from None
    baseline = recipe.baseline or names[0]
    if baseline not in names:
        raise document.error(("baseline",), f"no variant is called {baseline!r}{nearest(baseline, names)}; there are {names}")
    base = document.section("base")
    points = _combinations(recipe.axes)
    corpora: dict[str, Corpus] = {}
    readable: set[str] = set()
    runs = []
    for seed in recipe.seeds:
        for group, point in enumerate(points):
            at = base
            for path, value in point.items():
                at = at.with_value(path, value, document.place(("axes", path)))
            for name, n, entry, own in variants:
                place = document.place(("variants", n))
                run = _settings(at, place, entry, own, seed)
                path = str(Path(run.data.path).resolve())
                run = run.model_copy(update={"data": run.data.model_copy(update={"path": path})})
                if path not in corpora:
                    try:
                        corpora[path] = load(Path(path))
                    except ValueError as wrong:
                        raise base.error(("data", "path"), str(wrong)) from None
                corpus = corpora[path]
                reading = json.dumps([path, run.data.length, run.data.weights], sort_keys=True)
                if reading not in readable:  # a wrong length or weight is said now, not by every run
                    try:
                        TrainingOrder(corpus, run.data.length, seed, run.data.weights)
                    except ValueError as wrong:
                        raise at.error(("data",), str(wrong)) from None
                    readable.add(reading)
                try:
                    runs.append(PlannedRun(group, name, seed, run.resolve(corpus.vocab_size, corpus.fingerprint, corpus.eos)))
                except ValueError as wrong:
                    raise ValueError(f"{place}: {name}: {wrong}") from None
    own_settings = {name: dict(entry.set) for name, _, entry, _ in variants if entry.set}
    return StudyPlan(recipe, baseline, tuple(names), own_settings, tuple(points), tuple(runs), tuple(corpora.values()))


def _settings(base: Document, place: str, entry: VariantEntry, own: Point, seed: int) -> RunSettings:
    at = base
    key, value = ("wiring", entry.wiring) if entry.wiring is not None else ("variant", entry.variant)
    at = at.with_value(f"model.{key}", value, place)
    if entry.options:
        at = at.with_value("model.variant_options", entry.options, place)
    for path, setting in own.items():
        at = at.with_value(path, setting, place)
    return at.with_value("seed", seed, place).check(RunSettings)
