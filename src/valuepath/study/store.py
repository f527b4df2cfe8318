"""A study's folder::

    study.json         the plan: recipe, runs, their settings; replaced when the study is started with another recipe
    runs/<id>/         one folder a run, see valuepath.train.folder
    runs/<id>.lock     held by the process that trains the run, let go by the system when that process ends in any way
    logs/              what the workers had to say
    results.json, results.csv, results-by-seed.csv, results.md, report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from valuepath import files
from valuepath.data.corpus import Corpus
from valuepath.study.recipe import Point, StudyPlan
from valuepath.study.results import HeldOut, Text
from valuepath.train.folder import RunFolder
from valuepath.train.result import Record, RunFailure
from valuepath.train.settings import RunSettings

FORMAT = 1

State = Literal["finished", "diverged", "error", "running", "interrupted", "waiting"]


class StoredRun(Record):
    """A planned run; runs with the same id are one."""

    id: str
    group: int
    variant: str
    seed: int
    steps: int
    settings: RunSettings


class StoredCosts(Record):
    """What the plan of a variant at a point of the axes amounts to."""

    equation: str
    parameters: int
    training_flops: int
    tokens: int
    growing_bytes_per_token: float
    shared_bytes: int


class StoredStudy(Record):
    """``study.json``."""

    format: int = FORMAT
    name: str
    baseline: str
    variants: list[str]
    own: dict[str, dict[str, Any]]
    points: list[dict[str, Any]]
    seeds: list[int]
    budget: str
    context: int
    dtype: str
    texts: list[Text]
    costs: list[dict[str, StoredCosts]]
    runs: list[StoredRun]

    @property
    def distinct(self) -> dict[str, StoredRun]:
        found: dict[str, StoredRun] = {}
        for run in self.runs:
            found.setdefault(run.id, run)
        return found


def stored(plan: StudyPlan) -> StoredStudy:
    """A plan as it is kept."""
    from valuepath.counts import cache_counts, parameter_counts
    from valuepath.describe import DTYPES

    recipe = plan.recipe
    costs: list[dict[str, StoredCosts]] = [{} for _ in plan.points]
    for planned in plan.runs:
        run = planned.run
        if planned.variant in costs[planned.group]:
            continue
        cache = cache_counts(run.plan, recipe.report.context, 1, DTYPES[recipe.report.dtype])
        costs[planned.group][planned.variant] = StoredCosts(
            equation=run.config.equation(),
            parameters=parameter_counts(run.plan).total,
            training_flops=run.training_flops,
            tokens=run.tokens,
            growing_bytes_per_token=cache.growing_bytes / recipe.report.context,
            shared_bytes=cache.shared_bytes,
        )
    return StoredStudy(
        name=recipe.name,
        baseline=plan.baseline,
        variants=list(plan.variants),
        own=plan.own,
        points=list(plan.points),
        seeds=list(recipe.seeds),
        budget=_budget(plan),
        context=recipe.report.context,
        dtype=recipe.report.dtype,
        texts=[_text(corpus) for corpus in plan.corpora],
        costs=costs,
        runs=[
            StoredRun(
                id=planned.run.id,
                group=planned.group,
                variant=planned.variant,
                seed=planned.seed,
                steps=planned.run.steps,
                settings=planned.run.settings,
            )
            for planned in plan.runs
        ],
    )


def _text(corpus: Corpus) -> Text:
    held_out = {
        name: HeldOut(tokens=len(domain.validation) - 1, bytes=domain.validation_bytes)
        for name, domain in corpus.domains.items()
    }
    return Text(fingerprint=corpus.fingerprint, vocab_size=corpus.vocab_size, held_out=held_out)


def _budget(plan: StudyPlan) -> str:
    words = list(dict.fromkeys(planned.run.settings.budget.words() for planned in plan.runs))
    return words[0] if len(words) == 1 else "varies with the axes: " + "; ".join(words)


@dataclass(frozen=True)
class RunStatus:
    """How far a run is."""

    run: StoredRun
    state: State
    step: int
    failure: RunFailure | None = None


class StudyFolder:
    """The folder of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "study.json"
        self.logs = path / "logs"

    def run(self, run_id: str) -> RunFolder:
        return RunFolder(self.path / "runs" / run_id)

    def lock(self, run_id: str) -> FileLock:
        """Held while the run is trained. Not in the run's folder, which may be removed and made anew."""
        (self.path / "runs").mkdir(parents=True, exist_ok=True)
        return FileLock(self.path / "runs" / f"{run_id}.lock")

    def save(self, study: StoredStudy) -> None:
        """
        Raises:
            ValueError: if the folder is in use for something else.
        """
        if not self.plan_file.exists() and self.path.exists():
            if not self.path.is_dir() or any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise ValueError(f"{self.path}: is not empty and holds no study; choose another folder")
        files.write_json(self.plan_file, study.model_dump(mode="json"))

    def load(self) -> StoredStudy:
        """The plan that the folder was last started with.

        Raises:
            ValueError: if this is no study's folder, or one of another format.
        """
        if not self.plan_file.exists():
            raise ValueError(f"{self.path}: no study here (study.json is missing); expected the --out of `valuepath study run`")
        data = files.read_json(self.plan_file)
        if data.get("format") != FORMAT:
            raise ValueError(
                f"{self.plan_file}: format {data.get('format')!r}, this version reads {FORMAT}; start the study in a new folder"
            )
        try:
            return StoredStudy.model_validate(data)
        except ValidationError as wrong:
            raise ValueError(f"{self.plan_file}: damaged: {wrong.errors()[0]['loc']}: {wrong.errors()[0]['msg']}") from None

    def being_trained(self, run_id: str) -> bool:
        """Whether a process holds the run's lock now."""
        lock = self.lock(run_id)
        try:
            with lock.acquire(timeout=0):
                return False
        except Timeout:
            return True

    def status(self, run: StoredRun) -> RunStatus:
        """How far a run is, from its folder alone."""
        folder = self.run(run.id)
        if folder.result_file.exists():
            return RunStatus(run, "finished", run.steps)
        step = max((record["step"] for record in folder.metrics()), default=0)
        if folder.path.exists() and self.being_trained(run.id):
            return RunStatus(run, "running", step)
        if folder.result_file.exists():  # it ended meanwhile
            return RunStatus(run, "finished", run.steps)
        if (failure := folder.failure()) is not None:
            return RunStatus(run, "diverged" if failure.kind == "diverged" else "error", failure.step or step, failure)
        last = folder.last_checkpoint()
        if folder.path.exists():
            return RunStatus(run, "interrupted", 0 if last is None else last[0])
        return RunStatus(run, "waiting", 0)


def point_text(point: Point) -> str:
    """``optimiser.lr = 0.001, data.length = 128``."""
    return ", ".join(f"{path} = {value}" for path, value in point.items())
