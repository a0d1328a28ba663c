"""Saving a checkpoint: all ranks agree on who writes what, write, and the main process publishes.

The order of things, each of which fails on all ranks or on none:

    begin      the main process makes the data folder; a taken place is refused before any write
    hooks      the user's own files go into the folder, and models may be left to them
    list       every rank says what it has; from that each knows who writes what
    write      every rank writes its file, or copies it to be written behind
    publish    the main process writes index and manifest, and only then removes the old data
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_checkpoint.assembling import Weights
from accel_checkpoint.background import Job
from accel_checkpoint.collective_steps import everywhere, exchange, on_each_rank, on_main_rank
from accel_checkpoint.files.folder import Draft
from accel_checkpoint.plan import plan
from accel_checkpoint.record import progress_of
from accel_checkpoint.run_state import MODEL, Content, check_moment, collect, pending_gradients
from accel_checkpoint.words import LINES
from accel_checkpoint.writing import (
    Inventory,
    Publication,
    Work,
    encode_objects,
    file_name,
    firsts,
    keep,
    take_inventory,
)
from accel_core import CheckpointError
from accel_core.api.component import broadcast_object, gather_objects

if TYPE_CHECKING:
    from torch import nn

    from accel_checkpoint.background import Background, Mode
    from accel_checkpoint.codec import Encoded
    from accel_core.api.checkpoint import Run, SaveHook

VISIBLE = 5.0  # seconds after which every rank sees the folder that the main process made, if they share it


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of one save."""

    folder: Path
    each_node: bool  # whether every node writes a full set, into its own file system
    mode: Mode | None  # how it is written behind, if so
    record: Mapping[str, Any]
    hooks: Sequence[SaveHook]
    published: Callable[[], None]  # is called on the process that publishes, afterwards


def save(run: Run, request: SaveRequest, background: Background) -> None:
    """Saves a checkpoint, or begins to; errors are raised on every rank. A collective."""
    on_cpu = all(
        parameter.is_cpu for parameter in run.prepared.learned()
    )  # what is not, is copied without a wait anyway
    if request.mode == "lazy" and run.world.size == 1 and on_cpu and not request.hooks:
        _save_lazily_alone(run, request, background)
        return
    hooked, shards = _compare_calls(run, request)
    members = _members(run, request.each_node)
    draft = _begin(run, request, members)
    publishes = run.world.rank == members[0]
    try:
        left = _run_hooks(run, request) if hooked else []
        work, inventories, content = _agree(run, draft, members, left)
        record = _record(run, request, left, shards, content)
        publication = Publication(draft, record, inventories, request.published)
        if request.mode is not None:
            mode = request.mode
            start = partial(background.start, work, draft.data, publication if publishes else None, members, mode)
            everywhere(run.world, "for copies to be taken", start)
            return
        written = everywhere(run.world, "for all to have written", lambda: work.write(draft.data))
        own = [written[rank] for rank in members]
        everywhere(run.world, "to publish", lambda: publication.publish(own) if publishes else None)
        everywhere(run.world, "for what is replaced to be removed", lambda: publication.finish() if publishes else None)
    except BaseException:
        background.abandon()  # it has begun on other ranks, perhaps
        if publishes:
            draft.discard()
        raise


def _save_lazily_alone(run: Run, request: SaveRequest, background: Background) -> None:
    """Nobody is to agree: what would have been asked of the other ranks is left to the thread."""
    _, pending = _window(run)
    draft = Draft.begin(request.folder)
    try:
        content = collect(run)
        content.state.update(pending_gradients(run) if pending else {})
        encoded = encode_objects(content)
        keep(content, encoded)
        record = _record(run, request, (), [run.layout.shard.index], content)

        def prepare() -> Job:
            inventories = [take_inventory(content, encoded)]
            work = _work_of(0, [0], inventories, content, {0: encoded})
            return Job(work, Publication(draft, record, inventories, request.published))

        background.start_alone(prepare, draft)
    except BaseException:
        draft.discard()
        raise


