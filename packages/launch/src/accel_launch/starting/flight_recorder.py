"""Variables by which NCCL's part of torch says what it was at when a collective timed out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DUMP, _SIZE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE"
_OLDER = {_DUMP: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", _SIZE: "TORCH_NCCL_TRACE_BUFFER_SIZE"}
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's agent gives 1 where nothing is set, with which nothing is dumped
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    _SIZE: "2000",
}


def recording(log_dir: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's flight recorder; dumps stand in `log_dir`, beside those of earlier launches. Set ones hold."""
    variables = dict(_VARIABLES)
    if log_dir is not None:
        starts = (f"flight_recorder_{f'launch_{number}_' if number > 1 else ''}" for number in itertools.count(1))
        start = next(each for each in starts if not any(log_dir.glob(f"{each}[ar]*")))  # of attempts, and ranks
        variables[_DUMP] = f"{log_dir.absolute()}/{start}rank_"
    return {
        name: value
        for name, value in variables.items()
        if not environ.get(name) and not environ.get(_OLDER.get(name, ""))
    }


def recording_again(attempt: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an attempt after the first, whose dumps stand beside the earlier ones."""
    folder, _, name = environ.get(_DUMP, "").rpartition("/")
    is_ours = name.startswith("flight_recorder_") and name.endswith("rank_")  # torch adds the number of the rank
    return {_DUMP: f"{folder}/{name.removesuffix('rank_')}attempt_{attempt}_rank_"} if attempt and is_ours else {}
