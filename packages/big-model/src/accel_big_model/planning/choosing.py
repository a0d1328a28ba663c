"""`plan_training`: the simplest way to train a model that fits into the memory of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_big_model.estimate.command import size
from accel_big_model.estimate.estimating import estimate_memory
from accel_big_model.estimate.precisions import read_precision
from accel_big_model.estimate.shapes import ROOT, ModelShape, shape_of_model
from accel_big_model.estimate.sources import open_model
from accel_big_model.planning.candidates import Candidate, list_candidates, offload
from accel_big_model.sizes import convert_file_size_to_int

if TYPE_CHECKING:
    from accel_big_model.estimate.optimizers import OptimizerMaker
    from accel_big_model.estimate.result import StrategyEstimate

ROOM = 0.1
"""The part of a device's memory that is left free by default: for libraries, kernels, and gaps of the allocator."""

_MOST_DEVICES = 1024


@dataclass(frozen=True)
class TrainingPlan:
    """What was considered, and what was chosen.

    Args:
        model, parameters: its name, and how many elements it has.
        devices, memory: how many, and the bytes of each.
        usable: the bytes that may be taken, which leaves head room.
        precision: as `mixed_precision` names it.
        considered: simplest first, up to the chosen one.
        chosen: the one that fits; None: none does.
        advice: what would help, where none fits.
    """

    model: str
    parameters: int
    devices: int
    memory: int
    usable: int
    precision: str
    considered: tuple[Candidate, ...]
    chosen: Candidate | None
    advice: tuple[str, ...] = ()

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Keys and values of a file for `accel launch --config-file`. Raises `ValueError` if none fits."""
        if self.chosen is None:
            raise ValueError("Nothing fits, so there is no configuration. See `advice`.")
        return {"num_processes": self.devices, "mixed_precision": self.precision, **self.chosen.options}


def plan_training(
    model: nn.Module | ModelShape | str | Path,
    *,
    batch: Any = None,
    devices: int,
    memory: int | str,
    dtype: str = "bf16",
    optimizer: str | OptimizerMaker = "adamw",
    room: float = ROOM,
    host_memory: int | str | None = None,
    device: str = "accelerator",
    name: str | None = None,
) -> TrainingPlan:
    """Chooses the simplest way to train a model that fits: DDP, FSDP, then with further options.

    Nothing is allocated, no process is started. Sizes are those of `estimate_memory`.

    Args:
        model, batch, optimizer, name: as for `estimate_memory`; the batch is that of one rank.
        devices: how many accelerators train, one process on each.
        memory: bytes of each, or text such as "80GiB".
        dtype: as for `estimate_memory`, of what is trained.
        room: the part of the memory that is to stay free.
        host_memory: of the machine, for all its ranks; None: whether offloading fits there is not asked.
        device: "accelerator", or "cpu": as for `estimate_memory`.

    Raises:
        ValueError: as `estimate_memory`; also for a dtype in which nothing is trained, a `room`
            that is not in [0, 1), or activations that nobody knows.
    """
    _check(devices, dtype, room)
    if isinstance(model, (str, Path)):
        name = str(model) if name is None else name
        model = open_model(str(model))
    shape = model if isinstance(model, ModelShape) else shape_of_model(model)
    limit = convert_file_size_to_int(memory)
    usable = int(limit * (1 - room))
    asked = _Asked(model, batch, optimizer, device, dtype, devices)
    has_units = any(each.unit != ROOT for each in shape.parameters)
    host = None if host_memory is None else convert_file_size_to_int(host_memory) // devices
    considered = list[Candidate]()
    chosen = None
    for each in list_candidates(asked.estimate, devices, has_units):
        considered.append(each)
        if each.estimate.peak <= usable and (host is None or each.host <= host):
            chosen = each
            break
    advice = () if chosen else tuple(_advice(asked, considered, usable, has_units))
    return TrainingPlan(
        name or type(model).__name__,
        shape.numel,
        devices,
        limit,
        usable,
        _mixed_precision(dtype),
        tuple(considered),
        chosen,
        advice,
    )


def _mixed_precision(dtype: str) -> str:
    """The `mixed_precision` of a dtype: torch's names are of weights, and the Accelerator has others for these."""
    name = read_precision(dtype).name
    if dtype == "tf32":  # sizes are those of fp32, products are not
        return dtype
    return "no" if name == "fp32" else name


def _check(devices: int, dtype: str, room: float) -> None:
    if devices < 1:
        raise ValueError(f"devices={devices}: expected how many accelerators train, at least 1.")
    if not 0 <= room < 1:
        raise ValueError(f"room={room}: expected the part of the memory that stays free, such as 0.1.")
    if read_precision(dtype).param is None:
        raise ValueError(f"dtype {dtype!r} is of weights that are not trained. Give bf16, fp16, fp32 or bf16-true.")


@dataclass(frozen=True)
class _Asked:
    """A model and what it is trained with."""

    model: nn.Module | ModelShape
    batch: Any
    optimizer: str | OptimizerMaker
    device: str
    dtype: str
    devices: int

    def estimate(
        self, strategy: str, checkpointing: bool, devices: int | None = None, dtype: str | None = None
    ) -> StrategyEstimate:
        """The row of a strategy; raises `ValueError` where activations are unknown."""
        dtype = dtype or self.dtype
        found = estimate_memory(
            self.model,
            batch=self.batch,
            dtypes=[dtype],
            strategies=[strategy],
            world_size=devices or self.devices,
            optimizer=self.optimizer,
            device=self.device,
            activation_checkpointing=checkpointing,
        )
        (row,) = found.rows
        if not row.complete:
            why = next(
                (text for what, text in found.assumptions.items() if what.startswith("activations in")), "unknown"
            )
            raise ValueError(
                f"What the activations take is {why}. So nobody can say what fits: give --input, the shape of one row or a function that returns a batch."
            )
        return row


def _advice(asked: _Asked, considered: list[Candidate], usable: int, has_units: bool) -> list[str]:
    """What would make it fit, each tried alone."""
    found = []
    again = " with activation checkpointing" if has_units else ""
    if asked.estimate("fsdp", has_units, _MOST_DEVICES).peak <= usable:
        devices = 2 * asked.devices
        while asked.estimate("fsdp", has_units, devices).peak > usable:
            devices *= 2
        found.append(f"{devices} devices: fsdp{again} fits")
    if read_precision(asked.dtype).bits > 16:
        row = asked.estimate("fsdp", has_units, dtype="bf16-true")
        if min(row.peak, offload(row).peak) <= usable:
            found.append(f"parameters in bfloat16 (--dtype bf16-true): fsdp{again} fits")
    last = considered[-1].estimate
    if last.activations and last.activations > usable / 2:
        found.append(f"a smaller batch or shorter rows: activations take {size(last.activations)} at most")
    if not has_units:
        found.append(
            "checkpointing inside of the model: it has no repeated blocks of which the forward could run again"
        )
    return found or ["a smaller model, or devices with more memory: more of them would not help"]
