"""Optimizers of sharded parameters: their state is sharded, unless they cannot step a DTensor.

No list says which optimizers can: it would be out of date with the next release of torch. Each is
tried, in a copy, on parameters of a few elements that lie on the ranks as the real ones do.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from accel_checkpoint import ELEMENTWISE, has_tensors, is_known, layouts_of
from accel_core import World
from accel_core.api.component import capture_random_state, gather_objects, restore_random_state
from accel_core.api.strategy import gate_of, is_fused
from accel_fsdp.sharding import DTensorSharding, is_sharded, local_of

if TYPE_CHECKING:
    from accel_core.api.strategy import MoveState

State = dict[str, Any]

STEPS = 2
"""The number of steps of a trial: the first one is special in many optimizers."""

TOLERANCE = 0.1
"""The part of the largest change by which a trial may differ. Muon, which orthogonalises in bfloat16, differs by up to 0.05 when its sums
are taken in another order; who takes the norm of a part for that of the whole, by 0.4 on two ranks
and more on others."""

RATE = 0.1
"""The learning rate of a trial: that of the user may be 0 at the start of a warm-up."""


def carrying(model: nn.Module, optimizers: Sequence[Optimizer], whole: Collection[nn.Parameter] = ()) -> MoveState:
    """The function that moves optimizer state to shards, for `ParameterReplacement.apply`.

    Args:
        model: with its parameters as they were when the optimizers stepped.
        optimizers: that may hold some of them.
        whole: parameters that will not be cut.

    Raises:
        ValueError: naming parameter and key, before anything is changed, if an optimizer has state
            that cannot be cut.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {id(parameter) for parameter in whole}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in names and id(parameter) not in kept:
                _check_state(parameter, state, optimizer, names[id(parameter)])

    def move(old: torch.Tensor, new: torch.Tensor, state: State) -> State:
        owner = next(each for each in optimizers if each.state.get(old) is state)
        return carry(old, new, state, owner, names[id(old)])

    return move


def carry(
    old: torch.Tensor, new: torch.Tensor, state: State, optimizer: Optimizer | None = None, name: str = "a parameter"
) -> State:
    """An optimizer's state of a parameter, sharded like its successor on this rank. No collective.

    What is declared to be laid out like the parameter is cut as it is; of an optimizer that
    declares nothing, floating tensors of its shape. Numbers stay. State is cut as each rank has it:
    that it is the same on all is up to the user, as under DDP.

    Args:
        old: the parameter, whole.
        new: its successor; unless it is a DTensor, state stays as it is.
        state: what the optimizer has under `old`. Is not changed.
        optimizer: whose it is; None: one that declares nothing.
        name: of the parameter, in messages.

    Raises:
        ValueError: naming parameter and key, for state that cannot be cut.
    """
    if not is_sharded(new):
        return state
    _check_state(old, state, optimizer, name)
    return {key: _part(value, new) if _is_cut(optimizer, old, key, value) else value for key, value in state.items()}


def _check_state(parameter: torch.Tensor, state: State, optimizer: Optimizer | None, name: str) -> None:
    for key, value in state.items():
        if _is_cut(optimizer, parameter, key, value) is None:
            found = type(value).__name__
            if isinstance(value, torch.Tensor):
                found += f" of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            raise ValueError(
                f"{'An optimizer' if optimizer is None else type(optimizer).__name__} has stepped before prepare(), and its state has to "
                f"be cut with the parameters, but {key!r} of {name!r}, a {found}, cannot be. Prepare the optimizer before its first "
                f"step; or if this is laid out like the parameter, declare it: optimizer.accel_layouts = {{{key!r}: 'elementwise'}}."
            )


def _is_cut(optimizer: Optimizer | None, parameter: torch.Tensor, key: str, value: Any) -> bool | None:
    """Whether a value of an optimizer's state is sharded, or stays; None if neither works."""
    if not has_tensors(value):
        return False
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    declared = layouts_of(optimizer)
    alike = value.shape == parameter.shape
    if key in declared:
        cut = declared[key] == ELEMENTWISE
    else:
        cut = not is_known(optimizer) and alike and value.is_floating_point()
    if cut:
        return True if alike else None
    return False if value.numel() == 1 else None


