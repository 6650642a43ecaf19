"""How sure a measured share is: intervals for one share, for two on the same examples, and a test of their difference.

All intervals are two-sided at 95 %. Sources: E. B. Wilson, Journal of the American Statistical Association 22 (1927) for one share;
R. G. Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10, for the difference of paired shares; Q. McNemar, Psychometrika 12
(1947), in its exact form, for the test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959963984540054
"""The standard normal quantile of 0.975."""


@dataclass(frozen=True)
class Interval:
    """A closed interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """Two contenders on the same examples, counted: both right, only one of them, neither."""

    both: int
    reference_only: int
    candidate_only: int
    neither: int

    @classmethod
    def of(cls, reference: Sequence[bool], candidate: Sequence[bool]) -> Pairs:
        """Count the pairs of two equally long sequences of right and wrong."""
        pairs = list(zip(reference, candidate, strict=True))
        return cls(pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True)), pairs.count((False, False)))

    @property
    def count(self) -> int:
        """How many examples there are."""
        return self.both + self.reference_only + self.candidate_only + self.neither

    @property
    def reference(self) -> int:
        """How many the reference has right."""
        return self.both + self.reference_only

    @property
    def candidate(self) -> int:
        """How many the candidate has right."""
        return self.both + self.candidate_only


def wilson(right: int, count: int) -> Interval:
    """The score interval of a share; (0, 1) for no examples at all."""
    if count <= 0:
        return Interval(0.0, 1.0)
    share, square = right / count, Z * Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    # The bounds at 0 and at all are exact; rounding must not move them.
    return Interval(0.0 if right == 0 else max(0.0, middle - half), 1.0 if right == count else min(1.0, middle + half))


def paired_loss(pairs: Pairs) -> Interval:
    """The interval of (share of the reference - share of the candidate): above zero where the candidate is worse."""
    count = pairs.count
    if count == 0:
        return Interval(-1.0, 1.0)
    first, second = pairs.reference / count, pairs.candidate / count
    one, two = wilson(pairs.reference, count), wilson(pairs.candidate, count)
    phi = _correlation(pairs)
    below, above = (first - one.low, two.high - second), (one.high - first, second - two.low)
    loss = first - second
    low = math.sqrt(max(0.0, below[0] ** 2 - 2 * phi * below[0] * below[1] + below[1] ** 2))
    high = math.sqrt(max(0.0, above[0] ** 2 - 2 * phi * above[0] * above[1] + above[1] ** 2))
    return Interval(max(-1.0, loss - low), min(1.0, loss + high))


def _correlation(pairs: Pairs) -> float:
    """Newcombe's phi: zero where a margin is empty, reduced by the continuity correction where it is positive."""
    margins = pairs.reference * (pairs.count - pairs.reference) * pairs.candidate * (pairs.count - pairs.candidate)
    if margins == 0:
        return 0.0
    product = float(pairs.both * pairs.neither - pairs.reference_only * pairs.candidate_only)
    if product > 0:
        product = max(0.0, product - pairs.count / 2)
    return product / math.sqrt(margins)


def mcnemar(pairs: Pairs) -> float:
    """The two-sided exact probability of a split of the differing pairs as uneven as this one, if neither contender were better."""
    differing, fewer = pairs.reference_only + pairs.candidate_only, min(pairs.reference_only, pairs.candidate_only)
    if differing == 0:
        return 1.0
    tail = sum(math.comb(differing, hits) for hits in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << differing))
