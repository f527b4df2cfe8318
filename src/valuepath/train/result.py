"""What a finished run leaves: ``result.json``, and ``failure.json`` where there is none."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Something that is written to a file and read back: no field more, no field less."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(Record):
    """One metric of the held-out text: the unweighted mean over domains, all text as one, each domain."""

    mean: float
    token_weighted: float
    domains: dict[str, float]


class Point(Record):
    """The held-out text after ``step`` optimiser steps."""

    step: int
    tokens: int
    flops: int
    loss: Metric
    bpb: Metric


class Learned(Record):
    """See ``valuepath.train.coefficients.learned``."""

    label: str
    layers: list[int]
    start: list[float]
    values: list[float]


class RunResult(Record):
    """All of it depends on the settings alone; times are in ``timing.json``.

    Attributes:
        id: the run's name.
        settings: what the name is a hash of.
        batches_id: equal for two runs that see the same tokens step by step.
        epochs: domain -> how often its text was seen.
        points: held-out losses in the order of steps; the last is the final one.
    """

    id: str
    settings: dict[str, Any]
    equation: str
    batches_id: str
    parameters: int
    steps: int
    tokens: int
    training_flops: int
    epochs: dict[str, float]
    points: list[Point]
    coefficients: list[Learned]

    @property
    def final(self) -> Point:
        return self.points[-1]


class RunFailure(Record):
    """Why a run has no result.

    Attributes:
        kind: ``diverged`` (the same settings would do it again: not repeated) or ``error`` (tried again next time).
        step: the optimiser step at which it happened, if it got that far.
        checkpoint: the last good checkpoint, relative to the run's folder.
        hint: what to try.
        detail: more for this machine's user only, such as places of files; reports leave it out.
        attempt: the invocation of a study that met an error.
    """

    kind: str
    step: int | None
    reason: str
    checkpoint: str | None
    hint: str
    detail: str = ""
    attempt: str = ""


class Diverged(Exception):
    """A loss, gradient or weight is NaN or infinite."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what
