"""A GAN: two models and two optimizers under one Accelerator, which take steps in turn.

The generator makes points in the plane out of noise, the critic tells them from points on a circle.

    python examples/by_feature/gan.py
    accel launch --num-processes 2 examples/by_feature/gan.py
    accel launch --num-processes 8 examples/by_feature/gan.py --steps 200
    accel launch --num-processes 2 --fsdp examples/by_feature/gan.py
"""

import argparse
from itertools import chain, islice, repeat

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

from accel_core import Accelerator, set_seed

NOISE = 8


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def main():
    parser = argparse.ArgumentParser(description="Trains a generator and a critic in turn.")
    parser.add_argument("--steps", type=int, default=400, help="of each")
    options = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    set_seed(1)
    angles = 2 * torch.pi * torch.rand(4096)
    circle = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(4096, 2)
    generator, critic = mlp(NOISE, 2), mlp(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    generator, critic, generator_optimizer, critic_optimizer, loader = accelerator.prepare(
        generator, critic, generator_optimizer, critic_optimizer, DataLoader(circle, 256, shuffle=True)
    )
    set_seed(1, device_specific=True)  # from here on each process draws noise of its own

    def distance():
        """How far generated points are from the circle, on average over all processes."""
        with torch.no_grad():
            made = generator(torch.randn(1024, NOISE, device=accelerator.device))
        return accelerator.reduce((made.norm(dim=1) - 1).abs().mean(), "mean").item()

    before = distance()
    for real in islice(chain.from_iterable(repeat(loader)), options.steps):
        made = generator(torch.randn(len(real), NOISE, device=accelerator.device))
        # The critic's step: the generator learns nothing from it.
        accelerator.backward((softplus(-critic(real)) + softplus(critic(made.detach()))).mean())
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        # The generator's step: its gradient comes through the critic. The critic is frozen, so that it gets none itself. To call
        # critic_optimizer.zero_grad() afterwards is right only without accumulation: inside a window it does nothing.
        critic.requires_grad_(False)
        accelerator.backward(softplus(-critic(made)).mean())
        critic.requires_grad_(True)
        generator_optimizer.step()
        generator_optimizer.zero_grad()

    accelerator.print(f"points are {distance():.3f} from the circle on average, and were {before:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
