"""Processes that a script starts by torch.multiprocessing find each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from accelerate import Accelerator
from accelerate.utils import PrepareForLaunch, patch_environment
from accelerate.utils.other import get_free_port


def summed(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]))
    Path(folder, f"{accelerator.process_index}").write_text(f"{total.item()} {accelerator.state.fork_launched}")
    accelerator.end_training()


@pytest.mark.timeout(120)
def test_a_prepared_function_is_a_rank_of_the_processes_that_torch_starts(tmp_path: Path):
    variables = {
        "world_size": 2,
        "master_addr": "127.0.0.1",
        "master_port": get_free_port(),
        "nproc": 2,
        "node_rank": 0,
    }
    with patch_environment(**variables):
        prepared = PrepareForLaunch(summed, distributed_type="MULTI_CPU")
        multiprocessing.start_processes(prepared, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    assert [(tmp_path / name).read_text() for name in ("0", "1")] == ["3.0 True", "3.0 True"]
