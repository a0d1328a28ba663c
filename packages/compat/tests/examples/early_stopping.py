"""One process sees a reason to stop, and all of them stop at the same step."""

import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser

from accelerate import Accelerator
from accelerate.utils import set_seed


class EarlyStoppingCallback:
    """Ends a training that has become no better for `patience` checks."""

    def __init__(self, min_delta=0.0, patience=3):
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest_loss = 0, float("inf")

    def check_early_stopping(self, eval_loss):
        if self.lowest_loss - eval_loss >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(42)
    train_dataloader, _ = loaders()
    model, optimizer = model_and_optimizer(lr=0.2)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    callback = EarlyStoppingCallback(min_delta=1e-3, patience=2 + accelerator.process_index)
    steps = 0
    for _ in range(20):
        for inputs, targets in train_dataloader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if callback.check_early_stopping(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        else:
            continue
        break
    counts = accelerator.gather(loss.detach().new_tensor([steps]))
    assert len(set(counts.tolist())) == 1, counts
    assert steps < 200, steps
    accelerator.print(f"stopped behind {steps} steps")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
