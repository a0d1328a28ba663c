"""H1: what a run of 1024 ranks costs the host of one of them, on torch's backend that talks to nobody. Run by `run.py`.

Every collective returns at once, as if all ranks had sent what this one sends. So what is measured is this process alone: its
loops over ranks, the groups it makes, the messages it packs and reads. Networks and the waits for others are left out.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from sharding import Blocks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")
from worker import Round, arguments, finish

from accel_core import Accelerator, World
from accel_fsdp import FSDP

RANKS, MACHINE = 1024, 8
CALLS = 20
WORLDS = {"accel": RANKS, "eight": 8}


def timed(function: Callable[[], object], calls: int = 1) -> float:
    """CPU seconds of the main thread for a call; the mean of several."""
    began = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - began) / calls


def groups() -> int:
    """How many process groups this rank is a member of."""
    return len(distributed_c10d._world.pg_map)


def store_with_others(count: int) -> dist.Store:
    """The store at which this rank, 0 of so many, meets the others: all of them have come already, each with a device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": MACHINE}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, count, True, limit, wait_for_workers=False, multi_tenant=True)
    for rank in range(1, count):
        store.set(f"accel/0/0/card/{rank}", f"cuda uuid={rank:036d} on host-{rank // MACHINE}")
    store.add("accel/0/0/cards", count - 1)
    return store


def plain(count: int) -> dict[str, float]:
    """torch's own DDP, and `fully_shard` of each block, as its tutorial does it; hybrid: sharded over a machine."""

    def ddp() -> nn.Module:
        return DistributedDataParallel(Blocks())

    def shard(shape: tuple[int, ...]) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = Blocks()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    shapes = {"fsdp": (count,), "hybrid": (count // MACHINE, MACHINE)}
    dist.init_process_group("fake", rank=0, world_size=count, store=dist.HashStore())
    ddp()  # the first imports the compiler
    found = {"ddp": timed(ddp)}
    for name, shape in shapes.items():
        before = groups()
        found[name] = timed(lambda shape=shape: shard(shape))
        found[f"{name}_groups"] = groups() - before
    dist.destroy_process_group()
    return found


def ours(count: int) -> dict[str, float]:
    """The same by an Accelerator, its world, and the messages that scripts send in a step."""
    store = store_with_others(count)
    found = {"world": timed(lambda: World.current(cpu=True, backend="fake"))}
    found["world_groups"] = groups()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Blocks())
    found["ddp"] = timed(lambda: accelerator.prepare(Blocks()))
    loss = torch.ones(())
    for name, call in (
        ("trigger", accelerator.check_trigger),
        ("gather", lambda: accelerator.gather(loss)),
        ("reduce", lambda: accelerator.reduce(loss, "mean")),
    ):
        call()
        found[name] = timed(call, CALLS)
    for name, options in (("fsdp", {}), ("hybrid", {"replicate": count // MACHINE})):
        before = groups()

        def prepare(options: dict[str, int] = options) -> None:
            Accelerator(cpu=True, strategy=FSDP(**options)).prepare(Blocks())

        found[name] = timed(prepare)
        found[f"{name}_groups"] = groups() - before
    dist.destroy_process_group()
    del store
    return found


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    rounds: list[Round] = []
    for number in range(options.rounds + 1):
        measured = {name: ours(count) for name, count in WORLDS.items()} | {"plain": plain(RANKS)}
        if number:
            rounds.append(measured)
    finish(options.out, 0, 1, rounds)


if __name__ == "__main__":
    main()
