"""Times of alternatives, taken in turns so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def alternating(work: dict[str, Callable[[], Any]], rounds: int, warm_up: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each piece of work over ``rounds`` turns, after ``warm_up`` turns that do not count.

    The order within a turn is drawn anew each time (always the same draws): what one leaves in the processor's caches falls
    on all the others alike.
    """
    times: dict[str, list[float]] = {name: [] for name in work}
    names, draws = [*work], random.Random(0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(warm_up + rounds):
            for name in draws.sample(names, len(names)):
                finish(device)
                start = time.perf_counter()
                work[name]()
                finish(device)
                if turn >= warm_up:
                    times[name].append((time.perf_counter() - start) * 1e3)
    finally:
        if was_enabled:
            gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}


def finish(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
