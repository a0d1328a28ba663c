"""The order of an epoch: a permutation that is a function of its key alone."""

from __future__ import annotations

import math

import pytest
import torch

from accel_data.order import SMALL, DrawnOrder, SequentialOrder, ShuffledOrder, permutation


def all_of(order):
    return order.at(torch.arange(order.length)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, SMALL, SMALL + 1, 65_543, 100_000, 131_071])
def test_every_sample_stands_in_the_order_once(size):
    assert sorted(all_of(ShuffledOrder(size, size, key=3))) == list(range(size))


@pytest.mark.parametrize("size", [1000, SMALL + 1])
def test_any_block_of_positions_can_be_asked_for(size):
    order = ShuffledOrder(size, size, key=3)
    whole = all_of(order)
    positions = torch.tensor([size - 1, 0, 17, 500])
    assert order.at(positions).tolist() == [whole[p] for p in positions.tolist()]


def test_the_order_of_a_key_never_changes():
    """Checkpoints hold a position, not an order: these numbers must stay as they are."""
    assert all_of(ShuffledOrder(10, 10, key=0)) == SMALL_ORDER
    assert ShuffledOrder(10**9, 10**9, key=0).at(torch.arange(5)).tolist() == LARGE_ORDER
    assert DrawnOrder(10, key=0).at(torch.arange(10)).tolist() == DRAWN_ORDER


SMALL_ORDER = [6, 1, 4, 3, 5, 2, 0, 9, 8, 7]
LARGE_ORDER = [814251486, 314629773, 841264640, 204623851, 280474715]
DRAWN_ORDER = [3, 6, 9, 2, 7, 6, 3, 8, 9, 8]


@pytest.mark.parametrize("size", [1000, SMALL + 1])
def test_keys_give_unrelated_orders(size):
    orders = [permutation(size, key).at(torch.arange(size)) for key in range(4)]
    for first in range(4):
        assert (orders[first] == torch.arange(size)).sum() < 10
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 10


def test_small_permutations_are_equally_likely():
    """All 6 orders of 3 samples, over 6000 keys: chi squared with 5 degrees of freedom is below 25.7 (p = 0.0001)."""
    seen: dict[tuple[int, ...], int] = {}
    for key in range(6000):
        order = tuple(permutation(3, key).at(torch.arange(3)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 25.7


def test_large_permutations_show_no_trend():
    """Spearman's correlation of position and index, and of neighbours, is within 5 standard deviations of 0."""
    size = 100_000
    ranks = permutation(size, 1).at(torch.arange(size)).double()
    for other in (torch.arange(size).double(), ranks.roll(1)):
        correlation = torch.corrcoef(torch.stack([ranks, other]))[0, 1]
        assert abs(correlation) < 5 / size**0.5


@pytest.mark.parametrize("key", range(4))
@pytest.mark.parametrize("size", [SMALL + 1, 131_071])
def test_positions_a_row_apart_in_the_network_are_unrelated(size, key):
    """Positions are written in rows as wide as the side of a square, and too few rounds leave rows alike. Chi squared of the
    distances, with 63 degrees of freedom, is below 137 (p = 0.0000002); after four rounds it is around 200."""
    order = permutation(size, key).at(torch.arange(size))
    side = -(-size // (math.isqrt(size - 1) + 1))
    for apart in (1, 2, side, 2 * side):
        counts = torch.bincount((order[apart:] - order[:-apart]) % size * 64 // size, minlength=64)
        expected = (size - apart) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 137


def test_more_samples_than_the_set_has_are_further_permutations_of_it():
    order = all_of(ShuffledOrder(5, 13, key=1))
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]
    assert len(set(order[10:])) == 3


def test_draws_with_replacement_cover_the_set_evenly():
    counts = torch.bincount(DrawnOrder(10, key=1).at(torch.arange(100_000)), minlength=10)
    assert ((counts - 10_000).abs() < 500).all()


def test_a_sequential_order_is_the_positions():
    assert SequentialOrder().at(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_positions_in_a_very_large_set_cost_no_memory():
    """The order of 10^9 samples is not materialised."""
    order = ShuffledOrder(10**9, 10**9, key=2)
    indices = order.at(torch.arange(10**9 - 4096, 10**9))
    assert indices.unique().numel() == 4096
    assert 0 <= int(indices.min()) < int(indices.max()) < 10**9
