"""Fetching weights ahead: those of the next module are read while this one computes.

The order of modules is learned by the first pass. A guess that turns out wrong costs a read, never
a result. At most one module's weights are fetched ahead.
"""

from __future__ import annotations

import copy
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from accel_big_model.tied_weights import TiedWeights


class Source(Protocol):
    """A source of weights."""

    execution_device: torch.device

    def fetch(self) -> dict[str, torch.Tensor]:
        """The weights, on the device where they are used."""

    def note(self, weights: dict[str, torch.Tensor]) -> None:
        """Lets others that share one of these weights find it."""


class Prefetcher:
    """One thread that fetches ahead, for all modules of a model; `tied` is read as seldom as possible."""

    def __init__(self, tied: TiedWeights | None = None) -> None:
        self.tied = TiedWeights() if tied is None else tied
        self._next: weakref.WeakKeyDictionary[Source, weakref.ref[Source]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Source] | None = None
        self._ahead: tuple[weakref.ref[Source], Future[dict[str, torch.Tensor]]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def take(self, source: Source) -> dict[str, torch.Tensor]:
        """The weights of `source`, which are needed now. Raises what fetching them raised."""
        this = weakref.ref(source)
        last = self._last() if self._last is not None else None
        if last is not None and last is not source:
            self._next[last] = this
        self._last = this
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0]() is source:
            weights = ahead[1].result()
        else:
            weights = source.fetch()
            source.note(weights)
        following = self._next.get(source)
        if following is not None and (guess := following()) is not None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="accel-prefetch")
            self._ahead = (
                following,
                self._thread.submit(_fetch, guess, _computing_stream(guess.execution_device), weights),
            )
        return weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        """A copy of a model learns its own order."""
        return Prefetcher(copy.deepcopy(self.tied, memo))


def _computing_stream(device: torch.device) -> torch.Stream | None:
    """The stream of the thread that calls the model: each thread has a current one of its own."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


def _fetch(source: Source, computing: torch.Stream | None, held: object) -> dict[str, torch.Tensor]:  # noqa: ARG001
    """Fetches in the thread, on a stream of its own: copies run beside the computation.

    `held`: the weights of the module that computes, so that those which are tied are found.
    """
    if computing is None:
        weights = source.fetch()
    else:
        with torch.Stream(source.execution_device) as stream:
            weights = source.fetch()
        stream.synchronize()  # only this thread waits
        for weight in weights.values():
            weight.record_stream(computing)  # its memory is not given away before what computes has used it
    source.note(weights)
    return weights
