"""Intervals against another library, a book's quantiles, and the truth they are to cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from valuepath.study.statistics import interval, paired_difference, score

BOOK = {2: 12.7062, 3: 4.3027, 4: 3.1824, 8: 2.3646, 30: 2.0452}
"""n -> t(0.975) with n - 1 degrees of freedom, as printed tables have it."""


@pytest.mark.parametrize("n", sorted(BOOK))
def test_the_interval_is_the_closed_form_with_a_book_s_quantile(n: int):
    values = np.random.default_rng(n).normal(0.3, 2.0, n)
    low, high = interval(list(values))
    centre = values.sum() / n
    spread = math.sqrt(((values - centre) ** 2).sum() / (n - 1))
    assert (low + high) / 2 == pytest.approx(centre, rel=1e-12)
    assert (high - low) / 2 == pytest.approx(BOOK[n] * spread / math.sqrt(n), rel=2e-5)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 20])
def test_the_paired_difference_is_scipy_s_related_test(n: int):
    rng = np.random.default_rng(100 + n)
    a, b = rng.normal(3, 1, n), rng.normal(3.2, 1, n)
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    expected = stats.ttest_rel(a, b)
    low, high = expected.confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
    assert found.mean == pytest.approx((a - b).mean(), rel=1e-12)
    assert (found.verdict == "undecided") == (expected.pvalue > 0.05)


@pytest.mark.parametrize("seeds", [3, 8])
def test_the_interval_covers_a_known_effect_in_95_percent_of_draws(seeds: int):
    rng, effect, covered, draws = np.random.default_rng(20260), -0.07, 0, 2000
    for _ in range(draws):
        shared = rng.normal(3.3, 0.5, seeds)  # what a seed does to both, larger than the effect
        baseline = shared + rng.normal(0, 0.02, seeds)
        variant = shared + effect + rng.normal(0, 0.03, seeds)
        found = paired_difference(dict(enumerate(variant)), dict(enumerate(baseline)))
        assert found is not None
        covered += found.low <= effect <= found.high
    assert 0.93 <= covered / draws <= 0.97


def test_only_seeds_that_both_have_are_paired():
    found = paired_difference({0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.25, 7: 0.0})
    assert found is not None
    assert found.per_seed == {0: 0.75, 1: 0.5} and found.mean == 0.625
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_seed_has_no_interval_and_no_verdict():
    found = paired_difference({4: 1.0}, {4: 3.0})
    assert found is not None
    assert (found.mean, found.low, found.high, found.verdict) == (-2.0, None, None, "undecided")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.0, 0.0], "equal"), ([0.0], "equal"), ([1.0, 1.0], "higher"), ([-1.0, -1.0, -1.0], "lower"), ([-1.0, 1.0], "undecided"),
     ([-1.00, -1.01, -0.99], "lower"), ([0.0, 0.0, 1e-9], "undecided")],
)  # fmt: skip
def test_verdicts(values: list[float], verdict: str):
    found = paired_difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None and found.verdict == verdict


def test_a_score_without_values_has_no_mean():
    assert score({}, None).mean is None and score({}, {0: 1.0}).difference is None
    assert score({1: 2.0, 0: 4.0}, None).mean == 3.0
