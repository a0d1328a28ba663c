"""Random streams of a sampler's own.

A sampler of the user's that takes no generator draws from the global streams of torch, Python or
NumPy. These differ between ranks, so each rank would share out another order: samples would be
lost, and others read twice. While such a sampler is asked for its next indices, the global streams
are therefore exchanged for private ones, which are the same on every rank.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def drawn_apart(items: Iterator[T], seed: int) -> Iterator[T]:
    """The items of an iterator that is asked under private streams of the CPU with this seed."""
    private: dict[str, Any] | None = None
    while True:
        outer = _states()
        _seed(seed) if private is None else _restore(private)
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            private = _states()
            _restore(outer)
        yield item


def draws_globally(sampler: Any) -> bool:
    """Whether a sampler, or the one inside a batch sampler, is the user's, without generator."""
    holders = [holder for holder in (sampler, getattr(sampler, "sampler", None)) if holder is not None]
    own = [holder for holder in holders if not type(holder).__module__.startswith("torch.utils.data")]
    return any(not hasattr(holder, "generator") for holder in own)


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_bit_generator()  # exchanging it takes less than a microsecond, its state 90
    return states


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_bit_generator(numpy.random.MT19937())
        numpy.random.seed(seed % 2**32)


def _restore(states: dict[str, Any]) -> None:
    torch.default_generator.set_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_bit_generator(states["numpy"])
