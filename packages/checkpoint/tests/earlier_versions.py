"""A run whose checkpoints earlier versions have written: they lie in `earlier_versions/`, and have to be loaded for ever.

    torchrun --nproc-per-node 2 earlier_versions.py FOLDER       # where that version is installed, with accel-data

writes a checkpoint, and what has to come back of it, into FOLDER. Only names of scripts are used, and nothing that is tied to
a kind of CPU: what is compared to the bit was read, drawn or counted, not computed.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ProjectConfiguration, set_seed

SAMPLES, BATCH, STEPS = 64, 4, 3


class Notes:
    """Something of the user's own, with values of many kinds."""

    def __init__(self):
        self.content = {}

    def state_dict(self):
        return self.content

    def load_state_dict(self, state):
        self.content = state


def written():
    """What the notes hold."""
    return {
        "plain": [1, -2.5, None, True, "ü", b"\x00\xff", 2**70, float("inf")],
        "ordered": OrderedDict(b=1, a=2),
        "queue": deque([1, 2], maxlen=3),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "tensor": torch.arange(5, dtype=torch.bfloat16),
        "keys": {(1, "two"): {3, 4}, 5: torch.float16},
        "path": Path("a/b"),
    }


class Run:
    """The objects of the run, prepared."""

    def __init__(self, folder, **options):
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project, **options)
        set_seed(7)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}]
        adam, momentum = torch.optim.AdamW(groups, lr=0.01), torch.optim.SGD(model[1].parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 20)
        numbers = torch.arange(SAMPLES, dtype=torch.float32)
        rows = TensorDataset(numbers[:, None] / SAMPLES + torch.arange(3) / 3)
        loader = DataLoader(rows, BATCH, shuffle=True)
        self.notes = Notes()
        self.accelerator.register_for_checkpointing(self.notes)
        self.model, self.adam, self.momentum, self.schedule, self.loader = self.accelerator.prepare(
            model, adam, momentum, schedule, loader
        )

    def train(self, steps):
        """Steps of one micro-batch; three of them leave a window open."""
        for _, (batch,) in zip(range(steps), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().mean())
                for each in (self.adam, self.momentum, self.schedule):
                    each.step()
                self.adam.zero_grad()
                self.momentum.zero_grad()

    def facts(self):
        """What has to come back: numbers as they are, in the order in which they are drawn and read."""
        model = self.accelerator.unwrap_model(self.model)
        found = {f"model.{name}": value.tolist() for name, value in model.state_dict().items()}
        for name, optimizer in (("adam", self.adam), ("momentum", self.momentum)):
            state = optimizer.state_dict()["state"]
            found |= {f"{name}.{i}.{key}": as_list(value) for i, of in state.items() for key, value in of.items()}
        found |= {f"gradient.{i}": each.grad.tolist() for i, each in enumerate(self.model.parameters())}
        found["rates"] = [group["lr"] for group in self.adam.param_groups]
        found["schedule"] = self.schedule.state_dict()["last_epoch"]
        found["window"] = [self.accelerator.step, self.accelerator.sync_gradients]
        found["drawn"] = torch.rand(4).tolist()
        found["read"] = [round(float(row) * SAMPLES) for (batch,) in self.loader for row in batch[:, 0]]
        return found


def as_list(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def main(folder):
    run = Run(folder)
    run.notes.content = written()
    torch.manual_seed(run.accelerator.process_index)
    run.train(STEPS)
    run.accelerator.save_state()
    run = Run(folder)  # what is compared is what that version itself reads back
    run.accelerator.load_state()
    facts = run.facts()
    gathered = [None] * run.accelerator.num_processes
    torch.distributed.all_gather_object(gathered, facts)
    if run.accelerator.is_main_process:
        (Path(folder) / "facts.json").write_text(json.dumps(gathered), encoding="utf-8")
    run.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
