"""The options of loading: one data class, and the checks that its receiver makes as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

from accel_core import KwargsHandler

Uneven = Literal["pad", "stop", "join"]

SEEDS = 2**64  # what torch.Generator.manual_seed takes


@dataclass
class DataLoaderConfiguration(KwargsHandler):
    """Options of data loading: `Accelerator(dataloader_config=DataLoaderConfiguration(...))`.

    It is complete: what it leaves out has its default, and an argument of the Accelerator or an
    environment variable for one of its fields is refused beside it. A wrong type is a TypeError, a
    value out of range, or options that contradict each other, a ValueError.

    Args:
        split_batches: a loader's batch size is that of the whole world, and each rank gets an equal
            piece of a batch. Otherwise it is the batch size of each rank.
        dispatch_batches: one rank reads the loader, and sends every other rank its part. False:
            every rank reads its own part. None: True for iterable datasets alone.
        even_batches: an incomplete last global batch is filled from the first samples of the epoch,
            so that all ranks have as many batches of one size; metrics leave the filling out.
            Otherwise the last batch may be short, and ranks may differ by one batch.
        use_seedable_sampler: shuffling loaders draw their order as `SeedableRandomSampler` does.
            Otherwise the order is computed, which gives any position at once.
        data_seed: the seed of the order, 0 to 2**64 - 1, the same on all ranks; None: the run's.
        non_blocking: the host goes on while batches are copied to the device. Otherwise, it does so
            for pinned memory alone.
        use_stateful_dataloader: asks for `state_dict` and `load_state_dict`, which every prepared
            loader has, so that True and False are the same.
        presharded: iterable datasets yield each rank's own samples already. Otherwise all ranks are
            taken to see the same stream. A position then holds for the same number of ranks.
        uneven: what happens where the iterable streams of ranks end unevenly. "pad": a rank whose
            stream has ended is given rows that metrics leave out, until all have ended; "stop": all
            end with the first; "join": each ends by itself, for loops inside `join_uneven_inputs`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    presharded: bool = False
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        check_options(type(self).__name__, asdict(self))


def check_options(receiver: str, options: Mapping[str, Any]) -> None:
    """Raises `TypeError` or `ValueError`, in the name of `receiver`, for the first wrong option."""
    for name, value in options.items():
        _CHECKS.get(name, _check_flag)(f"{receiver}({name}={value!r})", value)
    if options.get("presharded") and options.get("dispatch_batches"):
        raise ValueError(
            f"{receiver}(presharded=True, dispatch_batches=True) contradicts itself: of streams that differ between the ranks, "
            f"only one would be read. Use dispatch_batches=False, or leave presharded out."
        )


def _check_flag(asked: str, value: object, or_none: bool = False) -> None:
    if not (isinstance(value, bool) or (or_none and value is None)):
        expected = "True, False, or None for the default" if or_none else "True or False"
        raise TypeError(f"{asked} is a {type(value).__name__}: expected {expected}.")


def _check_seed(asked: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{asked} is a {type(value).__name__}: expected a whole number, or None for the run's seed.")
    if not 0 <= value < SEEDS:
        raise ValueError(f"{asked} is out of range: expected 0 to 2**64 - 1, such as {value % SEEDS}.")


def _check_uneven(asked: str, value: object) -> None:
    if value not in get_args(Uneven):
        known = ", ".join(map(repr, get_args(Uneven)))
        raise ValueError(f"{asked} is no policy for uneven ends: expected one of {known}.")


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "dispatch_batches": partial(_check_flag, or_none=True),
    "data_seed": _check_seed,
    "uneven": _check_uneven,
}
