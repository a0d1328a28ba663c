"""Repeating the micro-batches of a window until the first value that is not finite.

They come in the order in which they ran. Of one whose loss was not finite, the forwards are looked
at; of one whose loss was finite, the gradients are, from the last forward to the first.

Nothing here touches `.grad`, or talks to other ranks; random streams and buffers are put back.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accel_core.api.component import listed
from accel_core.api.diagnostics import map_leaves
from accel_diagnostics.findings import Finding, Kind, sample_ids
from accel_diagnostics.no_collectives import Alone
from accel_diagnostics.recording import Buffers, Forward, Named, Streams, autocast_of, versions_of
from accel_diagnostics.tracing import INPUTS, Call, Trace, is_dirty, is_finite, stand_ins, without_mask


@dataclass(frozen=True)
class Replay:
    """The search on one rank."""

    rank: int
    step: int  # optimizer steps so far
    first_turn: int  # the backwards of the window, the last one excluded
    last_turn: int
    records: Sequence[Forward]  # that were kept, in order
    bad_losses: set[int]  # the turns whose loss was not finite
    bad_gradients: Sequence[str]  # the names of parameters whose gradients are not finite

    def run(self) -> Finding | None:
        """The first value that is not finite; None if this rank's micro-batches are clean."""
        failures: list[str] = []
        for turn in range(self.first_turn, self.last_turn):
            try:
                found = self._in_forwards(turn) if turn in self.bad_losses else None
                if found is None and turn not in self.bad_losses and self.bad_gradients:
                    found = self._in_gradients(turn)
            except Exception as error:  # noqa: BLE001  (what was asked for is where the value comes from; the rest is a note)
                found = None
                failures.append(
                    f"repeating micro-batch {turn - self.first_turn} raised {type(error).__name__}: {error}"
                )
            if found is None and turn in self.bad_losses:
                found = self._unseen(turn, failures)
            if found is not None:
                return found
        return self._unseen(self.last_turn - 1, failures) if failures else None

    def unseen(self, *reasons: str) -> Finding:
        """The finding if no rank has found anything; `reasons`: what else explains that."""
        return self._unseen(self.last_turn - 1, ["sums over micro-batches or ranks may overflow", *reasons])

    def _forwards(self, turn: int) -> list[Forward]:
        """Forwards that a loss may come from: a backward reached them, or they shared its batch."""
        ended = [record for record in self.records if record.finite is not None]
        used = [_batches(record) for record in ended if turn in record.gradients]
        return [
            record
            for record in ended
            if turn in record.gradients
            or (record.turn == turn and not record.gradients and (not used or _batches(record) in used))
        ]

    def _in_forwards(self, turn: int) -> Finding | None:
        """A loss was not finite."""
        ended = self._forwards(turn)
        for record in ended:
            with _repeated(record, aliases=False) as trace:
                pass
            if any(not is_finite(tensor) for _, tensor in trace.outputs):
                return self._of_forward(record, turn, _without_masks(record, trace))
        if all(bool(record.finite) for record in ended):
            note = "" if ended else "No forward of a prepared model in training mode came before it. "
            return self._finding("loss", turn, ended[-1] if ended else None, None, note=note)
        return None

    def _of_forward(self, record: Forward, turn: int, trace: Trace) -> Finding:
        suspect = trace.first()
        call = suspect.call if suspect is not None else trace.root
        assert call is not None
        masked = next(((name, tensor) for name, tensor in call.inputs if not is_finite(tensor)), None)
        given = [] if trace.root is None else trace.root.inputs
        bad_input = trace.root.dirty if suspect is None and trace.root is not None else None
        if masked is not None and bad_input is None:
            bad_input = next((each for each in given if not is_finite(each[1])), None)
        if bad_input is not None:
            return self._finding("input", turn, record, None if suspect is None else call, bad_input)
        recurse = suspect is None or bool(suspect.note)
        state = next(_broken_state(call.module, recurse), None)
        if state is not None:
            name = f"{call.path}.{state[0]}" if call.path else state[0]
            return self._finding("parameter", turn, record, call, (name, state[1]), rows=False)
        assert suspect is not None, "outputs that are not finite are made somewhere"
        notes = [suspect.note] if suspect.note else []
        if not any(is_dirty(tensor) for _, tensor in trace.outputs):
            notes.append(
                "the outputs of the model hold no more than minus infinity: if that is a mask, look at the loss function"
            )
        if trace.nan is not None and trace.nan is not call:
            notes.append(f"the first NaN is in the output of module {trace.nan.path!r}")
        return self._finding("output", turn, record, call, suspect.made, note="; ".join(notes))

    def _in_gradients(self, turn: int) -> Finding | None:
        """The loss was finite, and some gradient is not."""
        reached = [record for record in self.records if turn in record.gradients and record.finite is not None]
        for record in reversed(reached):
            with _repeated(record, aliases=True) as trace:
                trace.run_backward(record.gradients[turn])
            if trace.gradient is None:
                continue
            place, made = trace.gradient
            if place is None:
                note = "it arrives at the model's output so: what computes the loss from the output made it"
                return self._finding("gradient", turn, record, None, made, note=note)
            if isinstance(place, Call):
                return self._finding("gradient", turn, record, place, (f"the gradient of {made[0]}", made[1]))
            owner = place.rpartition(".")[0]
            call = Call(owner, record.model.get_submodule(owner), [], None, 0)
            return self._finding("gradient", turn, record, call, (f"the gradient of {place}", made[1]), rows=False)
        return None

    def _unseen(self, turn: int, failures: Sequence[str]) -> Finding:
        record = next((each for each in self.records if each.turn == turn), None)
        seen = "the loss was not finite" if turn in self.bad_losses else ""
        if not seen:
            seen = f"the gradients of {listed(self.bad_gradients, most=4)} are not finite"
        note = f"{seen}, and repeating the micro-batch gave no such value"
        return self._finding("not reproduced", turn, record, None, note="; ".join([note, *failures]))

    def _finding(
        self,
        kind: Kind,
        turn: int,
        record: Forward | None,
        call: Call | None,
        made: Named | None = None,
        note: str = "",
        rows: bool = True,
    ) -> Finding:
        if record is not None and versions_of((record.args, record.kwargs)) != record.versions:
            note = "; ".join([*filter(None, [note]), "inputs were changed in place after the forward"])
        samples = () if record is None else tuple(sample_ids(drawn, held) for drawn, held in record.drawn)
        path, module = (None, "") if call is None else (call.path, type(call.module).__name__)
        name = "" if made is None else made[0]
        finding = Finding(
            self.rank, kind, path, module, name, self.step, turn - self.first_turn, samples=samples, note=note
        )
        if call is not None:
            low, high = _finite_range(call.inputs)
            finding = replace(finding, low=low, high=high)
        if made is None:
            return finding
        values = made[1].detach()
        counts = int(values.isnan().sum()), int(values.isinf().sum()), values.numel()
        found = _bad_rows(values, samples) if rows else None
        return replace(finding, nan=counts[0], inf=counts[1], values=counts[2], rows=found)


