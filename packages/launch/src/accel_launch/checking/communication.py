"""Whether the ranks are where they should be, and whether what they send arrives."""

from __future__ import annotations

import socket
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_core import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce
from accel_launch.checking.steps import CheckError, Passed

if TYPE_CHECKING:
    from accel_core import World


class _Card(NamedTuple):
    """The identity of a rank: its number, host and device, and the versions that it runs."""

    rank: int
    host: str
    device: str
    torch: str
    core: str


def check_processes(world: World) -> Passed:
    """Checks that all ranks came once, with devices of their own and equal versions. Collective."""
    own = _Card(world.rank, socket.gethostname(), str(world.device), torch.__version__, metadata.version("accel-core"))
    cards: list[_Card] = gather_object([own])
    if [card.rank for card in cards] != list(range(world.size)):
        raise CheckError(f"Ranks 0 to {world.size - 1} were expected, and {[card.rank for card in cards]} came.")
    shared = [place for place, count in Counter((card.host, card.device) for card in cards).items() if count > 1]
    if shared and world.device.type != "cpu":
        raise CheckError(
            f"Each rank should have a device of its own, and several have {shared[0][1]} on {shared[0][0]}. Start fewer "
            "processes there, or make more devices visible."
        )
    for what in ("torch", "core"):
        versions = {getattr(card, what): card.host for card in cards}
        if len(versions) > 1:
            told = ", ".join(f"{version} on {host}" for version, host in versions.items())
            raise CheckError(
                f"All ranks should have one version of {what}, and found was {told}. Install the same everywhere."
            )
    hosts = len({card.host for card in cards})
    where = f"{hosts} machines" if hosts > 1 else "1 machine"
    return Passed(f"{world.size} {'process' if world.size == 1 else 'processes'} on {where}, {world.device.type}")


def check_collectives(world: World) -> Passed:
    """That collectives bring the values that they should, of nested structures. Collective."""
    found, expected = _found(world), _expected(world)
    # All have run before anything is raised: the ranks stay in step.
    if wrong := [name for name in expected if _plain(found[name]) != _plain(expected[name])]:
        raise CheckError(
            f"{', '.join(wrong)} gave other values than the ranks sent. Of {wrong[0]}, expected was "
            f"{expected[wrong[0]]}, and found {found[wrong[0]]}. `accel doctor` says which pair of ranks cannot talk."
        )
    return Passed(f"{len(expected)} kinds, of nested structures, with the values checked")


def _found(world: World) -> dict[str, Any]:
    """Runs each collective, and returns its result on this rank by name. Collective."""
    rank, device = world.rank, world.device
    last, ones = world.size - 1, torch.ones(2, 3, device=device)
    return {
        "broadcast": broadcast(_nested(rank, device), last),
        "gather": gather({"row": ones[:1] * rank}),
        "gather of unequal sizes": gather([torch.full((rank + 1,), rank, device=device)]),
        "sum": reduce((ones * (rank + 1),), "sum"),
        "mean": reduce((ones * (rank + 1),), "mean"),
        "maximum": reduce((ones * rank,), "max"),
        "padding": pad_across_processes([torch.ones(rank + 1, device=device)], pad_index=7),
        "gather_object": gather_object([rank, {"text": "é" * rank}]),
        "broadcast_object_list": broadcast_object_list([f"from rank {rank}", {"rank": rank}], last),
    }


def _expected(world: World) -> dict[str, Any]:
    """The expected result of each collective on this rank, by name."""
    rank, size, device = world.rank, world.size, world.device
    last, ones = size - 1, torch.ones(2, 3, device=device)
    sizes = torch.tensor([of for of in range(size) for _ in range(of + 1)], device=device)
    return {
        "broadcast": _nested(last, device),
        "gather": {"row": torch.arange(size, device=device)[:, None] * ones[:1]},
        "gather of unequal sizes": [sizes],
        "sum": (ones * size * (size + 1) / 2,),
        "mean": (ones * (size + 1) / 2,),
        "maximum": (ones * last,),
        "padding": [torch.tensor([1.0] * (rank + 1) + [7.0] * (last - rank), device=device)],
        "gather_object": [item for of in range(size) for item in (of, {"text": "é" * of})],
        "broadcast_object_list": [f"from rank {last}", {"rank": last}],
    }


def _nested(rank: int, device: torch.device) -> dict[str, Any]:
    """The nested structure of tensors that a rank broadcasts."""
    numbers = [torch.full((2, 3), float(rank), device=device), (torch.arange(4, device=device) + rank,)]
    return {"numbers": numbers, "flag": torch.tensor([rank % 2 == 0], device=device)}


def _plain(tree: Any) -> Any:
    """A nested structure that can be compared, with the dtype and the values of each tensor."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return type(tree)(map(_plain, tree)) if isinstance(tree, (list, tuple)) else tree
