"""Main memory for weights that come and go: used again, so that a forward allocates none."""

from __future__ import annotations

import itertools
import math
import mmap
import threading
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch

from accel_big_model.forks import begin_in_each_process

LARGE = 1 << 20
"""Bytes from which on the allocator of C would keep what is freed, between other blocks."""


def own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in main memory. A large one has its own mapping, freed at once when it goes."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.empty(shape, dtype=dtype) if nbytes < LARGE else _tensor(memoryview(_mapping(nbytes)), shape, dtype)


class HostBuffers:
    """Lends memory to tensors; it is back when nothing refers to a tensor or a view of it.

    Never has more than was lent at once. Threads may borrow.
    """

    def __init__(self) -> None:
        begin_in_each_process(self)
        self._free: list[mmap.mmap] = []
        self._numbers = itertools.count()  # of what is lent: an id is that of another view as soon as one goes
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
        self._back: deque[int] = deque()  # tensors go at any moment, in any thread: there it is only noted
        self._bytes = self._most = 0  # that are lent, now and at once

    def begin(self) -> None:
        """Makes the lock."""
        self._borrowing = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has memory of its own."""
        return HostBuffers, ()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content, in the smallest free memory that is large enough, or in new one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LARGE:
            return torch.empty(shape, dtype=dtype)
        with self._borrowing:
            self._take_back()
            mapping = min((each for each in self._free if len(each) >= nbytes), key=len, default=None)
            if mapping is None:
                mapping = _mapping(nbytes)
            else:
                self._free.remove(mapping)
            view = memoryview(mapping)[:nbytes]
            key = next(self._numbers)
            self._lent[key] = weakref.ref(view, partial(_note, self._back, key)), mapping
            self._bytes += len(mapping)
            self._most = max(self._most, self._bytes)
            while self._free and self._bytes + sum(map(len, self._free)) > self._most:
                self._free.remove(min(self._free, key=len))
        return _tensor(view, shape, dtype)

    def _take_back(self) -> None:
        while self._back:
            _, mapping = self._lent.pop(self._back.popleft())
            self._bytes -= len(mapping)
            self._free.append(mapping)


def _note(back: deque[int], key: int, _: object) -> None:
    back.append(key)


def _mapping(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # huge pages would be waited for


def _tensor(view: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)
