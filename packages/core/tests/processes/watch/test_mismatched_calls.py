"""A rank that is in another call than the others: every rank ends by an error that names both, and none is aborted.

Real ranks and real ends. Most of the time they wait for each other, so the launches run side by side.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from side_by_side import side_by_side

from accel_core import Accelerator, InitProcessGroupKwargs, World
from accel_core.base.torch_versions import COLLECTIVES, all_gather_single
from accel_core.processes.process_groups import groups_beside
from accel_testing import RanksFailed, run_ranks
from accel_testing.ranks import RankReport

pytestmark = pytest.mark.timeout(300)  # the first test waits for the launches of all

Launches = dict[Hashable, Future[list[Any]]]


def small_message_of_torch(accelerator: Accelerator, folder: Path) -> None:
    """A library exchange on one rank, and four bytes of the same kind of collective on the other."""
    if accelerator.is_main_process:
        accelerator.reduce(torch.ones(1))  # here 0
    else:
        received = torch.zeros(2)
        all_gather_single(received, torch.ones(1))  # here 1


def save_alone(accelerator: Accelerator, folder: Path) -> None:
    if accelerator.is_main_process:
        accelerator.save_state(folder / "alone")  # here 0
    else:
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))  # here 1


def prepare_late(accelerator: Accelerator, folder: Path) -> None:
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))  # here 0
    else:
        accelerator.prepare(torch.nn.Linear(4, 1))  # here 1


def other_parameters(accelerator: Accelerator, folder: Path) -> None:
    width = 4 if accelerator.is_main_process else 5
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, width))
    accelerator.prepare(model)  # here 0, here 1


def reduce_in_a_backward(accelerator: Accelerator, folder: Path) -> None:
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    output = model(torch.ones(2, 4))
    if accelerator.is_main_process:
        output.register_hook(lambda gradient: accelerator.reduce(gradient))  # here 0
    accelerator.backward(output.sum())  # here 1


def uneven_forwards(accelerator: Accelerator, folder: Path) -> None:
    """A forward sends the running statistics of the first rank to all."""
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
    output = model(torch.ones(2, 4))
    if accelerator.is_main_process:
        output = model(torch.ones(2, 4))  # here 0
    accelerator.backward(output.sum())  # here 1


def one_more_iteration(accelerator: Accelerator, folder: Path) -> None:
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.is_main_process:
        accelerator.backward(model(torch.ones(2, 4)).sum())  # here 0
    else:
        accelerator.gather(torch.ones(1))  # here 1


WHERE: dict[Callable[[Accelerator, Path], None], list[str]] = {
    small_message_of_torch: ["in reduce('sum') for", f"in torch.distributed.{COLLECTIVES['all_gather_single']}() for"],
    save_alone: ["in save_state() for", "in torch.distributed.all_gather() for"],
    prepare_late: ["The ranks called different collectives", "rank 0: gather: ", "rank 1: prepare(): "],
    other_parameters: [
        "The ranks called prepare() with arguments that do not fit together",
        "rank 0: prepare(): 1.weight: float32[4, 2], 1.bias: float32[4]; 2 alike on all ranks",
        "rank 1: prepare(): 1.weight: float32[5, 2], 1.bias: float32[5]; 2 alike on all ranks",
        "Build the same model on every rank",
    ],
    reduce_in_a_backward: ["rank 0: in reduce('sum') inside of backward() for", "rank 1: in backward() for"],
    uneven_forwards: ["rank 1: in backward() for"],
    one_more_iteration: ["rank 0: in the forward of DistributedDataParallel for", "rank 1: in gather() for"],
}


def run(calls: Callable[[Accelerator, Path], None], folder: Path) -> None:
    calls(Accelerator(cpu=True), folder)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("elsewhere")
    return side_by_side({calls: partial(run_ranks, run, 2, calls, folder, timeout=60, grace=15.0) for calls in WHERE})


def reports_of(launch: Future[list[Any]]) -> list[RankReport]:
    with pytest.raises(RanksFailed) as caught:
        launch.result()
    return caught.value.reports


@pytest.mark.parametrize("calls", WHERE, ids=lambda calls: calls.__name__)
def test_all_ranks_end_and_every_ranks_call_and_line_is_named(
    launches: Launches, calls: Callable[[Accelerator, Path], None]
) -> None:
    reports = reports_of(launches[calls])
    everything = "".join(report.traceback + report.output for report in reports)
    for report in reports:
        assert "killed" not in report.state, str(report)
        assert report.exit_code == 1, str(report)
    for fact in WHERE[calls]:
        assert fact in everything, everything
    assert re.search(r"rank 0: .*# here 0", everything), everything
    assert re.search(r"rank 1: .*# (here 0, )?here 1", everything), everything


def own_groups() -> tuple[int, int, list[timedelta], int]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    default = dist.group.WORLD
    assert default is not None
    pair = World.current().subgroup([0, 1])
    before = len(groups_beside(default))
    for group in (None, pair):
        World.current().channel(group).arrive("here")
    groups = groups_beside(default)
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    accelerator.end_training()
    return before, len(groups), timeouts, len(groups_beside(default))


def test_messages_have_one_group_per_set_of_ranks_with_the_timeout_asked_for() -> None:
    wait = timedelta(seconds=77)
    assert run_ranks(own_groups, 2) == [(1, 1, [wait], 0)] * 2


def go_on() -> list[str]:
    """A script that catches the error of the Watch, and tries again."""
    accelerator = Accelerator(cpu=True)
    if not accelerator.is_main_process:
        with pytest.raises(RuntimeError):
            dist.barrier()
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            accelerator.gather(torch.ones(1))
        said.append(str(caught.value))
    return said


def test_script_that_goes_on_after_a_verdict_hears_it_once_and_ends_quietly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for first, second in run_ranks(go_on, 2):
        assert "do not come together" in first or "as an earlier error of this rank says" in first
        assert "as an earlier error of this rank says" in second
        assert "rank 0: " not in second
    output = capfd.readouterr().out
    assert output.count("do not come together") <= 1, "the rank whose first error was torch's own is told on its stderr"
    for noise in ("Exception ignored", "ends without the others", "Traceback"):
        assert noise not in output, output


def save_after_the_others_have_ended() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.save_state("never")
    accelerator.end_training()


def test_saving_on_the_main_process_alone_is_advised_as_such() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(save_after_the_others_have_ended, 2)
    said = caught.value.reports[0].traceback
    assert "rank 1: has ended its training, at " in said
    assert "save_state() is called by all ranks: take it out of a condition such as" in said


def loopback() -> set[str]:
    World.current(cpu=True)
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/net", name).read_text().splitlines()
        if port in row
    ]
    return {row[1].removesuffix(port) for row in rows if row[3] == "0A" and row[1].endswith(port)}


def test_store_of_a_run_on_one_machine_listens_at_the_loopback_alone() -> None:
    first, second = run_ranks(loopback, 2)
    assert first == second
    assert first in ({"0100007F"}, {"00000000000000000000000001000000"}), first


ABORTED = """
import os, torch
from accel_core import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.gather(torch.ones(1))
if accelerator.process_index == 1:
    os.abort()  # here
accelerator.gather(torch.ones(1))
"""


def test_rank_that_a_backend_aborts_shows_its_line_and_the_others_hear_where_to_look(tmp_path: Path) -> None:
    """The launch of a script: what shows the line is on where nobody has asked for it."""
    script = tmp_path / "aborted.py"
    script.write_text(ABORTED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = ranks[0].communicate(timeout=60)[1], ranks[1].communicate(timeout=60)[1]
    assert (ranks[0].returncode, ranks[1].returncode) == (1, -signal.SIGABRT)
    assert f'File "{script}", line 7 in <module>' in second
    assert re.search(r"rank 1: process \d+ on .* ended without a word: .* its output says where the rank", first), first
