"""Iterables of batches that keep their own position: pipelines of nodes, loaders of other libraries.

They are no `DataLoader`s, but what a prepared loader needs of them is little: batches in order, and
a state to go on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


class BatchStream(IterableDataset[Any]):
    """A dataset whose elements are the batches of an iterable that has `state_dict` and `load_state_dict`.

    Other attributes of the iterable are reachable through this object.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        """The state of the iterable."""
        state: dict[str, Any] = self.batches.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from `state`."""
        self.batches.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__"):  # a copy that is being made has no attributes yet
            raise AttributeError(name)
        return getattr(self.batches, name)


def is_batch_stream(obj: object) -> bool:
    """Whether `obj` is an iterable that keeps its own position."""
    return hasattr(type(obj), "__iter__") and all(
        callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")
    )


def as_data_loader(loader: Any) -> DataLoader[Any]:
    """A `DataLoader` as it is, a stream of batches as the dataset of one. Raises `TypeError` for anything else."""
    if isinstance(loader, DataLoader):
        return loader
    if not is_batch_stream(loader):
        raise TypeError(
            f"prepare_data_loader() was given a {type(loader).__name__}, expected a torch.utils.data.DataLoader, or an "
            f"iterable of batches with state_dict() and load_state_dict(). prepare() takes objects of any kind."
        )
    return DataLoader(BatchStream(loader), batch_size=None)
