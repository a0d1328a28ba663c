"""A world is what the launcher started, or the group that runs already; it makes groups as asked for and ends its own."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accel_core.base.errors import WorldError
from accel_core.processes import process_groups
from accel_core.processes import world as world_module
from accel_core.processes.world import World
from accel_testing import RanksFailed, run_ranks

SECONDS = timedelta(seconds=77)


@pytest.fixture(autouse=True)
def nobody_launched_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def running_group() -> Iterator[None]:
    """torch's default group, with one rank, started by somebody else."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=SECONDS)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_timeouts(group: dist.ProcessGroup) -> list[timedelta]:
    return [group._get_backend(device).options._timeout for device in group._device_types]


def test_process_alone_is_a_world_of_one_without_a_group() -> None:
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.source) == (0, 1, 0, 1, "alone")
    assert (world.is_main, world.is_local_main, world.is_last) == (True, True, True)
    assert world.group is None
    assert world.timeout == dist.default_pg_timeout
    assert not dist.is_initialized()


def test_world_of_one_needs_no_group_for_anything() -> None:
    world = World.current(timeout=SECONDS)
    world.barrier()
    channel = world.channel()
    assert (channel.group, channel.rank, channel.size) == (None, 0, 1)
    assert world.channel() is channel
    assert world.timeout == SECONDS
    world.end()
    world.end()


def group_of_one() -> tuple[int, object, bool, bool, bool, bool]:
    first = World.current()
    group = first.subgroup([0])
    dist.all_reduce(torch.ones(1), group=group)
    kept = first.subgroup([0]) is group, World.current() is first
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    del group
    first.end()
    return first.size, timeout, *kept, dist.is_initialized(), World.current() is first


def test_a_world_of_one_starts_a_group_when_it_is_asked_for_one() -> None:
    assert run_ranks(group_of_one, 1) == [(1, World.current().timeout, True, True, False, False)]


def launched_alone() -> tuple[str, int, bool]:
    world = World.current()
    world.barrier()
    return world.source, world.size, dist.is_initialized()


def test_torchrun_with_one_process_starts_no_group() -> None:
    assert run_ranks(launched_alone, 1) == [("torchrun", 1, False)]


def describe(cpu: bool) -> tuple[object, ...]:
    before = dict(os.environ)
    world = World.current(cpu=cpu)
    summed = torch.ones(1)
    dist.all_reduce(summed, group=world.group)
    world.barrier()
    place = (world.source, world.rank, world.size, world.local_rank, world.local_size)
    return place, (world.is_main, world.is_last), summed.item(), dict(os.environ) == before


@pytest.mark.parametrize("cpu", [False, True])
def test_world_size_is_what_the_launcher_started(cpu: bool) -> None:
    """On any device, `cpu=True` included; semantics 6. The environment is read and never written."""
    first, second = run_ranks(describe, 2, cpu)
    assert first == (("torchrun", 0, 2, 0, 2), (True, False), 2.0, True)
    assert second == (("torchrun", 1, 2, 1, 2), (False, True), 2.0, True)


def launch_as(launcher: str) -> tuple[str, int, int, float]:
    rank = os.environ.pop("RANK")
    names = {"slurm": ("PROCID", "LOCALID"), "mpi": ("RANK", "LOCAL_RANK")}[launcher]
    prefix = {"slurm": "SLURM_", "mpi": "OMPI_COMM_WORLD_"}[launcher]
    for name in names:
        os.environ[prefix + name] = rank
    world = World.current(cpu=True)
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return world.source, world.rank, world.size, summed.item()


SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
NO_TORCHRUN = {"WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "MASTER_ADDR": None}


@pytest.mark.parametrize(("launcher", "env"), [("slurm", SLURM), ("mpi", OPEN_MPI)])
def test_ranks_of_other_launchers_meet_too(launcher: str, env: dict[str, str]) -> None:
    """Ranks started by srun or mpirun are one world, and not many worlds of one."""
    results = run_ranks(launch_as, 2, launcher, env={**NO_TORCHRUN, **env})
    assert results == [(launcher, 0, 2, 2.0), (launcher, 1, 2, 2.0)]


def meet_in_a_file(path: str) -> int:
    return World.current(init_method=f"file://{path}").size


def test_init_method_says_where_the_ranks_meet(tmp_path: object) -> None:
    assert run_ranks(meet_in_a_file, 2, f"{tmp_path}/store", env={"MASTER_ADDR": None, "MASTER_PORT": None}) == [2, 2]


def same_world_twice() -> tuple[bool, bool]:
    first, second = World.current(), World.current()
    return first is second, first.channel() is second.channel(first.group)


def test_all_callers_of_a_process_share_the_world() -> None:
    assert run_ranks(same_world_twice, 2) == [(True, True)] * 2


def claim_rank_one() -> None:
    os.environ["RANK"] = str(min(1, int(os.environ["RANK"])))
    World.current(timeout=timedelta(seconds=60))
    ((store, _),) = world_module._met.values()
    while store.add("accel/rank/1", 0) < 2:  # stay until the third process has come
        time.sleep(0.01)


def test_rank_that_is_claimed_twice_is_an_error_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(claim_rank_one, 3, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert "Rank 1 of 2 was asked for (torchrun), but another process has claimed rank 1 at tcp://" in str(caught.value)
    assert time.monotonic() - started < 30


def claim_rank_zero() -> None:
    os.environ["RANK"] = "0"
    World.current(timeout=timedelta(seconds=3))


def test_host_of_the_store_that_is_claimed_twice_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="rank 0 did not meet the others at tcp://.*each with a rank of its own"):
        run_ranks(claim_rank_zero, 2)


def meet_at_the_agent() -> float:
    World.current(timeout=timedelta(seconds=20))
    summed = torch.ones(1)
    dist.all_reduce(summed)
    return summed.item()


def test_ranks_that_torchrun_restarts_meet_again_at_the_store_of_its_agent() -> None:
    """The agent hosts one store for all attempts: what an earlier attempt has left there must mislead nobody."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in ("0", "1"):
        assert run_ranks(meet_at_the_agent, 2, env={**env, "TORCHELASTIC_RESTART_COUNT": attempt}) == [2.0, 2.0]


def wait_for_nobody() -> None:
    os.environ["WORLD_SIZE"] = "2"
    World.current(timeout=timedelta(seconds=1))


def test_ranks_that_do_not_meet_say_where_they_waited() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 did not meet the others at tcp://.*: .*Check that 2 processes run"):
        run_ranks(wait_for_nobody, 1)


def read_timeouts_back() -> None:
    world = World.current(timeout=SECONDS)
    assert world.group is not None
    assert world.timeout == SECONDS
    assert set(backend_timeouts(world.group)) == {SECONDS}
    for ranks in ([0, 2], [1], [0, 1]):
        group = world.subgroup(ranks)
        if world.rank in ranks:
            assert set(backend_timeouts(group)) == {SECONDS}
            assert dist.get_process_group_ranks(group) == ranks
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER


def test_every_group_has_the_timeout_asked_for() -> None:
    """Read back from the default group and from each subgroup, from all their backends."""
    run_ranks(read_timeouts_back, 3)


def ask_again() -> None:
    world = World.current(timeout=SECONDS)
    assert World.current() is World.current(timeout=SECONDS, backend="gloo", cpu=True) is world
    with pytest.raises(WorldError, match=r"runs already \(torchrun\).*timeout=0:00:05 was asked for, it has 0:01:17"):
        World.current(timeout=timedelta(seconds=5))
    with pytest.raises(
        WorldError, match=r"backend=cpu:fake was asked for, it has cpu:gloo.*leave the argument out here"
    ):
        World.current(backend="cpu:fake")


def test_asking_a_running_world_for_something_else_is_an_error() -> None:
    """A timeout that can no longer be had is refused, not dropped."""
    run_ranks(ask_again, 2)


def test_timeout_that_the_backend_ignores_is_an_error(monkeypatch: pytest.MonkeyPatch, running_group: None) -> None:
    """What was asked for is compared with what the backend has."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(WorldError, match=r"timeout=0:00:05 was asked for, but torch made a process group with 0:01:17"):
        process_groups.check_timeouts(group, timedelta(seconds=5))


def groups_are_cached() -> None:
    world = World.current()
    pair = world.subgroup([2, 0])
    assert world.subgroup((0, 2)) is pair
    assert world.subgroup([0, 1, 2]) is world.group
    if world.rank != 1:
        channel = world.channel(pair)
        assert (channel.rank, channel.size) == (world.rank // 2, 2)
        assert world.channel(pair) is channel
    for ranks in ([0, 0], [0, 0, 1], [0, 3], [-1]):
        with pytest.raises(ValueError, match="duplicate|out of range"):
            world.subgroup(ranks)


def test_groups_are_made_once_for_the_same_ranks() -> None:
    run_ranks(groups_are_cached, 3)


def test_running_group_is_adopted_with_its_own_timeout_and_never_ended(running_group: None) -> None:
    """The timeout of a group that somebody else made is read back from it."""
    world = World.current()
    assert (world.source, world.rank, world.size, world.timeout) == ("running group", 0, 1, SECONDS)
    assert world.group is dist.group.WORLD
    assert World.current() is world
    world.barrier()
    world.end()
    assert dist.is_initialized()


def test_world_dies_with_its_group(running_group: None) -> None:
    world = World.current()
    world.channel()
    world.subgroup([0])
    group, reference = weakref.ref(world.group), weakref.ref(world)
    del world
    gc.collect()
    assert reference() is World.current()
    dist.destroy_process_group()
    gc.collect()
    assert reference() is None
    assert group() is None


def test_world_whose_group_has_ended_says_so(running_group: None) -> None:
    world = World.current()
    dist.destroy_process_group()
    with pytest.raises(
        WorldError, match=r"group of this world \(1 ranks, running group\) was asked for, but it has ended"
    ):
        _ = world.group
    assert World.current().source == "alone"


def test_running_group_that_contradicts_the_launcher_is_an_error(
    running_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=r"rank 0 of 1, but the environment says rank 1 of 2 \(torchrun\)"):
        World.current()


def adopt() -> tuple[int, int, int, bool]:
    dist.init_process_group("gloo")
    world = World.current(cpu=True)
    dist.barrier()  # rank 0 hosts the store, and leaves with it
    world.end()
    still = dist.is_initialized()
    dist.destroy_process_group()
    return world.rank, world.local_rank, world.local_size, still


def test_adopted_group_keeps_the_places_that_the_launcher_gave() -> None:
    assert run_ranks(adopt, 2) == [(0, 0, 2, True), (1, 1, 2, True)]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two accelerators. Gives the indices that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    return chosen


def test_gloo_stands_beside_the_backend_of_the_device() -> None:
    assert process_groups.default_backend(torch.device("cpu")) == "gloo"
    assert process_groups.default_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_cpu_in_a_world_on_an_accelerator_is_an_error(running_group: None, two_devices: list[int]) -> None:
    world = World.current()
    assert world.device == torch.device("cuda", 0)
    with pytest.raises(WorldError, match="cpu=True was asked for, it has device cuda:0"):
        World.current(cpu=True)


class Lodger:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def close(self) -> None:
        self.log.append(self.name)


def test_what_is_to_be_closed_is_so_once_the_last_one_first_and_held_weakly() -> None:
    log: list[str] = []
    world = World.current()
    first, second, third = (Lodger(log, name) for name in ("first", "second", "third"))
    for lodger in (first, second, third):
        world.close_before_end(lodger)
    del second, lodger
    world.end()
    world.end()
    assert log == ["third", "first"]


def last_user_ends_it() -> None:
    world = World.current()
    first, second = Lodger([], "first"), Lodger([], "second")
    world.enter(first)
    world.enter(second)
    world.leave(first)
    assert dist.is_initialized()
    world.leave(second)
    assert not dist.is_initialized()


def test_world_ends_with_its_last_user() -> None:
    run_ranks(last_user_ends_it, 2)


class Troublemaker:
    def close(self) -> None:
        raise RuntimeError("my wrapper is stuck")


def test_one_that_fails_to_close_is_heard_and_stops_nobody() -> None:
    log: list[str] = []
    world = World.current()
    first, second = Lodger(log, "first"), Troublemaker()
    world.close_before_end(first)
    world.close_before_end(second)
    with pytest.raises(RuntimeError, match="my wrapper is stuck"):
        world.end()
    assert log == ["first"]


def one_world_after_another() -> tuple[float, float]:
    seen = []
    for _ in range(3):
        world = World.current(timeout=SECONDS)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        seen.append(tensor.item())
        started = time.monotonic()
        world.end()
        assert not dist.is_initialized()
        if world.rank == 0:
            time.sleep(0.1)  # the other rank is ahead of us in starting the next world
    return sum(seen), time.monotonic() - started


def test_worlds_can_follow_each_other_in_one_process() -> None:
    for total, seconds in run_ranks(one_world_after_another, 2):
        assert total == 6.0
        assert seconds < 4  # nobody has waited in vain


def end_while_rank_one_works() -> float:
    world = World.current()
    if world.rank == 1:
        time.sleep(1.5)
    started = time.monotonic()
    world.end()
    return time.monotonic() - started


def test_rank_that_ends_first_waits_for_the_others() -> None:
    first, second = run_ranks(end_while_rank_one_works, 2)
    assert first > 1
    assert second < 1


def rank_one_never_ends(ended: Path) -> float:
    world = World.current()
    if world.rank == 1:
        while not ended.exists():  # rank 0 has waited in vain
            time.sleep(0.1)
        dist.destroy_process_group()
        return 0.0
    started = time.monotonic()
    world.end()
    ended.touch()
    return time.monotonic() - started


def test_rank_that_waits_in_vain_says_so_and_ends(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, _ = run_ranks(rank_one_never_ends, 2, tmp_path / "ended")
    assert first > 4
    assert "Rank 0 of 2 ends without the others, which were not all ready within 5 s" in capfd.readouterr().out


def asks_for_no_timeout() -> timedelta:
    own = {"gloo": timedelta(minutes=7)}  # as the one of NCCL is another than that of everything else
    dist.distributed_c10d._get_default_timeout = lambda backend: own.get(str(backend), dist.default_pg_timeout)
    return World.current(cpu=True, backend="cpu:gloo").timeout


def test_timeout_is_that_of_the_backend_that_serves_the_device() -> None:
    assert run_ranks(asks_for_no_timeout, 2) == [timedelta(minutes=7)] * 2