def _record(
    run: Run, request: SaveRequest, left: Sequence[int], shards: Sequence[int], content: Content
) -> dict[str, Any]:
    models = {"models": len(run.models()), "left_to_hooks": [f"{MODEL}.{number}" for number in left]}
    progress = progress_of(run.prepared, run.accumulation, content.objects)
    return {**request.record, **progress, "shards": shards, **models}


def _compare_calls(run: Run, request: SaveRequest) -> tuple[bool, list[int]]:
    """Raises if the ranks save into different folders. Returns whether any has hooks; data shards."""
    own = (request.each_node, str(request.folder), bool(request.hooks), run.layout.shard.index)
    each_node, folders, hooked, shards = map(list, zip(*exchange(run.world, "to begin a save", own), strict=True))
    if len(set(each_node)) > 1:
        raise CheckpointError(
            "save_state() was called with save_on_each_node=True on some ranks, and without it on others. Give every rank the same "
            "ProjectConfiguration."
        )
    if not request.each_node and len(set(folders)) > 1:
        raise CheckpointError(
            f"save_state() was given another folder on each rank: {', '.join(folders)}. Give all of them the same one: a time in its "
            f"name is best taken by the main process, and broadcast."
        )
    return any(hooked), shards


def _members(run: Run, each_node: bool) -> list[int]:
    """The ranks that write into the same folder as this one."""
    world = run.world
    if not each_node:
        return list(range(world.size))
    places = gather_objects([(socket.gethostname(), world.local_rank)], world)
    # Two launches on one host are two nodes: the n-th rank with a local rank belongs to the n-th of them.
    nodes = [(host, places[:rank].count((host, local))) for rank, (host, local) in enumerate(places)]
    return [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]


def _begin(run: Run, request: SaveRequest, members: Sequence[int]) -> Draft:
    world = run.world
    if not request.each_node:
        return on_main_rank(world, lambda: Draft.begin(request.folder))
    identity = broadcast_object(secrets.token_hex(8), world)
    draft = Draft(request.folder, identity)
    begins = world.rank == members[0]
    # One node before the others, who see its folder if it is theirs too.
    begun: list[Draft] = []  # a draft holds a lock, which does not travel

    def begin() -> None:
        begun.append(_begin_here(draft))

    everywhere(world, "for the first node to begin", lambda: begin() if world.is_main else None)
    everywhere(world, "to begin", lambda: begin() if begins and not world.is_main else None)
    return begun[0] if begun else draft


def _begin_here(draft: Draft) -> Draft:
    if draft.data.exists():
        raise CheckpointError(
            f"save_on_each_node=True was asked for, but another node has made {draft.data} already: the nodes share this folder. "
            f"Use ProjectConfiguration(save_on_each_node=False)."
        )
    return Draft.begin(draft.folder, draft.id)


def _run_hooks(run: Run, request: SaveRequest) -> list[int]:
    """Lets the user's hooks write; returns the models that they took on the main process."""
    numbers = range(len(run.models()))
    states = on_each_rank(run.world, "for hooks to be called", lambda: [run.model_state(number) for number in numbers])
    replicated = run.strategy.replicates_parameters
    weights: list[Mapping[str, Any]] = [Weights(state, run.world, replicated=replicated) for state in states]
    given = list(weights)
    models = [record.original for record in run.models()]
    everywhere(run.world, "for the hooks to have saved", lambda: _call_hooks(request, models, weights))
    left = [number for number in numbers if not any(each is given[number] for each in weights)]
    return broadcast_object(left, run.world)  # type: ignore[no-any-return]


def _call_hooks(request: SaveRequest, models: list[nn.Module], weights: list[Mapping[str, Any]]) -> None:
    given = list(weights)
    for hook in request.hooks:
        hook(models, weights, str(request.folder))
    strangers = [each for each in weights if not any(each is known for known in given)]
    if strangers:
        raise CheckpointError(
            f"A hook of register_save_state_pre_hook() put a {type(strangers[0]).__name__} into `weights`. It may take entries "
            f"out (weights.pop()), and then saves these models itself into {request.folder}; the others are saved as they are."
        )


