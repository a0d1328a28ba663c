"""Classes of prepared loaders: accel-data's, which say where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

import accel_data
from accel_compat.loaders.stateful import stateful_class
from accel_compat.state import GradientState

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler that draws the samples of a loader; None if it has none."""
    inner = dataloader.batch_sampler
    while (further := getattr(inner, "batch_sampler", None)) is not None and further is not inner:
        inner = further
    return getattr(inner, "sampler", None) if inner is not None else dataloader.sampler


class _OnObjects:
    """An attribute that objects have, and the class has not: the loader itself."""

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute 'base_dataloader'")
        return obj


class DataLoaderStateMixin(_Base):  # type: ignore[misc, unused-ignore]  # a loader, of either class
    """Where a loader stands in its iteration: for `GradientState`, and for scripts that ask it."""

    use_stateful_dataloader = False
    base_dataloader: Any = _OnObjects()

    @property
    def gradient_state(self) -> GradientState:
        """The shared state, whose innermost loader this is while it is iterated."""
        return GradientState()

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the last one; False outside of loops."""
        running = self.running
        return running is not None and running.is_last

    @property
    def remainder(self) -> int:
        """Samples of the incomplete last global batch, 0 if it is complete; -1 if that is not known."""
        if getattr(self.batch_sampler, "drop_last", False):
            return -1
        try:
            length, size = self.total_dataset_length, self.total_batch_size
        except TypeError:
            return -1
        return -1 if size is None else length % size

    @property
    def iteration(self) -> int:
        """The epoch of the present iteration, else of the next."""
        return int(self.state_dict()["epoch"])

    def __iter__(self) -> Any:
        GradientState()._begin(self)
        return super().__iter__()

    def begin(self) -> None:
        """Nothing: loaders notice by themselves that they are iterated."""

    def end(self) -> None:
        """Nothing: loaders notice by themselves that their iteration was left."""

    def get_sampler(self) -> Any:
        """The sampler that draws the samples."""
        return get_sampler(self)


class DataLoaderShard(DataLoaderStateMixin, accel_data.DataLoaderShard):
    """A loader that reads the part of one process: see `accel_data.DataLoaderShard`.

    With `use_stateful_dataloader` it is a `StatefulDataLoader` of torchdata, too, if that is installed; its state is that of
    every prepared loader.
    """

    def __new__(cls, *_: Any, use_stateful_dataloader: bool = False, **__: Any) -> Any:
        """An object of a class that is made of this one and torchdata's, where that is asked for."""
        kind: Any = cls
        return object.__new__(stateful_class(kind) if use_stateful_dataloader else kind)

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,  # noqa: ARG002  (who shares data out by one is told by prepare_data_loader)
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, device, rng_types, synchronized_generator, skip_batches, _drop_last, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader


class DataLoaderDispatcher(DataLoaderStateMixin, accel_data.DataLoaderDispatcher):
    """A loader that one process reads for all: see `accel_data.DataLoaderDispatcher`, and `DataLoaderShard`."""

    def __new__(cls, *_: Any, use_stateful_dataloader: bool = False, **__: Any) -> Any:
        """An object of a class that is made of this one and torchdata's, where that is asked for."""
        kind: Any = cls
        return object.__new__(stateful_class(kind) if use_stateful_dataloader else kind)

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,  # noqa: ARG002  (who shares data out by one is told by prepare_data_loader)
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, split_batches, skip_batches, _drop_last, slice_fn, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader


class SkipDataLoader(DataLoaderShard):
    """A loader whose iterations leave out the first batches, in this process alone."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


class SkipBatchSampler(BatchSampler):
    """A batch sampler that leaves out the first batches of another one."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skip_batches:
                yield batch

    @property
    def total_length(self) -> int:
        """The batches of the other one."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


CLASSES: tuple[type[DataLoader[Any]], type[DataLoader[Any]]] = (DataLoaderShard, DataLoaderDispatcher)
"""What prepared loaders are."""
