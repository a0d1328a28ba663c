"""save_state each epoch or every few steps, and resumption in the middle of an epoch by skip_first_batches."""

import os

import torch.nn.functional as F
from regression import loaders, model_and_optimizer, parser
from torch.optim.lr_scheduler import StepLR

from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 3


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    if args.checkpointing_steps is None or args.checkpointing_steps == "epoch":
        checkpointing_steps = args.checkpointing_steps
    else:
        checkpointing_steps = int(args.checkpointing_steps)
    set_seed(42)
    train_dataloader, _ = loaders()
    model, optimizer = model_and_optimizer(lr=0.05)
    lr_scheduler = StepLR(optimizer, step_size=20, gamma=0.5)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            overall_step = starting_epoch * len(train_dataloader)
        else:
            overall_step = int(training_difference.replace("step_", ""))
            starting_epoch = overall_step // len(train_dataloader)
            resume_step = overall_step - starting_epoch * len(train_dataloader)
    for epoch in range(starting_epoch, EPOCHS):
        model.train()
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for inputs, targets in active_dataloader:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    trained = accelerator.unwrap_model(model)
    accelerator.print(f"steps {overall_step} weight {trained.weight.item():.7f} bias {trained.bias.item():.7f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(parser().parse_args())