def _without_masks(record: Forward, trace: Trace) -> Trace:
    """The trace in which nothing is suspected without which the outputs are broken as before: a mask."""
    dirty = any(is_dirty(tensor) for _, tensor in trace.outputs)
    while (place := trace.mask()) is not None:
        with _repeated(record, aliases=False, masks=trace.masks | {place}) as again:
            pass
        if again.broken(dirty=dirty) < trace.broken(dirty=dirty):
            break
        trace = again
    return trace


@contextmanager
def _repeated(record: Forward, aliases: bool, masks: frozenset[int] = frozenset()) -> Iterator[Trace]:
    """Runs a forward again, as it was but for `masks`; inside, its graph can be run backwards."""
    trace = Trace(record.model, aliases, masks)
    streams, buffers = Streams.take(record.streams.place), Buffers(record.model)
    try:
        record.streams.restore()
        record.buffers.restore(record.model)
        args, kwargs = map_leaves(_leaf, record.args), map_leaves(_leaf, record.kwargs)
        if INPUTS in masks:
            args, kwargs = map_leaves(without_mask, args), map_leaves(without_mask, kwargs)
        with ExitStack() as stack:
            if aliases:
                stack.enter_context(stand_ins(record.model))
            stack.enter_context(trace.hooks())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_uncompiled())
            stack.enter_context(Alone())  # type: ignore[no-untyped-call]
            with autocast_of(record):
                record.model(*args, **kwargs)
            yield trace
    finally:
        buffers.restore(record.model)
        streams.restore()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Hooks are looked at in every call only where nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _batches(record: Forward) -> list[int]:
    return [id(drawn) for drawn, _ in record.drawn]


def _leaf(value: Any) -> Any:
    """A tensor without its history, also inside dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_() if value.requires_grad else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for each in dataclasses.fields(value):
            object.__setattr__(twin, each.name, map_leaves(_leaf, getattr(value, each.name)))
        return twin
    return value


def _broken_state(module: nn.Module, recurse: bool) -> Iterator[Named]:
    """Parameters that are not finite; and buffers, where minus infinity is a mask."""
    yield from (each for each in module.named_parameters(recurse=recurse) if not is_finite(each[1]))
    for name, buffer in module.named_buffers(recurse=recurse):
        if (buffer.is_floating_point() or buffer.is_complex()) and is_dirty(buffer):
            yield name, buffer


def _finite_range(inputs: Sequence[Named]) -> tuple[float | None, float | None]:
    found: list[float] = []
    for _, tensor in inputs:
        values = tensor.detach()
        values = values.abs() if values.is_complex() else values
        finite = values[torch.isfinite(values)]
        if finite.numel():
            found += [finite.min().item(), finite.max().item()]
    return min(found, default=None), max(found, default=None)


def _bad_rows(values: torch.Tensor, samples: Sequence[Any]) -> tuple[int, ...] | None:
    """Rows of a batch with values that are not finite; None if it is no tensor with rows."""
    if len(samples) != 1 or samples[0] is None or not values.dim() or values.shape[0] != len(samples[0].ids):
        return None
    bad = ~torch.isfinite(values.reshape(values.shape[0], -1)).all(dim=1)
    return tuple(bad.nonzero().flatten().tolist())
