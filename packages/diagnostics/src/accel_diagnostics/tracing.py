"""Observation of a repeated forward and its backward: the values that are not finite, by call.

In the forward, the first module whose output is not finite although its inputs are is suspected,
unless what it made is absorbed later: an infinite score that a softmax turns into 0 is no fault.
Negative infinity may be a mask. A forward is repeated without that of one place (`masks`): if the
outputs are broken as before, it was one, and the next place is suspected.

In the backward, every call of a module has an alias of its inputs, so that the gradient that this
very call gives can be told from what other uses of the same tensor give. Autograd runs from later
to earlier, so the first alias whose gradient is not finite belongs to the module that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel_core.api.diagnostics import map_leaves
from accel_diagnostics.recording import Named, can_be_looked_at, floating

INPUTS = 0
"""The place of the model's inputs among `masks`; calls are numbered from 1."""


@dataclass
class Call:
    """One call of one module, while a forward is repeated."""

    path: str
    module: nn.Module
    inputs: list[Named]  # its floating tensors
    parent: Call | None  # inside of which it stands
    suspects: int  # how many places were suspected when it began
    number: int = 0  # in the order of calls, from 1
    dirty: Named | None = None  # the first of its inputs that holds a NaN or a positive infinity


@dataclass
class Suspect:
    """A place where a value that is not finite was seen first: a call, and what it made."""

    call: Call
    made: Named
    note: str = ""
    tensors: list[torch.Tensor] = field(default_factory=list)


