"""The same state of a run, saved and loaded as each library does it.

A class of `WAYS` takes a `Run` and has `save(folder)` and `load(folder)`; those of `BEHIND` have `begin(folder)`, which returns
what waits until the folder is complete. `folder` does not exist before, and is on the disk afterwards; what a library leaves in
the cache of the system is written by `settle`, outside of the time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

LAYERS = 12
MIB = 2**20
Wait = Callable[[], object]


class Run:
    """A GPT without its embeddings, all fp32, and the AdamW that trains it: 144 parameters, whatever their size.

    Args:
        size: of weights and moments together, in MiB. The gradients are not counted.
        fresh: it has not begun: there are neither gradients nor moments.
    """

    def __init__(self, size: int, fresh: bool = False) -> None:
        width = max(8, round(math.sqrt(size * MIB / (3 * 4 * LAYERS * 12)) / 8) * 8)
        torch.manual_seed(1)
        self.model = nn.ModuleList(_block(width) for _ in range(LAYERS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.gradients = [] if fresh else [torch.full_like(parameter, 0.5) for parameter in self.model.parameters()]
        if not fresh:
            self.step()

    def step(self) -> None:
        """A step with the same gradients as all others, which a load may have taken away."""
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """Weights and moments, as they are used now."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters()]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    def nbytes(self) -> int:
        """Of weights and moments."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def sums(self) -> list[float]:
        """Something to compare two states by."""
        return [float(tensor.sum()) for tensor in self.tensors()]

    def forget(self) -> None:
        """Sets weights and moments to zero."""
        torch._foreach_zero_(self.tensors())


def _block(width: int) -> nn.Module:
    return nn.ModuleDict(
        {
            "before": nn.LayerNorm(width),
            "attention": nn.Linear(width, 3 * width),
            "projection": nn.Linear(width, width),
            "between": nn.LayerNorm(width),
            "up": nn.Linear(width, 4 * width),
            "down": nn.Linear(4 * width, width),
        }
    )


class Plain:
    """`torch.save` into one file, put in its place once it is on the disk; `torch.load` reads all of it."""

    mapped = False

    def __init__(self, run: Run) -> None:
        self.run = run

    def save(self, folder: Path) -> None:
        folder.mkdir()
        state = {"model": self.run.model.state_dict(), "optimizer": self.run.optimizer.state_dict()}
        with (folder / "state.pt.tmp").open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        (folder / "state.pt.tmp").replace(folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", mmap=self.mapped, weights_only=True)
        self.run.model.load_state_dict(state["model"])
        self.run.optimizer.load_state_dict(state["optimizer"])


class Mapped(Plain):
    """The same, but `torch.load` maps the file: what is not copied then is read when it is used."""

    mapped = True


class Distributed:
    """torch.distributed.checkpoint, in a world of one."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.run.model, self.run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def begin(self, folder: Path) -> Wait:
        import torch.distributed.checkpoint as dcp

        return dcp.async_save(self._state(), checkpoint_id=folder).result

    def _state(self) -> dict[str, object]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}


class Accelerate:
    """Hugging Face Accelerate, which writes without syncing."""

    def __init__(self, run: Run) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.prepared = self.accelerator.prepare(run.model, run.optimizer)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(folder)


class Fabric:
    """Lightning Fabric, which writes without syncing."""

    def __init__(self, run: Run) -> None:
        from lightning_fabric import Fabric as Peer

        self.fabric = Peer(accelerator="cpu")
        model, optimizer = self.fabric.setup(run.model, run.optimizer)
        self.state = {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        folder.mkdir()
        self.fabric.save(folder / "state.ckpt", self.state)

    def load(self, folder: Path) -> None:
        self.fabric.load(folder / "state.ckpt", self.state)


class Accel:
    """Ours."""

    asynchronous = "eager"

    def __init__(self, run: Run) -> None:
        from accel_core import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.prepared = self.accelerator.prepare(run.model, run.optimizer)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(folder)

    def begin(self, folder: Path) -> Wait:
        self.accelerator.save_state(folder, asynchronous=self.asynchronous)
        return self.accelerator.wait_for_checkpoint


class Lazy(Accel):
    """Ours, where the next step of the optimizer waits for the copy."""

    asynchronous = "lazy"


class Copied:
    """The state copied into memory that is there: what has to happen before training may go on."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.buffers = [tensor.clone() for tensor in run.tensors()]

    def begin(self, folder: Path) -> Wait:
        torch._foreach_copy_(self.buffers, self.run.tensors())
        return lambda: None


WAYS = {
    "plain": Plain,
    "mapped": Mapped,
    "dcp": Distributed,
    "accelerate": Accelerate,
    "fabric": Fabric,
    "accel": Accel,
}
BEHIND = {"plain": Copied, "dcp": Distributed, "eager": Accel, "lazy": Lazy}


def settle(folder: Path) -> None:
    """Writes what is still in the cache of the system, so that the next who saves does not pay for it."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
