"""A rank that is in another call than the others under FSDP: every rank ends, and the error names the lines of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core import Accelerator, broadcast_object_list
from accel_testing import RanksFailed, run_ranks
from accel_testing.ranks import RankReport

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


def clip_beside_a_reduction_of_the_users() -> None:
    accelerator, model = prepared()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    if accelerator.is_main_process:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)  # here 0
    else:
        dist.all_reduce(torch.ones(5))  # here 1


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


CASES = [
    gather_beside_a_forward,
    clip_beside_a_forward,
    clip_beside_a_reduction_of_the_users,
    reduce_in_a_backward,
    other_parameters,
    uneven_forwards,
]


@pytest.fixture(scope="module")
def launches() -> Launches:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return {calls: pool.submit(run_ranks, calls, 2, timeout=60, grace=15.0) for calls in CASES}


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


Calls = dict[str, Callable[[Accelerator, torch.nn.Module, Path], object]]

LIBRARY: Calls = {
    "gather": lambda accelerator, model, folder: accelerator.gather(torch.ones(3)),
    "reduce": lambda accelerator, model, folder: accelerator.reduce(torch.ones(700_000)),
    "objects": lambda accelerator, model, folder: broadcast_object_list([accelerator.process_index]),
    "wait": lambda accelerator, model, folder: accelerator.wait_for_everyone(),
    "save": lambda accelerator, model, folder: accelerator.save_state(folder / "saved"),
    "prepare": lambda accelerator, model, folder: accelerator.prepare(torch.nn.Linear(5, 3)),
    "clip": lambda accelerator, model, folder: accelerator.clip_grad_norm_(model.parameters(), 1.0),
}
OF_TORCH: Calls = {
    "forward": lambda accelerator, model, folder: model(torch.ones(2, 4)),
    "backward": lambda accelerator, model, folder: accelerator.backward(model(torch.ones(2, 4)).sum()),
    "all_reduce": lambda accelerator, model, folder: dist.all_reduce(torch.ones(5)),
    "all_gather": lambda accelerator, model, folder: dist.all_gather([torch.zeros(5), torch.zeros(5)], torch.ones(5)),
    "barrier": lambda accelerator, model, folder: dist.barrier(),
}
CALLS = {**LIBRARY, **OF_TORCH}
PAIRS = [pair for pair in permutations(CALLS, 2) if set(pair) & set(LIBRARY)]
"""A call of the library against every other. (gloo aborts a rank for two of torch's own that differ in their size alone.)"""


def each_in_its_call(strategy: str, pair: tuple[str, str], folder: Path) -> None:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    layers = [torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)]
    model = accelerator.prepare(torch.nn.Sequential(*layers))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    CALLS[pair[accelerator.process_index]](accelerator, model, folder)
    accelerator.end_training()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_any_call_of_the_library_against_any_other_ends_all_ranks(strategy: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        launches = {
            pair: pool.submit(
                run_ranks,
                partial(each_in_its_call, strategy, pair, tmp_path / "-".join(pair)),
                2,
                timeout=90,
                grace=15.0,
            )
            for pair in PAIRS
        }
    wrong = {}
    for pair, launch in launches.items():
        try:
            launch.result()
            wrong[pair] = "nobody has raised"
        except RanksFailed as failed:
            reports = failed.reports
            said = "".join(report.traceback + report.output for report in reports)
            bad = [str(report) for report in reports if "killed" in report.state or report.exit_code not in (0, 1)]
            if bad or not re.search("rank [01]: ", said):
                wrong[pair] = "\n".join(bad or map(str, reports))
    # Under DDP clipping is local, and the run ends with it.
    together = {pair for pair in PAIRS if strategy == "ddp" and set(pair) == {"clip", "forward"}}
    assert set(wrong) <= together, "\n\n".join(f"{pair}: {text}" for pair, text in wrong.items())
