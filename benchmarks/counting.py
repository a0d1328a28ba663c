"""Counting what a loop does, whatever the names by which it does it."""

from __future__ import annotations

import _pickle
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_FUNCTIONS = {_pickle.dump, _pickle.dumps, _pickle.load, _pickle.loads}


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called inside, by this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))


class Calls:
    """Counts what this thread calls inside: pickling and unpickling, and some functions of Python.

    Args:
        codes: of the functions.
    """

    def __init__(self, codes: Collection[CodeType] = ()) -> None:
        self._codes = codes
        self._outer: Any = None
        self.pickles = 0
        self.functions = 0

    def __enter__(self) -> Calls:
        self._outer = sys.getprofile()
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self.functions += frame.f_code in self._codes
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            whole = isinstance(owner, _pickle.Pickler | _pickle.Unpickler) and called.__name__ in ("dump", "load")
            self.pickles += whole or called in _FUNCTIONS
