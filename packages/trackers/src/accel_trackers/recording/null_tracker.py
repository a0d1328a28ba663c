"""The object that `get_tracker` returns where nothing is recorded: all its uses do nothing."""

from __future__ import annotations

from typing import Any

from accel_core import GeneralTracker


class Blank(GeneralTracker):
    """A stand-in for a tracker, or a service's own object, where nothing is recorded.

    Each attribute can be called, and gives a blank. It is false, empty, and a context manager.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Blank:
        """Does nothing, whatever is given."""
        return self

    start = store_init_configuration = log = finish = __enter__ = __getitem__ = __call__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Blank:
        if name.startswith("__"):  # as copying and pickling ask for
            raise AttributeError(name)
        return Blank(name)

    def __exit__(self, *_: object) -> None: ...

    def __setitem__(self, _: object, __: object) -> None: ...

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())
