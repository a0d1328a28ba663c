"""The files of a tag in a folder of DeepSpeed's, and refusals by their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from accel_core import CheckpointError

_LATEST = ("latest", "latest_universal")
_STATES = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank[_](\d+)_)?mp_rank[_](\d+)(?:_\d+)?_(model|optim)_states\.pt")
_REFUSED = {
    r".*expert_.*|expp_rank_.*": "a mixture of experts",
    r"layer_.*": "pipeline stages",
}
_KEEP = "Go on with it in DeepSpeed, on the same number of processes; of its weights alone zero_to_fp32.py, which lies beside it, makes a file"


class RankFiles(NamedTuple):
    """The files of one checkpoint.

    Args:
        folder: of the tag.
        models: those with `module`, in the order of ranks: one below stage 3.
        optimizers: those with the optimizer's shards, in the order of ranks; none in a universal
            checkpoint.
        universal: the folder with a folder for each parameter, of a universal checkpoint.
    """

    folder: Path
    models: list[Path]
    optimizers: list[Path]
    universal: Path | None


def find_rank_files(source: Path) -> RankFiles | None:
    """The files of a checkpoint's folder, or of its latest tag; None if it is not DeepSpeed's.

    Raises:
        CheckpointError: if the tag is not there; for a checkpoint of experts, of pipeline stages or
            of tensor-parallel ranks.
    """
    folder = _folder_of_tag(source)
    names = sorted(path.name for path in folder.iterdir())
    found = [match for name in names if (match := _STATES.fullmatch(name))]
    if not found:
        return None
    for name in names:
        for pattern, what in _REFUSED.items():
            if re.fullmatch(pattern, name):
                raise CheckpointError(
                    f"{folder} was to be imported, but {name} is of {what}, which cannot be. {_KEEP}."
                )
    if parallel := [match.group() for match in found if int(match[2])]:
        raise CheckpointError(
            f"{folder} was to be imported, but {parallel[0]} is of tensor-parallel ranks, which cannot be. {_KEEP}."
        )
    ranked = sorted(found, key=lambda match: int(match[1] or 0))
    universal = folder / "zero"
    return RankFiles(
        folder,
        [folder / match.group() for match in ranked if match[3] == "model"],
        [folder / match.group() for match in ranked if match[3] == "optim"],
        universal if universal.is_dir() else None,
    )


def check_ranks(files: list[Path], wanted: int) -> None:
    """Raises `CheckpointError` unless there is a file of each of so many ranks."""
    present = {int(match[1] or 0) for path in files if (match := _STATES.fullmatch(path.name))}
    missing = sorted(set(range(wanted)) - present)
    if missing or len(present) > wanted:
        found = f"those of the ranks {missing} are missing" if missing else f"there are {len(present)}"
        kind = f"{files[0].name if files else 'zero_pp_rank_*_optim_states.pt'!r}"
        raise CheckpointError(
            f"A checkpoint of {wanted} ranks was to be imported, but of files like {kind} {found}. Bring the files of all ranks into "
            f"one folder: those of another machine lie on its disk, perhaps."
        )


def _folder_of_tag(source: Path) -> Path:
    for name in _LATEST:
        latest = source / name
        if latest.is_file():
            tag = latest.read_text(encoding="utf-8", errors="replace").strip()
            folder = source / tag
            if Path(tag).name != tag or not folder.is_dir():
                tags = sorted(path.name for path in source.iterdir() if path.is_dir())
                raise CheckpointError(
                    f"{source} was to be imported, but its file {name!r} names the tag {tag!r:.80}, which is not there: {tags}. Pass "
                    f"the folder of one of these."
                )
            return folder
    return source
