"""`DataLoaderShard`: a loader that reads the part of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_core.api.component import overridden_class
from accel_core.api.loader import PreparedLoader, source_attributes
from accel_data.iterable_source import Stateful, StreamSource
from accel_data.map_source import EpochSource
from accel_data.positioned_loader import PositionedLoader
from accel_data.request import Request
from accel_data.sample_count import Counting, CountingCollate
from accel_data.worker_streams import CountedCollate, telling

if TYPE_CHECKING:
    from accel_data.loader_state import Start


class DataLoaderShard(PositionedLoader, DataLoader[Any]):
    """A `DataLoader` that places its batches, knows its position, and reads the part of one rank.

    Constructed, it reads what its own arguments say: to share data out, give it a
    `BatchSamplerShard`, or an `IterableDatasetShard` as dataset. Constructing it is a collective in
    a world larger than one, which agrees on the seed of the run.

    Args:
        dataset: as of a `DataLoader`, which takes `kwargs`.
        device: where batches are put; None leaves them where they are.
        rng_types: see `prepare_data_loader`; a collective of the world.
        synchronized_generator: one that is made equal to that of rank 0, beside the samplers'.
        skip_batches: how many batches each epoch leaves out at its beginning; behind
            `load_state_dict`, the rest of one leaves out nothing more.
        _drop_last: says that an incomplete last batch is left out; an error otherwise.
    """

    _accel_source: EpochSource | StreamSource

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        _drop_last: bool = False,
        **kwargs: Any,
    ) -> None:
        dress_made(self, DataLoaderShard)
        super().__init__(dataset, **kwargs)
        check_skipped("DataLoaderShard(skip_batches", skip_batches)
        if _drop_last and not (self.drop_last or getattr(self.batch_sampler, "drop_last", False)):
            raise ValueError(
                "DataLoaderShard(_drop_last=True) says that an incomplete last batch is left out, but neither the loader nor its "
                "batch sampler leaves it out. Use drop_last=True, or a batch sampler that has it."
            )
        self.__dict__.update(reading_part(as_plain(self), Request.alone(device, rng_types)))
        self._accel_source.skipped = skip_batches
        self._accel_source.synchronised = synchronized_generator

    def __iter__(self) -> Any:
        source = self._accel_source
        if isinstance(source, StreamSource):
            return source.iterate(self._fetched, self._accel_outlet, self._stateful())
        return super().__iter__()

    def _position(self) -> Start:
        source = self._accel_source
        return source.position(self._stateful()) if isinstance(source, StreamSource) else super()._position()

    def _fetched(self) -> Iterator[Any]:
        """The batches as torch, and the user's own class, give them."""
        return super(PreparedLoader, self).__iter__()

    def _get_iterator(self) -> Any:
        """torch's iterator. A note that comes with a batch is taken off before its use."""
        source = self._accel_source
        if not isinstance(source, StreamSource):
            return super()._get_iterator()
        inner: Any = cast(Any, super(PreparedLoader, self))._get_iterator()
        if not isinstance(self.collate_fn, (CountedCollate, CountingCollate)):
            return inner
        counting = Counting(inner)
        source.delivered = counting.delivered
        return counting

    def _stateful(self) -> Stateful | None:
        """The object with its own position: the user's loader, or a dataset read here."""
        source, inherited = self._accel_source, cast(Any, super(PreparedLoader, self))
        if isinstance(source, StreamSource) and source.inherits_state and _is_stateful(inherited):
            return SimpleNamespace(state_dict=inherited.state_dict, load_state_dict=inherited.load_state_dict)
        return cast(Stateful, self.dataset) if self.num_workers == 0 and _is_stateful(self.dataset) else None


def reading_part(loader: DataLoader[Any], request: Request) -> dict[str, Any]:
    """The attributes that make a copy of `loader` a `DataLoaderShard` over all of its dataset."""
    outlet, shard, options = request.outlet(), request.shard, request.options
    identity, synchronise = request.identity(loader), request.synchronise()
    if isinstance(loader.dataset, IterableDataset):
        told = telling(loader)
        stream = StreamSource(loader, shard, identity, told.get("dataset", loader.dataset), synchronise=synchronise)
        return {"_accel_outlet": outlet, "_accel_source": stream, **told}
    # The workers of a rank are to draw from streams of their own.
    generator = torch.Generator() if shard.count > 1 and loader.num_workers else None
    source = EpochSource(
        loader,
        shard,
        identity,
        split_batches=options.split_batches and shard.count > 1,
        even_batches=options.even_batches,
        worker_generator=generator,
        synchronise=synchronise,
        seedable=options.use_seedable_sampler,
    )
    source.batches()  # raises now for what cannot be split
    attributes = source_attributes(loader, source, outlet, strict=source.shard.count > 1)
    attributes["_accel_source"] = source
    return attributes if generator is None else {**attributes, "generator": generator}


def as_plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of torch's own class with the same attributes."""
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    plain.__dict__.update(loader.__dict__)
    return plain


def check_skipped(asked: str, number: object) -> None:
    """Raises unless this many batches can be left out."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{asked}={number!r}): expected how many batches are left out, a whole number of at least 0.")


def _is_stateful(obj: Any) -> bool:
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def dress_made(loader: DataLoader[Any], overrides: type) -> None:
    """Gives a constructed loader a class as `prepare` makes: these overrides over its own class."""
    bases = type(loader).__bases__
    if not (len(bases) == 2 and issubclass(bases[0], overrides) and issubclass(bases[1], DataLoader)):
        loader.__class__ = overridden_class(DataLoader, type(loader))
