"""Gradient synchronisation: decided by each forward, as under every strategy.

torch's engine decides in the backward instead, by a switch in each unit. So every call of a sharded
model turns the switches for the backward that follows, if they stand otherwise; and if they do not,
which is the common case, it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from accel_checkpoint import pieces_of
from accel_core.api.component import ClassOverride, map_tensors
from accel_core.api.layouts import Elementwise, Partial
from accel_fsdp.engine_internals import (
    clear,
    cut_parameters,
    engine_state,
    held_gradients,
    is_any_gathered,
    is_gathered,
    is_in_backward,
    refuse_second_derivatives,
    was_gathered,
    was_interrupted,
)
from accel_fsdp.sharding import DTensorSharding, local_of
from accel_fsdp.torch_versions import held_gradient, reset_iter_state

if TYPE_CHECKING:
    from torch import nn

    from accel_core.api.layouts import GradientState, State
    from accel_fsdp.unsharded_parameters import WholeParameters

_SYNCHRONISATION = "_accel_synchronisation"


class Synchronisation:
    """Whether the gradients of one sharded model travel in the next backward.

    Args:
        model: the root, with all its units.
        reshards: whether the units inside are cut again after their forward.
        whole: its parameters that are not cut.

    Attributes:
        calls: how many calls of the model run, one inside the other.
        units: the model, and the modules in it that are gathered by themselves.
        cuts: the engine's records of its parameters.
        held_back: whether forwards that run now lead to backwards that do not synchronise.
        travels: what the units were told.
        cut_as: how the model was cut, for comparison.
    """

    __slots__ = (
        "__weakref__",
        "_kept",
        "_may_hold",
        "_places",
        "_states",
        "calls",
        "cut_as",
        "cuts",
        "engine",
        "held_back",
        "travels",
        "units",
        "whole",
    )

    def __init__(self, model: nn.Module, reshards: bool, whole: WholeParameters) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.cuts = cut_parameters(self.units)
        self._kept = cut_parameters([model]) if reshards else self.cuts
        self.engine = engine_state(model)
        self._states = [engine_state(unit) for unit in self.units]
        refuse_second_derivatives(self.units)
        self.cut_as: object = None
        self.whole = whole
        self.calls = 0
        self.held_back = False
        self.travels = True
        self._may_hold = False
        shown, cut_of = DTensorSharding(), {id(cut.sharded_param): cut for cut in self.cuts}
        self._places = [
            (name, cut_of.get(id(each)), each, shown.extent(each)) for name, each in model.named_parameters()
        ]

    def tell(self, travels: bool) -> None:
        """The next backward synchronises, or does not."""
        for unit in self.units:
            unit.set_requires_gradient_sync(travels, recurse=False)
        self.travels = travels
        self._may_hold |= not travels

    def held(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The gradients that were not reduced, whole and live, by name; free where none wait."""
        if not self._may_hold:
            return {}
        found = held_gradients(model, self.cuts)
        self._may_hold = bool(found) or not self.travels
        return found

    def gradients(self, model: nn.Module) -> GradientState:
        """The hook `gradient_state`: the parts that have travelled, and what waits, whole."""
        waits, found = bool(self.held(model)), dict[str, list[Elementwise | Partial]]()
        for name, cut, parameter, extent in self._places:
            gradient = parameter.grad if cut is None else cut.sharded_param.grad
            held = None if cut is None or not waits else held_gradient(cut)
            if gradient is not None and cut is None and waits:
                found[name] = [Partial(gradient)]  # a whole one travels with the others
            elif gradient is not None:
                local = local_of(gradient)
                found[name] = [Elementwise(extent.shape, local.dtype, tuple(pieces_of(extent.boxes, local)))]
            if held is not None:
                found.setdefault(name, []).append(Partial(held))
        return found

    def outliving(self, output: torch.Tensor) -> torch.Tensor:
        """An output that stays valid after resharding: parameters and views of them are copied."""
        return output.clone() if is_gathered(output, self._kept) else output

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather_outside(self) -> None:
        """Makes the tensors that units gather into, which could not be trained if inference mode made them. Collective."""
        for unit in self.units if not was_gathered(self.cuts) else ():
            unit.unshard()
            unit.reshard()

    def reshard(self) -> None:
        """Shows shards in the places of gathered parameters that are out of date or not needed."""
        for unit, state in zip(self.units, self._states, strict=True):
            if is_any_gathered(state):
                unit.reshard()


def synchronisation_of(model: nn.Module) -> Synchronisation | None:
    """That of a model which `FSDP` has sharded; None for any other."""
    found: Synchronisation | None = vars(model).get(_SYNCHRONISATION)
    return found


def attach(model: nn.Module, synchronisation: Synchronisation) -> None:
    """Sets what `synchronisation_of` finds, and what calls of the `ShardedModel` go by."""
    vars(model)[_SYNCHRONISATION] = synchronisation


class ShardedModel(ClassOverride):
    """The overrides of a sharded model: calls decide about synchronising, copying raises.

    `__call__` is overridden, and no hook is registered: hooks would be compiled with the model.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for its arguments."""
        own: Synchronisation = vars(self)[_SYNCHRONISATION]
        if was_interrupted(own.engine):
            reset_iter_state(self)  # type: ignore[arg-type]
        learns = torch.is_grad_enabled()
        if learns and own.travels is own.held_back:
            own.tell(not own.held_back)
        elif torch.is_inference_mode_enabled():
            own.gather_outside()
        own.calls += 1
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if not is_in_backward(own.engine):  # torch ends a recomputation by an exception, and the backward goes on
                reset_iter_state(self)  # type: ignore[arg-type]
            raise
        finally:
            own.calls -= 1
        if own.calls:  # a method such as `generate`, which goes on and may use what is gathered, has called its model
            return output
        if learns:
            own.whole.follow(output, own)
        else:
            # No backward needs what is gathered, and it would be out of date when optimizers or users change the parts.
            output = map_tensors(own.outliving, output)
            own.reshard()
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of shards, and those that were not reduced."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        clear(vars(self)[_SYNCHRONISATION].cuts, set_to_none)

    def accel_state(self) -> State:
        """The parts on this rank, which `load_checkpoint_in_model` fills."""
        from accel_checkpoint import capture_model

        vars(self)[_SYNCHRONISATION].reshard()
        return capture_model(self, DTensorSharding())  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy(self, "copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(self, "copied or pickled")


def _refuse_copy(model: object, done: str) -> NoReturn:
    raise TypeError(
        f"This {type(model).__name__} was to be {done}, but FSDP has sharded it: this process has a part of each parameter, in process "
        f"groups that a copy could not join. Copy the model before prepare(); take its weights by accelerator.get_state_dict(model), or "
        f"save them by accelerator.save_model(model, folder)."
    )


class NoSync:
    """Forwards inside lead to backwards whose gradients stay here."""

    __slots__ = ("_before", "_own")

    def __init__(self, own: Synchronisation) -> None:
        self._own = own
        self._before = False

    def __enter__(self) -> None:
        self._before, self._own.held_back = self._own.held_back, True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own.held_back = self._before


@contextmanager
def triggered(own: Synchronisation) -> Iterator[None]:
    """The next backward synchronises, whatever its forward said."""
    own.tell(True)
    yield
