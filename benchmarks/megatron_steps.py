"""M1: what a step costs under Megatron-core on two ranks that share each layer. Run by `run.py` under torchrun.

Megatron-core asks for CUDA; the double of the tests answers for a CPU, to both loops alike. So this measures what the host does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from libraries import Epoch
from steps import timed
from worker import alternate, arguments, finish, join

sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "megatron-plugin" / "tests"))
import megatron_cpu

WIDTH, HEADS, LAYERS, WORDS, LENGTH, ROWS = 256, 4, 2, 256, 64, 4
WINDOW, CLIPPING, RATE = 4, 0.5, 1e-3
"""Micro-batches of a window, of ROWS rows each; the largest norm of the gradients; the rate of AdamW, without weight decay."""

Batch = tuple[torch.Tensor, torch.Tensor]


def gpt(parallel: dict[str, Any]) -> torch.nn.Module:
    """The same for all, with the same weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(2)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **parallel,
    )
    layer = get_gpt_layer_local_spec(num_experts=None, moe_grouped_gemm=False)
    return GPTModel(config, layer, WORDS, LENGTH, share_embeddings_and_output_weights=False, parallel_output=True)


def called(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called with a batch."""
    tokens, labels = batch
    return (tokens, torch.arange(LENGTH).expand_as(tokens), None), {"labels": labels}


def windows(batches: int) -> list[list[Batch]]:
    """The micro-batches of all windows of an epoch; both ranks read the same, for they hold one model."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (batches, ROWS, LENGTH + 1), generator=generator)
    found = [(each[:, :-1], each[:, 1:]) for each in tokens]
    return [found[first : first + WINDOW] for first in range(0, batches, WINDOW)]


class Accel:
    """Ours. It comes first, for it has Megatron-core make its process groups, which both use."""

    def __init__(self) -> None:
        from accel_core import Accelerator
        from accel_megatron import Megatron

        self.accelerator = Accelerator(strategy=Megatron(tensor_parallel=dist.get_world_size()), cpu=True)
        model = self.accelerator.build_model(gpt)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def epoch(self, data: list[list[Batch]]) -> None:
        """Every window of the data."""
        for micro_batches in data:
            self.accelerator.forward_backward(self.model, micro_batches, self.loss, called)
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIPPING)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @staticmethod
    def loss(losses: torch.Tensor, _: Batch) -> tuple[torch.Tensor, int]:
        """The sum, and how many tokens it is of."""
        return losses.sum(), losses.numel()

    def weights(self) -> torch.Tensor:
        """Those of this rank, flat."""
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])


class Plain:
    """Megatron-core's own loop: its data-parallel wrapper, schedule and optimizer."""

    def __init__(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        model = gpt({"tensor_model_parallel_size": dist.get_world_size()})
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model.config.finalize_model_grads_func = finalize_model_grads
        self.model = DistributedDataParallel(model.config, settings, model)
        self.model.broadcast_params()
        config = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=CLIPPING)
        self.optimizer = get_megatron_optimizer(config, [self.model])
        self.config = model.config

    def epoch(self, data: list[list[Batch]]) -> None:
        """Every window of the data."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for micro_batches in data:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=self.forward_step,
                data_iterator=iter(micro_batches),
                model=self.model,
                num_microbatches=WINDOW,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            self.mean(losses)
            self.optimizer.step()

    @staticmethod
    def forward_step(data: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable[[Any], Any]]:
        """One micro-batch, as Megatron-core's examples write it."""
        args, kwargs = called(next(data))
        return model(*args, **kwargs), mean_and_report

    @staticmethod
    def mean(losses: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The loss of the window over the data-parallel ranks, which ours returns."""
        from megatron.core import parallel_state

        total = torch.stack([each["loss"] for each in losses]).mean()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total

    def weights(self) -> torch.Tensor:
        """Those of this rank, flat."""
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])


def mean_and_report(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch, and what is kept of it."""
    loss = losses.mean()
    return loss, {"loss": loss.detach()}


def main() -> None:
    options = arguments()
    rank, world = join()
    warnings.filterwarnings("ignore")
    megatron_cpu.use_cpu()
    jobs = {"accel": Accel(), "plain": Plain()}
    data = windows(options.batches)
    for job in jobs.values():
        job.epoch(data)
    difference = "after an epoch, accel has other weights than plain"
    torch.testing.assert_close(jobs["accel"].weights(), jobs["plain"].weights(), rtol=1e-4, atol=1e-5, msg=difference)
    epochs: dict[str, Epoch] = {name: partial(job.epoch, data) for name, job in jobs.items()}
    turns = {name: timed(epochs[name], options.batches) for name in ("plain", "accel")}
    dist.barrier()
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
