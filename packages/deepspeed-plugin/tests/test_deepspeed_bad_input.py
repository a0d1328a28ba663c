"""What cannot work is said on every rank, also where one rank alone has found it, and nobody waits for ever."""

from __future__ import annotations

import errno
import re
from datetime import timedelta

import pytest
import torch
from torch import nn

from accel_core import Accelerator, InitProcessGroupKwargs
from accel_deepspeed import DeepSpeed
from accel_deepspeed.state_files import StateFiles
from accel_testing import RanksFailed, run_ranks

WORLD = 2


class Scaled(nn.Linear):
    """With a parameter without dims."""

    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def half_frozen():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))


def prepare(model=None, steps=1, **options):
    accelerator = Accelerator(strategy=DeepSpeed(**options), cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(4, 4) if model is None else model
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def on_a_folder(folder):
    rank = Accelerator(cpu=True).process_index
    prepare(zero_stage=3, offload_optimizer="nvme", offload_folder=folder / ("file" if rank else "") / "folder")


def full(files, numel, dtype):
    raise OSError(errno.ENOSPC, "No space left on device")


def without_room(folder):
    rank, zeros = Accelerator(cpu=True).process_index, StateFiles.zeros
    if rank:
        StateFiles.zeros = full
    try:
        prepare(zero_stage=3, offload_optimizer="nvme", offload_folder=folder)
    finally:
        StateFiles.zeros = zeros


def accumulate_otherwise(**keys):
    accelerator, model, _ = prepare(steps=2, config={"zero_optimization": {"stage": 2}, **keys})
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())


def said(folder):
    zero_3 = {"zero_optimization": {"stage": 3}}
    attempts = {
        "unknown key": lambda: prepare(config={"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1}}),
        "another stage": lambda: prepare(zero_stage=2, config=zero_3),
        "two norms": lambda: prepare(gradient_clipping=1.0, config={**zero_3, "gradient_clipping": 2.0}),
        "other windows": lambda: accumulate_otherwise(gradient_accumulation_steps=4),
        "other sizes": lambda: accumulate_otherwise(train_batch_size=16, train_micro_batch_size_per_gpu=2),
        "a number": lambda: prepare(Scaled(), zero_stage=3),
        "hierarchy": lambda: prepare(config={"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}),
        "folder": lambda: on_a_folder(folder),
        "no room": lambda: without_room(folder),
        "frozen in files": lambda: prepare(half_frozen(), zero_stage=3, offload_param="nvme", offload_folder=folder),
        "built in files": lambda: Accelerator(
            strategy=DeepSpeed(zero_stage=3, offload_param="nvme", offload_folder=folder), cpu=True
        ).build_model(lambda: nn.Linear(4, 4)),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file").touch()
    return run_ranks(said, WORLD, folder, timeout=110)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unknown key", "ValueError: .* has no key 'reduce_bucket_sise'. Did you mean 'reduce_bucket_size'"),
        ("another stage", "ValueError: zero_stage=2 was given, but .* 'zero_optimization.stage' with 3"),
        ("two norms", "ValueError: gradient_clipping=1.0 was given, but .* 'gradient_clipping' with 2.0"),
        ("other windows", "ValueError: .* accumulates over 4 steps, by .* sizes, but .*gradient_accumulation_steps=2"),
        ("other sizes", "ValueError: .* accumulates over 4 steps, by .* sizes, but .*gradient_accumulation_steps=2"),
        ("a number", "ValueError: Scaled .* cannot send parameters without dims: scale"),
        (
            "hierarchy",
            "ValueError: .* 'zero_optimization.zero_hpz_partition_size' with 3, which does not divide 2 processes",
        ),
        (
            "folder",
            r"ValueError: 'offload_optimizer' is to be kept in .* is not a folder on this machine.*\(on rank 1\)",
        ),
        ("no room", r"OSError: .*No space left on device.*\(on rank 1\)"),
        ("frozen in files", r"ValueError: offload_param to 'nvme' was asked for with frozen parameters"),
        ("built in files", r"ValueError: offload_param to 'nvme' was asked for with a model that is built in parts"),
    ],
)
def test_every_rank_says_what_is_wrong(ranks, what, message):
    for rank in ranks:
        assert re.match(message, rank[what], re.DOTALL), rank[what]


def on_one_rank(stage):
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=8))
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True, kwargs_handlers=[patience])
    model = nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.is_main_process:
        accelerator.backward(model(torch.ones(1, 4)).sum())
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(("stage", "call"), [(2, r"backward\(\)"), (3, r"torch\.distributed\.\w+\(\)")])
def test_a_model_that_one_rank_calls_alone_ends_the_run_and_it_is_said_who_waits(stage, call):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(on_one_rank, WORLD, stage, timeout=60)
    text = str(failed.value)
    assert re.search(r"The ranks do not come together: rank \d waits in .* in vain", text), text
    assert re.search(rf"rank 0: in {call} for \d+ s", text), text
    assert "rank 1: in wait_for_everyone()" in text
