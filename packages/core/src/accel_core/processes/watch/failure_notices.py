"""Notices of failed ranks and their errors, for the ranks that only see a connection break.

A rank whose process ends by an exception that nobody caught puts a *notice* into the store at which
the ranks have met, before it leaves. A rank whose collective fails with a broken connection looks
there, and only then.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from torch.distributed import Store

LINGER = timedelta(seconds=2)
"""The time that a rank that may host the store waits for those that have not read the notices."""

LONGEST = 4000
"""Characters of an error that travel, its last ones: a worker's error ends with the original exception."""


def is_broken_connection(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has gone. gloo raises a bare `RuntimeError` that names its source."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def timed_out(error: BaseException) -> bool:
    """Whether a rank gave up by itself, after the timeout of its process group."""
    return any(word in str(error).lower() for word in ("timed out", "timeout"))


def broken_connection_in(error: BaseException) -> BaseException | None:
    """The first error of a broken connection among an error, its cause or context, theirs, and so on."""
    return next((each for each in _chain(error) if is_broken_connection(each)), None)


class Notices:
    """The notices of the ranks of one process group, in the store at which they have met. One that has gone is no error here."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = dist.PrefixStore("accel/failures", store), rank, size

    @classmethod
    def running(cls) -> Notices | None:
        """Those of torch's default group; None if there is none, or if its backend met without a store."""
        if not dist.is_initialized():
            return None
        store: Store | None = distributed_c10d._get_default_store()
        return None if store is None else cls(store, dist.get_rank(), dist.get_world_size())

    def post(self, error: BaseException) -> None:
        """Posts a notice of the error that ends this rank."""
        with contextlib.suppress(dist.DistError):
            notice = json.dumps([self._rank, described(error)])
            self._store.set(f"notice/{self._store.add('count', 1)}", notice)
            self._store.set(f"read/{self._rank}", "")  # whoever knows needs no news

    def read(self) -> str:
        """The notices of the other ranks, as a paragraph for the user; empty if there are none."""
        errors: dict[int, str] = {}
        with contextlib.suppress(dist.DistError):
            for number in range(1, self._store.add("count", 0) + 1):
                key = f"notice/{number}"
                if self._store.check([key]):  # else its rank was killed between counting and writing
                    rank, error = json.loads(self._store.get(key))
                    errors[rank] = error
            self._store.set(f"read/{self._rank}", "")
        errors.pop(self._rank, None)
        if not errors:
            return ""
        told = "; ".join(f"rank {rank} failed: {error}" for rank, error in sorted(errors.items()))
        return f"The connection broke because {told}\nMend that one: the error of this rank only follows from it."

    def linger(self) -> None:
        """On rank 0, which may host the store: waits until the others have read the notices, `LINGER` at most."""
        with contextlib.suppress(dist.DistError):
            if self._rank == 0 and self._store.add("count", 0):
                self._store.wait([f"read/{rank}" for rank in range(1, self._size)], LINGER)


def described(error: BaseException) -> str:
    """Type and message, and the line that raised it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return (text if len(text) <= LONGEST else f"…{text[-LONGEST:]}") + place


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
