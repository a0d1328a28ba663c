"""A folder of `save_state` as a foreign checkpoint, for `load_state` and `accel checkpoint import`."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_checkpoint import ForeignCheckpoint
from accel_compat.checkpoints.folder import PeerFolder, is_peer_folder, list_files
from accel_compat.checkpoints.model_files import Parts, model_parts
from accel_compat.checkpoints.optimizer_files import open_optimizer
from accel_compat.checkpoints.pickled_file import read_dict, read_pickled
from accel_compat.checkpoints.run_files import read_positions, read_scale, read_streams
from accel_core import Accelerator, CheckpointError
from accel_core.api.launcher import Group, find, how_to_install, list_offers

ORIGIN = "Accelerate"
_GROUP: Group = "accel.importers"
_ENGINE = "deepspeed"


def open_accelerate(folder: Path, optimizer: str | None) -> ForeignCheckpoint | None:
    """The checkpoint in a folder that `save_state` wrote; None for others.

    Raises:
        CheckpointError: for what cannot be read, or is not complete.
    """
    if not is_peer_folder(folder):
        return None
    files = list_files(folder)
    found = _of_engine(files.engine, optimizer) if files.engine else _of_files(files, optimizer)
    streams = [read_streams(path, rank) for rank, path in enumerate(files.streams)]
    steps = {step for _, step in streams}
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder} was to be read, but the files random_states_*.pkl are of the steps {sorted(steps)}: files of different saves are "
            f"mixed. Remove those of another save."
        )
    positions = read_positions(files)
    step = max(steps, default=0)
    facts = {
        **found.facts,
        "processes": str(len(streams)) if streams else "not said",
        "step": str(step),
        "schedulers": str(len(files.schedulers) or len(found.schedulers)),
        "registered objects": str(len(files.objects)),
        "loss scale": "yes" if files.scaler else "none",
        "positions of loaders": ", ".join("none" if each is None else f"batch {each['batches']}" for each in positions)
        or "none",
    }
    return replace(
        found,
        facts=facts,
        schedulers=[read_dict(path) for path in files.schedulers] or found.schedulers,
        objects=[read_pickled(path) for path in files.objects],
        components=read_scale(files.scaler),
        random=[each for each, _ in streams],
        positions=positions,
        backwards=step or found.backwards,
    )


def load_peer_state(accelerator: Accelerator, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Restores a run from a folder that Accelerate's `save_state` wrote. Collective.

    Prepare and register the same objects first, in the same order. Of `kwargs`, those of
    `load_state`, `map_location` has no effect and others are refused. Raises `CheckpointError` on
    every rank, before anything is changed, for what is damaged, would have to be run, or does not fit.
    """
    Accelerator.load_state(accelerator, path, **kwargs)
    steps, files = accelerator.gradient_accumulation_steps, list_files(Path(path))
    step = read_streams(files.streams[0], 0)[1] if files.streams else 0
    if step % steps and accelerator.is_main_process:
        warnings.warn(
            f"load_state() reads {path}, which was saved after {step % steps} of {steps} micro-batches of a window of accumulation. Their "
            f"gradients are in no file of Accelerate's: a new window begins. Save where accelerator.sync_gradients is True.",
            stacklevel=2,
        )


def _of_files(files: PeerFolder, asked: str | None) -> ForeignCheckpoint:
    if files.streams and not files.models and not files.optimizers:
        warnings.warn(f"{files.path} has neither a model nor an optimizer: hooks saved them, perhaps.", stacklevel=2)
    parts: Parts = []
    where = []
    for number, path in enumerate(files.models):
        more, text = model_parts(path, f"model.{number}")
        parts += more
        where.append(text)
    optimizers = []
    for number, path in enumerate(files.optimizers):
        optimizer, more = open_optimizer(path, number, asked)
        optimizers.append(optimizer)
        parts += more
    facts = {
        "models": ", ".join(where) or "none",
        "optimizers": ", ".join(_words(each.kind, len(each.groups)) for each in optimizers) or "none",
    }
    return ForeignCheckpoint(ORIGIN, facts, parts or [dict], models=len(files.models), optimizers=optimizers)


def _words(kind: str, groups: int) -> str:
    name = kind.replace(":", ".") or "of a class that is not said (that of the run that loads it)"
    return f"{name}, {groups} groups"


def _of_engine(engine: Path, asked: str | None) -> ForeignCheckpoint:
    """Models and optimizers that an engine saved, by the importer of its own package."""
    offers = [offer for offer in list_offers(_GROUP) if offer.name == _ENGINE]
    if not offers:
        raise CheckpointError(
            f"{engine} was to be read, but it was saved by an engine. {how_to_install('accel-deepspeed')}."
        )
    found: ForeignCheckpoint | None = find(_GROUP, f"{offers[0].distribution}:{_ENGINE}", offers).load()(engine, asked)
    if found is None:
        raise CheckpointError(f"{engine} was to be read, but {offers[0].distribution} does not know it. Copy it again.")
    return replace(found, origin=f"{ORIGIN} ({found.origin})")
