"""Loading a checkpoint: everything is compared first, and then restored whole.

open       every rank reads manifest and index, and verifies them
hooks      the user's own files are read, and models may be left to them
compare    every rank lists misfits; if any has a line, all raise, and nothing was changed
positions  of the loaders, which may refuse them
models, optimizers     from disk into the memory that training uses, verified by blocks
objects    schedulers, what the user registered, the window of accumulation; the random streams last
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint.collective_steps import everywhere, on_each_rank
from accel_checkpoint.deferred import data_of, is_deferred
from accel_checkpoint.files.disk import read_all
from accel_checkpoint.importing.fitting import names_here, other_schedule, state_of_position, units_here
from accel_checkpoint.importing.opened import open_to_load
from accel_checkpoint.optimizers.known_optimizers import kind_of
from accel_checkpoint.plan import Claim
from accel_checkpoint.reading import Job, SavedState
from accel_checkpoint.record import IMPORTED, warn_of_absent, warn_of_batches
from accel_checkpoint.run_state import (
    ACCUMULATION,
    ENGINE,
    GRADIENT,
    LOADER,
    MODEL,
    OBJECT,
    OPTIMIZER,
    RANDOM,
    SCHEDULER,
    named_parameters,
    stateful,
    within,
)
from accel_checkpoint.words import LINES, quoted
from accel_core import CheckpointError, CollectiveMismatchError
from accel_core.api.checkpoint import TORCH_STREAM, Run, begin_random_state, has_state, memory_of
from accel_core.api.component import derive_seed, listed, restore_random_state
from accel_core.api.layouts import Alias, Elementwise, Entry, Opaque, Partial

if TYPE_CHECKING:
    from accel_checkpoint.reading import Checkpoint
    from accel_core.api.checkpoint import LoadHook

_RESUMED = int.from_bytes(b"rng", "big")


def load(run: Run, folder: Path, hooks: Sequence[LoadHook]) -> dict[str, Any]:
    """Restores all of a run, and returns the record of the checkpoint. A collective.

    CheckpointError is raised on every rank if none, damaged or a misfit; OSError if unreadable.
    """
    world = run.world
    checkpoint = on_each_rank(world, "to have opened the checkpoint", lambda: open_to_load(folder, world.device))
    with checkpoint:
        compared = everywhere(world, "to compare checkpoints", lambda: (checkpoint.manifest.id, run.layout.shard.index))
        identities, shards = [identity for identity, _ in compared], [shard for _, shard in compared]
        if len(set(identities)) > 1:
            raise CheckpointError(
                f"load_state() found another checkpoint on each rank ({', '.join(identities)}): the folder is not shared, or a save replaced "
                f"it."
            )
        left = _run_hooks(run, folder, hooks)
        restoring = _Restoring(run, checkpoint, left, shards)
        misfits = everywhere(world, "to compare what is prepared", restoring.misfits)
        _raise_misfits(checkpoint.folder, misfits)
        if world.is_main:
            warn_of_absent(checkpoint.manifest.record, list(stateful(run)))
            warn_of_batches(checkpoint.manifest.record, run.prepared, run.accumulation)
        try:
            restoring.restore()
        except CollectiveMismatchError:
            raise
        except Exception as error:
            known = isinstance(error, (CheckpointError, OSError))
            found = str(error) if known else f"{checkpoint.folder}: {type(error).__name__}: {error}"
            raise CheckpointError(
                f"{found}\nPart of the run was restored by then: do not train on from here. Load another checkpoint, or start anew."
            ) from error
        return dict(checkpoint.manifest.record)


def _raise_misfits(folder: Path, by_rank: Sequence[Sequence[str]]) -> None:
    lines = list(dict.fromkeys(line for lines in by_rank for line in lines))
    if lines:
        raise CheckpointError(
            f"{folder} does not fit what is prepared here, so nothing was loaded:{LINES}{listed(lines, LINES, 20)}\nPrepare and register the same objects as in the "
            f"run that saved it, in the same order. For weights alone there is load_checkpoint_in_model(model, folder)."
        )


def _run_hooks(run: Run, folder: Path, hooks: Sequence[LoadHook]) -> list[int]:
    """Lets the user's hooks read; returns the models they took, alike on all ranks. Collective."""
    taken = everywhere(run.world, "for the hooks to have loaded", lambda: _call_hooks(run, folder, hooks))
    if any(each != taken[0] for each in taken):
        raise CheckpointError(
            f"The hooks of register_load_state_pre_hook() took other models out of `models` on each rank (their numbers, by rank: {taken}). "
            f"Take them out on every rank, also where the main process alone reads."
        )
    return taken[0]


