"""Refusals, before anything is sharded: of models that FSDP cannot train, and of optimizers.

Every rank finds the same, so every rank raises.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_core.api.component import listed
from accel_fsdp.engine_internals import engine_state
from accel_fsdp.gradient_sync import synchronisation_of
from accel_fsdp.sharding import is_sharded

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import PrecisionPolicy
    from accel_fsdp.preparing import Sharded
    from accel_fsdp.wrapping import Unit


TRAVELS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes in which parameters are gathered and gradients summed."""


def check(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raises for parameters that `fully_shard` could not cut."""
    if engine_state(model) is not None:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} that torch's fully_shard has sharded already. Pass the model as it is "
            f"before that, and say how to cut it: strategy=FSDP(wrap=..., reshard_after_forward=...)."
        )
    for name, module in model.named_modules():
        if synchronisation_of(module) is not None:
            raise ValueError(
                f"prepare() was given a {type(model).__name__} whose {name!r} has been prepared by itself, and a parameter cannot be cut "
                f"twice. Prepare the whole model alone, before any of its parts."
            )
    cut = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if cut:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} with parameters that are cut already: {_quoted(cut)}. If they belong to a "
            f"model that was prepared before, make both parts of one nn.Module and prepare that; if you cut layers yourself, give "
            f"the plan to FSDP(tensor_parallel=..., parallelize_plan=...) instead."
        )
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter not in ignored]
    lazy = [name for name, parameter in named if isinstance(parameter, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} with parameters that have no shape yet: {_quoted(lazy)}. Run a batch through "
            f"the model first, then it can be cut."
        )
    strided = [name for name, parameter in named if not parameter.is_contiguous()]
    if strided:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} with parameters that do not lie in memory row by row: {_quoted(strided)}, and "
            f"FSDP cuts rows. Type model.to(memory_format=torch.contiguous_format) before prepare(), or assign "
            f"parameter.data = parameter.data.contiguous()."
        )


def check_policy(policy: PrecisionPolicy) -> None:
    """Raises for a dtype in which gradients cannot be summed."""
    if policy.reduce is not None and policy.reduce not in TRAVELS:
        raise ValueError(
            f"The precision asks for gradients that travel as {policy.reduce}, and FSDP sums them on the way, which is done in "
            f"{', '.join(map(str, TRAVELS))}. Choose one of these as PrecisionPolicy(reduce=...), or leave it out."
        )


def check_again(model: nn.Module, before: object, now: object, policy: PrecisionPolicy) -> None:
    """Raises for a model that was sharded otherwise than is asked for now."""
    differs = before != now
    if not differs:
        dtypes = {each.dtype for each in model.parameters()}
        differs = policy.param is not None and dtypes != {policy.param}
    if differs:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} that another FSDP strategy has sharded, with other options or dtypes, which "
            f"would go on to hold. Use the Accelerator that prepared it, or build the model anew; its weights can be taken over by "
            f"save_model() and load_checkpoint_in_model()."
        )


def check_lookups(model: nn.Module) -> None:
    """Raises for embeddings that renormalise in the forward, or have sparse gradients."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            raise ValueError(
                f"prepare() was given a {type(model).__name__} whose {name!r} has max_norm={module.max_norm}, so each forward changes its "
                f"weights, and under FSDP what a forward changes is lost. Leave max_norm out, and normalise in the forward."
            )
        if module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"prepare() was given a {type(model).__name__} whose {name!r} has sparse=True, and FSDP cuts dense gradients only. Leave "
                f"sparse out, or keep parameters whole with strategy='ddp'."
            )


def check_hooks(model: nn.Module, whole: Collection[nn.Parameter]) -> None:
    """Raises for hooks on parameters that will be cut: they would never run."""
    hooked = [name for name, parameter in model.named_parameters() if parameter not in whole and _is_hooked(parameter)]
    if hooked:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} with hooks on parameters: {_quoted(hooked)}. FSDP puts parts in the places of "
            f"parameters, so hooks on these would never run. Register them after prepare(), with register_post_accumulate_grad_hook "
            f"of what model.parameters() gives then: they see the parts, when gradients have travelled."
        )


def check_apart(model: nn.Module, sharded: Mapping[nn.Module, Sharded], whole: Iterable[nn.Module]) -> None:
    """Raises for a model that shares a trained parameter with a model prepared before."""
    own = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for earlier, record in sharded.items():
        former = {id(reference()) for reference in record.former.values()}
        _refuse_shared(model, earlier, [own[each] for each in own.keys() & former])
    for earlier in whole:
        if earlier is not model:
            elsewhere = set(earlier.modules()).difference(model.modules())  # what both have is cut for both
            present = {id(each) for module in elsewhere for each in module.parameters(recurse=False)}
            _refuse_shared(model, earlier, [own[each] for each in own.keys() & present])


def check_late(optimizer: Optimizer, sharded: Mapping[nn.Module, Sharded], frozen: Iterable[nn.Module]) -> None:
    """Raises for an optimizer of trained parameters whose gradients nobody averages."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    for model, record in sharded.items():
        plain = [
            (name, each) for name, each in model.named_parameters() if id(each) in trained and not is_sharded(each)
        ]
        added = [name for name, each in plain if not any(each is known() for known in record.whole)]
        if added:
            raise ValueError(
                f"{type(optimizer).__name__} trains parameters that {type(model).__name__} got after it was prepared: {_quoted(added)}. "
                f"Nobody averages their gradients, so the ranks would drift apart. Change the model first, then prepare it."
            )
    for model in frozen:
        thawed = [name for name, each in model.named_parameters() if id(each) in trained]
        if thawed:
            raise ValueError(
                f"{type(optimizer).__name__} trains parameters of {type(model).__name__}, which was frozen as a whole when it was prepared, "
                f"and so was not sharded: {_quoted(thawed)}. Unfreeze what is to be trained first, then prepare the model."
            )


def check_dtypes(model: nn.Module, units: Iterable[Unit], whole: Collection[nn.Parameter]) -> None:
    """Raises for units with trained parameters of several dtypes, which are reduced as one."""
    for parameters in _cut_together(model, units, whole):
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(name)
        if len(by_dtype) > 1:
            found = "; ".join(f"{dtype}: {_quoted(names)}" for dtype, names in by_dtype.items())
            raise ValueError(
                f"FSDP was to shard trained parameters of several dtypes as one unit, whose gradients travel together: {found}. Give "
                f"them one dtype (model.to(dtype), or a precision such as mixed_precision='bf16-true'), or separate them into units "
                f"by FSDP(wrap=...)."
            )


def _is_hooked(parameter: Any) -> bool:
    return bool(
        parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    )  # torch has no public question for it


def _refuse_shared(model: nn.Module, earlier: nn.Module, shared: Sequence[str]) -> None:
    if shared:
        raise ValueError(
            f"prepare() was given a {type(model).__name__} that shares parameters with a {type(earlier).__name__} which was prepared before: "
            f"{_quoted(sorted(shared))}. Cut for each by itself, they would be trained apart. Make both models parts of one nn.Module, "
            f"and prepare that."
        )


def _cut_together(
    model: nn.Module, units: Iterable[Unit], whole: Collection[nn.Parameter]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {id(parameter) for parameter in whole}
    for unit in (*units, model):
        members = unit if isinstance(unit, list) else [unit]
        own = {id(parameter): parameter for member in members for parameter in member.parameters()}
        yield [(names[key], parameter) for key, parameter in own.items() if key not in taken]
        taken |= own.keys()


def _quoted(names: Sequence[str]) -> str:
    return listed([*map(repr, names)])
