"""A process that trains runs of a study, one after the other: it imports once and lives until nothing is left to do.

It takes whichever run is neither finished nor locked. Its parent holds the other end of standard input: when that closes, for
whatever reason the parent ended, this process ends at once, wherever it is; checkpoints are made for that. It reports on
standard output, one JSON object a line::

    {"event": "start", "run": id, "pid": n}         {"event": "step", "run": id, "step": n}
    {"event": "finished", "run": id}                {"event": "failed", "run": id, "reason": text}
    {"event": "elsewhere", "run": id}               (finished or given up by another process)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout

from valuepath.study.store import StoredRun, StoredStudy, StudyFolder
from valuepath.train.result import Diverged, RunFailure

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus

REPORT_EVERY = 0.5
"""Seconds between two reports of a step."""

WAIT = 0.5
"""Seconds between two looks at runs that other processes have."""


def tell(**event: Any) -> None:
    try:
        sys.__stdout__.write(json.dumps(event) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
    except OSError:  # nobody listens any more
        os._exit(1)


def _end_with_parent() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock a waiting thread would keep while the interpreter ends
        pass
    os._exit(1)


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            os._exit(1)
        line += part
    return line


class Worker:
    """
    Args:
        folder: of the study.
        runs: those to see to.
        attempt: this invocation of the study; an error that one of its workers met is not tried again in it.
    """

    def __init__(self, folder: StudyFolder, runs: list[StoredRun], attempt: str) -> None:
        self.folder, self.runs, self.attempt = folder, runs, attempt
        self.corpora: dict[str, Corpus] = {}

    def work(self) -> None:
        """Until every run is finished or has failed."""
        open_runs = {run.id: run for run in self.runs}
        while open_runs:
            busy = True
            for run_id, run in list(open_runs.items()):
                try:
                    with self.folder.lock(run_id).acquire(timeout=0):
                        self._see_to(run)
                except Timeout:
                    continue
                busy = False
                del open_runs[run_id]
            if busy:
                time.sleep(WAIT)

    def _see_to(self, run: StoredRun) -> None:
        folder = self.folder.run(run.id)
        failure = folder.failure()
        done = folder.result_file.exists()
        if done or (failure is not None and (failure.kind == "diverged" or failure.attempt == self.attempt)):
            if done:
                folder.tidy()
            tell(event="elsewhere", run=run.id, finished=done)
            return
        tell(event="start", run=run.id, pid=os.getpid())
        try:
            self._train(run)
            tell(event="finished", run=run.id)
        except Diverged as wrong:
            tell(event="failed", run=run.id, reason=str(wrong))
        except Exception as wrong:
            traceback.print_exc()
            reason = f"{type(wrong).__name__}: {wrong}"
            folder.fail(
                RunFailure(
                    kind="error",
                    step=None,
                    reason=f"{type(wrong).__name__}, see logs",
                    detail=reason,
                    checkpoint=None if (last := folder.last_checkpoint()) is None else last[1].name,
                    hint="start the study again once the cause is gone: the run goes on",
                    attempt=self.attempt,
                )
            )
            tell(event="failed", run=run.id, reason=reason)

    def _train(self, run: StoredRun) -> None:
        from valuepath.data.corpus import Corpus
        from valuepath.train.run import train

        path = run.settings.data.path
        if path not in self.corpora:
            self.corpora[path] = Corpus.load(Path(path))
        corpus = self.corpora[path]
        resolved = run.settings.resolve(corpus.vocab_size, corpus.fingerprint, corpus.eos)
        if resolved.id != run.id:
            raise ValueError(
                f"{path}: the text or the package changed since the study was started (the run would be {resolved.id}); "
                "start the study again"
            )
        last = 0.0

        def watch(step: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= REPORT_EVERY:
                last = now
                tell(event="step", run=run.id, step=step)

        train(resolved, corpus, self.folder.run(run.id).path, watch)


def main() -> None:
    """``python -m valuepath.study.worker FOLDER ATTEMPT``, the plan as the first line of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and with it this process
    plan = StoredStudy.model_validate_json(_first_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    Worker(StudyFolder(Path(sys.argv[1])), list(plan.distinct.values()), sys.argv[2]).work()


if __name__ == "__main__":
    main()