def _call_hooks(run: Run, folder: Path, hooks: Sequence[LoadHook]) -> list[int]:
    given = [record.original for record in run.models()]
    models = list(given)
    for hook in hooks:
        hook(models, str(folder))
    strangers = [each for each in models if not any(each is known for known in given)]
    if strangers:
        raise CheckpointError(
            f"A hook of register_load_state_pre_hook() put a {type(strangers[0]).__name__} into `models`, which was not "
            f"prepared. It may take models out (models.pop()), and then loads these itself."
        )
    return [number for number, model in enumerate(given) if not any(model is each for each in models)]


class _Restoring:
    """One load into one run; `left` are the models that a hook has loaded, `shards` the data shards by rank."""

    def __init__(self, run: Run, checkpoint: Checkpoint, left: Sequence[int], shards: Sequence[int]) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._left = left
        self._place = run.world.rank, run.world.size
        self._shards = shards
        self._source_of_streams: int | None = None
        self._states: dict[int, dict[str, Entry]] = {}
        self._jobs: list[Job] = []  # by which the models are read
        self._optimizers: list[SavedState] = []
        self._objects: dict[str, Any] = {}
        self._imported = IMPORTED in checkpoint.manifest.record
        self._units = units_here(checkpoint.manifest.record, len(run.models()), left)

    def misfits(self) -> list[str]:
        """Lines on mismatches of run and checkpoint. Changes nothing; raises if that is invalid."""
        try:
            lines = list(self._misfits())
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            text = f"cannot be compared with what is prepared, so nothing was loaded: {type(error).__name__}: {error}"
            raise CheckpointError(f"{self._checkpoint.folder} {text}. Load another checkpoint.") from error
        if not lines:
            self._jobs = self._jobs_of_models()
        return lines

    def _misfits(self) -> Iterator[str]:
        yield from self._misfits_in_number()
        for number in range(len(self._run.models())):
            if number not in self._left:
                yield from self._misfits_of_model(number)
        names = self._run.names()
        for number, optimizer in enumerate(self._run.prepared.optimizers):
            unit = f"{OPTIMIZER}.{number}"
            if unit in self._checkpoint.index.objects:
                saved = SavedState(self._checkpoint, unit, *self._place)
                if self._imported:
                    saved.kind = saved.kind or kind_of(optimizer)
                    saved.rename(names_here(optimizer, names, self._states))
                self._optimizers.append(saved)
                found = self._run.relay.optimizer_misfits(optimizer, names, saved)
                yield from (f"{unit}: {line}" for line in found)
        yield from self._misfits_of_objects()
        yield from self._misfits_of_loaders()
        yield from self._misfits_of_window()
        if RANDOM not in self._checkpoint.absent:
            self._source_of_streams = _rank_to_follow(self._checkpoint, self._run.world.rank, self._shards)
            self._objects[RANDOM] = self._checkpoint.object_of(RANDOM, self._source_of_streams or 0)

    def restore(self) -> None:
        """Restores everything, step by step on all ranks."""
        run = self._run
        # First, for a loader may refuse: of another dataset, say.
        on_each_rank(run.world, "for the positions of loaders", self._restore_positions)
        on_each_rank(run.world, "for models to be read", self._restore_models)
        for number, record in enumerate(run.models()):
            if number not in self._left:
                loaded = partial(run.relay.model_loaded, record.original, record.prepared)
                on_each_rank(run.world, "for the strategy to take a model over", loaded)
        on_each_rank(run.world, "for optimizers to be read", self._restore_optimizers)
        on_each_rank(run.world, "for gradients to be read", self._restore_gradients)
        on_each_rank(run.world, "for objects to be restored", self._restore_objects)
        run.prepared.drifted = run.prepared.apart is not None  # all ranks have the same optimizers again

    def _misfits_in_number(self) -> Iterator[str]:
        prepared, saved = self._run.prepared, self._checkpoint
        left = saved.manifest.record["left_to_hooks"]
        for kind, here_are, there in (
            (MODEL, len(self._units) if self._imported else len(prepared.models), saved.manifest.record["models"]),
            (OPTIMIZER, len(prepared.optimizers), len(saved.units(OPTIMIZER))),
            (SCHEDULER, len(prepared.schedulers), len(saved.units(SCHEDULER))),
            (LOADER, len(prepared.loaders), len(saved.units(LOADER))),
            (OBJECT, len(self._run.registered), len(saved.units(OBJECT))),
        ):
            if here_are != there and kind not in saved.absent:
                what = "registered objects" if kind == OBJECT else f"{kind}s"
                yield f"there are {here_are} {what} here, and {there} in the checkpoint"
        components = {name for name, component in self._run.components.items() if has_state(component)}
        components = {name for name in components if name.partition(".")[0] not in saved.absent}
        there = saved.components() & components if self._imported else saved.components()  # of other precisions
        for name in sorted(components ^ there):
            has, has_not = ("here", "in the checkpoint") if name in components else ("in the checkpoint", "here")
            yield f"the {name} has a state {has}, and none {has_not}"
        known = (MODEL, OPTIMIZER, GRADIENT)
        unknown = {name.partition("/")[0] for name in saved.index.tensors} - {*components}
        for unit in sorted(unit for unit in unknown if unit.partition(".")[0] not in known):
            yield f"the checkpoint has tensors of {unit}, which this version does not know"
        for unit in left:
            if int(unit.rpartition(".")[2]) not in self._left:
                yield f"{unit} was left to a hook of register_save_state_pre_hook(), and no hook here has taken it"

    def _misfits_of_model(self, number: int) -> Iterator[str]:
        unit = self._units[number]
        state = self._run.model_state(number)
        self._states[number] = within(unit, state)
        if self._imported:
            self._checkpoint.fit(unit, state)
        names = self._checkpoint.names(unit)
        record = self._checkpoint.manifest.record
        if int(unit.rpartition(".")[2]) >= record["models"] or unit in record["left_to_hooks"]:
            return  # which is said already
        known = set(names)
        missing = [name for name in state if name not in known]
        unknown = [name for name in names if name not in state]
        if missing:
            yield f"{unit}: the checkpoint has no {quoted(missing)}"
        if unknown:
            yield f"{unit}: the model has no {quoted(unknown)}"
        for name, entry in state.items():
            line = self._misfit_of_entry(f"{unit}/{name}", entry)
            if line is not None:
                yield f"{unit}: {name!r} {line}"

    def _misfit_of_entry(self, name: str, entry: Entry) -> str | None:
        index = self._checkpoint.index
        record = index.tensors.get(index.aliases.get(name, name))
        if record is None:
            return None
        if isinstance(entry, Alias):
            other = f"{name.partition('/')[0]}/{entry.of}"
            tied = index.aliases.get(name, name) == index.aliases.get(other, other)
            return None if tied else f"is one tensor with {entry.of!r} here, and another one in the checkpoint"
        claim = Claim.of(entry)
        if {record["kind"], claim.kind} & {"opaque", "partial"} and record["kind"] != claim.kind:
            return f"is {claim.kind} here, and {record['kind']} in the checkpoint"
        if isinstance(entry, Opaque):
            found = {part["part"]: part["signature"] for part in record["parts"]}.get(entry.part)
            return None if found == entry.signature else f"is {entry.signature} ({entry.part}) here, and {found} there"
        here = f"{claim.dtype.removeprefix('torch.')} {list(claim.shape)}"
        if here != (there := f"{record['dtype']} {record['shape']}"):
            return f"is {here} here, and {there} in the checkpoint"
        if any(map(_overlaps, memory_of(entry))):
            return "has several elements in one place of memory (expand()), which cannot be filled: give it its clone()"
        if any(map(is_deferred, memory_of(entry))) and not self._holds(name, entry):
            return (
                "is offloaded here, and has another value in the checkpoint. Build the model from it: "
                "accelerator.build_model(factory, folder), or load_checkpoint_and_dispatch(model, folder)"
            )
        return None

    def _holds(self, name: str, entry: Elementwise | Any) -> bool:
        """Whether the checkpoint has the very value that is offloaded here."""
        (kept,) = memory_of(entry)
        stored = torch.empty(kept.shape, dtype=kept.dtype)
        where = self._checkpoint.index.aliases.get(name, name)
        read_all([*self._checkpoint.jobs(where, Elementwise.whole(stored), *self._place)])
        found, expected = (each.contiguous().view(-1).view(torch.uint8) for each in (data_of(kept), stored))
        return torch.equal(found, expected)

    def _misfits_of_objects(self) -> Iterator[str]:
        self._checkpoint.verify_objects(*self._place)  # those too that no rank here has a use for
        for unit, each in stateful(self._run).items():
            if self._run.world.size == self._checkpoint.world_size:
                self._objects.update(state_of_position(self._checkpoint.manifest.record, unit, each))
            off = self._imported and unit in self._run.components and not each.state_dict()  # a loss scale, for one
            if unit not in self._checkpoint.index.objects or off:
                continue
            try:
                self._objects[unit] = self._object(unit)
                if self._imported and unit.startswith(SCHEDULER):
                    yield from other_schedule(unit, each, self._objects[unit])
            except CheckpointError as error:
                yield str(error)

    def _misfits_of_loaders(self) -> Iterator[str]:
        """Of those loaders that say what they would refuse."""
        for number, loader in enumerate(self._run.prepared.loaders):
            unit = f"{LOADER}.{number}"
            check = getattr(loader, "check_state_dict", None)
            if check is not None and unit in self._objects:
                try:
                    check(self._objects[unit])
                except Exception as error:  # noqa: BLE001  (a state of another kind may bring about anything)
                    yield _refusal(unit, loader, error)

    def _misfits_of_window(self) -> Iterator[str]:
        # Behind join_uneven_inputs() the ranks have counted backwards differently: another world goes on from the count of rank 0.
        rank, ranks = self._place
        holder = rank if ranks == self._checkpoint.world_size else 0
        state = self._objects[ACCUMULATION] = self._checkpoint.object_of(ACCUMULATION, holder)
        steps = self._run.accumulation.steps
        if state["open"] and state["steps"] != steps:
            at = f"{state['position']} of {state['steps']}"
            yield f"the checkpoint was saved after {at} micro-batches of a window, and here gradient_accumulation_steps={steps}"
        named = dict(named_parameters(self._run))
        saved = self._checkpoint.names(GRADIENT)
        unknown = [f"{GRADIENT}/{name}" for name in saved if name not in named]
        if unknown:
            yield f"no parameter here has the pending gradients {quoted(unknown)}"
        kept = self._run.prepared.gradients.kept(named.values())
        in_parts = [name for name in saved if name in named and not _is_whole(kept.get(id(named[name])), named[name])]
        if in_parts or (saved and not self._run.strategy.replicates_parameters):
            yield f"it was saved inside a window, and {type(self._run.strategy).__name__} cannot take pending gradients over"

    def _object(self, unit: str) -> Any:
        # Where a loader stands is the same for all; where it is not, the loader itself says so.
        if unit.startswith(LOADER) and self._run.world.size != self._checkpoint.world_size:
            return self._checkpoint.object_of(unit, 0)
        return self._checkpoint.object(unit, *self._place)

    def _jobs_of_models(self) -> list[Job]:
        """The jobs that fill the models, once the checkpoint is known to have all of them."""
        aliases = self._checkpoint.index.aliases
        jobs: list[Job] = []
        for entries in self._states.values():
            for name, entry in entries.items():
                if not isinstance(entry, (Alias, Opaque)) and not any(map(is_deferred, memory_of(entry))):
                    jobs += self._checkpoint.jobs(aliases.get(name, name), entry, *self._place)
        return jobs

    def _restore_models(self) -> None:
        aliases = self._checkpoint.index.aliases
        for entries in self._states.values():
            for name, entry in entries.items():
                if isinstance(entry, Opaque):
                    assert entry.assign is not None, name
                    entry.assign(self._checkpoint.opaque(aliases.get(name, name), entry.part))
        read_all(self._jobs)

    def _restore_optimizers(self) -> None:
        names = self._run.names()
        for optimizer, saved in zip(self._run.prepared.optimizers, self._optimizers, strict=True):
            self._run.relay.load_optimizer_state(optimizer, names, saved)
        read_all([job for saved in self._optimizers for job in saved.pending])

    def _restore_gradients(self) -> None:
        jobs: list[Job] = []
        named, gradients = dict(named_parameters(self._run)), self._run.prepared.gradients
        gradients.drop(named.values())
        kept = gradients.kept(named.values())
        for name in self._checkpoint.names(GRADIENT):
            parameter, place = named[name], self._place
            terms = kept.get(id(parameter))
            if terms:
                memory, place = memory_of(terms[0])[0], place if isinstance(terms[0], Partial) else _MEAN
            else:
                memory = parameter.grad = torch.empty_like(parameter)
            jobs += self._checkpoint.jobs(f"{GRADIENT}/{name}", Partial(memory), *place)
        read_all(jobs)

    def _restore_positions(self) -> None:
        for number, loader in enumerate(self._run.prepared.loaders):
            self._give(f"{LOADER}.{number}", loader)

    def _give(self, unit: str, each: Any) -> None:
        """Restores an object's state, unless an imported checkpoint has none of its kind."""
        if unit not in self._objects:
            return
        try:
            each.load_state_dict(self._objects[unit])
        except Exception as error:
            raise CheckpointError(_refusal(unit, each, error)) from error

    def _restore_objects(self) -> None:
        for unit, each in stateful(self._run).items():
            if not unit.startswith(f"{LOADER}."):
                self._give(unit, each)
        state = self._objects[ACCUMULATION]
        self._run.accumulation.load_state_dict(state)
        for gate in self._run.prepared.gates():
            gate.resume()
        if RANDOM in self._objects:
            self._restore_streams(state["total_backwards"])

    def _restore_streams(self, step: int) -> None:
        saved = self._objects[RANDOM]
        if self._source_of_streams is not None:
            restore_random_state(saved, self._run.world.device)
        else:
            seed = self._run.prepared.seed
            if seed is None:  # no loader was prepared: the run has no seed but where rank 0 stood
                seed = derive_seed(_RESUMED, *saved[TORCH_STREAM][:16].tolist())
            begin_random_state(seed, self._run.layout.shard.index, step, self._run.world.device)
        self._run.strategy.load_random_state(saved.get(ENGINE), step)


def _rank_to_follow(checkpoint: Checkpoint, rank: int, shards: Sequence[int]) -> int | None:
    """The rank that saved the random streams which `rank` goes on from; None: it begins its own.

    It is `rank` itself where the ranks share the data as they did. Elsewhere ranks that compute on
    the same data, tensor-parallel peers, go on alike: they draw dropout for one activation.
    """
    saved = checkpoint.manifest.record.get("shards") or list(range(checkpoint.world_size))
    if saved == shards:
        return rank
    return saved.index(shards[rank]) if shards[rank] in saved else None


def _refusal(unit: str, each: Any, error: Exception) -> str:
    return f"{unit}, a {type(each).__name__}, did not take the state that the checkpoint has of it: {type(error).__name__}: {error}"


_MEAN = (0, 0)  # A place in no world that has saved: whoever reads from there gets the mean of all terms


def _is_whole(terms: Sequence[Elementwise | Partial] | None, parameter: torch.Tensor) -> bool:
    """Whether there is a place for a pending gradient: `.grad`, or memory for all of it."""
    return terms is None or any(part.shape == parameter.shape for term in terms[:1] for part in memory_of(term))


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
