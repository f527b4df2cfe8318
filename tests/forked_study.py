"""Start a study's worker again and again and kill it each time: ``python forked_study.py STUDY SEED KILLS``.

Everything is imported once; each attempt is a fork of that, so that it begins to train at once. Each is killed a random number
of records, and then a random moment, after it began. Prints, for every kill, how many records of training there were. A study
that ends before it was killed often enough is followed by another: STUDY-1, STUDY-2 and so on. The last one ends by itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import transformers.trainer  # noqa: F401 (imported before the fork, where it is used)

import valuepath.data.corpus
import valuepath.train.run  # noqa: F401
from valuepath.study.store import StudyFolder
from valuepath.study.worker import Worker


def attempt(folder: StudyFolder, kill_at: int | None = None, moment: float = 0.0) -> int:
    """The worker's status; -9 if it was killed, ``moment`` seconds after the study had ``kill_at`` records."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Worker(folder, list(folder.load().distinct.values()), str(os.getpid())).work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    while kill_at is not None:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if records(folder) >= kill_at:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def records(folder: StudyFolder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.path.glob("runs/*/metrics.jsonl"))


def main() -> None:
    first, chance, kills = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    folder, studies, landed = StudyFolder(first), 1, 0
    while landed < kills:
        status = attempt(folder, records(folder) + chance.randint(0, 20), chance.uniform(0, 0.1))
        if status == -signal.SIGKILL:
            landed += 1
            print(f"killed with {records(folder)} records", flush=True)
        elif status == 0:
            following = StudyFolder(first.with_name(f"{first.name}-{studies}"))
            following.save(folder.load())
            folder, studies = following, studies + 1
        else:
            sys.exit(f"the worker ended with status {status}")
    sys.exit(attempt(folder))


if __name__ == "__main__":
    main()
