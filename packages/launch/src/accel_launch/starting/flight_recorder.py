"""Variables by which NCCL's part of torch says what it was at when a collective timed out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DUMP, _SIZE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_BUFFER_SIZE"
_NAME = "flight_recorder_{}rank_"  # torch adds the number of the rank
_OLDER = {_DUMP: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", _SIZE: "TORCH_NCCL_TRACE_BUFFER_SIZE"}
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torch's agent gives 1 where nothing is set, with which nothing is dumped
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    _SIZE: "2000",
}


def recording(log_dir: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch's flight recorder; dumps stand in `log_dir`. Set ones hold."""
    variables = dict(_VARIABLES)
    if log_dir is not None:
        variables[_DUMP] = f"{log_dir.absolute()}/{_NAME.format('')}"
    return {
        name: value
        for name, value in variables.items()
        if not environ.get(name) and not environ.get(_OLDER.get(name, ""))
    }


def recording_again(attempt: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an attempt after the first, whose dumps stand beside the earlier ones."""
    folder, _, name = environ.get(_DUMP, "").rpartition("/")
    is_ours = attempt and name == _NAME.format("")
    return {_DUMP: f"{folder}/{_NAME.format(f'attempt_{attempt}_')}"} if is_ours else {}
