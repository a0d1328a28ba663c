"""The loader component `sharded`: ranks share out every kind of loader."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from accel_core import hookimpl
from accel_core.api.component import as_rng_types
from accel_data.configuration import DataLoaderConfiguration, Uneven, check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader

    from accel_core import Feed, Shard


class Sharded:
    """Each process reads its part of every batch; seed and epoch decide the order of samples.

    `DataLoaderConfiguration` says more about each option.

    Args:
        split_batches: divide the batch of a loader among the processes. Otherwise each process gets
            a whole batch, so more processes take more samples per step.
        even_batches: fill the last batch with the first samples of the epoch, so that all processes
            have equally many batches of one size. Metrics leave these samples out. Otherwise the
            last batch may be short, and processes may differ by one batch.
        dispatch_batches: let one process read the data and send the others their parts. None: for
            iterable datasets only.
        use_seedable_sampler: shuffle as other libraries do, by a list of random numbers from seed
            and epoch (`torch.randperm`), instead of computing the place of each sample.
        data_seed: seed of the order of samples, 0 to 2**64 - 1. None: the seed of the run.
        non_blocking: let the program continue while any batch is copied to the device. Otherwise it
            continues only if the loader puts batches in pinned memory.
        use_stateful_dataloader: has no effect: every prepared loader can save and load its
            position.
        rng_types: random streams that all processes take from process 0 when a loader starts:
            "generator" for those that you gave to samplers, "torch" for the one of torch, and kinds
            of devices, such as "cuda".
        presharded: tell the loader that an iterable dataset already gives each process samples of
            its own.
        uneven: what to do if the data of a process ends before that of others: "pad" with rows
            that metrics leave out, "stop" all, or "join": each ends by itself, for loops in
            `join_uneven_inputs`.

    Raises:
        TypeError: if a value is of another type, such as a text for a truth value.
        ValueError: if it is out of range, or no known name.
    """

    handler = DataLoaderConfiguration
    rng_types: Sequence[str]
    classes: ClassVar[tuple[type[Any], type[Any]] | None] = None
    """For subclasses: the classes of prepared loaders, subclasses of `DataLoaderShard` and `DataLoaderDispatcher`; None: these."""

    def __init__(
        self,
        split_batches: bool = False,
        even_batches: bool = True,
        dispatch_batches: bool | None = None,
        use_seedable_sampler: bool = False,
        data_seed: int | None = None,
        non_blocking: bool = False,
        use_stateful_dataloader: bool = False,
        rng_types: Sequence[str] = ("generator",),
        presharded: bool = False,
        uneven: Uneven = "pad",
    ) -> None:
        given = locals()
        options = {field.name: given[field.name] for field in fields(self.handler)}
        check_options(type(self).__name__, options)
        self.__dict__.update(options, rng_types=as_rng_types("rng_types", rng_types))

    @hookimpl
    def prepare_loader(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        feed: Feed,
        device: torch.device | None,
        seed: int,
        number: int = 0,
        group: ProcessGroup | None = None,
        slice_fn: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """A copy of the loader that gives one shard."""
        # Not at the top: the component is made with every Accelerator, and some scripts prepare no loader.
        from accel_data.preparing import prepare
        from accel_data.request import Request

        options = DataLoaderConfiguration(**{field.name: getattr(self, field.name) for field in fields(self.handler)})
        given = (shard, feed, device, seed, number, group, slice_fn, options, tuple(self.rng_types))
        request = Request(*given, self.classes)
        return prepare(loader, request)
