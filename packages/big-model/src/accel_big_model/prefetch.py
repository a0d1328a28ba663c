"""Fetching weights ahead: those of the next modules are read while this one computes.

The order of modules is learned by the first pass. A guess that turns out wrong costs a read, never
a result. What is ahead has at most as many bytes as the largest module, or is one module.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from accel_big_model.forks import begin_in_each_process
from accel_big_model.tied_weights import TiedWeights

_MOST = 8  # modules ahead


class Source(Protocol):
    """A source of weights, of `nbytes` in all."""

    execution_device: torch.device
    nbytes: int

    def fetch(self) -> dict[str, torch.Tensor]:
        """The weights, on the device where they are used."""

    def note(self, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Lets others that share one of these weights find it; returns those that are shared."""


class _Ahead(NamedTuple):
    source: weakref.ref[Source]
    nbytes: int
    weights: Future[dict[str, torch.Tensor]]


class Prefetcher:
    """One thread that fetches ahead, for all modules of a model; `tied` is read as seldom as possible."""

    def __init__(self, tied: TiedWeights | None = None) -> None:
        self.tied = TiedWeights() if tied is None else tied
        self._next: weakref.WeakKeyDictionary[Source, weakref.ref[Source]] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Source] | None = None
        self._largest = 0
        begin_in_each_process(self)

    def begin(self) -> None:
        """Makes the lock; the thread follows when there is something to fetch ahead."""
        self._taking = threading.Lock()
        self._ahead: deque[_Ahead] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}  # of the thread: memory is used again in one stream only

    def take(self, source: Source) -> dict[str, torch.Tensor]:
        """The weights of `source`, which are needed now. Raises what fetching them raised."""
        with self._taking:  # threads that are in several modules would take each other's weights
            self._learn(source)
            if self._ahead and self._ahead[0].source() is source:
                weights = self._ahead.popleft().weights.result()
            else:
                self._forget()
                weights = source.fetch()
            for weight in weights.values():
                _use(weight)
            self._fetch_ahead(source, source.note(weights))
            return weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        """A copy of a model learns its own order."""
        return Prefetcher(copy.deepcopy(self.tied, memo))

    def _learn(self, source: Source) -> None:
        last = self._last() if self._last is not None else None
        this = weakref.ref(source)
        if last is not None and last is not source:
            self._next[last] = this
        self._last = this
        self._largest = max(self._largest, source.nbytes)

    def _forget(self) -> None:
        while self._ahead:
            self._ahead.popleft().weights.cancel()

    def _fetch_ahead(self, source: Source, held: list[torch.Tensor]) -> None:
        ahead = sum(each.nbytes for each in self._ahead)
        last = self._ahead[-1].source() if self._ahead else source
        while (guess := self._after(last)) is not None and guess is not source:
            if self._ahead and (ahead + guess.nbytes > self._largest or len(self._ahead) == _MOST):
                return
            if any(each.source() is guess for each in self._ahead):
                return  # a module that is called twice: what comes after it is not known
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="accel-prefetch")
            weights = self._thread.submit(self._fetch, guess, held)
            self._ahead.append(_Ahead(weakref.ref(guess), guess.nbytes, weights))
            ahead, last = ahead + guess.nbytes, guess

    def _after(self, source: Source | None) -> Source | None:
        following = None if source is None else self._next.get(source)
        return None if following is None else following()

    def _fetch(self, source: Source, held: object) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Fetches in the thread, on a stream of its own: copies run beside the computation.

        `held`: the tied weights of the module that computes, which are found as long as somebody
        has them.
        """
        device = source.execution_device
        if device.type in ("cpu", "meta"):
            weights = source.fetch()
        else:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            with self._streams[device] as stream:
                weights = source.fetch()
                stream.synchronize()  # only this thread waits
        source.note(weights)
        return weights


def _use(weight: Any) -> None:
    """Has the memory of a weight, which is of another stream perhaps, last until the current stream has used it."""
    if hasattr(weight, "__tensor_flatten__"):
        for part in weight.__tensor_flatten__()[0]:
            _use(getattr(weight, part))
    elif weight.device.type not in ("cpu", "meta"):
        weight.record_stream(torch.accelerator.current_stream(weight.device))
