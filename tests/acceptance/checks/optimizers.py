"""Optimizers whose kernels read their state by raw pointers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from acceptance.registry import Run, check, skip

KINDS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "capturable": {"capturable": True}}


def options_here(run: Run) -> dict[str, dict[str, Any]]:
    return {name: given for name, given in KINDS.items() if name != "capturable" or run.is_cuda}


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 24).view(3, 8).to(next(model.parameters()).device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(options: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def expected(steps: int) -> torch.Tensor:
    model, optimizer = made({})
    for _ in range(steps):
        step(model, optimizer)
    return model.weight.detach()


def assert_same(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].device == run.device, f"{what}: {name} is on {state[name].device}"
    step(model, optimizer)
    torch.testing.assert_close(model.weight.detach().cpu(), expected(2), msg=lambda text: f"{what}: {text}")


@check()
def stepped_before_prepare(run: Run) -> str:
    """Fused, foreach and capturable AdamW that have stepped on the host before `prepare` go on as they were."""
    told = []
    for name, given in options_here(run).items():
        model, optimizer = made({} if name == "capturable" else given)
        step(model, optimizer)
        if name == "capturable":
            optimizer.param_groups[0]["capturable"] = True
        model, optimizer = run.accelerator().prepare(model, optimizer)
        assert_same(run, model, optimizer, name)
        told.append(name)
    return ", ".join(told)


@check()
def loaded_before_prepare(run: Run) -> str:
    """The same with a state that was loaded before `prepare`."""
    first, its_optimizer = made({})
    step(first, its_optimizer)
    told = []
    for name, given in options_here(run).items():
        model, optimizer = made({} if name == "capturable" else given)
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(deepcopy(its_optimizer.state_dict()))
        optimizer.param_groups[0].update(given)
        model, optimizer = run.accelerator().prepare(model, optimizer)
        assert_same(run, model, optimizer, name)
        told.append(name)
    return ", ".join(told)


@check()
def resumed(run: Run) -> str:
    """The same with a state of a checkpoint."""
    told = []
    for name, given in options_here(run).items():
        accelerator = run.accelerator()
        model, optimizer = accelerator.prepare(*made(given))
        step(model, optimizer)
        accelerator.save_state(run.folder / name)
        accelerator = run.accelerator()
        model, optimizer = accelerator.prepare(*made(given))
        accelerator.load_state(run.folder / name)
        assert_same(run, model, optimizer, name)
        told.append(name)
    return ", ".join(told)


@check(package="bitsandbytes", on="cuda")
def bitsandbytes(run: Run) -> str:
    """8-bit AdamW of bitsandbytes: saved, loaded, and equal."""
    import bitsandbytes as bnb

    if not hasattr(bnb.optim, "AdamW8bit"):
        skip("no AdamW8bit")

    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        accelerator = run.accelerator()
        model = torch.nn.Linear(128, 128)
        return accelerator, *accelerator.prepare(model, bnb.optim.AdamW8bit(model.parameters(), lr=0.1))

    def go(model: Any, optimizer: Any) -> None:
        model(torch.linspace(-1, 1, 256, device=run.device).view(2, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator, model, optimizer = build()
    go(model, optimizer)
    accelerator.save_state(run.folder / "state")
    go(model, optimizer)
    later, resumed_model, its_optimizer = build()
    later.load_state(run.folder / "state")
    go(resumed_model, its_optimizer)
    assert torch.equal(model.weight, resumed_model.weight)
    return "equal"
