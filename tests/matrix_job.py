"""Trains with whatever is installed and compares the weights with plain torch in one process.

`nox -s matrix` runs it from wheels in worlds of one and two: with the default strategy and with every other one that is
installed, but for two which need what is not here (it says so), in full precision and in every precision for which autocast alone is needed. Without a loader plugin a larger world
must refuse to prepare a loader, and trains with a sampler of its own. Where the tracker of plain files is installed, each run is
recorded; where accel-checkpoint is, it is saved and loaded, and elsewhere it must say what to install, as it must for a prepared
loader of torch, whose position nobody knows.
"""

from __future__ import annotations

import os
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accel_core
from accel_core import Accelerator, CheckpointError, NotInstalledError
from accel_core.api.component import how_to_install

BATCH, SAMPLES = 4, 32
TOLERANCES = {"no": 1e-6, "bf16": 2e-2}  # the largest difference of a weight
DEFAULTS = ("single", "ddp")
ALONE = ("dispatch",)  # of one process
ELSEWHERE = {"megatron": "tests (it asks for CUDA)", "xla": "xla (it asks for torch_xla)"}
"""Strategies that cannot run here, with the session that has them."""


def dataset():
    inputs = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    return TensorDataset(inputs, 3 * inputs - 1)


def model_and_optimizer():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, loader, backward, device):
    for inputs, targets in loader:
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)))
        optimizer.step()


def prepared_loader(accelerator, loader_plugins):
    """What each rank reads: its part of batches of BATCH times the world."""
    loader = DataLoader(dataset(), batch_size=BATCH)
    if loader_plugins or accelerator.num_processes == 1:
        return accelerator.prepare(loader)
    try:
        accelerator.prepare(loader)
    except NotInstalledError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError("without a loader plugin, prepare(loader) let all ranks read the same batches")
    sampler = DistributedSampler(dataset(), accelerator.num_processes, accelerator.process_index, shuffle=False)
    return DataLoader(dataset(), batch_size=BATCH, sampler=sampler)


def saved_and_loaded(accelerator, model, folder):
    """What training goes on with: the model of a checkpoint, if one can be saved."""
    lacks = None if offered("accel.checkpoints") else "accel-checkpoint"
    if lacks is None and accelerator.num_processes == 1 and not offered("accel.loaders"):
        lacks = "accel-data"
    if lacks is not None:
        try:
            accelerator.save_state(folder)
        except (NotInstalledError, CheckpointError) as error:
            assert how_to_install(lacks) in str(error), error
        else:
            raise AssertionError(f"without {lacks}, save_state() returned")
        return f"not saved, for {lacks} is not installed"
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    return "saved and loaded"


def shared(folder):
    """The folder of rank 0, for all."""
    (found,) = accel_core.broadcast_object_list([str(folder / "checkpoint")])
    return found


def offered(group):
    return sorted({point.name for point in metadata.entry_points(group=group)})


def compared(strategy, precision, folder):
    """Trains, and compares the weights on the main process."""
    trackers = [name for name in offered("accel.trackers") if name == "jsonl"]
    accelerator = Accelerator(strategy=strategy, mixed_precision=precision, log_with=trackers, project_dir=folder)
    accelerator.init_trackers("matrix", {"strategy": strategy})
    loader = prepared_loader(accelerator, offered("accel.loaders"))
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    train(model, optimizer, loader, accelerator.backward, accelerator.device)
    checkpoint = saved_and_loaded(accelerator, model, shared(folder))
    trained = accelerator.get_state_dict(model)

    reference, its_optimizer = model_and_optimizer()
    whole = DataLoader(dataset(), batch_size=BATCH * accelerator.num_processes)
    train(reference, its_optimizer, whole, torch.Tensor.backward, "cpu")
    for name, parameter in reference.state_dict().items() if accelerator.is_main_process else ():
        torch.testing.assert_close(trained[name].detach().cpu(), parameter, atol=TOLERANCES[precision], rtol=1e-5)
    told = f"world of {accelerator.num_processes}, {accelerator.distributed_type}, {precision}: trained as plain torch does, {checkpoint}"
    accelerator.log({"told": told})
    for name in trackers:
        recorded = accelerator.get_tracker(name, unwrap=True)
        assert not accelerator.is_main_process or told in recorded.read_text(encoding="utf-8"), recorded
    accelerator.print(told + "".join(f", recorded by {name}" for name in trackers))
    return accelerator


def main():
    left_out = {*DEFAULTS, *ELSEWHERE, *(ALONE if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ())}
    for name in set(ELSEWHERE).intersection(offered("accel.strategies")):
        print(f"{name}: left out here; nox -s {ELSEWHERE[name]}")
    strategies = [None, *(name for name in offered("accel.strategies") if name not in left_out)]
    precisions = [name for name in offered("accel.precisions") if name in TOLERANCES]
    with tempfile.TemporaryDirectory() as folder:
        ran = [compared(strategy, precision, Path(folder)) for strategy in strategies for precision in precisions]
        for accelerator in ran:
            accelerator.end_training()


if __name__ == "__main__":
    main()
