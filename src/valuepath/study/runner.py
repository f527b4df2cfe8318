"""Run a study: workers, what they report, and what to do when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from valuepath.study.store import StoredStudy, StudyFolder
from valuepath.train.result import RunFailure

TRIES = 2
"""How often a run may take its worker process down with it before it is given up."""


class Watcher(Protocol):
    """What is told of a study's progress."""

    def started(self, run_id: str) -> None: ...

    def stepped(self, run_id: str, step: int) -> None: ...

    def ended(self, run_id: str, failure: str | None) -> None: ...

    def said(self, message: str) -> None: ...


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    log: IO[str]
    run_id: str | None = None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers(study: StoredStudy, left: int) -> int:
    """As many as there are cores for (or GPUs, where the runs use them), and runs left."""
    runs = study.distinct.values()
    if any(run.settings.compute.device == "cuda" for run in runs):
        import torch

        return max(1, min(torch.cuda.device_count(), left))
    return max(1, min(cores() // max(run.settings.compute.threads for run in runs), left))


@dataclass(frozen=True)
class Standing:
    """Run ids: to train, finished, and diverged, which would diverge again."""

    left: list[str]
    finished: list[str]
    diverged: list[str]

    def words(self) -> str:
        """``3 of 12 runs finished, 1 diverged``."""
        total = len(self.left) + len(self.finished) + len(self.diverged)
        text = f"{len(self.finished)} of {total} runs finished"
        return text + (f", {len(self.diverged)} diverged" if self.diverged else "")


def standing(folder: StudyFolder, study: StoredStudy) -> Standing:
    """How far a study is."""
    states = {run_id: folder.status(run).state for run_id, run in study.distinct.items()}
    return Standing(
        left=[run_id for run_id, state in states.items() if state not in ("finished", "diverged")],
        finished=[run_id for run_id, state in states.items() if state == "finished"],
        diverged=[run_id for run_id, state in states.items() if state == "diverged"],
    )


def forget_failures(folder: StudyFolder, study: StoredStudy) -> None:
    """Let runs that diverged be tried again."""
    for run_id in study.distinct:
        folder.run(run_id).failure_file.unlink(missing_ok=True)


@dataclass
class Runner:
    """One invocation of ``valuepath study run``.

    Attributes:
        workers: processes; each trains one run at a time.
        watcher: told of everything.
    """

    folder: StudyFolder
    study: StoredStudy
    workers: int
    watcher: Watcher
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        self.events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.alive: dict[int, _Worker] = {}
        self.deaths: dict[str, int] = {}

    def run(self) -> None:
        """Until every run is finished or has failed; runs that another invocation has are waited for.

        Raises:
            KeyboardInterrupt: after the workers have ended.
        """
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(self.workers):
                self._start(number)
            while self.alive:
                number, event = self.events.get()
                if event is None:
                    self._ended(number)
                else:
                    self._heard(self.alive[number], event)
        finally:
            self._stop()

    # ----------------------------------------------------------------------------------------------------- workers
    def _start(self, number: int) -> None:
        threads = max(run.settings.compute.threads for run in self.study.runs)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if any(run.settings.compute.device == "cuda" for run in self.study.runs):
            environment["CUDA_VISIBLE_DEVICES"] = self._device(number)
        log = (self.folder.logs / f"worker-{self.attempt}-{number}.log").open("a", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "valuepath.study.worker", str(self.folder.path), self.attempt],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self.alive[number] = _Worker(process, log)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already, which is noticed when its output ends
            process.stdin.write(self.study.model_dump_json() + "\n")
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def _device(self, number: int) -> str:
        """One GPU a worker, of those that this process may use."""
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
        return devices[number % len(devices)]

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # something printed by a library
            self.events.put((number, event))
        self.events.put((number, None))

    def _heard(self, worker: _Worker, event: dict[str, Any]) -> None:
        run_id = event["run"]
        match event["event"]:
            case "start":
                worker.run_id = run_id
                self.watcher.started(run_id)
            case "step":
                self.watcher.stepped(run_id, event["step"])
            case "finished":
                worker.run_id = None
                self.watcher.ended(run_id, None)
            case "failed":
                worker.run_id = None
                self.watcher.ended(run_id, event["reason"])
            case "elsewhere":
                failure = self.folder.run(run_id).failure()
                self.watcher.ended(run_id, None if failure is None else failure.reason)

    def _ended(self, number: int) -> None:
        worker = self.alive.pop(number)
        code = worker.process.wait()
        worker.log.close()
        if code == 0:
            return
        log = Path(worker.log.name)
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = f"a worker ended with status {code}"
        detail = f"worker {number} ended with status {code}" + (f" ({said[-1]})" if said else "")
        run_id = worker.run_id
        if run_id is None:
            if self.deaths.setdefault("", 0) >= TRIES:
                raise ValueError(f"{detail}; see {log}")
            self.deaths[""] += 1
        else:
            self.deaths[run_id] = self.deaths.get(run_id, 0) + 1
            if self.deaths[run_id] >= TRIES:
                self._give_up(run_id, reason, detail)
                self.watcher.ended(run_id, detail)
        self.watcher.said(f"{detail}; a new one goes on")
        self._start(number)

    def _give_up(self, run_id: str, reason: str, detail: str) -> None:
        self.folder.run(run_id).fail(
            RunFailure(
                kind="error",
                step=None,
                reason=reason,
                detail=detail,
                checkpoint=None,
                hint="out of memory? fewer workers (--workers) or a smaller batch.sequences; then start the study again",
                attempt=self.attempt,
            )
        )

    def _stop(self) -> None:
        """End every worker that is left: they end when their standard input closes."""
        for worker in self.alive.values():
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self.alive.values():
            try:
                worker.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.log.close()
        self.alive.clear()
