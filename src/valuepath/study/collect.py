"""From the folders of a study's runs to ``StudyResults``: means over seeds, differences paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Literal

from valuepath import files
from valuepath.study.results import (
    Cache,
    Coefficients,
    Curve,
    Failure,
    Group,
    Measured,
    Score,
    Scores,
    StudyResults,
    VariantResult,
)
from valuepath.study.statistics import score
from valuepath.study.store import StoredRun, StoredStudy, StudyFolder, point_text
from valuepath.train.result import Metric, RunResult

Results = dict[int, RunResult]
"""Seed -> result."""

MetricName = Literal["loss", "bpb"]


def collect(folder: StudyFolder, study: StoredStudy) -> StudyResults:
    """What the study found so far.

    Raises:
        ValueError: if a result is damaged, or two runs that are to be compared did not see the same batches.
    """
    finished = {run_id: result for run_id in study.distinct if (result := folder.run(run_id).result()) is not None}
    groups = [_group(folder, study, g, finished) for g in range(len(study.points))]
    return StudyResults(
        name=study.name,
        baseline=study.baseline,
        seeds=study.seeds,
        budget=study.budget,
        data=study.texts,
        planned=len(study.distinct),
        finished=len(finished),
        notes=_notes(study, finished),
        groups=groups,
        measured=Measured(
            machine=_machine(folder, study),
            step_seconds=[_step_seconds(folder, study, g) for g in range(len(groups))],
        ),
    )


def _machine(folder: StudyFolder, study: StoredStudy) -> dict[str, str | int]:
    """Where the runs were trained; what differs between them is listed."""
    found = [files.read_json(path) for run in study.distinct if (path := folder.run(run).machine_file).exists()]
    values: dict[str, list[str | int]] = {}
    for each in found:
        for name, value in each.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: each[0] if len(each) == 1 else "; ".join(map(str, each)) for name, each in values.items()}


def _runs(study: StoredStudy, group: int, variant: str) -> list[StoredRun]:
    return [run for run in study.runs if run.group == group and run.variant == variant]


def _group(folder: StudyFolder, study: StoredStudy, group: int, finished: dict[str, RunResult]) -> Group:
    by_variant: dict[str, Results] = {
        name: {run.seed: finished[run.id] for run in _runs(study, group, name) if run.id in finished}
        for name in study.variants
    }
    baseline = by_variant[study.baseline]
    for name, results in by_variant.items():
        for seed in results.keys() & baseline.keys():
            if results[seed].batches_id != baseline[seed].batches_id:
                raise ValueError(
                    f"{folder.path}: {name} and {study.baseline} saw different batches with seed {seed}: not comparable"
                )
    variants = [_variant(folder, study, group, name, by_variant[name], baseline) for name in study.variants]
    return Group(point=study.points[group], variants=variants)


def _variant(
    folder: StudyFolder, study: StoredStudy, group: int, name: str, results: Results, baseline: Results
) -> VariantResult:
    runs = _runs(study, group, name)
    failures = []
    for run in runs:
        if run.seed not in results and (failure := folder.run(run.id).failure()) is not None:
            failures.append(Failure(seed=run.seed, step=failure.step, reason=failure.reason, hint=failure.hint))
    failed = {failure.seed for failure in failures}
    costs = study.costs[group][name]
    compared = None if name == study.baseline else baseline
    return VariantResult(
        name=name,
        equation=costs.equation,
        baseline=name == study.baseline,
        seeds=sorted(results),
        missing=[run.seed for run in runs if run.seed not in results and run.seed not in failed],
        failures=failures,
        run_ids={run.seed: run.id for run in runs},
        loss=_scores("loss", results, compared),
        bpb=_scores("bpb", results, compared),
        parameters=costs.parameters,
        training_flops=float(costs.training_flops),
        tokens=costs.tokens,
        cache=Cache(
            context=study.context,
            dtype=study.dtype,
            growing_bytes_per_token=costs.growing_bytes_per_token,
            shared_bytes=costs.shared_bytes,
        ),
        curve=_curve(results),
        coefficients=_coefficients(results),
    )


def _scores(metric: MetricName, results: Results, baseline: Results | None) -> Scores:
    def by(pick: Callable[[Metric], float]) -> Score:
        def values(found: Results) -> dict[int, float]:
            return {seed: pick(getattr(found[seed].final, metric)) for seed in sorted(found)}

        return score(values(results), None if baseline is None else values(baseline))

    def domain(name: str) -> Callable[[Metric], float]:
        return lambda found: found.domains[name]

    some = next(iter((results or baseline or {}).values()), None)
    return Scores(
        mean=by(lambda found: found.mean),
        token_weighted=by(lambda found: found.token_weighted),
        domains={name: by(domain(name)) for name in (some.final.loss.domains if some is not None else ())},
    )


def _curve(results: Results) -> Curve:
    seeds = sorted(results)
    points = results[seeds[0]].points if seeds else []
    return Curve(
        tokens=[point.tokens for point in points],
        flops=[float(point.flops) for point in points],
        loss={seed: [point.loss.mean for point in results[seed].points] for seed in seeds},
    )


def _coefficients(results: Results) -> list[Coefficients]:
    seeds = sorted(results)
    if not seeds:
        return []
    return [
        Coefficients(
            label=each.label,
            layers=each.layers,
            start=each.start,
            values={seed: results[seed].coefficients[n].values for seed in seeds},
        )
        for n, each in enumerate(results[seeds[0]].coefficients)
    ]


def _step_seconds(folder: StudyFolder, study: StoredStudy, group: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in study.variants:
        seconds = [s for run in _runs(study, group, name) for s in folder.run(run.id).step_seconds()]
        found[name] = statistics.median(seconds) if seconds else None
    return found


def _notes(study: StoredStudy, finished: dict[str, RunResult]) -> list[str]:
    notes = []
    for name, own in study.own.items():
        notes.append(f"Only {name} has {point_text(own)}.")
    several: dict[str, float] = {}
    for result in finished.values():
        for domain, epochs in result.epochs.items():
            several[domain] = max(several.get(domain, 0.0), epochs)
    repeated = {domain: epochs for domain, epochs in several.items() if epochs > 1}
    if repeated:
        text = ", ".join(f"{domain} {epochs:.1f} times" for domain, epochs in sorted(repeated.items()))
        notes.append(f"Training text was seen more than once: {text}.")
    devices = sorted({run.settings.compute.device for run_id, run in study.distinct.items() if run_id in finished})
    if devices:
        notes.append(f"Trained on: {', '.join(devices)}.")
    return notes
