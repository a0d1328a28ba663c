"""Of the shape of diffusion examples: steps counted by hand, guarded trackers, weights of one process. Never run, only read."""

import math
import os

import torch
import torch.nn.functional as F
from data import load_parts
from diffusers.optimization import get_scheduler

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, is_wandb_available

logger = get_logger(__name__)


def main(args):
    project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs"))
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(  # short-window
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with=args.report_to,
        project_config=project,
        kwargs_handlers=[ddp],
    )
    unet, scheduler, train_dataloader = load_parts(args)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr)
    num_update_steps_per_epoch = math.ceil(
        len(train_dataloader) / args.gradient_accumulation_steps  # schedule-length
    )
    args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,  # schedule-processes
        num_training_steps=args.max_train_steps,
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image", config=vars(args))
    for _ in range(args.num_train_epochs):
        for batch in train_dataloader:
            with accelerator.accumulate(unet):
                noise = torch.randn_like(batch["pixels"])
                noisy = scheduler.add_noise(batch["pixels"], noise, batch["steps"])
                loss = F.mse_loss(unet(noisy, batch["steps"]).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.is_main_process:
                accelerator.save_state(os.path.join(args.output_dir, "checkpoint"))  # collective-alone
            accelerator.log({"loss": loss.detach().item()})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unet = accelerator.unwrap_model(unet)
        unet.save_pretrained(args.output_dir)
        if is_wandb_available():  # name
            logger.info("done")
    accelerator.end_training()
