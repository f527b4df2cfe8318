"""``valuepath study``: run a recipe, see how far it is, write its report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from valuepath.cli.common import console_for, options, reported

if TYPE_CHECKING:
    from rich.console import Console

    from valuepath.study.recipe import StudyPlan
    from valuepath.study.store import StoredStudy, StudyFolder

app = typer.Typer(help="Compare value pathways, paired by seed.", no_args_is_help=True)

SPEAK_EVERY = 60
"""Seconds between two lines where there is no terminal for a bar."""

INTERRUPTED = 130
FAILED = 1

Recipe = Annotated[Path, typer.Argument(help="YAML: base run, variants, axes, seeds. See docs/studies.md.")]
Folder = Annotated[Path, typer.Argument(help="The --out of `valuepath study run`.")]


@app.command("run")
def run(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="Folder of the study; finished runs in it are kept, interrupted ones go on.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="a.b=c for a key of the recipe, e.g. base.budget.tokens=1e6; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default as many as there are cores for.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try runs again that diverged.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print runs, parameters, FLOPs and a time estimate; train nothing.")
    ] = False,
) -> None:
    """Train every run of a recipe, then print and write the answer. Run it again after an interruption: it goes on."""
    with reported():
        from valuepath.data.corpus import Corpus
        from valuepath.settings import read_yaml
        from valuepath.study.recipe import expand
        from valuepath.study.runner import Runner, default_workers, forget_failures, standing
        from valuepath.study.store import StudyFolder, stored

        document = read_yaml(recipe).with_overrides(options(overrides or [], "--set", "base.budget.tokens=1e6"))
        plan = expand(document, Corpus.load)
        folder, study = StudyFolder(out), stored(plan)
        if dry_run:
            _dry_run(plan, folder, study, workers)
            return
        folder.save(study)
        if retry_failed:
            forget_failures(folder, study)
        now = standing(folder, study)
        left = now.left
        console = console_for(stderr=True)
        if left:
            count = min(workers or default_workers(study, len(left)), len(left))
            progress = _Shown(console, study, done=len(now.finished) + len(now.diverged))
            console.print(
                f"{study.name}: {now.words()}; "
                f"{count} worker{'s' if count > 1 else ''}, {study.budget} a run. Ctrl-C stops, the same command goes on.",
                markup=False,
            )
            try:
                with progress:
                    Runner(folder, study, count, progress).run()
            except KeyboardInterrupt:
                console.print(
                    f"stopped: {standing(folder, study).words()}; the same command goes on from the last checkpoints",
                    markup=False,
                )
                raise typer.Exit(INTERRUPTED) from None
        failed = _report(folder, study)
    if failed:
        raise typer.Exit(FAILED)


@app.command("status")
def status(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run, one a line.")] = False,
) -> None:
    """How far every run is."""
    with reported():
        from valuepath.study.store import StudyFolder, point_text

        home = StudyFolder(folder)
        study = home.load()
        states = [home.status(run) for run in study.distinct.values()]
    if as_json:
        for each in states:
            record = {"run": each.run.id, "variant": each.run.variant, "seed": each.run.seed, "state": each.state}
            typer.echo(json.dumps({**record, "point": study.points[each.run.group], "step": each.step, "of": each.run.steps}))
        return
    console = console_for()
    table = Table(box=None, pad_edge=False)
    for name, justify in (("run", "left"), ("variant", "left"), ("seed", "right"), ("step", "right"), ("state", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for each in states:
        point = point_text(study.points[each.run.group])
        name = each.run.variant + (f" ({point})" if point else "")
        colour = {"finished": "green", "running": "cyan", "diverged": "red", "error": "red"}.get(each.state, "")
        table.add_row(
            each.run.id, Text(name), str(each.run.seed), f"{each.step:,}/{each.run.steps:,}", Text(each.state, style=colour)
        )
    console.print(table)
    for each in states:
        if each.failure is not None:
            console.print(
                f"{each.run.id} ({each.run.variant}, seed {each.run.seed}): {each.failure.detail or each.failure.reason}; "
                f"{each.failure.hint}",
                markup=False,
            )
    finished = sum(each.state == "finished" for each in states)
    console.print(f"{finished} of {len(states)} runs finished")


@app.command("report")
def report(folder: Folder) -> None:
    """Print the answer from the runs that are finished, and write results.json, CSV, Markdown and the page."""
    with reported():
        from valuepath.study.store import StudyFolder

        home = StudyFolder(folder)
        _report(home, home.load())


# ----------------------------------------------------------------------------------------------------------- pieces
def _report(folder: StudyFolder, study: StoredStudy) -> bool:
    """Print and write the answer; whether a run has failed."""
    from valuepath.report.table import table
    from valuepath.report.write import write_all
    from valuepath.study.collect import collect

    results = collect(folder, study)
    if not results.finished:
        console_for(stderr=True).print("no run is finished: nothing to report yet", markup=False)
    console = console_for()
    console.print(table(results))
    written = write_all(results, folder.path)
    page = next(path for path in written if path.suffix == ".html")
    console.print(f"\nopen {page.resolve()}", markup=False, soft_wrap=True)
    return any(variant.failures for group in results.groups for variant in group.variants)


class _Shown:
    """A bar for the whole study and one for each run that is being trained; plain lines where there is no terminal."""

    def __init__(self, console: Console, study: StoredStudy, done: int) -> None:
        self.console, self.study = console, study
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.total = sum(run.steps for run in study.distinct.values())
        self.whole = self.progress.add_task("all steps", total=self.total)
        self.spoke = time.monotonic()
        self.bars: dict[str, TaskID] = {}
        self.steps: dict[str, int] = {}
        self.began: dict[str, float] = {}
        self.done = done

    def __enter__(self) -> _Shown:
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.stop()

    def _name(self, run_id: str) -> str:
        run = self.study.distinct[run_id]
        point = ", ".join(str(value) for value in self.study.points[run.group].values())
        name = f"{run.variant} ({point})" if point else run.variant
        return f"{name if len(name) <= 27 else name[:26] + '…'}, seed {run.seed}"

    def started(self, run_id: str) -> None:
        self.began[run_id] = time.monotonic()
        self.bars[run_id] = self.progress.add_task(self._name(run_id), total=self.study.distinct[run_id].steps)

    def stepped(self, run_id: str, step: int) -> None:
        self.steps[run_id] = step
        if run_id in self.bars:
            self.progress.update(self.bars[run_id], completed=step)
        done = sum(self.steps.values())
        self.progress.update(self.whole, completed=done)
        if not self.console.is_terminal and time.monotonic() - self.spoke >= SPEAK_EVERY:
            self.said(f"{done:,} of {self.total:,} steps")

    def ended(self, run_id: str, failure: str | None) -> None:
        if run_id in self.bars:
            self.progress.remove_task(self.bars.pop(run_id))
        self.stepped(run_id, self.study.distinct[run_id].steps)
        if run_id not in self.began:  # finished before, or by another invocation
            return
        self.done += 1
        took = time.monotonic() - self.began.pop(run_id)
        what = "finished" if failure is None else f"failed: {failure}"
        self.said(f"{self.done}/{len(self.study.distinct)} {self._name(run_id)}: {what} after {took:.0f} s")

    def said(self, message: str) -> None:
        self.spoke = time.monotonic()
        self.progress.console.print(message, markup=False)


def _dry_run(plan: StudyPlan, folder: StudyFolder, study: StoredStudy, workers: int | None) -> None:
    from valuepath.study.estimate import estimate
    from valuepath.study.runner import default_workers, standing
    from valuepath.study.store import point_text

    console = console_for()
    now = standing(folder, study)
    left = set(now.left)
    table = Table(box=None, pad_edge=False)
    for name in ("run", "variant", "seed", "parameters", "steps", "FLOPs"):
        table.add_column(name, justify="left" if name in ("run", "variant") else "right", overflow="fold")
    for run in study.distinct.values():
        costs = study.costs[run.group][run.variant]
        point = point_text(study.points[run.group])
        table.add_row(
            run.id,
            Text(run.variant + (f" ({point})" if point else "")),
            str(run.seed),
            f"{costs.parameters:,}",
            f"{run.steps:,}",
            f"{costs.training_flops:.3g}",
            style="" if run.id in left else "dim",
        )
    console.print(table)
    count = max(1, min(workers or default_workers(study, len(left)), len(left)))
    total = sum(study.costs[run.group][run.variant].training_flops for run in study.distinct.values())
    console.print(f"{now.words()}; {total:.3g} training FLOPs in all")
    if left:
        guess = estimate(plan, left)
        console.print(
            f"about {_duration(guess.seconds / count)} with {count} worker{'s' if count > 1 else ''}: "
            f"{guess.measured}. Evaluation included, start-up not; what else the machine does is not foreseen.",
            markup=False,
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
