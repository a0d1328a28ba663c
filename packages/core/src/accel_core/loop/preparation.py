"""Preparation of objects: their kinds, the order, and records of what was prepared."""

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
from accel_core.base.suggestions import listed
from accel_core.collectives import reduce_gather
from accel_core.contract.precision_policy import remove_policy
from accel_core.loading.index_source import is_batch_stream, length_of
from accel_core.loop.compilation import forget_compiled
from accel_core.loop.forward_methods import unmark
from accel_core.loop.gradients import Gradients
from accel_core.loop.optimizer_gate import OptimizerGate, gate_of, held_by
from accel_core.loop.scheduler_gate import is_scheduler, ungate_scheduler
from accel_core.options.handlers import AutocastKwargs
from accel_core.options.resolution import as_sequence

if TYPE_CHECKING:
    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.precision_policy import PrecisionPolicy
    from accel_core.loop.gradients import GradientHook
    from accel_core.processes.world import World

Kind = Literal["model", "optimizer", "scheduler", "loader", "other"]

ORDER: tuple[Kind, ...] = ("model", "loader", "optimizer", "scheduler", "other")
"""Models first, for a strategy may replace the parameters that optimizers hold."""

_KINDS: dict[type, Kind] = {nn.Module: "model", Optimizer: "optimizer", DataLoader: "loader"}


MoveState = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], dict[str, Any]]
"""`move(old, new, state)` gives the state of a parameter for its successor."""


@dataclass(frozen=True)
class PrepareRequest:
    """The settings that `prepare_model` is to apply to a model.

    `device` is where the model goes (None: it stays), `device_type` the kind on which it will run.
    With `evaluation` no gradients are synchronised. `compile_options` are arguments of
    `torch.nn.Module.compile`, None: it is not compiled; `autocast` options where calls compute.
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

    Its parameters, and those of the user's model by name, are those of then: a strategy may show
    others for a while. `frozen`: whether none was trained, so that nobody averages their gradients.
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
    """The objects that one Accelerator prepared, in order; of its hooks, None have no owner."""

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
        return next((record for record in self.models if record.original is model or record.prepared is model), None)

    def find_part(self, model: nn.Module) -> tuple[PreparedModel, str] | None:
        """The record of the trained model with `model` as all or part; its parameters' prefix."""
        inner = getattr(model, "_orig_mod", model)
        for record in self._training():
            if inner is record.prepared:
                return record, ""
            for name, module in record.original.named_modules():
                if module is inner:
                    return record, f"{name}." if name else ""
        return None

    def _training(self) -> list[PreparedModel]:
        return [record for record in self.models if not record.evaluation]

    def trained(self) -> list[nn.Module]:
        """The prepared models that are trained."""
        return [record.prepared for record in self._training()]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the models that are trained; some of them twice."""
        for record in self._training():
            yield from record.parameters
            yield from record.prepared.parameters()

    def learned(self, *models: nn.Module) -> list[nn.Parameter]:
        """Parameters that may get a gradient, once: of trained models, optimizers, `models`."""
        found = {id(parameter): parameter for parameter in self.parameters()}
        for holder in (*map(held_by, self.optimizers), *(model.parameters() for model in models)):
            found.update((id(parameter), parameter) for parameter in holder)
        return list(found.values())

    def gates(self) -> Iterator[OptimizerGate]:
        """The gate of each optimizer that has one."""
        return (gate for optimizer in self.optimizers if (gate := gate_of(optimizer)) is not None)

    def copy_behind(self, wait: Callable[[], None] | None) -> None:
        """Has optimizers call `wait` before their next step: somebody copies what they change."""
        self._copying = wait
        for gate in self.gates():
            gate.checked = False

    def await_copies(self) -> None:
        """Returns when nobody copies what an optimizer is about to change."""
        if (wait := self._copying) is not None:
            self._copying = None
            wait()

    def rescale(self, factor: float) -> None:
        """Multiplies the gradients that are pending."""
        self.gradients.scale(self.learned(), factor)

    def holders(self, model: nn.Module, candidates: Iterable[Optimizer]) -> list[Optimizer]:
        """The optimizers that hold a parameter of `model`, prepared or among `candidates`."""
        own = set(map(id, model.parameters()))
        known = {id(optimizer): optimizer for optimizer in (*self.optimizers, *candidates)}
        return [each for each in known.values() if any(id(parameter) in own for parameter in held_by(each))]

    def mean_over_ranks(self, loss: Any) -> Any:
        """What a closure returns to an optimizer, which may decide by it (LBFGS): on all ranks alike."""
        if self._world.size == 1 or self.apart is not None or not isinstance(loss, (float, torch.Tensor)):
            return loss
        return reduce_gather.reduce_tree(torch.as_tensor(loss), self._world, "mean")

    def check_orphans(self) -> None:
        """Raises if an optimizer has parameters whose gradients are not averaged. Cheap later."""
        if self._world.size > 1 and self.unchecked:
            known = {id(each) for record in self._training() for each in record.parameters}
            for optimizer in self.optimizers:
                orphans = [name for name, parameter in _named(optimizer) if id(parameter) not in known]
                if orphans:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} holds parameters that belong to no prepared model: "
                        f"{listed(orphans)}. In a world of {self._world.size} nobody averages their gradients. Pass "
                        f"their model to prepare(), or build the optimizer from the parameters of the model that you "
                        f"prepare; what a model got after it was prepared is averaged by nobody."
                    )
        self.unchecked = False

    def frozen_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """By name, an optimizer's parameters of models that were wholly frozen when prepared."""
        trained = self._training()
        frozen = [record for record in trained if record.frozen]
        if self._world.size == 1 or not frozen:
            return {}
        averaged = {id(each) for record in trained if not record.frozen for each in record.parameters}
        held = {id(each) for each in held_by(optimizer)} - averaged
        named = ((type(record.original).__name__, *item) for record in frozen for item in record.named.items())
        return {f"{name} of {model}": each for model, name, each in named if id(each) in held}

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
            if (gate := gate_of(optimizer)) is not None:
                gate.remove(optimizer)
        for record in self.models:
            unmark(record.prepared)
            remove_policy(record.original)
            forget_compiled(record.original)
        for forgotten in (self.models, self.optimizers, self.schedulers, self.loaders):
            forgotten.clear()
        self.unchecked = self.fused = self.drifted = False


