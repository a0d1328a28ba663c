"""`accel plan MODEL`: how to train a model on so many devices, and the configuration for it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_big_model.estimate.command import size
from accel_big_model.estimate.model_arguments import REFUSALS, add_model_arguments, opened_model
from accel_big_model.planning.choosing import ROOM, TrainingPlan, plan_training
from accel_big_model.planning.configuration import write_configuration
from accel_big_model.planning.devices import count_devices, memory_of_smallest
from accel_core.api.launcher import format_table

if TYPE_CHECKING:
    from accel_big_model.planning.candidates import Candidate

FITS, NOTHING_FITS, NO_ANSWER = 0, 1, 2  # exit statuses

_EPILOG = """The model is a folder with config.json, a config.json of transformers, module:function (a function or class
of yours that returns a model), or a name on the Hugging Face Hub. Nothing is trained, and no memory
is allocated for the model. These ways are tried, simplest first:

  one device (single), or one copy of the model on each of several devices (ddp)
  one copy divided among all devices (fsdp)
  the same, computing results of layers again instead of keeping them (activation checkpointing)
  the same, with weights, gradients and optimizer state in main memory (CPU offload)

  accel plan ./llama --devices 8 --memory 80GiB --batch 4 --output plan.yaml
  accel launch --config-file plan.yaml train.py

exit status: 0 a way fits; 1 none fits, with advice; 2 no answer, with the reason"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Find a way to train a model on the devices that you have, and write its configuration."""
    typed = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(typed)
    try:
        plan = _planned(given)
        if plan.chosen and given.output:
            write_configuration(plan, Path(given.output), f"accel plan {shlex.join(typed)}\n{as_text(plan)}")
    except REFUSALS as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    print(json.dumps(as_json(plan), indent=2) if given.json else _told(plan, given.output))  # noqa: T201
    return FITS if plan.chosen else NOTHING_FITS


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(
        prog="accel plan",
        description=main.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(page)
    add = page.add_argument
    add("--devices", type=int, metavar="N", help="number of accelerators (default: those of this machine)")
    about = "memory of each accelerator, such as 80GiB (default: that of the smallest here)"
    add("--memory", metavar="SIZE", help=about)
    add("--room", type=float, default=ROOM, metavar="PART", help="fraction of the memory to keep free (default: 0.1)")
    add("--host-memory", metavar="SIZE", help="main memory of the machine, for offloading (default: not checked)")
    add("--dtype", default="bf16", help="number format to train in, such as bf16, fp32, bf16-true (default: bf16)")
    about = "write the configuration to this new file, for accel launch --config-file"
    add("--output", metavar="FILE", type=os.path.expanduser, help=about)  # no shell does so in --output=~/plan.yaml
    add("--json", action="store_true", help="print JSON: all sizes in bytes")
    return page


def _planned(given: argparse.Namespace) -> TrainingPlan:
    devices = count_devices() if given.devices is None else given.devices
    memory = memory_of_smallest() if given.memory is None else given.memory
    if not devices and given.devices is None:
        raise ValueError("This machine has no accelerator. Say which you mean: --devices 8 --memory 80GiB.")
    if memory is None:
        raise ValueError("How much memory a device has is not known here. Say it: --memory 80GiB.")
    with opened_model(given) as (model, batch):
        return plan_training(
            model,
            batch=batch,
            devices=devices,
            memory=memory,
            dtype=given.dtype,
            optimizer=given.optimizer,
            room=given.room,
            host_memory=given.host_memory,
            name=given.model,
        )


def as_json(plan: TrainingPlan) -> dict[str, Any]:
    """All of it, sizes in bytes."""
    rows = [{**asdict(each), "peak": each.estimate.peak} for each in plan.considered]
    return {
        **asdict(plan),
        "considered": rows,
        "chosen": plan.chosen and plan.chosen.name,
        "configuration": dict(plan.configuration) if plan.chosen else None,
    }


def as_text(plan: TrainingPlan) -> str:
    """What was considered, what fits, and why the simpler ways do not."""
    devices = "1 device" if plan.devices == 1 else f"{plan.devices} devices"
    title = f"{plan.model}: {plan.parameters / 1e9:.3g} billion parameters, {devices} of {size(plan.memory)}, mixed_precision {plan.precision}"
    sizes = ("weights", "gradients", "optimizer", "peak per device", "main memory")
    header = ("way to train", *sizes, f"of {size(plan.usable)}")
    table = format_table(header, [_cells(each, plan) for each in plan.considered])
    if plan.chosen is None:
        closing = "\n".join(["Nothing fits. What would help:", *(f"  {line}" for line in plan.advice)])
    else:
        free = plan.memory - plan.chosen.estimate.peak
        closing = f"Train with {plan.chosen.name}: {size(free)} of each device stay free."
    return f"{title}\n\n{table}\n\n{closing}"


def _cells(each: Candidate, plan: TrainingPlan) -> tuple[str, ...]:
    row = each.estimate
    host = size(each.host * plan.devices) if each.host else "-"
    sizes = map(size, (row.weights, row.gradients, row.optimizer, row.peak))
    return (each.name, *sizes, host, _why(each, plan))


def _why(each: Candidate, plan: TrainingPlan) -> str:
    """That it fits, or what is in the way."""
    row = each.estimate
    if each is plan.chosen:
        return "fits"
    if row.peak <= plan.usable:
        return "too much main memory"
    parts = {
        "weights": row.weights,
        "gradients": row.gradients or 0,
        "the optimizer": row.optimizer or 0,
        "gathered weights": row.communication or 0,
        "activations": row.activations or 0,
    }
    return f"{size(row.peak - plan.usable)} too much, the most for {max(parts, key=lambda name: parts[name])}"


def _told(plan: TrainingPlan, output: str | None) -> str:
    text = as_text(plan)
    if plan.chosen is None:
        return text
    if output:
        return f"{text}\nWritten: {output}. Start with: accel launch --config-file {output} train.py"
    return f"{text}\n--output plan.yaml writes the configuration for: accel launch --config-file plan.yaml train.py"
