"""Loops of the shape that diffusers' training scripts have, over the module `accelerate`.

    python scenario_diffusion.py OUT unconditional

One at a time: `end_training` is the end of a process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from scenario_report import norm, report
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

logger = get_logger(__name__)
ORDER = DataLoaderConfiguration(use_seedable_sampler=True)
"""The order that both distributions draw alike: without it, one draws from torch's stream, and one computes it from the seed."""
SMALL: dict[str, Any] = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}


class Pictures(Dataset):
    """Random pictures, each with the tokens of its caption."""

    def __init__(self, rows: int) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.pictures = torch.rand((rows, 3, 16, 16), generator=drawn) * 2 - 1
        self.captions = torch.randint(0, 64, (rows, 8), generator=drawn)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.pictures[index], "input_ids": self.captions[index]}


def noise_like(latents: torch.Tensor, accelerator: Accelerator, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and timesteps of this step and process, whatever was drawn before."""
    drawn = torch.Generator().manual_seed(100 * step + accelerator.process_index)
    times = torch.randint(0, 50, (latents.shape[0],), generator=drawn)
    return torch.randn(latents.shape, generator=drawn), times


def start_tracking(accelerator: Accelerator, name: str) -> None:
    if accelerator.is_main_process:
        accelerator.init_trackers(name, config={"rate": 1e-3})


def unconditional(folder: Path) -> dict[str, Any]:
    """An EMA beside the model, hooks that take the weights out of the list, trackers that only the main process begins."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=ORDER,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
    )
    set_seed(3)
    model = UNet2DModel(
        sample_size=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **SMALL,
    )
    ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)

    def save_hook(models: list[Any], weights: list[Any], where: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(str(Path(where) / "unet_ema"))
            for each in models:
                each.save_pretrained(str(Path(where) / "unet"))
                weights.pop()

    def load_hook(models: list[Any], where: str) -> None:
        ema.load_state_dict(EMAModel.from_pretrained(str(Path(where) / "unet_ema"), UNet2DModel).state_dict())
        for _ in range(len(models)):
            each = models.pop()
            read = UNet2DModel.from_pretrained(where, subfolder="unet")
            each.register_to_config(**read.config)
            each.load_state_dict(read.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(20), batch_size=2, shuffle=True)
    scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=len(loader) // accelerator.gradient_accumulation_steps * 2,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    start_tracking(accelerator, "unconditional")
    noising = DDPMScheduler(num_train_timesteps=50)
    logger.info("training", main_process_only=True)
    found: dict[str, Any] = {"loss": [], "learning_rate": [], "grad_norm": []}

    def epoch(number: int) -> None:
        model.train()
        for step, batch in enumerate(loader):
            noise, times = noise_like(batch["input"], accelerator, 50 * number + step)
            with accelerator.accumulate(model):
                predicted = model(noising.add_noise(batch["input"], noise, times), times).sample
                loss = F.mse_loss(predicted.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["grad_norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
            logs = {"loss": loss.detach().item(), "lr": scheduler.get_last_lr()[0]}
            accelerator.log(logs, step=step)
            found["loss"].append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            found["learning_rate"].append(logs["lr"])
        accelerator.wait_for_everyone()

    epoch(0)
    accelerator.save_state(str(folder / "checkpoint-0"))
    saved = norm(accelerator.unwrap_model(model).parameters())
    epoch(1)
    trained, averaged = norm(accelerator.unwrap_model(model).parameters()), norm(ema.shadow_params)
    accelerator.load_state(str(folder / "checkpoint-0"))
    loaded = norm(accelerator.unwrap_model(model).parameters())
    accelerator.end_training()
    return found | {"norm": [saved, trained, averaged, loaded]}


def text_to_image(folder: Path) -> dict[str, Any]:
    """Frozen text encoder and VAE in the weights' precision, a conditional UNet that is trained."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1, mixed_precision="no", dataloader_config=ORDER)
    set_seed(3)
    noising = DDPMScheduler(num_train_timesteps=50)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **SMALL,
    )  # fmt: skip
    vae.requires_grad_(False)
    encoder.requires_grad_(False)
    unet.train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(12), batch_size=2, shuffle=True)
    scheduler = get_scheduler(
        "constant_with_warmup", optimizer=optimizer, num_warmup_steps=2 * accelerator.num_processes
    )
    unet, optimizer, loader, scheduler = accelerator.prepare(unet, optimizer, loader, scheduler)
    encoder.to(accelerator.device, dtype=torch.float32)
    vae.to(accelerator.device, dtype=torch.float32)
    found: dict[str, Any] = {"loss": [], "learning_rate": [], "grad_norm": []}
    for step, batch in enumerate(loader):
        with accelerator.accumulate(unet):
            latents = vae.encode(batch["input"]).latent_dist.mode() * vae.config.scaling_factor
            noise, times = noise_like(latents, accelerator, step)
            hidden = encoder(batch["input_ids"], return_dict=False)[0]
            predicted = unet(noising.add_noise(latents, noise, times), times, hidden, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), noise.float(), reduction="mean")
            found["loss"].append(accelerator.gather(loss.repeat(2)).mean().item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["grad_norm"].append(float(accelerator.clip_grad_norm_(unet.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found["learning_rate"].append(scheduler.get_last_lr()[0])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(unet).save_pretrained(str(folder / "unet"))
    accelerator.end_training()
    return found | {"norm": norm(accelerator.unwrap_model(unet).parameters())}


if __name__ == "__main__":
    out, shape = Path(sys.argv[1]), sys.argv[2]
    report(shape, {"unconditional": unconditional, "text_to_image": text_to_image}[shape](out / shape))