class ParameterReplacement:
    """Remembers the parameters of a model, which keep their names, before they are replaced.

    An optimizer built before would go on with dead tensors, and train nothing without a word.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._before = dict(model.named_parameters(remove_duplicate=False))

    def apply(self, move: MoveState | None = None) -> None:
        """Puts present parameters into `group["params"]`; `move` fits a former one's state."""
        after = dict(self._model.named_parameters(remove_duplicate=False))
        replaced = {name: old for name, old in self._before.items() if after.get(name, old) is not old}
        successor = {id(old): (old, after[name]) for name, old in replaced.items()}
        for optimizer in self._optimizers if successor else ():
            for group in optimizer.param_groups:
                group["params"][:] = [successor.get(id(each), (each, each))[1] for each in group["params"]]
            state: Any = optimizer.state
            for old, new in successor.values():
                if move is not None and state.get(old):
                    state[new] = move(old, new, state[old])
                    del state[old]


def kind_of(obj: object) -> Kind:
    """The kind of `obj` for `prepare`; `TypeError` for what would be trained half prepared."""
    for kind, name in _KINDS.items():
        if isinstance(obj, kind):
            return name
    if hasattr(obj, "optimizer") and callable(getattr(obj, "zero_grad", None)):
        what = f"prepare() was given a {type(obj).__name__}, which wraps an optimizer: its steps could not be"
        raise TypeError(f"{what} held back. Prepare the optimizer inside it (`.optimizer`), and keep the wrapper.")
    if is_scheduler(obj):
        return "scheduler"
    if is_batch_stream(obj):
        return "loader"
    if isinstance(obj, torch.Tensor) and obj.requires_grad:
        what = "prepare() was given a tensor that requires a gradient, which nobody averages."
        raise TypeError(f"{what} Make it a parameter of a module.")
    members = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple, set)) else ()
    for member in members:
        if isinstance(member, (*_KINDS, nn.Parameter)) or is_scheduler(member):
            what = f"prepare() was given a {type(obj).__name__} that holds a {type(member).__name__}. It takes the"
            raise TypeError(f"{what} objects themselves: prepare(*objects), which returns them in the same order.")
    return "other"


