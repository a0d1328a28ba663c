"""The state of a run: all that `prepare` was given, and all else that the next step depends on.

model.<i>/<name>             entries of the i-th prepared model
optimizer.<i>/<parameter>/<key>      entries of the i-th optimizer; optimizer.<i> has its groups
gradient/<parameter>         of a window of accumulation that is open
scheduler.<i>, loader.<i>, object.<i>    their state_dict(); object: in order of registration
precision, strategy, plugin.<i>      of components that have a state
accumulation                 where the window stands
random                       the random streams of each rank
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint.collective_steps import exchange
from accel_core import CheckpointError
from accel_core.api.checkpoint import Run, check_random_state, has_state, held_by
from accel_core.api.component import capture_random_state, how_to_install
from accel_core.api.layouts import Alias, Entry, Partial, State

if TYPE_CHECKING:
    from torch import nn


MODEL, OPTIMIZER, SCHEDULER, LOADER, OBJECT = "model", "optimizer", "scheduler", "loader", "object"
GRADIENT, ACCUMULATION, RANDOM = "gradient", "accumulation", "random"
COMPONENTS = ("precision", "strategy", "plugin")
ENGINE = "engine"  # among the random streams, those of the strategy's
VALUES = "values"  # of an optimizer: what is no tensor in the state of its parameters


@dataclass
class Content:
    """A rank's state for a checkpoint: entries by name, objects by unit, versions of pieces."""

    state: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)


def stateful(run: Run) -> dict[str, Any]:
    """Everything whose state is an object, by the name under which it is saved."""
    prepared = run.prepared
    numbered = ((LOADER, prepared.loaders), (SCHEDULER, prepared.schedulers), (OBJECT, run.registered))
    found = {f"{kind}.{number}": each for kind, several in numbered for number, each in enumerate(several)}
    return found | {name: each for name, each in run.components.items() if has_state(each)}


def collect(run: Run, leave_out: Sequence[int] = ()) -> Content:
    """The content of this rank, but for the models that a user's hook saves. No collective."""
    content = Content()
    # First, for what is asked for its state may draw: torchdata's loader begins its next epoch.
    streams = content.objects[RANDOM] = {ENGINE: run.strategy.random_state(), **capture_random_state(run.world.device)}
    if isinstance(streams.get("numpy"), Mapping):  # of MT19937 it is a tuple
        raise CheckpointError(
            f"save_state() cannot save numpy's global random stream: numpy.random.set_bit_generator() made it a "
            f"{streams['numpy']['bit_generator']}. Leave it as it was, and draw from one of your own, numpy.random.Generator(...)."
        )
    for number in range(len(run.models())):
        if number not in leave_out:
            content.state.update(within(f"{MODEL}.{number}", run.model_state(number)))
    for number, state in enumerate(run.optimizer_states()):
        if run.prepared.drifted and not run.world.is_main:
            state = replace(state, values={}, entries={})  # every rank has its own, and that of the main process counts
        unit = f"{OPTIMIZER}.{number}"
        content.state.update(within(unit, state.entries))
        content.objects[unit] = {"kind": state.kind, "groups": state.groups, "whole": state.whole}
        content.objects[f"{unit}.{VALUES}"] = state.values
    for unit, each in stateful(run).items():
        content.objects[unit] = _state_of(unit, each)
    content.objects[ACCUMULATION] = run.accumulation.state_dict()
    return content


def check_moment(run: Run) -> None:
    """Raises `CheckpointError` where no resumed loop can go on: in a micro-batch. No collective."""
    accumulation = run.accumulation
    _check_together(run)
    if not accumulation.inside:
        _check_stepped(run)
        return
    if not accumulation.micro_backwards:
        raise CheckpointError(
            "save_state() was called inside accumulate() before accelerator.backward(loss): the batch at hand is behind the "
            "loader already, and a run that resumes would never train on it. Call it after the backward, or behind the block."
        )
    gates = list(run.prepared.gates())
    if gates and not accumulation.open and not any(gate.settled == accumulation.serial for gate in gates):
        raise CheckpointError(
            "save_state() was called between the backward that closes a window of accumulation and optimizer.step(): a run "
            "that resumes would never take that step. Call it after the step, or behind the accumulate() block."
        )


