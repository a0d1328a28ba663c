"""`accel estimate-memory MODEL`: what training a model takes, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accel_big_model.estimate.estimating import BATCH, estimate_memory
from accel_big_model.estimate.model_arguments import REFUSALS, add_model_arguments, opened_model
from accel_big_model.estimate.precisions import PRECISIONS
from accel_big_model.estimate.strategies import STRATEGIES
from accel_core.api.launcher import format_table

if TYPE_CHECKING:
    from accel_big_model.estimate.result import MemoryEstimate, StrategyEstimate

FINE, NO_ANSWER = 0, 2  # exit statuses

_EPILOG = """The model is a folder with config.json or *.safetensors, a config.json of transformers, module:function (a function or
class of yours that returns a model), or a name on the Hugging Face Hub. No memory is allocated for the model. Peaks do not include
the process itself, its libraries, and temporary memory inside of kernels."""
_SIZES = ("weights", "gradients", "optimizer", "communication", "activations")
_HEADER = ("dtype", "strategy", *_SIZES, "peak per rank", "fits")


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate the memory that training a model needs on each device, by number format and strategy."""
    given = parser().parse_args(arguments)
    try:
        estimate = _estimated(given)
    except REFUSALS as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    print(json.dumps(as_json(estimate), indent=2) if given.json else as_text(estimate))  # noqa: T201
    return FINE


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(prog="accel estimate-memory", description=main.__doc__, epilog=_EPILOG)
    add_model_arguments(page)
    add = page.add_argument
    add("--library_name", "--library-name", choices=("transformers",), help="library that defines the model")
    about = f"number formats to compare: any of {', '.join(PRECISIONS)} (default: fp32 bf16)"
    add("--dtypes", "--dtype", nargs="+", default=["fp32", "bf16"], help=about)
    about = f"strategies to compare: any of {', '.join(STRATEGIES)} (default: all)"
    add("--strategy", "--strategies", nargs="+", default=["all"], help=about)
    add("--world", "--num-processes", type=int, default=8, metavar="N", help="number of processes (default: 8)")
    about = "number of processes that share each layer, under the strategy tensor (default: 2)"
    add("--tensor-parallel", type=int, default=2, metavar="N", help=about)
    about = "memory of each device, in bytes or with a unit, such as 40GiB (default: 80GiB)"
    add("--memory", default="80GiB", help=about)
    about = "kind of device to estimate for: accelerator (default), or cpu"
    add("--device", default="accelerator", help=about)
    about = "under fsdp and tensor: compute results of layers again instead of keeping them"
    add("--activation-checkpointing", action="store_true", help=about)
    add("--json", action="store_true", help="print JSON: all sizes in bytes, and the formulas")
    return page


def _estimated(given: argparse.Namespace) -> MemoryEstimate:
    with opened_model(given) as (model, batch):
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
            name=given.model,
        )


def _words(given: Sequence[str]) -> list[str]:
    return [word for text in given for word in text.split(",") if word]


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