def _part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor of a parameter's shape, sharded like the parameter."""
    sharding, own = DTensorSharding(), local_of(parameter)
    local = torch.empty(own.shape, dtype=value.dtype, device=own.device)
    for box in sharding.extent(parameter).boxes:
        local.copy_(value[box.slices])
    return sharding.like(parameter, local)


def check(optimizer: Optimizer) -> None:
    """Raises if an optimizer cannot step its DTensors. Collective; it chooses `foreach` alone.

    A copy of it steps small parameters twice, those cut like its own and the same ones whole, and
    has to find the same values. It takes milliseconds; seconds, where the optimizer compiles
    itself.

    Raises:
        ValueError: on every rank, saying what happened.
    """
    if not any(map(is_sharded, _held(optimizer))):
        return
    name = type(optimizer).__name__
    if is_fused(optimizer):
        raise ValueError(
            f"{name} was prepared under FSDP, but it steps each parameter during the backward, before gradients have travelled. "
            f"{_INSTEAD}"
        )
    for group in optimizer.param_groups:
        # torch's own choice on accelerators is to step all at once, which it cannot where some are whole.
        if (
            len(set(map(is_sharded, group["params"]))) > 1
            and group.get("foreach", True) is None
            and not group.get("fused")
        ):
            group["foreach"] = False
    world = World.current()
    reasons = gather_objects([_failure(optimizer, world.device)], world)
    reason = next((each for each in reasons if each is not None), None)
    if reason is not None:
        raise ValueError(
            f"{name} was prepared under FSDP, but it cannot step parameters that are cut into DTensors: in a trial step on small ones, "
            f"{reason}. {_INSTEAD}"
        )


_INSTEAD = (
    "Take one that computes with DTensors, such as torch.optim.AdamW and torch.optim.SGD, or for 8-bit states torchao.optim.AdamW8bit; "
    "leave out its fused=True or foreach=True; or keep parameters whole with strategy='ddp'."
)


def _failure(optimizer: Optimizer, device: torch.device) -> str | None:
    """The failure of the trial, in words; None if it succeeded."""
    before = capture_random_state(device)
    errors: dict[str, None] = {}
    try:
        with warnings.catch_warnings(), _no_hooks_of_all_optimizers():
            warnings.simplefilter("ignore")  # the real steps say the same
            for with_closure in _ways_to_step(optimizer):
                try:
                    return _Trial(optimizer, with_closure).difference()
                except Exception as error:  # noqa: BLE001  (somebody else's optimizer; whatever it raises is the answer)
                    reason = str(error).strip().partition("\n")[0]
                    errors[f"{type(error).__name__}: {reason:.300}"] = None
    finally:
        restore_random_state(before, device)
    return f"it raised {'; and with a closure, '.join(errors)}"


def _ways_to_step(optimizer: Optimizer) -> tuple[bool, ...]:
    """Whether a trial passes a closure: an optional one where the step fails without."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None:
        return (False,)
    return (True,) if closure.default is closure.empty else (False, True)


@contextmanager
def _no_hooks_of_all_optimizers() -> Iterator[None]:
    """Leaves out the hooks of the user's on steps: a trial is none."""
    added: tuple[dict[int, Any], ...] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    kept = [hooks.copy() for hooks in added]
    try:
        for hooks in added:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(added, kept, strict=True):
            hooks.update(before)