def require(call: str, obj: object, kind: type, wanted: str) -> None:
    """Raises `TypeError` unless `obj` is of the kind that `call` takes."""
    if not isinstance(obj, kind):
        raise TypeError(f"{call} was given a {type(obj).__name__}, expected {wanted}. prepare() takes any kind.")


def check_device_placement(given: Sequence[bool] | None, objects: Sequence[object], places_models: bool) -> None:
    """Raises unless `device_placement` has an entry per object, and the user places models."""
    if given is None:
        return
    as_sequence("device_placement", given)
    if places_models:
        raise ValueError("prepare(): the chosen strategy places models by itself. Leave device_placement out.")
    if len(given) != len(objects):
        what = f"prepare() was given {len(objects)} objects and device_placement with {len(given)} entries."
        raise ValueError(f"{what} Give one True or False each.")


def check_state_kept(optimizers: Iterable[Optimizer]) -> None:
    """Raises if a strategy has replaced parameters of an optimizer that has state for them."""
    for optimizer in optimizers:
        held = {id(parameter) for parameter in held_by(optimizer)}
        states: Iterable[tuple[Any, Any]] = optimizer.state.items()  # some optimizers keep state under names, or empty
        left = [key for key, kept in states if isinstance(key, torch.Tensor) and id(key) not in held and kept]
        if left:
            raise ValueError(
                f"{type(optimizer).__name__} has stepped before prepare(), and the strategy has replaced its "
                f"parameters: its state of {len(left)} of them (shapes {[tuple(key.shape) for key in left[:4]]}) would "
                f"be lost. Prepare it before its first step, or use load_state()."
            )


def check_reading(feed: Feed, ranks: int) -> None:
    """Warns, before the first backward, if every rank trains on all of an unprepared loader."""
    if ranks == 1 or feed.newest() is not None:
        return
    for each in gc.get_objects():
        if not issubclass(type(each), _BaseDataLoaderIter):  # proxies and lazy objects are not to be asked
            continue
        # Others than torch's samplers, and iterable data sets, may share samples out by themselves.
        sampler = each._index_sampler
        if type(getattr(sampler, "sampler", sampler)) in (SequentialSampler, RandomSampler):
            warnings.warn(
                f"{ranks} data-parallel ranks train on a loader over a {type(each._dataset).__name__} that was not "
                f"prepared, so each may read all of it. Loop over what accelerator.prepare(loader) returns, or use a "
                f"DistributedSampler.",
                stacklevel=level_of_the_user(),
            )
            return


def warn_of_empty(loader: DataLoader[Any]) -> None:
    """Warns if a prepared loader has no batch; nothing is known of those without a length."""
    if length_of(loader) == 0:
        warnings.warn(
            f"The prepared {type(loader).__name__} has no batch on this rank, so loops over it do nothing. Look at "
            f"len(loader.dataset) and drop_last, and take a smaller batch size.",
            stacklevel=level_of_the_user(),
        )


def check_device_map(model: nn.Module, world: World, param: torch.dtype | None) -> None:
    """Raises for a device map in a larger world, or with weights that cannot become `param`."""
    if world.size > 1 and has_device_map(model):
        what = f"{type(model).__name__} is spread over several devices by its hf_device_map, and {world.size}"
        raise ValueError(f"{what} processes were started. Load it without a device map, or start one process.")
    if param is not None and stays_in_place(model):
        offloaded = [name for name, each in model.named_parameters() if each.is_meta and each.dtype is not param]
        if offloaded:
            raise ValueError(
                f"The precision asks for parameters in {param}, but {len(offloaded)} of {type(model).__name__}, "
                f"{offloaded[0]!r} for one, are offloaded by its hf_device_map. Load the model in that dtype, or use "
                f"mixed_precision='bf16'."
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
        for position, parameter in enumerate(group["params"]):
            named = group.get("param_names")
            name = f"param_groups[{index}]['params'][{position}]" if named is None else named[position]
            yield f"{name} {tuple(parameter.shape)}", parameter
