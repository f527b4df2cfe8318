"""The statistics of a comparison: differences paired by seed, with Student's t interval of their mean.

With one seed all variants see the same batches and start from the same shared weights, so that much of what a seed changes
cancels in the difference ``d_s = variant_s - baseline_s``::

    mean(d) +- t(0.975, n - 1) * sd(d) / sqrt(n)        sd with n - 1 in the denominator
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Literal

from valuepath.study.results import Difference, Score

LEVEL = 0.95
"""Of the intervals."""


def paired_difference(
    variant: Mapping[int, float], baseline: Mapping[int, float], level: float = LEVEL
) -> Difference | None:
    """Variant minus baseline over the seeds that both have.

    Args:
        variant, baseline: seed -> value.
        level: probability with which the interval covers the true mean difference.

    Returns:
        None if they have no seed in common. From one seed there is a difference and no interval.
    """
    seeds = sorted(variant.keys() & baseline.keys())
    if not seeds:
        return None
    per_seed = {seed: variant[seed] - baseline[seed] for seed in seeds}
    values = list(per_seed.values())
    mean = math.fsum(values) / len(values)
    low, high = interval(values, level) if len(values) > 1 else (None, None)
    verdict: Literal["lower", "higher", "equal", "undecided"] = "undecided"
    if not any(values):
        verdict = "equal"
    elif low is not None and high is not None and (low > 0 or high < 0):
        verdict = "higher" if low > 0 else "lower"
    return Difference(per_seed=per_seed, mean=mean, low=low, high=high, verdict=verdict)


def interval(values: list[float], level: float = LEVEL) -> tuple[float, float]:
    """Student's t interval of the mean of at least two values."""
    from scipy import stats

    n = len(values)
    mean = math.fsum(values) / n
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def score(per_seed: Mapping[int, float], baseline: Mapping[int, float] | None) -> Score:
    """Mean over seeds, and the difference from a baseline if there is one."""
    values = dict(sorted(per_seed.items()))
    mean = math.fsum(values.values()) / len(values) if values else None
    return Score(
        per_seed=values, mean=mean, difference=None if baseline is None else paired_difference(values, baseline)
    )