def _check_together(run: Run) -> None:
    """Raises while ranks train by themselves; warns if they did before, as optimizers show."""
    apart = run.prepared.apart
    if not run.prepared.drifted:
        return
    if apart is not None and apart():
        raise CheckpointError(
            f"save_state() was called inside LocalSGD, {apart()} steps after the last average: every rank has a model of its own "
            f"now. Call it right behind a LocalSGD.step() that averages, or behind the block."
        )
    alone = "their optimizers have stepped alone. The optimizer state of rank 0 is saved, for all ranks"
    warnings.warn(f"save_state() was called after LocalSGD: {alone}.", stacklevel=2)


def _check_stepped(run: Run) -> None:
    """Raises `CheckpointError` between backward and step, if `accumulate` is never called."""
    prepared, accumulation = run.prepared, run.accumulation
    if accumulation.serial or prepared.fused or not prepared.optimizers:
        return
    if any(gate.seen_backwards == accumulation.total_backwards for gate in prepared.gates()):
        return
    held = [parameter for optimizer in prepared.optimizers for parameter in held_by(optimizer)]
    present = prepared.gradients.tensors(held)
    if any(map(torch.any, present)) if prepared.gradients.are_elsewhere else present:
        raise CheckpointError(
            "save_state() was called between accelerator.backward(loss) and optimizer.step(): a run that resumes would never take that step. "
            "Call it after the step, or after optimizer.zero_grad(); in a window, where accelerator.accumulate(model) counts the micro-batches."
        )


def pending_gradients(run: Run) -> dict[str, Entry]:
    """The gradients of an open window. A collective: some ranks may have none for a parameter."""
    accumulation = run.accumulation
    named, found, in_parts = dict(named_parameters(run)), dict[str, torch.Tensor](), False
    names = {id(parameter): name for name, parameter in named.items()}
    for parameter, gradient in run.prepared.gradients.of(named.values()):
        name = names[id(parameter)]
        in_parts |= gradient.shape != parameter.shape
        found[name] = gradient.detach() if name not in found or in_parts else found[name] + gradient.detach()
    refused = in_parts or not run.strategy.replicates_parameters
    ranks = exchange(run.world, "for the names of gradients", (list(found), refused))
    if any(refused for _, refused in ranks):
        raise CheckpointError(
            f"A checkpoint was asked for after {accumulation.position} of {accumulation.size} micro-batches of a window, and the strategy "
            f"{type(run.strategy).__name__} cannot save the gradients that are pending. Save when accelerator.sync_gradients is True."
        )
    wanted = sorted({name for present, _ in ranks for name in present})
    terms = {name: found[name] if name in found else torch.zeros_like(named[name]) for name in wanted}
    return {f"{GRADIENT}/{name}": Partial(term) for name, term in terms.items()}


def named_parameters(run: Run) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter that a backward may give a gradient, by the name of its saved gradient."""
    names = run.names()
    for position, parameter in enumerate(run.prepared.learned()):
        yield names.get(id(parameter), f"loose.{position}"), parameter


def check_value(name: str, value: Any, device: torch.device | None) -> None:
    """Raises for random streams that cannot be set, before anything is; other values pass."""
    if name == RANDOM:
        try:
            check_random_state(value, device)
        except CheckpointError:  # what is missing here: the value may be right
            raise
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint lies: its hashes hold, but no save_state() leaves such a value as its {name}: "
                f"{type(error).__name__}: {error!s:.200}. Load another checkpoint."
            ) from error


def within(unit: str, state: State) -> dict[str, Entry]:
    """A state under the names that it has in a checkpoint."""
    return {
        f"{unit}/{name}": Alias(f"{unit}/{entry.of}") if isinstance(entry, Alias) else entry
        for name, entry in state.items()
    }


def _state_of(unit: str, each: Any) -> Any:
    if not has_state(each):
        raise CheckpointError(
            f"{unit} is a {type(each).__name__} without state_dict() and load_state_dict(), so where it stands cannot be "
            f"saved. {_HINTS.get(unit.partition('.')[0], 'Give it these two methods.')}"
        )
    return each.state_dict()


_HINTS = {
    LOADER: "Prepare it by a loader component whose loaders have a position, as those of accel-data, or leave it out of prepare(). "
    + how_to_install("accel-data"),
    SCHEDULER: "Give it these two methods, or leave it out of prepare().",
}
