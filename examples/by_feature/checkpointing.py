"""Checkpointing and resuming: a run that was stopped goes on with the next sample, on any number of processes.

A checkpoint holds what is prepared (model, optimizer, scheduler, the position in the data), what is registered, and the random
streams. Stop this one at any moment, by Ctrl+C or `kill`; the newest complete checkpoint stays.

    python examples/by_feature/checkpointing.py --save run --stop-after 40
    python examples/by_feature/checkpointing.py --save run --resume
    accel launch --num-processes 2 examples/by_feature/checkpointing.py --save run --resume
    accel launch --num-processes 8 examples/by_feature/checkpointing.py --save run
    accel launch --num-processes 2 --fsdp examples/by_feature/checkpointing.py --save run --resume

The stopped and resumed run prints the last line of the one that was never stopped: bit by bit in as many processes, to rounding in
another number of them.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ProjectConfiguration, set_seed


class Progress:
    """What is yours: anything with these two methods is saved too."""

    def __init__(self):
        self.steps, self.losses = 0, []

    def state_dict(self):
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state):
        self.steps, self.losses = state["steps"], state["losses"]


def main():
    parser = argparse.ArgumentParser(description="Saves as it goes, and goes on where it was.")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder of checkpoints; the newest two are kept")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--every", type=int, default=15, help="steps between two checkpoints")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="leave in the middle, as a failure would")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))
    loader = DataLoader(data, 64, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    progress = Progress()

    project = ProjectConfiguration(options.save, automatic_checkpoint_naming=True, total_limit=2)
    # The batch of 64 is that of all processes together, so that it is the same when there are more of them.
    accelerator = Accelerator(project_config=project, split_batches=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(progress)
    accelerator.stop_on_signal()  # SIGTERM, which schedulers send before they take a machine away
    if options.resume and accelerator.load_state(missing_ok=True):  # after prepare and register
        accelerator.print(f"resumed at step {progress.steps}")

    for _ in range(loader.state_dict()["epoch"], options.epochs):
        for x, y in loader:  # after load_state: the rest of the epoch
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.steps += 1
            progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if progress.steps == options.stop_after:
                accelerator.print(f"stopped at step {progress.steps}")
                return
            told = accelerator.should_stop()
            if told or progress.steps % options.every == 0:
                accelerator.save_state()
            if told:
                return

    accelerator.print(
        f"{progress.steps} steps, losses {sum(progress.losses):.6f} in all, {progress.losses[-1]:.6f} at the end"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