class Trace:
    """The observations of one repeated forward and its backward.

    With `aliases`, calls get aliases of their inputs, and gradients are looked at. `masks` are numbers
    of calls whose outputs have no negative infinity this time.
    """

    def __init__(self, model: nn.Module, aliases: bool, masks: frozenset[int] = frozenset()) -> None:
        self._model = model
        self._aliases = aliases
        self.masks = masks
        self._calls = 0
        self._stack: list[Call] = []
        self._cleared: list[Suspect] = []
        self._backward = False
        self.suspects: list[Suspect] = []
        self.nan: Call | None = None  # the first that makes a NaN of other values
        self.root: Call | None = None
        self.outputs: list[Named] = []
        self.gradient: tuple[Call | str | None, Named] | None = None  # the first that is not finite, and whose it is

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Looks at every module of the model, inside."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                name = path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")
                stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def first(self) -> Suspect | None:
        """The place that explains outputs which are not finite; None if they are finite."""
        if self.suspects:
            return self.suspects[0]
        if any(not is_finite(tensor) for _, tensor in self.outputs) and self._cleared:
            return self._cleared[0]
        return None

    def mask(self) -> int | None:
        """What may be a mask, and is suspected before anything else: `INPUTS` or the number of a call."""
        given = [] if self.root is None else [tensor for _, tensor in self.root.inputs]
        if INPUTS not in self.masks and any(map(_is_masked, given)):
            return INPUTS
        suspect = self.suspects[0] if self.suspects else None
        if suspect is None or suspect.call.number in self.masks or any(map(is_dirty, suspect.tensors)):
            return None
        return suspect.call.number

    def broken(self, *, dirty: bool) -> int:
        """How many values of the outputs are not finite; with `dirty`, minus infinity does not count."""
        return sum(int((dirty_values(each) if dirty else ~torch.isfinite(each)).sum()) for _, each in self.outputs)

    def run_backward(self, gradients: dict[int, torch.Tensor]) -> None:
        """The backward, from the gradients that arrived at the outputs, by their number.

        The parameters have to be `stand_ins`: a checkpoint that computes its part again allows no
        other backward than one that accumulates gradients.
        """
        self._backward = True
        roots = [(tensor, gradients[number]) for number, (_, tensor) in enumerate(self.outputs) if number in gradients]
        for number, gradient in sorted(gradients.items()):
            if not is_finite(gradient):
                self.gradient = (None, (self.outputs[number][0], gradient))
                return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._arriving(name, name))
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = list(named_inputs(args, kwargs))
            parent = self._stack[-1] if self._stack else None
            self._calls += 1
            call = Call(path, module, inputs, parent, len(self.suspects), self._calls)
            call.dirty = next(((name, tensor) for name, tensor in inputs if is_dirty(tensor)), None)
            self._stack.append(call)
            self.root = self.root or call
            enters_dirty = call.dirty is not None and parent is not None and parent.dirty is None
            # In the backward, a checkpoint computes it again.
            if enters_dirty and not (self._backward or self.suspects):
                assert parent is not None
                assert call.dirty is not None
                self._suspect(parent, call.dirty, f"made in its own forward before it calls {path!r}")
            return self._aliased(call, args, kwargs) if self._aliases and torch.is_grad_enabled() else None

        return enter

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:  # noqa: ARG002
        call = self._stack.pop()
        replaced = None
        if call.number in self.masks:
            output = replaced = map_leaves(without_mask, output)
        outputs = list(floating(output, "output"))
        if self._aliases and torch.is_grad_enabled():
            for name, tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._arriving(call.parent, name))
        if self._backward:
            return None
        if call.parent is None:
            self.outputs = outputs
        first_dirty = next((each for each in outputs if is_dirty(each[1])), None)
        bad = first_dirty or next((each for each in outputs if not is_finite(each[1])), None)
        if bad is not None and self.nan is None and _has_nan(outputs) and not _has_nan(call.inputs):
            self.nan = call
        if bad is None:
            self._absorb(call)
        elif call.dirty is None and len(self.suspects) == call.suspects:
            self._suspect(call, bad, "")
            self.suspects[-1].tensors += [tensor for _, tensor in outputs]
        return replaced

    def _suspect(self, call: Call, made: Named, note: str) -> None:
        self.suspects.append(Suspect(call, (made[0], made[1].detach()), note, [made[1]]))

    def _absorb(self, call: Call) -> None:
        """A call with finite outputs: what was suspected inside it, or before it, did no harm."""
        given = {id(tensor) for _, tensor in call.inputs}
        for number, suspect in reversed(list(enumerate(self.suspects))):
            if number >= call.suspects or any(id(tensor) in given for tensor in suspect.tensors):
                self._cleared.insert(0, self.suspects.pop(number))

    def _aliased(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of a call, with aliases whose gradients come from this call alone."""
        aliases: dict[int, torch.Tensor] = {}

        def alias(name: str, tensor: torch.Tensor) -> torch.Tensor:
            made = aliases.get(id(tensor))
            if made is None:
                made = aliases[id(tensor)] = tensor.clone() if tensor.is_leaf else tensor.view_as(tensor)
                made.register_hook(self._arriving(call, name))
            return made

        given = {id(tensor): name for name, tensor in call.inputs if tensor.requires_grad}
        if not given:
            return None

        def exchanged(value: Any) -> Any:
            return alias(given[id(value)], value) if id(value) in given else value

        return map_leaves(exchanged, args), map_leaves(exchanged, kwargs)

    def _arriving(self, place: Call | str | None, name: str) -> Any:
        def arrived(gradient: torch.Tensor) -> None:
            if self.gradient is None and not is_finite(gradient):
                self.gradient = (place, (name, gradient.detach()))

        return arrived


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are."""
    return bool(torch.isfinite(tensor.detach()).all())


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Inside, the model has parameters of the same values and memory, with own gradients."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    twins: dict[int, nn.Parameter] = {}
    for _, _, parameter in places:
        twin = twins.setdefault(id(parameter), nn.Parameter(parameter.detach(), parameter.requires_grad))
        vars(twin).update(vars(parameter))
    try:
        for module, name, parameter in places:
            setattr(module, name, twins[id(parameter)])
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


def _has_nan(tensors: list[Named]) -> bool:
    return any(bool(tensor.detach().isnan().any()) for _, tensor in tensors)


def is_dirty(tensor: torch.Tensor) -> bool:
    """Whether it holds a NaN, or an infinity that is no mask."""
    return bool(dirty_values(tensor).any())


def dirty_values(tensor: torch.Tensor) -> torch.Tensor:
    """Which of its values are NaN, or an infinity that is no mask."""
    values = tensor.detach()
    return ~torch.isfinite(values) if values.is_complex() else values.isnan() | (values == torch.inf)


def without_mask(value: Any) -> Any:
    """A tensor whose least finite value, or 0, stands for minus infinity; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not can_be_looked_at(value) or not _is_masked(value):
        return value
    finite = value.detach()[torch.isfinite(value.detach())]
    return value.masked_fill(value == -torch.inf, finite.min().item() if finite.numel() else 0.0)


def _is_masked(tensor: torch.Tensor) -> bool:
    return not tensor.is_complex() and bool((tensor.detach() == -torch.inf).any())


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Named]:
    """The floating tensors among the arguments of a call, by the place where they stand."""
    for index, value in enumerate(args):
        yield from floating(value, f"argument {index}")
    for name, value in kwargs.items():
        yield from floating(value, name)
