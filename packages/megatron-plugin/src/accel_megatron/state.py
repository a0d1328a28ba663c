"""The state of a model for checkpoints: this rank's parts, and the names of what others have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_checkpoint import capture_model
from accel_core.api.layouts import Elementwise, Entry, Opaque, Replicated
from accel_megatron.layouts import parts_of
from accel_megatron.model_engine import engine_that_steps
from accel_megatron.sharding import MegatronSharding
from accel_megatron.stages import Form, Stages

if TYPE_CHECKING:
    from torch import nn


def model_state(model: nn.Module) -> dict[str, Entry]:
    """Live entries under the names of the whole model. No collective."""
    chunks = list(model.chunks) if isinstance(model, Stages) else [model]
    parts = {id(part.parameter): part for chunk in chunks for part in parts_of(chunk)}
    sharding = MegatronSharding({key: part.extent for key, part in parts.items()})
    if not isinstance(model, Stages):
        return capture_model(model, sharding)
    found: dict[str, Entry] = {}
    for number, chunk in enumerate(chunks):
        for local, entry in capture_model(chunk, sharding).items():
            if isinstance(entry, Replicated):  # a buffer, which other stages have not
                entry = Elementwise.whole(entry.data)
            found[model.named(f"chunks.{number}.{local}")] = entry
    masters = any((engine := engine_that_steps(each)) is not None and engine.shards for each in model.parameters())
    return {name: found[name] if name in found else _absent(form, masters) for name, form in model.order.items()}


def _absent(form: Form, masters: bool) -> Entry:
    """What another stage has, of which this rank has nothing; and values that are None everywhere."""
    if form.shape is None or form.dtype is None:
        return Opaque(None, type(None).__qualname__, assign=_ignore)
    return Elementwise(form.shape, torch.float32 if masters and form.is_trained else form.dtype, ())


def _ignore(_: object) -> None:
    """A stage that has no such module has no use for its state."""