class _Kind(NamedTuple):
    """The properties of parameters that are alike, of which only one is tried."""

    mesh: Any
    placements: tuple[Any, ...]
    uneven: tuple[bool, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Kind:
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
        parts = _parts_by_dim(mesh, placements, parameter.dim())
        uneven = tuple(size % part != 0 for size, part in zip(parameter.shape, parts, strict=True))
        return cls(mesh, tuple(placements), uneven, parameter.dtype, parameter.device)

    @property
    def shape(self) -> list[int]:
        """Two elements a dim on each rank; on the last one fewer, if shards are uneven."""
        parts = _parts_by_dim(self.mesh, self.placements, len(self.uneven))
        return [2 * part - uneven for part, uneven in zip(parts, self.uneven, strict=True)]

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """A whole tensor as the parameters lie."""
        if self.mesh is None:
            return value.to(self.device)
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        # Shards of shards may be taken in any order here.
        plain = [Replicate() if each.is_replicate() else Shard(each.dim) for each in self.placements]
        return distribute_tensor(value, self.mesh, plain, src_data_rank=None).to(self.device)


def _parts_by_dim(mesh: Any, placements: Sequence[Any], dims: int) -> list[int]:
    """Into how many parts each dim is cut."""
    parts = [1] * dims
    for number, placement in enumerate(placements):
        if not placement.is_replicate():
            parts[placement.dim] *= mesh.size(number)
    return parts


class _Trial:
    """Two copies of an optimizer over equal small parameters: whole ones, and shards."""

    def __init__(self, optimizer: Optimizer, with_closure: bool) -> None:
        self._with_closure = with_closure
        self._draws = torch.Generator().manual_seed(0)
        groups = [list(dict.fromkeys(map(_Kind.of, group["params"]))) for group in optimizer.param_groups]
        self._kinds = [kind for kinds in groups for kind in kinds]
        self._starts = [self._drawn(kind) for kind in self._kinds]
        pairs = list(zip(self._starts, self._kinds, strict=True))
        self._whole = [nn.Parameter(start.to(kind.device, copy=True)) for start, kind in pairs]
        self._cut = [nn.Parameter(kind.laid_out(start.clone())) for start, kind in pairs]
        self._steppers = []
        for stand_ins in (iter(self._whole), iter(self._cut)):
            self._steppers.append(_copied(optimizer, [{kind: next(stand_ins) for kind in kinds} for kinds in groups]))

    def difference(self) -> str | None:
        """The difference between the two after some steps, in words; None if there is none."""
        for _ in range(STEPS):
            self._step()
        for start, kind, whole, cut in zip(self._starts, self._kinds, self._whole, self._cut, strict=True):
            change = _largest(whole.detach().to(start.device) - start)
            off = _largest(local_of(cut).detach() - local_of(kind.laid_out(whole.detach())))
            rounding = 4 * torch.finfo(kind.dtype).eps * _largest(start)
            if not off <= TOLERANCE * change + rounding:
                return f"it changed whole parameters by up to {change:.3g}, and those that were cut to values {off:.3g} beside that"
        return None

    def _step(self) -> None:
        gradients = [self._drawn(kind) for kind in self._kinds]

        def backward() -> torch.Tensor:
            for kind, whole, cut, gradient in zip(self._kinds, self._whole, self._cut, gradients, strict=True):
                whole.grad, cut.grad = gradient.to(kind.device, copy=True), kind.laid_out(gradient.clone())
            return torch.ones(())

        for stepper in self._steppers:
            backward()
            stepper.step(*([backward] if self._with_closure else []))

    def _drawn(self, kind: _Kind) -> torch.Tensor:
        return torch.randn(kind.shape, generator=self._draws).to(kind.dtype)


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max())


def _copied(optimizer: Optimizer, groups: Sequence[Mapping[_Kind, nn.Parameter]]) -> Any:
    """A copy of an optimizer, with all it refers to, over other parameters and without state.

    It is not built by the constructor, whose arguments nobody has kept. What was put over its
    methods (gates, schedulers) and into its hooks stays behind.
    """
    kind = type(optimizer)
    memo: dict[int, Any] = {id(gate_of(optimizer)): None}
    for value in (optimizer, *vars(optimizer).values()):
        if isinstance(value, Optimizer):
            memo[id(value.state)] = defaultdict(dict)
        elif isinstance(value, _handles()):
            memo[id(value)] = value
    for group, stand_ins in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = list(stand_ins.values())
        memo.update((id(parameter), stand_ins[_Kind.of(parameter)]) for parameter in group["params"])
    state = {
        name: copy.deepcopy(value, memo)
        for name, value in vars(optimizer).items()
        if not name.endswith("_hooks") and not (callable(value) and hasattr(kind, name))
    }
    for group in state["param_groups"]:
        rate = group.get("lr")
        group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE
    stepper: Any = kind.__new__(kind)
    stepper.__setstate__(state)
    if callable(getattr(stepper, "train", None)):
        stepper.train()  # one that evaluates with other parameters than it trains
    return stepper


def _handles() -> tuple[type, ...]:
    """The types of objects that cannot be copied, and are no optimizer's state."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    return ProcessGroup, DeviceMesh


def _held(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
