"""A rank that is in another call than the others under FSDP: every rank ends, and the error names the lines of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from accel_core import Accelerator
from accel_core.testing import RanksFailed, run_ranks
from accel_core.testing.ranks import RankReport

pytestmark = pytest.mark.timeout(300)  # the first test waits for the launches of all

Launches = dict[Hashable, Future[list[Any]]]


def prepared() -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    layers = [torch.nn.Linear(4, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)]
    return accelerator, accelerator.prepare(torch.nn.Sequential(*layers))


def gather_beside_a_forward() -> None:
    accelerator, model = prepared()
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))  # here 0
    else:
        model(torch.ones(2, 4))  # here 1


def clip_beside_a_forward() -> None:
    accelerator, model = prepared()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.is_main_process:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # here 0
    else:
        model(torch.ones(2, 4))  # here 1


def reduce_in_a_backward() -> None:
    accelerator, model = prepared()
    output = model(torch.ones(2, 4))
    if accelerator.is_main_process:
        output.register_hook(lambda gradient: accelerator.reduce(gradient))  # here 0
    accelerator.backward(output.sum())  # here 1


def other_parameters() -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(torch.nn.Linear(4, 1 + accelerator.process_index))  # here 0, here 1


def uneven_forwards() -> None:
    accelerator, model = prepared()
    output = model(torch.ones(2, 4))
    if accelerator.is_main_process:
        output = model(torch.ones(2, 4))  # here 0
    accelerator.backward(output.sum())  # here 1


CASES = [gather_beside_a_forward, clip_beside_a_forward, reduce_in_a_backward, other_parameters, uneven_forwards]


@pytest.fixture(scope="module")
def launches() -> Launches:
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(CASES)) as pool:
        patch.setattr("accel_core.testing.ranks.GRACE", 15.0)
        return {calls: pool.submit(run_ranks, calls, 2, timeout=60) for calls in CASES}


def reports_of(launch: Future[list[Any]]) -> list[RankReport]:
    with pytest.raises(RanksFailed) as caught:
        launch.result()
    return caught.value.reports


@pytest.mark.parametrize("calls", CASES, ids=lambda calls: calls.__name__)
def test_all_ranks_end_and_every_rank_is_named_with_its_line(launches: Launches, calls: Callable[[], None]) -> None:
    reports = reports_of(launches[calls])
    everything = "".join(report.traceback + report.output for report in reports)
    for report in reports:
        assert "killed" not in report.state, str(report)
        assert report.exit_code == 1, str(report)
    assert re.search(r"rank 0: .*# here 0", everything), everything
    assert re.search(r"rank 1: .*# (here 0, )?here 1", everything), everything
