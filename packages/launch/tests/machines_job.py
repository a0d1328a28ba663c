"""Trains for a while, saves as it goes, and goes on from the last checkpoint; at the end the parameters stand in a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accel_core import Accelerator, ProjectConfiguration

STEPS, EVERY = 16, 2


class Progress:
    """How many steps were made."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Tied(nn.Module):
    """One parameter, used twice.

    With several, DDP lays out gradients anew after the first step, in the order in which they come; and what four ranks sum up
    depends on the layout, by a rounding. A run that was interrupted has one such step more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.weight) @ self.weight).sum(1, keepdim=True)


def train(folder: Path, pause: float = 0.0) -> None:
    """Trains in whatever world there is, on random batches of which no two are the same."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    first, rank = progress.steps, accelerator.process_index
    while progress.steps < STEPS:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * progress.steps + rank))
        accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.steps += 1
        if pause and progress.steps % EVERY == 0:
            accelerator.save_state()
        time.sleep(pause)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_file(state, folder / "trained.safetensors")
    print(f"rank {rank} of {accelerator.num_processes} made the steps {first} to {STEPS}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))
