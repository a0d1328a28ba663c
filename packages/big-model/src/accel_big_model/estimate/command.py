"""`accel estimate-memory MODEL`: what training a model takes, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_big_model.estimate.estimating import BATCH, estimate_memory
from accel_big_model.estimate.inputs import batch_of, read_input
from accel_big_model.estimate.optimizers import OPTIMIZERS
from accel_big_model.estimate.precisions import PRECISIONS
from accel_big_model.estimate.shapes import ModelShape
from accel_big_model.estimate.sources import open_model, working_directory
from accel_big_model.estimate.strategies import STRATEGIES
from accel_core import NotInstalledError
from accel_core.api.launcher import format_table

if TYPE_CHECKING:
    from accel_big_model.estimate.result import MemoryEstimate, StrategyEstimate

FINE, NO_ANSWER = 0, 2  # exit statuses

_EPILOG = """The model is a folder with config.json or *.safetensors, a config.json of transformers, module:function (a function or
class of yours that returns a model), or a name on the Hugging Face Hub. No memory is allocated for the model. Peaks do not include
the process itself, its libraries, and temporary memory inside of kernels."""
_HEADER = (
    "dtype",
    "strategy",
    "weights",
    "gradients",
    "optimizer",
    "communication",
    "activations",
    "peak per rank",
    "fits",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate the memory that training a model needs on each device, by number format and strategy."""
    given = parser().parse_args(arguments)
    try:
        estimate = _estimated(given)
    except (ValueError, NotInstalledError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    print(json.dumps(as_json(estimate), indent=2) if given.json else as_text(estimate))  # noqa: T201
    return FINE


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel estimate-memory", description=main.__doc__, epilog=_EPILOG)
    add = page.add_argument
    add(
        "model_name",
        metavar="MODEL",
        help="a folder, a config.json, a name on the Hugging Face Hub, or module:function in your code",
    )
    add("--library_name", "--library-name", choices=("transformers",), help="library that defines the model")
    add(
        "--dtypes",
        "--dtype",
        nargs="+",
        default=["fp32", "bf16"],
        help=f"number formats to compare: any of {', '.join(PRECISIONS)} (default: fp32 bf16)",
    )
    add(
        "--strategy",
        "--strategies",
        nargs="+",
        default=["all"],
        help=f"strategies to compare: any of {', '.join(STRATEGIES)} (default: all)",
    )
    add("--world", "--num-processes", type=int, default=8, metavar="N", help="number of processes (default: 8)")
    add(
        "--tensor-parallel",
        type=int,
        default=2,
        metavar="N",
        help="number of processes that share each layer, under the strategy tensor (default: 2)",
    )
    add(
        "--optimizer",
        default="adamw",
        help=f"one of {', '.join(OPTIMIZERS)}, or module:Class in your code (default: adamw)",
    )
    add("--batch", type=int, default=1, metavar="ROWS", help="number of rows in the batch of one process (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens in a row (default: 2048, or the most that the model takes)")
    add("--input", metavar="SHAPE", help="shape of one row, such as 3x224x224; or module:function that returns a batch")
    add("--arguments", default="{}", metavar="JSON", help="arguments of module:function, such as '{\"layers\": 4}'")
    add(
        "--memory",
        default="80GiB",
        help="memory of each device, in bytes or with a unit, such as 40GiB (default: 80GiB)",
    )
    add(
        "--device",
        default="accelerator",
        help="kind of device to estimate for: accelerator (default), or cpu",
    )
    add(
        "--activation-checkpointing",
        action="store_true",
        help="under fsdp and tensor: compute results of layers again instead of keeping them",
    )
    add(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a model on the Hugging Face Hub",
    )
    add("--json", action="store_true", help="print JSON: all sizes in bytes, and the formulas")
    return page


def _estimated(given: argparse.Namespace) -> MemoryEstimate:
    for name in ("batch", "sequence"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} {getattr(given, name)}: expected a number of at least 1.")
    names_code = any(":" in text for text in (given.model_name, given.input or "", given.optimizer))
    with working_directory() if names_code else nullcontext():  # a model's folder may have files of any names
        model = open_model(given.model_name, read_arguments(given.arguments), given.trust_remote_code)
        if given.input:
            batch = read_input(given.input, given.batch)
        else:
            batch = None if isinstance(model, ModelShape) else batch_of(model, given.batch, given.sequence)
        return estimate_memory(
            model,
            batch=batch,
            dtypes=_words(given.dtypes),
            strategies=STRATEGIES if _words(given.strategy) == ["all"] else _words(given.strategy),
            world_size=given.world,
            tensor_parallel=given.tensor_parallel,
            optimizer=given.optimizer,
            memory=given.memory,
            device=given.device,
            activation_checkpointing=given.activation_checkpointing,
            name=given.model_name,
        )


def _words(given: Sequence[str]) -> list[str]:
    return [word for text in given for word in text.split(",") if word]


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a callable. Raises `ValueError` for what is no object of JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--arguments {text!r} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"--arguments {text!r}: expected an object of JSON, such as '{{\"layers\": 4}}'.")
    return found


def as_json(estimate: MemoryEstimate) -> dict[str, Any]:
    """All of it, sizes in bytes, with the peaks and whether they fit."""
    rows = [
        {**asdict(row), "peak": row.peak, "complete": row.complete, "fits": row.fits(estimate.memory)}
        for row in estimate.rows
    ]
    return {**asdict(estimate), "rows": rows}


def as_text(estimate: MemoryEstimate) -> str:
    """A table, and below it what its reader has to know."""
    trained = "" if estimate.trained == estimate.parameters else f", {_count(estimate.trained)} trained"
    title = f"{estimate.model}: {_count(estimate.parameters)} parameters{trained}; {estimate.optimizer}"
    title += f"; {BATCH}: {estimate.assumptions[BATCH]}"
    table = format_table(_HEADER, [_cells(row, estimate.memory) for row in estimate.rows])
    notes = [f"{row.strategy}, {row.dtype}: {note}" for row in estimate.rows for note in row.notes]
    notes += [f"{what}: {text}" for what, text in estimate.assumptions.items() if " in " in what]
    closing = "A peak is less than the sum, for not all is there at once. --json has bytes, moments and formulas."
    return "\n".join([title, "", table, "", *dict.fromkeys(notes), closing])


def _cells(row: StrategyEstimate, memory: int) -> tuple[str, ...]:
    parts = (row.weights, row.gradients, row.optimizer, row.communication)
    trained = row.gradients is not None
    activations = size(row.activations) if row.complete else "unknown" if trained else "-"
    fits = {True: "yes", False: "no", None: "unknown"}[row.fits(memory)]
    return (
        row.dtype,
        row.strategy,
        *("-" if each is None else size(each) for each in parts),
        activations,
        f"{'' if row.complete else '≥ '}{size(row.peak)}",
        f"{row.ranks} × {size(memory)}: {fits}",
    )


def size(count: int | None) -> str:
    """Bytes in a unit that leaves three or four digits."""
    value = float(count or 0)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def _count(number: int) -> str:
    for factor, word in ((10**9, " billion"), (10**6, " million")):
        if number >= factor:
            return f"{number / factor:.3g}{word}"
    return str(number)
