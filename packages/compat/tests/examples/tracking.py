"""Every tracker that is installed, the run's name from the file, a value per epoch."""

import os

import torch
import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=args.output_dir, logging_dir=args.output_dir),
    )
    set_seed(42)
    train_dataloader, _ = loaders()
    model, optimizer = model_and_optimizer()
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    if accelerator.is_main_process:
        run = os.path.split(__file__)[-1].split(".")[0]
        accelerator.init_trackers(run, {"lr": 0.1, "epochs": 2})
    overall_step = 0
    for epoch in range(2):
        total_loss = 0
        for inputs, targets in train_dataloader:
            loss = F.mse_loss(model(inputs), targets)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            overall_step += 1
        accelerator.log({"train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch}, step=overall_step)
    tracker = accelerator.get_tracker("tensorboard")
    if accelerator.is_main_process:
        tracker.writer.add_histogram("weights", torch.ones(4), overall_step)
    accelerator.end_training()
    if accelerator.is_main_process:
        written = [name for _, _, names in os.walk(args.output_dir) for name in names if "tfevents" in name]
        assert written, os.listdir(args.output_dir)
    accelerator.print(f"tracked {overall_step} steps")


if __name__ == "__main__":
    training_function(parser().parse_args())
