"""A checkpoint of another library, as an importer gives it, and the neutral one made of it.

Importers, of the entry-point group `accel.importers`, are functions of the folder and the class of
the user's optimizer, which return a `ForeignCheckpoint`, or None for what is not theirs.
`load_state` reads such folders too (`importing.opened`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accel_checkpoint.codec import encode
from accel_checkpoint.files.folder import Draft
from accel_checkpoint.plan import Claim, Task
from accel_checkpoint.record import IMPORTED
from accel_checkpoint.run_state import (
    ACCUMULATION,
    COMPONENTS,
    LOADER,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    SCHEDULER,
    VALUES,
    Content,
    within,
)
from accel_checkpoint.writing import Inventory, Publication, Work, file_name
from accel_core.api.checkpoint import WHOLE
from accel_core.api.layouts import Alias, Elementwise, State

Say = Callable[[str], None]
Part = Mapping[str, State]  # state by unit, "model.0" and "optimizer.0", that is written into one file


@dataclass(frozen=True)
class ForeignOptimizer:
    """An optimizer, but for its tensors.

    Args:
        kind: its class, "module:QualName"; "" if that is not known: the one of the run that loads.
        groups: the options of each group, and "names": "0.<name>" for the parameters of model 0,
            or "loose.<group>.<position>" where only the order in the groups is known.
        values: by such a name, the values of its state that are no tensors.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another library.

    Args:
        origin: what wrote it, in a few words, for messages: "DeepSpeed 0.19.8".
        facts: about it, for the user, by name.
        parts: each is called once, and what it returned is written before the next one is called.
            Together the boxes of each tensor cover it exactly once.
        models: their number.
        optimizers, schedulers: in the order in which a run prepares them; of a scheduler its
            `state_dict()`.
        backwards: how many the run had done.
        objects: states of the objects that the user registered; None: they are not in it.
        components: states of components that have one here, such as "precision".
        random: the random streams of each rank, as `capture_random_state` gives them.
        positions: of each loader {"batches": on each rank, of the epoch}, or None.
    """

    origin: str
    facts: Mapping[str, str]
    parts: Sequence[Callable[[], Part]]
    models: int = 1
    optimizers: Sequence[ForeignOptimizer] = ()
    schedulers: Sequence[Mapping[str, Any]] = ()
    backwards: int = 0
    objects: Sequence[Any] | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    random: Sequence[Mapping[str, Any]] = ()
    positions: Sequence[Mapping[str, int] | None] = ()

    @property
    def absent(self) -> list[str]:
        """The kinds of units that a run has, and this checkpoint not: loads leave them alone."""
        has = {SCHEDULER: self.schedulers, OBJECT: self.objects is not None, RANDOM: self.random, **self.components}
        return [kind for kind in (LOADER, OBJECT, *COMPONENTS, RANDOM, SCHEDULER) if not has.get(kind)]


Importer = Callable[[Path, "str | None"], "ForeignCheckpoint | None"]
"""What an entry point names: of a folder and the class of an optimizer; None, or CheckpointError for what it cannot import."""


def write_foreign(foreign: ForeignCheckpoint, folder: Path, say: Say) -> None:
    """Writes a neutral checkpoint into a folder, part by part; publishes it when complete."""
    draft = Draft.begin(folder)
    try:
        inventories, works = [], []
        for number, part in enumerate(foreign.parts):
            say(f"file {number + 1} of {len(foreign.parts)}")
            inventory, work = work_of(foreign, number, part())
            work.write(draft.data)
            inventories.append(inventory)
            works.append(work.written)
        publication = Publication(draft, record_of(foreign), inventories)
        publication.publish(works)
        publication.finish()
    except BaseException:
        draft.discard()
        raise


def work_of(foreign: ForeignCheckpoint, number: int, part: Part) -> tuple[Inventory, Work]:
    """The content of a file, from a part; with that of the first all that is no tensor."""
    state = {name: entry for unit, entries in part.items() for name, entry in within(unit, entries).items()}
    aliases = {name: entry.of for name, entry in state.items() if isinstance(entry, Alias)}
    content = Content({name: entry for name, entry in state.items() if not isinstance(entry, Alias)})
    work, claims = Work(file_name(number)), {}
    for name, entry in content.state.items():
        assert not isinstance(entry, Alias)
        claims[name] = Claim.of(entry)
        boxes = [piece.box for piece in entry.pieces] if isinstance(entry, Elementwise) else [None]
        for box in boxes:
            work.add_task(Task(name, box, WHOLE), content)
        work.written.tensors.setdefault(name, [])  # of an empty tensor nothing is written
    if number == 0:
        _add_objects(work, foreign)
    return Inventory(claims, aliases, {}), work


def _add_objects(work: Work, foreign: ForeignCheckpoint) -> None:
    objects: dict[str, Any] = {}
    for number, optimizer in enumerate(foreign.optimizers):
        unit = f"{OPTIMIZER}.{number}"
        objects[unit] = {"kind": optimizer.kind, "groups": [dict(each) for each in optimizer.groups], "whole": None}
        objects[f"{unit}.{VALUES}"] = {name: dict(values) for name, values in optimizer.values.items()}
    for number, scheduler in enumerate(foreign.schedulers):
        objects[f"{SCHEDULER}.{number}"] = dict(scheduler)
    for number, registered in enumerate(foreign.objects or ()):
        objects[f"{OBJECT}.{number}"] = registered
    objects.update(foreign.components)
    objects[ACCUMULATION] = {
        "steps": 1, "open": False, "position": 0, "size": 1, "backwards": 0, "total_backwards": foreign.backwards,
    }  # fmt: skip
    for unit, value in objects.items():
        work.add_object(unit, "all", encode(value, f"the state of {unit}"))
    for rank, streams in enumerate(foreign.random):
        encoded = encode(dict(streams), f"the random streams of rank {rank}")
        work.add_object(RANDOM, [rank], encoded, f"{RANDOM} of rank {rank}")


def record_of(foreign: ForeignCheckpoint) -> dict[str, Any]:
    """The record in the manifest."""
    positions = {"positions": list(foreign.positions)} if any(foreign.positions) else {}
    return {
        "accel-core": version("accel-core"), "torch": torch.__version__, "components": [], "options": [],
        "world": {"size": len(foreign.random) or 1, "source": "import", "device": "cpu"}, "backwards": foreign.backwards, "positions": [],
        "window": {"open": False, "position": 0, "steps": 1}, "iteration": None, "tracking": [],
        "models": foreign.models, "left_to_hooks": [],
        IMPORTED: {"origin": foreign.origin, "facts": dict(foreign.facts), "absent": foreign.absent, **positions},
    }  # fmt: skip
