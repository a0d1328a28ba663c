"""Preparing: which object is what, in which order they are prepared, and what is remembered of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from accel_core.base.deprecation import level_of_the_user
from accel_core.contract.precision_policy import remove_policy
from accel_core.loading.batch_stream import is_batch_stream
from accel_core.loop.compilation import forget_compiled
from accel_core.loop.forward_methods import unmark
from accel_core.loop.gradients import Gradients, listed
from accel_core.loop.optimizer_gate import gate_of, held_by
from accel_core.loop.scheduler_gate import is_scheduler, ungate_scheduler
from accel_core.options.handlers import AutocastKwargs
from accel_core.options.resolution import as_sequence

if TYPE_CHECKING:
    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.precision_policy import PrecisionPolicy
    from accel_core.loop.gradients import GradientHook
    from accel_core.loop.optimizer_gate import OptimizerGate
    from accel_core.processes.world import World

Kind = Literal["model", "optimizer", "scheduler", "loader", "other"]

ORDER: tuple[Kind, ...] = ("model", "loader", "optimizer", "scheduler", "other")
"""Models first, for a strategy may replace the parameters that optimizers hold."""


@dataclass(frozen=True)
class PrepareRequest:
    """The settings that `prepare_model` is to apply to a model.

    Args:
        policy: the dtypes that are to hold.
        device: where the model goes; None leaves it where it is.
        device_type: the kind of device on which it will run.
        evaluation: whether it is only evaluated: precision and compilation apply, gradients are not
            synchronised.
        compile_options: arguments of `torch.nn.Module.compile`, None to leave compilation out.
        autocast: options of the context in which calls compute, where the policy has a `compute`.
    """

    policy: PrecisionPolicy
    device: torch.device | None
    device_type: str
    evaluation: bool = False
    compile_options: Mapping[str, Any] | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)


@dataclass(frozen=True)
class PreparedModel:
    """A user's model, and what the loop calls.

    Args:
        parameters: those that it had when it was prepared. A strategy may show others for a while:
            gathered ones, in the forward.
        named: those of the user's model by name, at that time.

    Attributes:
        frozen: whether none of them was trained then, so that nobody averages its gradients.
        ids: of all these parameters.
    """

    original: nn.Module
    prepared: nn.Module
    evaluation: bool
    parameters: tuple[nn.Parameter, ...] = ()
    named: Mapping[str, nn.Parameter] = field(default_factory=dict)
    frozen: bool = field(init=False)
    ids: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", not any(each.requires_grad for each in self.parameters))
        object.__setattr__(self, "ids", frozenset(map(id, (*self.parameters, *self.named.values()))))


class Prepared:
    """The objects that one Accelerator has prepared, in order; `gradients` are those of the models.

    `gradient_state` and `check_gradients` are the hooks of these names, None where nobody owns
    them.
    """

    def __init__(
        self,
        world: World,
        gradient_state: GradientHook | None = None,
        check_gradients: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._world = world
        self.check_gradients = check_gradients
        self.models: list[PreparedModel] = []
        self.gradients = Gradients(self.models, gradient_state)
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[DataLoader[Any]] = []
        self.seed: int | None = None  # of the run, agreed when the first loader was prepared
        self.unchecked = False  # whether optimizers came since the last check for orphans
        self.fused = False  # whether one of the optimizers updates parameters during the backward
        self.drifted = False  # whether each rank's optimizers have stepped by themselves
        self._released = 0  # how many of the models the strategy was told to release
        self.apart: Callable[[], int] | None = None  # for how many steps each rank has trained by itself, if it does
        self._copying: Callable[[], None] | None = None  # waits for what is being copied of the parameters

    def find_model(self, model: nn.Module) -> PreparedModel | None:
        """The record in which `model` stands, as the user's or as the prepared one."""
        for record in self.models:
            if record.original is model or record.prepared is model:
                return record
        return None

    def find_part(self, model: nn.Module) -> tuple[PreparedModel, str] | None:
        """The record of a trained model of which `model` is all or a part, and what names of its parameters begin with."""
        inner = getattr(model, "_orig_mod", model)
        for record in self.models:
            if record.evaluation:
                continue
            if inner is record.prepared:
                return record, ""
            for name, module in record.original.named_modules():
                if module is inner:
                    return record, f"{name}." if name else ""
        return None

    def trained(self) -> list[nn.Module]:
        """The prepared models that are trained."""
        return [record.prepared for record in self.models if not record.evaluation]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the models that are trained; some of them twice."""
        for record in self.models:
            if not record.evaluation:
                yield from record.parameters
                yield from record.prepared.parameters()

    def learned(self, *models: nn.Module) -> list[nn.Parameter]:
        """Every parameter that a backward may give a gradient, once: of trained models, of optimizers, and of `models`."""
        found = {id(parameter): parameter for parameter in self.parameters()}
        for holder in (
            *(held_by(optimizer) for optimizer in self.optimizers),
            *(model.parameters() for model in models),
        ):
            found.update((id(parameter), parameter) for parameter in holder)
        return list(found.values())

    def gates(self) -> Iterator[OptimizerGate]:
        """The gate of each optimizer that has one."""
        for optimizer in self.optimizers:
            gate = gate_of(optimizer)
            if gate is not None:
                yield gate

    def copy_behind(self, wait: Callable[[], None] | None) -> None:
        """Optimizers call `wait` before they step again: until it returns, somebody copies what they change."""
        self._copying = wait
        if wait is not None:
            for gate in self.gates():
                gate.recheck()

    def await_copies(self) -> None:
        """Returns when nobody copies what an optimizer is about to change."""
        wait, self._copying = self._copying, None
        if wait is not None:
            wait()

    def rescale(self, factor: float) -> None:
        """Multiplies the gradients that are pending."""
        self.gradients.scale(self.learned(), factor)

    def holders(self, model: nn.Module, candidates: Iterable[Optimizer]) -> list[Optimizer]:
        """The optimizers that hold a parameter of `model`, prepared earlier or among `candidates`."""
        own = {id(parameter) for parameter in model.parameters()}
        known = list(self.optimizers)
        known += [optimizer for optimizer in candidates if not any(optimizer is other for other in known)]
        return [optimizer for optimizer in known if any(id(parameter) in own for parameter in held_by(optimizer))]

    def check_orphans(self) -> None:
        """Raises when an optimizer trains parameters whose gradients no strategy averages. Cheap after the first time."""
        if self._world.size > 1 and self.unchecked:
            known = {id(each) for record in self.models if not record.evaluation for each in record.parameters}
            for optimizer in self.optimizers:
                orphans = [name for name, parameter in _named(optimizer) if id(parameter) not in known]
                if orphans:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} holds parameters that belong to no prepared model: {listed(orphans)}. In a world "
                        f"of {self._world.size} their gradients would differ from rank to rank. Pass their model to prepare(), or "
                        f"build the optimizer from the parameters of the model that you prepare; what a model got after it was prepared is "
                        f"averaged by nobody: change the model first, then prepare it."
                    )
        self.unchecked = False

    def frozen_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """By name, the parameters of an optimizer that are from models wholly frozen when prepared."""
        trained = [record for record in self.models if not record.evaluation]
        frozen = [record for record in trained if record.frozen]
        if self._world.size == 1 or not frozen:
            return {}
        averaged = {id(each) for record in trained if not record.frozen for each in record.parameters}
        held = {id(each) for each in held_by(optimizer)} - averaged
        return {
            f"{name} of {type(record.original).__name__}": each
            for record in frozen
            for name, each in record.named.items()
            if id(each) in held
        }

    def release_models(self, hook: Callable[[nn.Module, nn.Module], None]) -> None:
        """Calls `release_model` for each model, once."""
        left, self._released = self.models[self._released :], len(self.models)
        for record in left:
            hook(record.original, record.prepared)

    def release(self) -> None:
        """Takes gates, overrides and marks off everything, and forgets it."""
        self._released = 0
        for scheduler in self.schedulers:
            ungate_scheduler(scheduler)
        for optimizer in self.optimizers:
            gate = gate_of(optimizer)
            if gate is not None:
                gate.remove(optimizer)
        for record in self.models:
            unmark(record.prepared)
            remove_policy(record.original)
            forget_compiled(record.original)
        for forgotten in (self.models, self.optimizers, self.schedulers, self.loaders):
            forgotten.clear()
        self.unchecked = self.fused = self.drifted = False


def kind_of(obj: object) -> Kind:
    """The kind of `obj` for `prepare`.

    Raises `TypeError` for what would be trained on half prepared: a container of models, optimizers
    or loaders, or a tensor that requires a gradient.
    """
    if isinstance(obj, nn.Module):
        return "model"
    if isinstance(obj, Optimizer):
        return "optimizer"
    if isinstance(obj, DataLoader):
        return "loader"
    if hasattr(obj, "optimizer") and callable(getattr(obj, "zero_grad", None)):
        raise TypeError(
            f"prepare() was given a {type(obj).__name__}, which wraps an optimizer: neither its steps nor its zero_grad "
            f"could be held back. Prepare the optimizer inside it (its attribute `optimizer`), and go on using the wrapper."
        )
    if is_scheduler(obj):
        return "scheduler"
    if is_batch_stream(obj):
        return "loader"
    if isinstance(obj, torch.Tensor) and obj.requires_grad:
        raise TypeError(
            "prepare() was given a tensor that requires a gradient, which no strategy can synchronise by itself. Make it "
            "a parameter of a torch.nn.Module, and prepare that."
        )
    if isinstance(obj, (list, tuple, dict, set)):
        _refuse_container(obj)
    return "other"


def require(call: str, obj: object, kind: type, wanted: str) -> None:
    """Raises `TypeError` unless `obj` is of the kind that `call` takes."""
    if not isinstance(obj, kind):
        raise TypeError(
            f"{call} was given a {type(obj).__name__}, expected {wanted}. prepare() takes objects of any kind."
        )


def check_device_placement(given: Sequence[bool] | None, objects: Sequence[object], places_models: bool) -> None:
    """Raises unless `device_placement=[...]` has an entry per object, and the strategy leaves placing to the user."""
    if given is None:
        return
    as_sequence("device_placement", given)
    if places_models:
        raise ValueError(
            f"prepare(device_placement={list(given)}) was given, but the chosen strategy places models by itself. Leave "
            f"device_placement out."
        )
    if len(given) != len(objects):
        raise ValueError(
            f"prepare() was given {len(objects)} objects and device_placement with {len(given)} entries. Give one True "
            f"or False per object, in the same order."
        )


def check_state_kept(optimizers: Iterable[Optimizer]) -> None:
    """Raises if a strategy has replaced parameters, and left behind what an optimizer that has stepped knew of them."""
    for optimizer in optimizers:
        held = {id(parameter) for parameter in held_by(optimizer)}
        states: Iterable[tuple[Any, Any]] = optimizer.state.items()  # some optimizers keep state under names, or empty
        left = [
            tuple(key.shape) for key, kept in states if isinstance(key, torch.Tensor) and id(key) not in held and kept
        ]
        if left:
            raise ValueError(
                f"{type(optimizer).__name__} has stepped before prepare(), and the strategy has replaced its parameters: its state "
                f"of {len(left)} of them (shapes {left[:4]}) would be lost. Prepare the optimizer before its first step; state "
                f"from a checkpoint comes back by load_state()."
            )


def check_reading(feed: Feed, ranks: int) -> None:
    """Warns where every data-parallel rank trains on all samples of a loader that nobody prepared. Called once, before the first backward.

    Looks for iterators of torch's loaders that take the samples of a data set in torch's own
    orders: other samplers, and iterable data sets, may share samples out by themselves.
    """
    if ranks == 1 or feed.newest() is not None:
        return
    for each in gc.get_objects():
        if not issubclass(type(each), _BaseDataLoaderIter):  # proxies and lazy objects are not to be asked
            continue
        sampler = each._index_sampler
        if type(getattr(sampler, "sampler", sampler)) in (SequentialSampler, RandomSampler):
            warnings.warn(
                f"{ranks} data-parallel ranks train on a loader over a {type(each._dataset).__name__} that was not prepared: unless its "
                f"data set differs by rank, each of them reads all of it. Loop over what accelerator.prepare(loader) returns, or give it "
                f"a torch.utils.data.DistributedSampler.",
                stacklevel=level_of_the_user(),
            )
            return


def warn_of_empty(loader: DataLoader[Any]) -> None:
    """Warns if a prepared loader has no batch, so that a loop over it does nothing. Of those without a length nobody knows."""
    try:
        length = len(loader)
    except TypeError:
        return
    if length == 0:
        warnings.warn(
            f"The prepared {type(loader).__name__} has no batch on this rank, so loops over it do nothing: its data set is empty, or drop_last "
            f"leaves nothing of it for the batches of all ranks. Look at len(loader.dataset), and take a smaller batch size.",
            stacklevel=level_of_the_user(),
        )


def check_device_map(model: nn.Module, world: World, param: torch.dtype | None) -> None:
    """Raises for a device map in a larger world, or with weights that nobody can cast to `param`."""
    if world.size > 1 and has_device_map(model):
        raise ValueError(
            f"{type(model).__name__} is spread over several devices by its hf_device_map, and {world.size} processes were "
            f"started, which would each spread it over the same devices. Load it without a device map, or start one "
            f"process."
        )
    if param is not None and stays_in_place(model):
        offloaded = [name for name, each in model.named_parameters() if each.is_meta and each.dtype is not param]
        if offloaded:
            raise ValueError(
                f"The precision asks for parameters in {param}, but {len(offloaded)} of {type(model).__name__}, {offloaded[0]!r} for one, are "
                f"offloaded by its hf_device_map, where nobody casts them. Load the model in that dtype, or choose a precision that leaves "
                f"parameters alone, such as mixed_precision='bf16'."
            )


def stays_in_place(model: nn.Module) -> bool:
    """Whether a device map has spread a model over devices, or offloaded its parameters."""
    mapped = any(hasattr(module, "hf_device_map") for module in model.modules())
    return has_device_map(model) or (mapped and any(parameter.is_meta for parameter in model.parameters()))


def has_device_map(model: nn.Module) -> bool:
    """Whether a submodule's `hf_device_map` has more than one entry."""
    return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())


def _named(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for position, parameter in enumerate(group["params"]):
            name = names[position] if names else f"param_groups[{index}]['params'][{position}]"
            yield f"{name} {tuple(parameter.shape)}", parameter


def _refuse_container(container: Any) -> None:
    for member in container.values() if isinstance(container, dict) else container:
        if isinstance(member, (nn.Module, Optimizer, DataLoader, nn.Parameter)) or is_scheduler(member):
            raise TypeError(
                f"prepare() was given a {type(container).__name__} that holds a {type(member).__name__}. It takes the "
                f"objects themselves: prepare(*objects), which returns them in the same order."
            )
