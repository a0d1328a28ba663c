"""DeepSpeed's ZeRO: optimizer state, gradients and parameters are shared out among the processes; the loop stays as it is.

python examples/by_feature/deepspeed_zero.py
accel launch --num-processes 2 examples/by_feature/deepspeed_zero.py --stage 3
accel launch --num-processes 8 examples/by_feature/deepspeed_zero.py --stage 3 --offload
accel launch --num-processes 2 examples/by_feature/deepspeed_zero.py --config zero.json   # a file as DeepSpeed takes it
accel launch --num-processes 2 --deepspeed --deepspeed.zero-stage 2 train.py              # any script, from outside
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, set_seed
from accel_deepspeed import DeepSpeed


def main():
    parser = argparse.ArgumentParser(description="Trains with ZeRO.")
    parser.add_argument(
        "--stage", type=int, default=2, choices=range(4), help="1: states, 2: gradients too, 3: parameters too"
    )
    parser.add_argument("--offload", action="store_true", help="keep optimizer state in the memory of the host")
    parser.add_argument("--config", help="a configuration of DeepSpeed, instead of the two options above")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    set_seed(1)
    pixels, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(digits))

    strategy = DeepSpeed(options.stage, offload_optimizer="cpu" if options.offload else None)
    if options.config:
        strategy = DeepSpeed(config=options.config)
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=2, split_batches=True)
    model = accelerator.build_model(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=14, gamma=0.5)
    loader = DataLoader(data, 64, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    for _ in range(options.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)  # this one, and not engine.backward: all strategies have one loop
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    weights = accelerator.get_state_dict(model)  # whole, in single precision, on the main process
    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"stage {strategy.configuration.stage}, {optimizer_elements(optimizer)} elements of state here")
    accelerator.print(f"{sum(weight.numel() for weight in weights.values())} weights, loss {loss:.3f}")
    accelerator.end_training()


def optimizer_elements(optimizer):
    """How much of the optimizer's state is in this process."""
    return sum(
        value.numel() for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    )


if __name__ == "__main__":
    main()
