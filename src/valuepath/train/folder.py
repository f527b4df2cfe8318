"""A run's folder, and what in it can be relied on after a crash at any moment.

::

    id                     the hash of the settings, 12 hexadecimal digits
    settings.yaml          what was trained
    machine.json           where, with which versions
    metrics.jsonl          one record a line: training loss, held-out loss
    timing.jsonl           seconds of an optimiser step
    tensorboard/
    checkpoint-<step>/     the last one only, until the run is finished; complete if it holds the file ``complete``
    model/                 the trained model and its tokenizer, as transformers saves them
    result.json            written last: with it the run is finished
    failure.json           why there is none

Everything but metrics.jsonl and timing.jsonl appears whole. A run that goes on from a checkpoint first cuts these two back to
the checkpoint's step, so that no step is recorded twice.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from valuepath import files
from valuepath.train.result import Record, RunFailure, RunResult

COMPLETE = "complete"

Kind = TypeVar("Kind", bound=Record)


class RunFolder:
    """The folder of one run; ``path`` need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result_file = path / "result.json"
        self.failure_file = path / "failure.json"
        self.metrics_file = path / "metrics.jsonl"
        self.timing_file = path / "timing.jsonl"
        self.model = path / "model"
        self.tensorboard = path / "tensorboard"
        self.id_file = path / "id"
        self.machine_file = path / "machine.json"

    # ------------------------------------------------------------------------------------------------- what it has
    def result(self) -> RunResult | None:
        """The result, if the run is finished.

        Raises:
            ValueError: if it is damaged.
        """
        return _record(self.result_file, RunResult)

    def failure(self) -> RunFailure | None:
        return _record(self.failure_file, RunFailure)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints by step."""
        found = []
        for path in self.path.glob("checkpoint-*"):
            step = path.name.removeprefix("checkpoint-")
            if step.isdigit() and (path / COMPLETE).exists():
                found.append((int(step), path))
        return sorted(found)

    def last_checkpoint(self) -> tuple[int, Path] | None:
        return self.checkpoints()[-1] if self.checkpoints() else None

    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; a line that a crash cut short is left out."""
        return list(_records(self.metrics_file))

    def step_seconds(self) -> list[float]:
        return [record["seconds"] for record in _records(self.timing_file)]

    def check(self, run_id: str) -> None:
        """Refuse a folder of other settings.

        Raises:
            ValueError: if a run with another name is in it, or something that is no run.
        """
        if self.id_file.exists():
            found = self.id_file.read_text(encoding="utf-8").strip()
            if found != run_id:
                raise ValueError(
                    f"{self.path}: holds a run with other settings ({found}, these are {run_id}); choose another folder"
                )
        elif self.path.exists() and any(
            entry != self.failure_file and not entry.name.startswith(".") for entry in self.path.iterdir()
        ):
            raise ValueError(f"{self.path}: is not empty and holds no run; choose another folder")

    # ----------------------------------------------------------------------------------------------------- changes
    def append(self, file: Path, record: dict[str, Any]) -> None:
        """One more line. Not yet durable: see ``complete``."""
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def complete(self, step: int) -> None:
        """Call a saved checkpoint good, once all of it and the records up to it are on the disk; drop the older ones."""
        checkpoint = self.path / f"checkpoint-{step}"
        for file in (self.metrics_file, self.timing_file):
            if file.exists():
                with file.open("rb") as lines:
                    os.fsync(lines.fileno())
        files.sync_tree(checkpoint)
        files.write_text(checkpoint / COMPLETE, "")
        files.sync_folder(self.path)
        for older, path in self.checkpoints():
            if older < step:
                _remove(path)

    def prepare(self) -> tuple[int, Path] | None:
        """Make the folder fit to go on: half-written checkpoints go, records behind the last complete one go.

        Returns:
            That checkpoint's step and path, or None to begin.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        good = self.checkpoints()
        last = good[-1] if good else None
        for path in self.path.glob("checkpoint-*"):
            if last is None or path != last[1]:
                _remove(path)
        for path in self.path.glob(".*.tmp"):  # what a crash left of an atomic write
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept = 0 if last is None else last[0]
        for file in (self.metrics_file, self.timing_file):
            lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in _records(file) if r["step"] <= kept]
            files.write_text(file, "".join(lines))
        self.failure_file.unlink(missing_ok=True)
        return last

    def fail(self, failure: RunFailure) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        files.write_json(self.failure_file, failure.model_dump(mode="json"))

    def finish(self, result: RunResult) -> None:
        """The result last: what is only needed to go on is removed after it."""
        files.write_json(self.result_file, result.model_dump(mode="json"))
        self.tidy()

    def tidy(self) -> None:
        """Remove a finished run's checkpoints."""
        for path in self.path.glob("checkpoint-*"):
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """First no longer complete, then gone: a crash between leaves no checkpoint that looks whole."""
    (checkpoint / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _record(file: Path, kind: type[Kind]) -> Kind | None:
    if not file.exists():
        return None
    try:
        return kind.model_validate(files.read_json(file))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: damaged ({at}: {first['msg']}); remove the folder and run it again") from None


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError:  # a power cut can leave anything behind what was made durable
                    return
