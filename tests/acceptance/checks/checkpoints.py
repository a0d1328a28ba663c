"""Runs go on from their checkpoints exactly, and are saved while they train, whatever the device is doing meanwhile."""

from __future__ import annotations

import time
from typing import Any

import torch
from acceptance.registry import ALL, ANY, EVEN, Run, check
from acceptance.training import PLAN, Curve, Shape, Trainer, make_model

STEPS = 6


def resumes(run: Run, **options: Any) -> str:
    """Trains and saves in the first processes, goes on in others: equal to having gone on."""
    from accel_core import set_seed

    set_seed(7)
    trainer = Trainer(run, STEPS, options, Shape(rows=4 * run.size, dropout=0.2))
    file = run.folder / f"curve-{run.rank}.pt"
    if run.stage == 0:
        whole = trainer.train(STEPS // 2, run.folder / "state")
        torch.save({"losses": whole.losses[STEPS // 2 :], "norms": whole.norms[STEPS // 2 :]}, file)
        return ""
    trainer.accelerator.load_state(run.folder / "state")
    found, expected = trainer.train(), Curve(**torch.load(file, weights_only=True))
    assert len(found.losses) == STEPS - STEPS // 2, f"{len(found.losses)} steps were left"
    assert found == expected, f"found {found}, where it would have gone on with {expected}"
    return "equal"


@check(stages=2)
def resume(run: Run) -> str:
    """One device with dropout: a run that is resumed is the run that went on."""
    return resumes(run)


@check(devices=ALL, stages=2, long=True)
def resume_ddp_bf16(run: Run) -> str:
    """DDP with dropout, in bf16."""
    return resumes(run, mixed_precision="bf16")


@check(devices=ANY, stages=2)
def resume_fsdp(run: Run) -> str:
    """FSDP with dropout."""
    from accel_fsdp import FSDP

    return resumes(run, strategy=FSDP())


@check(devices=EVEN, stages=2)
def resume_tensor_parallel(run: Run) -> str:
    """Tensor parallelism with dropout: random numbers over shards go on as well."""
    from accel_fsdp import FSDP

    return resumes(run, strategy=FSDP(tensor_parallel=2, parallelize_plan=PLAN))


def keep_busy(run: Run) -> None:
    """A tenth of a second of work that the device has still to do, where it can be told to; of CUDA, in cycles."""
    sleep = getattr(torch.get_device_module(run.device), "_sleep", None)
    if sleep is not None:
        sleep(200_000_000 if run.is_cuda else 0.1)


def trained_meanwhile(run: Run, asynchronous: str, stream: Any = None, **options: Any) -> None:
    """A save, and at once steps that change all it holds: what is loaded is what was saved."""
    from contextlib import nullcontext

    shape = Shape(width=256, layers=4, rows=4 * run.size)
    trainer = Trainer(run, 8, options, shape)
    with torch.get_device_module(run.device).stream(stream) if stream is not None else nullcontext():
        batches = iter(trainer.loader)
        trainer.step(next(batches)[0])
        expected = {name: value.clone() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}
        keep_busy(run)
        for (tokens,) in (next(batches), next(batches)):
            trainer.accelerator.save_state(run.folder / "state", asynchronous=asynchronous)
            for _ in range(2):
                trainer.step(tokens)
            trainer.accelerator.wait_for_checkpoint()
            loaded = Trainer(run, 8, options, shape)
            loaded.accelerator.load_state(run.folder / "state")
            found = loaded.accelerator.get_state_dict(loaded.model)
            assert found.keys() == expected.keys()
            wrong = [name for name, value in expected.items() if not torch.equal(value.cpu(), found[name].cpu())]
            assert not wrong, f"saved {asynchronous} while training went on, {len(wrong)} tensors are torn: {wrong[:3]}"
            expected = {
                name: value.clone() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()
            }


@check(seconds=120)
def eager(run: Run) -> None:
    """An eager save, while training goes on."""
    trained_meanwhile(run, "eager")


@check(seconds=120)
def lazy(run: Run) -> None:
    """A lazy save, while training goes on."""
    trained_meanwhile(run, "lazy")


@check(devices=ANY, seconds=120, long=True)
def lazy_fsdp(run: Run) -> None:
    """A lazy save of shards, while training goes on."""
    from accel_fsdp import FSDP

    trained_meanwhile(run, "lazy", strategy=FSDP())


@check(on="accelerator", seconds=120)
def lazy_in_a_stream(run: Run) -> None:
    """A lazy save of a loop that runs in a stream of its own."""
    trained_meanwhile(run, "lazy", torch.get_device_module(run.device).Stream())


@check(on="cuda", seconds=120)
def lazy_beside_a_capture(run: Run) -> None:
    """A CUDA graph is captured behind a lazy save: torch waits for the device before it begins to."""
    accelerator = run.accelerator()
    model = accelerator.prepare(make_model(Shape(width=512, layers=8)))
    expected = model.head.weight.detach().clone()
    static = torch.zeros(1024, 1024, device=run.device)
    torch.cuda.synchronize()
    for number in range(5):
        accelerator.save_state(run.folder / f"state-{number}", asynchronous="lazy")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                static.add_(1)
        graph.replay()
        accelerator.wait_for_checkpoint()
    torch.cuda.synchronize()
    assert static[0, 0].item() == 250, static[0, 0]
    accelerator.load_state(run.folder / "state-4")
    assert torch.equal(model.head.weight, expected)


@check(devices=ALL, stages=2, seconds=120, long=True)
def other_world(run: Run) -> str:
    """What FSDP has saved on all devices is loaded under DDP, and the other way round."""
    from accel_fsdp import FSDP

    first, second = [{"strategy": FSDP()}, {"strategy": "ddp"}][:: -1 if run.stage else 1]
    shape = Shape(rows=4 * run.size)
    trainer, other = Trainer(run, 2, first, shape), Trainer(run, 2, second, shape)
    trainer.train()
    trainer.accelerator.save_state(run.folder / "state")
    other.accelerator.load_state(run.folder / "state")
    whole, found = (each.accelerator.get_state_dict(each.model) for each in (trainer, other))
    if run.rank == 0:  # of a sharded model, the others have nothing
        assert whole.keys() == found.keys()
        assert all(torch.equal(value.cpu(), found[name].cpu()) for name, value in whole.items())
    return "equal"


@check(devices=ANY, long=True, seconds=240)
def rate(run: Run) -> str:
    """How fast all devices save and load a model of 2 GiB with its moments; what training waits for."""
    from accel_fsdp import FSDP

    accelerator = run.accelerator(strategy=FSDP())
    width = 1024 if run.device.type == "cpu" else 6144
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(5)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, width, device=run.device)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    size, told = 3 * 4 * 5 * width**2 / 1e9, []
    for asynchronous in (False, "eager", "lazy", "eager", "lazy"):  # the first of each makes its buffers
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.save_state(run.folder / "state", asynchronous=asynchronous)
        blocked = time.perf_counter() - began
        accelerator.wait_for_checkpoint()
        written = time.perf_counter() - began
        told.append((str(asynchronous or "sync"), blocked, written))
    began = time.perf_counter()
    accelerator.load_state(run.folder / "state")
    loaded = time.perf_counter() - began
    rates = {name: f"{name} blocks {blocked:.2f} s, {size / written:.1f} GB/s" for name, blocked, written in told}
    return f"{size:.1f} GB: {', '.join(rates.values())}, loads {size / loaded:.1f} GB/s"
