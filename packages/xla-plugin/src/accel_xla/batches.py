"""Batches on a mesh: divided over its devices, and the last one padded to the shape of the others."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_core import Rows
from accel_core.api.component import flatten, map_tensors

if TYPE_CHECKING:
    from accel_xla.engine import Engine

AXES = ("replicate", "shard")  # of the mesh: a batch is divided over both


class Batches:
    """Puts batches on the mesh of an engine. Each device gets as many rows as the others.

    The last batch of a loader may have fewer rows than the mesh needs, or than the batches before,
    for which another graph would be compiled. Rows of its own are repeated behind it then, as data
    parallelism does on as many ranks; metrics leave them out. One device gets it as it is.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._full: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # rows of full batches, by loader
        self._warned = False

    def place(self, batch: Any, rows: Rows | None, remaining: int | None, by: object) -> tuple[Any, Rows | None]:
        """A batch on the mesh, and its rows. Raises `ValueError` for one that does not divide it."""
        sizes = [leaf.shape[0] for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not sizes:
            return map_tensors(self._moved, batch), rows
        count, devices = sizes[0] if rows is None or rows.rows is None else rows.rows, self._engine.devices
        full = self._full[by] = max(self._full.get(by, 0), count)
        if devices > 1 and remaining == 0 and (count % devices or count < full):
            target = max(full, -(-count // devices) * devices)
            target = -(-target // devices) * devices
            real = count if rows is None else rows.real
            batch, rows = map_tensors(lambda leaf: _padded(leaf, count, target), batch), Rows(target, real)
            count = target
        elif count % devices:
            raise ValueError(
                f"A batch has {count} rows, and the mesh {devices} devices, which share a batch in equal parts. Take a batch_size "
                f"that {devices} divides."
            )
        return map_tensors(lambda leaf: self._divided(self._moved(leaf), count), batch), rows

    def divide_inputs(self, args: Any, kwargs: Any) -> None:
        """Divides what a model is called with and was placed by hand; what does not divide stays."""
        for leaf in flatten((args, kwargs))[0]:
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla" or not leaf.dim():
                continue
            if self._engine.devices == 1 or self._engine.is_marked(leaf):
                continue
            if leaf.shape[0] % self._engine.devices == 0:
                self._divided(leaf, leaf.shape[0])
            elif not self._warned:
                self._warned = True
                warnings.warn(
                    f"A model was called with {leaf.shape[0]} rows, which the {self._engine.devices} devices of the mesh do not "
                    f"divide: every device computes all of them. Loop over a prepared loader, which pads, or take a batch size "
                    f"that divides.",
                    stacklevel=2,
                )

    def _moved(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(self._engine.device)

    def _divided(self, leaf: torch.Tensor, count: int) -> torch.Tensor:
        if self._engine.devices > 1 and leaf.dim() and leaf.shape[0] == count and leaf.numel():
            self._engine.mark(leaf, (AXES, *(None,) * (leaf.dim() - 1)))
        return leaf


def _padded(leaf: torch.Tensor, count: int, target: int) -> torch.Tensor:
    """A tensor with a row per sample, its rows repeated until there are `target` of them."""
    if not leaf.dim() or leaf.shape[0] != count:
        return leaf
    return leaf[torch.arange(target, device=leaf.device) % count]


class ModelCalls:
    """The hooks on a model: its inputs are divided, and in an evaluation it runs at the end of each call.

    What is done with its outputs is recorded behind that: the last batch, of which a part counts, is
    no other graph then. Copies of the model share this object; what is pickled does nothing.
    """

    def __init__(self, batches: Batches | None = None, run: Callable[[], None] | None = None) -> None:
        self._batches, self._run = batches, run

    def before(self, module: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Divides what the model is called with."""
        if self._batches is not None:
            self._batches.divide_inputs(args, kwargs)

    def after(self, module: Any, args: Any, output: Any) -> None:  # noqa: ARG002
        """Runs what was recorded, if the model is evaluated."""
        if self._run is not None and not module.training and not torch.is_grad_enabled():
            self._run()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelCalls:
        return self

    def __reduce__(self) -> tuple[type[ModelCalls], tuple[()]]:
        return ModelCalls, ()
