"""In which order an epoch runs through its samples, as a function from position to index.

Nothing is materialised: any block of positions can be asked for, so a rank computes the indices
that it reads, and no others. An order depends on its key alone, never on the number of ranks, on
torch's version, or on what a script draws.

Permutations: up to `SMALL` samples, positions are sorted by a keyed 64-bit hash. Above, eight
rounds of a Feistel network on Z_a x Z_b with a*b barely above n (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), walking the cycle until the result is below n. The hash is the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014). A round takes a shorter one of its kind:
after eight of them the order is as even, and an index costs half as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from accel_core.api.component import derive_seed

SMALL = 65_536
ROUNDS = 8

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the increments of SplitMix64, as int64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MASK = 2**62 - 1


class Order(Protocol):
    """An order of positions, as an epoch or a permutation has it."""

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Indices of the samples at `positions`: new, int64, 1-d."""


class SequentialOrder:
    """0, 1, 2, …"""

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions themselves."""
        return positions


class ShuffledOrder:
    """Each of `size` samples once, then again in another order, up to `length` samples."""

    def __init__(self, size: int, length: int, key: int) -> None:
        self.size = size
        self.length = length
        self.key = key
        self._passes: dict[int, Order] = {}

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices of the samples at `positions`."""
        if self.length <= self.size:
            return self._pass(0).at(positions)
        passes, places = positions // self.size, positions % self.size
        indices = torch.empty_like(places)
        for number in passes.unique().tolist():
            chosen = passes == number
            indices[chosen] = self._pass(number).at(places[chosen])
        return indices

    def _pass(self, number: int) -> Order:
        if number not in self._passes:
            self._passes = {number: permutation(self.size, derive_seed(self.key, number))}  # one is enough: they ascend
        return self._passes[number]


@dataclass(frozen=True)
class DrawnOrder:
    """Independent draws from `size` samples, with replacement."""

    size: int
    key: int

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices of the samples at `positions`."""
        return (_hashed(positions, self.key) & _MASK) % self.size


def permutation(size: int, key: int) -> Order:
    """A permutation of range(size) that is chosen by `key`."""
    return _SortedPermutation(size, key) if size <= SMALL else _FeistelPermutation(size, key)


class _SortedPermutation:
    """A Feistel network is biased on few samples; these are few enough to be sorted."""

    def __init__(self, size: int, key: int) -> None:
        self._table = torch.argsort(_hashed(torch.arange(size), key), stable=True)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        return self._table[positions]


class _FeistelPermutation:
    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._keys = [torch.tensor(derive_seed(key, number), device="cpu") for number in range(ROUNDS)]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        indices = self._network(positions)
        outside = (indices >= self._size).nonzero().flatten()
        while outside.numel():
            walked = self._network(indices[outside])
            indices[outside] = walked
            outside = outside[walked >= self._size]
        return indices

    def _network(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self._right, values % self._right
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _mixed(left, key).add_(right).remainder_(self._right)
            else:
                left = _mixed(right, key).add_(left).remainder_(self._left)
        return left.mul_(self._right).add_(right)


def _mixed(values: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The function of a round, on signed 32 bits, in five operations: calls cost most."""
    mixed = torch.add(key, values, alpha=_GOLDEN)
    mixed.bitwise_xor_(mixed >> 32).mul_(_FACTORS[0])
    return mixed.bitwise_right_shift_(32)


def _hashed(values: torch.Tensor, key: int) -> torch.Tensor:
    """The `values`-th numbers of the SplitMix64 stream that starts at `key`; int64, all 64 bits."""
    mixed = (values + 1).mul_(_GOLDEN).add_(key)
    mixed.bitwise_xor_(_shifted(mixed, 30)).mul_(_FACTORS[0])
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(_FACTORS[1])
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own copies the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
