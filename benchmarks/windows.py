"""M1: what a step costs under Megatron-core. Run by `run.py`, as one process or under torchrun; the ranks share each layer."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from libraries import Epoch
from steps import timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker import alternate, arguments, finish, join

sys.path.append(str(Path(__file__).parents[1] / "packages" / "megatron-plugin" / "tests"))
import megatron_cpu
import megatron_jobs

WINDOW, ROWS, CLIPPING = 4, 2, 1.0
ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-4,
}  # so large that biases of keys, whose gradients are rounding errors, stay
DECAY = 0.1


class Job:
    """What every loop trains: the same GPT of four layers, data and AdamW, clipped, four micro-batches a step."""

    def __init__(self, batches: int) -> None:
        generator = torch.Generator().manual_seed(1)
        size = (batches * ROWS, megatron_jobs.LENGTH + 1)
        self.data = TensorDataset(torch.randint(megatron_jobs.WORDS, size, generator=generator))
        self.steps = batches // WINDOW
        self.model: Any = None

    def loader(self) -> DataLoader[Any]:
        """All data, for ranks that share layers read the same."""
        return DataLoader(self.data, batch_size=ROWS)

    def weights(self) -> torch.Tensor:
        """All weights of this rank, flat."""
        return torch.cat([parameter.detach().flatten().clone() for parameter in self.model.parameters()])


def split(batch: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: all tokens but the last, and all but the first as labels."""
    tokens = batch[0]
    positions = torch.arange(megatron_jobs.LENGTH).expand(len(tokens), -1)
    return (tokens[:, :-1], positions, None), {"labels": tokens[:, 1:]}


def plain(job: Job) -> Epoch:
    """Megatron-core's own: its buffers, schedule and optimizer, and the mean loss over all data, once a step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    job.model = megatron_jobs.gpt({"tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size()})
    config = job.model.config
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model: Any = DistributedDataParallel(config, settings, job.model)
    betas = dict(zip(("adam_beta1", "adam_beta2"), ADAM["betas"], strict=True))
    options = {"lr": ADAM["lr"], "adam_eps": ADAM["eps"], "weight_decay": DECAY, "clip_grad": CLIPPING, **betas}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), [model])
    for each in optimizer.param_groups:  # as Megatron's scheduler does it in each step
        each["weight_decay"] = DECAY * each["wd_mult"]
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    forward_backward = get_forward_backward_func()

    def forward_step(data: Iterator[Any], chunk: nn.Module) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        args, kwargs = split(next(data))

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            loss, count = losses.sum(), torch.tensor(losses.numel())
            return loss, count, {"loss": torch.stack([loss.detach(), count])}

        return chunk(*args, **kwargs), loss_of

    def epoch() -> None:
        data = iter(job.loader())
        for _ in range(job.steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            told = forward_backward(
                forward_step_func=forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=WINDOW,
                seq_length=megatron_jobs.LENGTH,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            optimizer.step()
            total = torch.stack([each["loss"] for each in told]).sum(dim=0)
            dist.all_reduce(total, group=group)
            (total[0] / total[1]).item()

    return epoch


def accel(job: Job) -> Epoch:
    """Ours."""
    from accel_core import Accelerator
    from accel_megatron import Megatron

    accelerator = Accelerator(strategy=Megatron(tensor_parallel=_ranks()), cpu=True)
    job.model = accelerator.build_model(megatron_jobs.gpt)
    groups = [
        {"params": [each for each in job.model.parameters() if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in job.model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    model, optimizer, loader = accelerator.prepare(job.model, optimizer, job.loader())

    def loss_fn(losses: torch.Tensor, _: object) -> tuple[torch.Tensor, int]:
        return losses.sum(), losses.numel()

    def epoch() -> None:
        data = iter(loader)
        while micro_batches := list(itertools.islice(data, WINDOW)):
            accelerator.forward_backward(model, micro_batches, loss_fn, split).item()
            accelerator.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


LOOPS: dict[str, Callable[[Job], Epoch]] = {"accel": accel, "plain": plain}
"""Ours first: it makes Megatron's groups, which Megatron-core keeps once for a process."""


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")
    megatron_cpu.use_cpu()
    names = [name for name in LOOPS if name in options.libraries]
    jobs = {name: Job(options.batches) for name in names}
    epochs = {name: LOOPS[name](job) for name, job in jobs.items()}
    for epoch in epochs.values():
        epoch()
    for name, job in jobs.items():
        difference = f"after an epoch, {name} has other weights than plain"
        torch.testing.assert_close(job.weights(), jobs["plain"].weights(), msg=difference)
    turns = {name: timed(epoch, options.batches // WINDOW) for name, epoch in epochs.items()}
    if world > 1:
        dist.barrier()
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
