"""Processes that train on their own, and average their parameters every few steps."""

import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    set_seed(42)
    train_dataloader, _ = loaders()
    model, optimizer = model_and_optimizer(lr=0.05)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(2):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps, enabled=True
        ) as local_sgd:
            for inputs, targets in train_dataloader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().reshape(1))
    assert (weights - weights[0]).abs().max() < 1e-6, weights
    accelerator.print(f"weight {weights[0].item():.3f} in {len(weights)} processes")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
