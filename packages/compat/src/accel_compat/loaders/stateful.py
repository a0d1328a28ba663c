"""torchdata's `StatefulDataLoader` in place of torch's `DataLoader`, for what asks for its class."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_core import NotInstalledError

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def stateful_loader_class() -> Any:
    """torchdata's class; `NotInstalledError` without torchdata."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        what = "use_stateful_dataloader=True makes loaders of torchdata's class, which is not installed."
        raise NotInstalledError(
            f"{what} Type: pip install torchdata; or leave it out: every loader has a state."
        ) from None
    return StatefulDataLoader


@functools.cache
def stateful_class(cls: type) -> type:
    """A class that is `cls` and torchdata's."""
    return type(cls.__name__, (cls, stateful_loader_class()), {"__module__": cls.__module__})


def as_stateful(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of torchdata's class that reads the same; one of another class of its own as it is."""
    if type(loader) is not DataLoader:
        return loader
    options: dict[str, Any] = {}
    if type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
    else:
        options["batch_sampler"] = loader.batch_sampler
    return reading(loader, stateful_loader_class(), **options)


def reading(loader: DataLoader[Any], kind: Any, **options: Any) -> DataLoader[Any]:
    """A loader of class `kind` with the arguments of another one, but for what draws its indices."""
    made: DataLoader[Any] = kind(loader.dataset, **{name: getattr(loader, name) for name in _KEPT}, **options)
    return made
