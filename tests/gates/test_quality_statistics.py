"""Intervals and the test: figures published with the methods, and what must hold for any counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencoti_build.gates.quality.statistics import Pairs, mcnemar, paired_loss, wilson

COUNTS = st.integers(min_value=0, max_value=300)
PAIRS = st.builds(Pairs, COUNTS, COUNTS, COUNTS, COUNTS).filter(lambda pairs: pairs.count > 0)


@pytest.mark.parametrize(("right", "count", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)])
def test_wilson_gives_the_published_intervals(right, count, low, high):
    """R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I."""
    found = wilson(right, count)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_paired_interval_is_the_published_one():
    """R. G. Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10 for 36, 12, 2, 0."""
    found = paired_loss(Pairs(36, 12, 2, 0))
    assert (found.low, found.high) == (pytest.approx(0.0569, abs=5e-5), pytest.approx(0.3404, abs=5e-5))


@pytest.mark.parametrize(("pairs", "p"), [(Pairs(9, 0, 0, 9), 1.0), (Pairs(5, 5, 0, 5), 2 / 32), (Pairs(5, 0, 6, 5), 2 / 64), (Pairs(0, 3, 1, 0), 10 / 16), (Pairs(0, 2, 2, 0), 1.0)])
def test_mcnemar_counts_the_coin_tosses(pairs, p):
    assert mcnemar(pairs) == pytest.approx(p)


@given(COUNTS, COUNTS)
def test_a_share_lies_in_its_interval_and_more_examples_narrow_it(right, wrong):
    count = right + wrong
    found = wilson(right, count)
    assert 0 <= found.low <= found.high <= 1
    if count:
        assert found.low <= right / count <= found.high
        wider, narrower = wilson(right, count), wilson(4 * right, 4 * count)
        assert narrower.high - narrower.low < wider.high - wider.low


@given(PAIRS)
def test_a_loss_lies_in_its_interval_and_changes_sign_with_the_sides(pairs):
    found, loss = paired_loss(pairs), (pairs.reference - pairs.candidate) / pairs.count
    assert -1 <= found.low <= loss + 1e-12 and loss - 1e-12 <= found.high <= 1
    turned = paired_loss(Pairs(pairs.both, pairs.candidate_only, pairs.reference_only, pairs.neither))
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_pairs_are_counted(outcomes):
    pairs = Pairs.of([one for one, _ in outcomes], [two for _, two in outcomes])
    assert pairs.count == len(outcomes)
    assert pairs.reference == sum(one for one, _ in outcomes) and pairs.candidate == sum(two for _, two in outcomes)
    assert 0 < mcnemar(pairs) <= 1


def test_no_examples_know_nothing():
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)
    assert (paired_loss(Pairs(0, 0, 0, 0)).low, paired_loss(Pairs(0, 0, 0, 0)).high) == (-1, 1)