def _agree(
    run: Run, draft: Draft, members: Sequence[int], left: Sequence[int]
) -> tuple[Work, list[Inventory], Content]:
    """The work of this rank, the inventories of all ranks, and its content. A collective."""
    found: list[tuple[Content, dict[str, Encoded]]] = []
    windows = everywhere(run.world, "to compare windows", lambda: _window(run))
    positions = [position for position, _ in windows]
    if len(set(positions)) > 1:
        raise CheckpointError(
            f"save_state() was called at different places of the loop: of their windows of accumulation the ranks have done "
            f"{positions} micro-batches. Call it after the same batch on every rank."
        )
    gradients = pending_gradients(run) if any(pending for _, pending in windows) else {}

    def inventory() -> Inventory:
        _check_visible(draft, run.world.rank)
        content = collect(run, left)
        content.state.update(gradients)
        encoded = encode_objects(content)
        found.append((content, encoded))
        return take_inventory(content, encoded)

    inventories = everywhere(run.world, "to know what all have", inventory)
    _check_units(inventories)
    content, encoded = found[0]
    rank, everyone = run.world.rank, len(members) == run.world.size
    encodings = {rank: encoded} if everyone else dict(enumerate(gather_objects([encoded], run.world)))
    work = partial(_work_of, rank, members, inventories, content, encodings)
    return on_each_rank(run.world, "to begin writing", work), inventories, content


def _work_of(
    rank: int,
    members: Sequence[int],
    inventories: Sequence[Inventory],
    content: Content,
    encodings: Mapping[int, Mapping[str, Encoded]],
) -> Work:
    """The part of one of the `members`, who write all that the ranks have listed. No collective.

    `encodings` are the encoded objects by rank: its own, and others' where it writes these too.
    """
    ranks, mine = range(len(inventories)), Work(file_name(rank))
    everyone = len(members) == len(ranks)
    for task in plan([each.claims for each in inventories], None if everyone else members)[rank]:
        mine.add_task(task, content)
    for unit, groups in firsts(inventories, ranks).items():
        for first, named in groups.items():
            holders = ranks if named == "all" else named
            writer = next((member for member in members if member in holders), members[0])
            if writer == rank:
                # On another node, one rank writes for several, whose tensors have the same names.
                owner, prefix = (rank, "") if rank in holders else (first, f"{unit} of rank {first}")
                mine.add_object(unit, named, encodings[owner][unit], prefix)
    return mine


def _window(run: Run) -> tuple[int, bool]:
    """The number of micro-batches done in an open window, and whether they left gradients."""
    check_moment(run)
    window = run.accumulation
    return (window.position, window.backwards > 0) if window.open else (0, False)


def _check_units(inventories: Sequence[Inventory]) -> None:
    every = [set(inventory.digests) for inventory in inventories]
    partial = {unit: [rank for rank, units in enumerate(every) if unit in units] for unit in set().union(*every)}
    lines = [f"{unit} on ranks {ranks}" for unit, ranks in sorted(partial.items()) if len(ranks) < len(every)]
    if lines:
        raise CheckpointError(
            f"Not all of {len(every)} ranks have prepared and registered the same:{LINES}{LINES.join(lines)}\nCall prepare() and "
            f"register_for_checkpointing() with the same objects on every rank, in the same order."
        )


def _check_visible(draft: Draft, rank: int) -> None:
    deadline = time.monotonic() + VISIBLE
    while not draft.data.is_dir():
        if time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # a network file system may remember for a while that nothing was there
                os.listdir(draft.folder)
            time.sleep(0.1)
            continue
        raise CheckpointError(
            f"{draft.data} was made by the main process, and rank {rank} does not see it: the ranks do not share this folder. "
            f"Save into one that they share, or let every node save a full set: ProjectConfiguration(save_on_each_node=True)."
        )
