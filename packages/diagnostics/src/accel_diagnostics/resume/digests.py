"""The state of a run on one rank, as short texts by name: equal texts mean equal bits."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accel_core.api.checkpoint import has_state, memory_of
from accel_core.api.component import capture_random_state, children_of
from accel_core.api.layouts import Alias, Entry, Opaque

if TYPE_CHECKING:
    from accel_core.api.checkpoint import PreparedModel, Run

UNPREPARED = {"scheduler": "unprepared scheduler", "optimizer": "unprepared optimizer"}
_LONGEST = 40  # characters of a value that is shown as it is
_PLAIN = (str, int, float, bool, type(None))


def hashed(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor of any dtype and strides, on any device but meta."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_state(run: Run, unprepared: Unprepared) -> dict[str, str]:
    """All that the next step depends on, but the loaders."""
    found = dict(_leaves("random", capture_random_state(run.world.device)))
    for number, record in enumerate(run.models()):
        replaced = _replaced_buffers(run, record)
        for name, entry in run.model_state(number).items():
            if name not in replaced:
                found.update(_entry(f"model.{number}/{name}", entry))
    for number, state in enumerate(run.optimizer_states()):
        unit = f"optimizer.{number}"
        for name, entry in state.entries.items():
            found.update(_entry(f"{unit}/{name}", entry))
        groups = [{key: each[key] for key in each if key != "names"} for each in state.groups]
        found.update(_leaves(unit, {"groups": groups, "values": state.values, "whole": state.whole}))
    kinds: list[tuple[str, list[Any]]] = [
        ("scheduler", run.prepared.schedulers),
        ("object", run.registered),
        (UNPREPARED["optimizer"], unprepared.optimizers),
        (UNPREPARED["scheduler"], unprepared.schedulers),
    ]
    units = {f"{kind}.{number}": each for kind, several in kinds for number, each in enumerate(several)}
    for name, each in {**units, **run.components}.items():
        if has_state(each):
            found.update(_leaves(name, each.state_dict()))
    return found


class Unprepared(NamedTuple):
    """Optimizers of prepared models, and schedulers of any, that the script keeps to itself."""

    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]


def find_unprepared(run: Run) -> Unprepared:
    """What the script did not prepare, in no certain order."""
    gc.collect()  # one that a circle of references still holds is there in some runs only
    known = {id(each) for each in (*run.prepared.optimizers, *run.prepared.schedulers)}
    trained = run.names()
    made = [each for each in gc.get_objects() if issubclass(type(each), (Optimizer, LRScheduler))]
    optimizers = [
        each
        for each in made
        if isinstance(each, Optimizer)
        and id(each) not in known
        and any(
            id(parameter) in trained for group in getattr(each, "param_groups", ()) for parameter in group["params"]
        )
    ]
    all_optimizers = set(map(id, (*run.prepared.optimizers, *optimizers)))
    schedulers = [
        each
        for each in made
        if isinstance(each, LRScheduler)
        and id(each) not in known
        and id(getattr(each, "optimizer", None)) in all_optimizers
    ]
    return Unprepared(optimizers, schedulers)


def _replaced_buffers(run: Run, record: PreparedModel) -> set[str]:
    """The names of buffers that DDP replaces by those of rank 0 in the next forward that synchronises."""
    if run.world.rank == 0 or not getattr(record.prepared, "broadcast_buffers", False):
        return set()
    return {name for name, _ in record.original.named_buffers(remove_duplicate=False)}


def _entry(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    if isinstance(entry, Alias):
        return
    if isinstance(entry, Opaque):
        yield from _leaves(name, entry.value)
        return
    yield name, hashed(b"|".join(map(bits, memory_of(entry))))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """A text for each leaf of a nested value. A list of plain values is one leaf."""
    children = children_of(value)
    if children is None or (not isinstance(value, Mapping) and all(isinstance(each, _PLAIN) for each in children)):
        yield name, _text(value)
        return
    keys = list(value) if isinstance(value, Mapping) else list(range(len(children)))
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(f"{name}[{key!r}]", child)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return hashed(bits(value))
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return hashed(value.tobytes())
    text = repr(value)
    return text if len(text) <= _LONGEST else hashed(text.encode())
