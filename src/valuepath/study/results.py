"""The schema of ``results.json``: all that a study found, and nothing that differs between two runs of the same study.

Losses are in nats a token, bits per byte (BPB) in bits a UTF-8 byte of the held-out text. What depends on the machine's mood
(times) stands apart, in ``measured``: everything else is equal bit for bit when the study is repeated with the same settings
on the same kind of machine.
"""

from __future__ import annotations

from typing import Any, Literal

from valuepath.train.result import Record

SCHEMA = 1
"""Raised whenever a field changes its meaning or goes away."""


class Difference(Record):
    """Variant minus baseline, paired by seed: negative is better.

    Attributes:
        per_seed: seed -> difference.
        mean: their mean.
        low, high: the 95 % interval of the mean, Student's t with n - 1 degrees of freedom; None from fewer than two seeds.
        verdict: ``lower`` or ``higher`` where the interval leaves out 0, ``equal`` where every difference is exactly 0,
            ``undecided`` otherwise, also from one seed.
    """

    per_seed: dict[int, float]
    mean: float
    low: float | None
    high: float | None
    verdict: Literal["lower", "higher", "equal", "undecided"]


class Score(Record):
    """One quantity of one variant: seed -> value, their mean, and the difference from the baseline (None for the baseline
    itself and where no seed has both)."""

    per_seed: dict[int, float]
    mean: float | None
    difference: Difference | None


class Scores(Record):
    """One metric over domains: ``mean`` is the unweighted mean over domains, ``token_weighted`` is over all held-out tokens
    (for BPB: all held-out nats over all held-out bytes), ``domains`` each domain alone."""

    mean: Score
    token_weighted: Score
    domains: dict[str, Score]


class Cache(Record):
    """Computed from the equation, not measured: one sequence of ``context`` tokens.

    Attributes:
        growing_bytes_per_token: keys, values and token ids, divided by ``context``.
        shared_bytes: |V|-row tables that all sequences share.
        dtype: of keys, values and tables.
    """

    context: int
    dtype: str
    growing_bytes_per_token: float
    shared_bytes: int


class Curve(Record):
    """Held-out loss during training, unweighted mean over domains: ``loss[seed][i]`` after ``tokens[i]`` tokens and
    ``flops[i]`` training FLOPs."""

    tokens: list[int]
    flops: list[float]
    loss: dict[int, list[float]]


class Coefficients(Record):
    """One learned weight of the equation, followed through the layers, e.g. ``v: tap(0)``.

    ``values[seed][i]`` belongs to ``layers[i]``; the mean over its entries where the weight is per head or per channel. Layer N
    is the final norm's input.
    """

    label: str
    layers: list[int]
    start: list[float]
    values: dict[int, list[float]]


class Failure(Record):
    """A run that has no result: what happened, at which step, and what to try."""

    seed: int
    step: int | None
    reason: str
    hint: str


class VariantResult(Record):
    """One variant at one point of the axes.

    Attributes:
        run_ids: seed -> the run's folder under ``runs/``.
        missing: seeds not finished yet.
        training_flops: of one run, by the counts of ``valuepath.counts``.
    """

    name: str
    equation: str
    baseline: bool
    seeds: list[int]
    missing: list[int]
    failures: list[Failure]
    run_ids: dict[int, str]
    loss: Scores
    bpb: Scores
    parameters: int
    training_flops: float
    tokens: int
    cache: Cache
    curve: Curve
    coefficients: list[Coefficients]


class Group(Record):
    """One point of the axes, e.g. ``{"optimiser.lr": 0.001}``; {} if the recipe has no axes. Comparisons stay inside it."""

    point: dict[str, Any]
    variants: list[VariantResult]


class Measured(Record):
    """What differs from one run of the study to the next.

    Attributes:
        machine: processor, cores, operating system, versions of python, torch, transformers and valuepath.
        step_seconds: ``step_seconds[g][name]`` for group g and a variant: median seconds of an optimiser step over all seeds.
            Runs share the machine, so that these compare only roughly.
    """

    machine: dict[str, str | int]
    step_seconds: list[dict[str, float | None]]


class StudyResults(Record):
    """``results.json``.

    Attributes:
        schema_version: ``SCHEMA``.
        name: the recipe's.
        baseline: the variant that all others are compared with.
        seeds: those that the recipe asks for.
        budget: in words, e.g. ``400,000 tokens``.
        data: the prepared texts.
        planned, finished: numbers of runs.
        notes: what a reader has to know about these numbers, one sentence each.
    """

    schema_version: int = SCHEMA
    name: str
    baseline: str
    seeds: list[int]
    budget: str
    data: list[Text]
    planned: int
    finished: int
    notes: list[str]
    groups: list[Group]
    measured: Measured


class HeldOut(Record):
    """Predicted tokens, EOS included, and UTF-8 bytes of text."""

    tokens: int
    bytes: int


class Text(Record):
    """A prepared text: its fingerprint, its vocabulary, and how much of each domain is held out."""

    fingerprint: str
    vocab_size: int
    held_out: dict[str, HeldOut]


StudyResults.model_rebuild()
