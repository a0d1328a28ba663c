"""The files of a folder that `save_state` wrote, by what they hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_core import CheckpointError

_OWN = "manifest.json"  # what a neutral checkpoint has
_KNOWN_BY = re.compile(
    r"(optimizer|scheduler)(_\d+)?\.bin|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|pytorch_model_fsdp.*|optimizer_\d+|scaler\.pt"
)
_SAFE, _PICKLED = r"model(?:_(\d+))?\.safetensors", r"pytorch_model(?:_fsdp)?(?:_(\d+))?\.bin"
_INDEX = ".index.json"
_OF_RANKS = re.compile(r"(pytorch_model(_fsdp)?(_\d+)?|optimizer_\d+)_rank\d+\.bin")
_OF_PARALLEL_MODELS = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class PeerFolder:
    """The files by their numbers, which have no gaps.

    Args:
        path: the folder.
        models: a file of weights, its index, or a folder of torch.distributed.checkpoint.
        optimizers: a file, or such a folder.
        engine: the folder of an engine that saves models and optimizers by itself, or None.
        schedulers, objects: of `state_dict()`s.
        samplers, loaders: by the number of the loader, of which not all have one.
        streams: the random streams of each rank.
        scaler: the loss scale, or None.
    """

    path: Path
    models: list[Path]
    optimizers: list[Path]
    engine: Path | None
    schedulers: list[Path]
    objects: list[Path]
    samplers: Mapping[int, Path]
    loaders: Mapping[int, Path]
    streams: list[Path]
    scaler: Path | None


def is_peer_folder(path: str | os.PathLike[str]) -> bool:
    """Whether Hugging Face Accelerate's `save_state` wrote a folder. Never raises."""
    try:
        names = [each.name for each in Path(path).iterdir()]
    except OSError:
        return False
    return _OWN not in names and any(map(_KNOWN_BY.fullmatch, names))


def newest_folder(root: str | os.PathLike[str]) -> Path | None:
    """The folder `checkpoint_<number>` with the highest number, if Accelerate's `save_state` wrote it."""
    folders = {int(each.name[11:]): each for each in Path(root).glob("checkpoint_*") if each.name[11:].isdecimal()}
    newest = folders[max(folders)] if folders else None
    return newest if newest is not None and is_peer_folder(newest) else None


def list_files(path: Path) -> PeerFolder:
    """What is there. Raises `CheckpointError` for a gap, and for what cannot be read."""
    names = sorted(each.name for each in path.iterdir())
    _refuse(path, names)
    scaler = path / "scaler.pt"
    engine = next((path / name for name in names if _is_of_engine(path / name)), None)
    return PeerFolder(
        path,
        [] if engine else _in_order(path, _models(path, names), "model.safetensors"),
        [] if engine else _in_order(path, _optimizers(path, names), "optimizer.bin"),
        engine,
        _in_order(path, _numbered(path, names, r"scheduler(?:_(\d+))?\.bin"), "scheduler.bin"),
        _in_order(path, _numbered(path, names, r"custom_checkpoint_(\d+)\.pkl"), "custom_checkpoint_0.pkl"),
        _numbered(path, names, r"sampler(?:_(\d+))?\.bin"),
        _numbered(path, names, r"dl_state_dict(?:_(\d+))?\.bin"),
        _in_order(path, _numbered(path, names, r"random_states_(\d+)\.pkl"), "random_states_0.pkl"),
        scaler if scaler.is_file() else None,
    )


def _refuse(path: Path, names: list[str]) -> None:
    of_ranks = [name for name in names if _OF_RANKS.fullmatch(name)]
    if of_ranks:
        raise CheckpointError(
            f"{path / of_ranks[0]} was to be read, but it has the shards of one rank, without their places. Load it in the run that saved "
            f"it, and save it again with SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    if _OF_PARALLEL_MODELS in names:
        raise CheckpointError(
            f"{path} was to be read, but it has tensor-parallel models, which cannot be. Go on with it as it was saved."
        )


def _models(path: Path, names: list[str]) -> dict[int, Path]:
    """Files of several kinds may lie there: safetensors count, as for who wrote them."""
    found = _numbered(path, names, r"pytorch_model(?:_fsdp)?_(\d+)", folders=True)
    for pattern in (_PICKLED, _SAFE):
        for tail in (re.escape(_INDEX), ""):
            found |= _numbered(path, names, pattern + tail)
    return found


def _optimizers(path: Path, names: list[str]) -> dict[int, Path]:
    return _numbered(path, names, r"optimizer_(\d+)", folders=True) | _numbered(
        path, names, r"optimizer(?:_(\d+))?\.bin"
    )


def _numbered(path: Path, names: list[str], pattern: str, folders: bool = False) -> dict[int, Path]:
    matches = [match for name in names if (match := re.fullmatch(pattern, name))]
    found = {int(match[1] or 0): path / match[0] for match in matches}
    return {number: each for number, each in sorted(found.items()) if (each.is_dir() if folders else each.is_file())}


def _in_order(path: Path, found: Mapping[int, Path], first: str) -> list[Path]:
    missing = sorted(set(range(max(found, default=-1))) - found.keys())
    if missing:
        has = ", ".join(each.name for each in found.values())
        raise CheckpointError(
            f"{path} was to be read, but of files like {first} that of number {missing[0]} is missing; there are {has}. Bring all files "
            f"of the save into one folder."
        )
    return [found[number] for number in sorted(found)]


def _is_of_engine(path: Path) -> bool:
    return path.is_dir() and path.name.startswith("pytorch_model") and any(path.glob("*_states.pt"))
