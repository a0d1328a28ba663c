"""The values of a checkpoint, whole, without the run that saved it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.reading import Checkpoint
from accel_core.api.layouts import Elementwise, Partial


def read_values(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Each tensor and object of a checkpoint of `save_state`, by name; tensors one after another.

    Tensors are whole, in CPU memory, of the dtype that was saved; of a part that only some ranks
    had, and of an object that differs between ranks, each is given under the name with its rank or
    part. Names are "model.<i>/<name>", "optimizer.<i>/<parameter>/<key>", "optimizer.<i>",
    "scheduler.<i>", "loader.<i>", "object.<i>", "random". No collective. Raises `CheckpointError`
    for what is incomplete or damaged.
    """
    with Checkpoint(Path(folder)) as checkpoint:
        for name, record in checkpoint.index.tensors.items():
            if record["kind"] == "opaque":
                for part in record["parts"]:
                    yield f"{name} ({part['part']})", checkpoint.opaque(name, part["part"])
                continue
            value = torch.empty(record["shape"], dtype=checkpoint.index.dtype(name))
            lies = Partial(value) if record["kind"] == "partial" else Elementwise.whole(value)
            for job in checkpoint.jobs(name, lies, 0, 0):
                job()
            yield name, value
        for unit, entries in checkpoint.index.objects.items():
            for entry in entries:
                first = 0 if entry["ranks"] == "all" else entry["ranks"][0]
                yield unit if len(entries) == 1 else f"{unit} (rank {first})", checkpoint.object_of(unit, first)
