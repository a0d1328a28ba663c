"""Windows of several batches: accumulate() does it, and the loop stays as it is."""

import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser

from accelerate import Accelerator
from accelerate.utils import set_seed


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu, mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    set_seed(42)
    train_dataloader, _ = loaders()
    model, optimizer = model_and_optimizer()
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    steps = 0
    for _ in range(2):
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    expected = 2 * -(-len(train_dataloader) // args.gradient_accumulation_steps)
    assert steps == expected, (steps, expected)
    weight = accelerator.unwrap_model(model).weight.item()
    assert abs(weight - 2) < 1, weight
    accelerator.print(f"{steps} steps, weight {weight:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
