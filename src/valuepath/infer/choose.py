"""Choosing between ways to compute the same thing by what they cost here: measured on the first calls, then remembered."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

R = TypeVar("R")

TRIES = 3
"""Calls of each candidate that are measured; the fastest counts, so that a first call's warm-up does not."""
HOPELESS = 3.0
"""A candidate that takes this many times the best is not tried again."""


@dataclass
class _Race:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    winner: str | None = None


class Chooser:
    """Runs one of several candidates. The first calls for a key are shared out among them and timed; from then on the fastest
    one runs. All candidates give the same result up to rounding, so that no call is wasted."""

    def __init__(self) -> None:
        self._races: dict[Hashable, _Race] = {}
        self._forced: str | None = None

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Within this context take the candidate ``name`` wherever there is one."""
        before, self._forced = self._forced, name
        try:
            yield
        finally:
            self._forced = before

    def forget(self) -> None:
        """Measure anew."""
        self._races.clear()

    def chosen(self) -> dict[Hashable, str]:
        """What was chosen so far, by key."""
        return {key: race.winner for key, race in self._races.items() if race.winner is not None}

    def run(self, key: Hashable, candidates: dict[str, Callable[[], R]], device: torch.device) -> R:
        """The result of the candidate that is fastest for ``key`` on ``device``."""
        if self._forced in candidates:
            return candidates[self._forced]()
        if len(candidates) == 1:
            return next(iter(candidates.values()))()
        race = self._races.setdefault(key, _Race({name: [] for name in candidates}))
        if race.winner is not None and race.winner in candidates:
            return candidates[race.winner]()
        name = min(candidates, key=lambda one: len(race.seconds.setdefault(one, [])))
        _finish(device)
        start = time.perf_counter()
        result = candidates[name]()
        _finish(device)
        race.seconds[name].append(time.perf_counter() - start)
        best = min(min(found) for found in race.seconds.values() if found)
        open_ = [
            one
            for one in candidates
            if len(found := race.seconds[one]) < TRIES and not (found and min(found) > HOPELESS * best)
        ]
        if not open_:
            race.winner = min(candidates, key=lambda one: min(race.seconds[one]))
        return result


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


chooser = Chooser()
"""The choices of this process."""


def bucket(size: int) -> int:
    """Sizes within a factor of 1.5 or less fall into one bucket: two for each power of two."""
    bits = size.bit_length()
    return 2 * bits + (size >> max(bits - 2, 0) & 1)
