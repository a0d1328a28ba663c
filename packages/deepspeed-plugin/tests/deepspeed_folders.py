"""Runs that train with DeepSpeed alone and save its folders, for the tests of importing.

Beside each folder lie the masters at the save ("saved") and after DeepSpeed's own next step ("next").
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "sgd": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "bf16-zero1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "bf16-zero2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "bf16-zero3": {"zero_optimization": {"stage": 3, "sub_group_size": 20}, "bf16": {"enabled": True}},
}
COMPILED: dict[str, dict[str, Any]] = {
    "fused": {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
}
"""Runs with an optimizer of DeepSpeed's own, for which the operator `fused_adam` is needed."""

MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.SGD: ("momentum_buffer",)}


class Net(nn.Module):
    """Odd sizes, one smaller than the world, a tied weight, a frozen layer, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 0.5))  # DeepSpeed takes none without dims
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(hidden * self.scale + self.frozen(hidden))


def make(seed: int = 0) -> tuple[Net, list[dict[str, Any]]]:
    """The model, and the groups of its optimizer."""
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [model.embedding.weight, model.hidden.weight], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [model.hidden.bias, model.scale], "lr": 2e-2, "weight_decay": 0.0},
    ]
    return model, groups


def optimizer_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW, or what the name of a run says."""
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    return torch.optim.AdamW(groups)


def tokens_of(step: int, rank: int, world: int) -> torch.Tensor:
    """The tokens of one rank in one step: its rows of a batch of four."""
    rows = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(step))
    return rows.chunk(world)[rank]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of one batch."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def compile_operator(name: str) -> None:
    """Compiles an operator, in a process of its own."""
    from accel_deepspeed.operators import build

    build(name, print)


def train_with_deepspeed(folder: Path, names: list[str], universal: list[str]) -> None:
    """Makes the folders of some runs, and universal ones of some of them. On every rank."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.checkpoint import ds_to_universal

    from accel_deepspeed.operators import without_shared_memory

    with without_shared_memory():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name in names:
        _train(folder, name)
    dist.barrier()
    for name in universal if dist.get_rank() == 0 else []:
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / name / f"global_step{STEPS}"),
                output_folder=str(folder / f"{name}-universal" / f"global_step{STEPS}_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    dist.destroy_process_group()


def _train(folder: Path, name: str) -> None:
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param

    model, groups = make()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **{**RUNS, **COMPILED}[name],
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None if name in COMPILED else optimizer_of(name, groups),
        model_parameters=groups if name in COMPILED else None,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        config=config,
    )
    trained = {key: each for key, each in model.named_parameters() if each.requires_grad}

    def step(number: int) -> None:
        engine.backward(loss_of(engine, tokens_of(number, dist.get_rank(), dist.get_world_size())))
        engine.step()

    def masters() -> dict[str, torch.Tensor]:
        return {key: safe_get_full_fp32_param(each).clone() for key, each in trained.items()}

    for number in range(STEPS):
        step(number)
    engine.save_checkpoint(str(folder / name), client_state={"epoch": 1})
    saved = masters()
    step(STEPS)
    after = masters()
    if dist.get_rank() == 0:
        torch.save({"saved": saved, "next": after}, folder / f"{name}.pt")
    engine.destroy()


class Going(NamedTuple):
    """A run after `load_state`: what it has then, what it warned of, and its weights after the next step."""

    loaded: dict[str, dict[str, torch.Tensor]]
    buffer: torch.Tensor
    frozen: torch.Tensor
    is_tied: bool
    rates: list[float]
    warned: list[str]
    after: dict[str, torch.Tensor]


def go_on(targets: dict[str, Path]) -> dict[str, Going]:
    """Loads imported checkpoints, and takes the step that DeepSpeed took. On every rank, under `single` or `ddp`."""
    return {name: _go_on(name.removesuffix("-universal"), target) for name, target in targets.items()}


def _go_on(name: str, target: Path) -> Going:
    accelerator = Accelerator(cpu=True)
    model, groups = make(seed=1)
    optimizer = optimizer_of(name, groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = DataLoader(TensorDataset(torch.arange(8)))
    prepared, optimizer, _, _ = accelerator.prepare(model, optimizer, schedule, data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(target)
    trained = {key: each for key, each in model.named_parameters() if each.requires_grad}
    loaded = {"fp32": {key: each.detach().clone() for key, each in trained.items()}}
    for moment in MOMENTS[type(optimizer_of(name, groups))]:
        loaded[moment] = {key: optimizer.state[each][moment].clone() for key, each in trained.items()}
    buffer, rates = model.seen.clone(), [group["lr"] for group in optimizer.param_groups]
    tokens = tokens_of(STEPS, accelerator.process_index, accelerator.num_processes)
    accelerator.backward(loss_of(prepared, tokens))
    optimizer.step()
    after = {key: each.detach().clone() for key, each in trained.items()}
    accelerator.end_training()
    texts = [str(warning.message) for warning in caught]
    return Going(
        loaded, buffer, model.frozen.weight.detach(), model.head.weight is model.embedding.weight, rates, texts, after
    )
