"""A batch size that does not fit is halved, and everything is built again inside."""

import torch
import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, release_memory, set_seed


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    tried = []

    @find_executable_batch_size(starting_batch_size=32)
    def inner_training_loop(batch_size):
        accelerator.free_memory()
        tried.append(batch_size)
        if batch_size > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        set_seed(42)
        train_dataloader, _ = loaders(batch_size=batch_size)
        model, optimizer = model_and_optimizer()
        model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
        for inputs, targets in train_dataloader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = release_memory(model, optimizer)
        assert model is None
        return loss.item()

    loss = inner_training_loop()
    assert tried[0] == 32, tried
    assert tried[-1] <= 8, tried
    accelerator.print(f"batch sizes {tried}, loss {loss:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
