"""Questions about modules, and modules out of what wraps them."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_compat.availability import is_deepspeed_available, is_peft_available

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_compiled_module(module: object) -> bool:
    """Whether `torch.compile` made the module."""
    from torch._dynamo.eval_frame import OptimizedModule  # torch has no public name for it

    return isinstance(module, OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a module in this one was made by `torch.compile`."""
    return any(is_compiled_module(each) for each in module.modules()) and bool(module._modules)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether it is a list of modules of one class, and not empty."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(each, type(module[0])) for each in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether there is such a list in it."""
    return any(map(is_repeated_blocks, module.modules()))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> Any:
    """A shallow copy of a model whose repeated blocks are compiled each, and what is beside them as a whole.

    Equal blocks share one compilation. The parameters are those of `module`, which is kept as
    `_orig_mod` and stays as it is.
    """
    compiled = _compile_regions(module, compile_kwargs)
    vars(compiled).setdefault("_orig_mod", module)
    return compiled


def _compile_regions(module: nn.Module, options: dict[str, Any]) -> Any:
    if is_repeated_blocks(module):
        return nn.ModuleList([torch.compile(block, **options) for block in module.children()])  # type: ignore[misc]  # modules
    if not has_repeated_blocks(module):
        return torch.compile(module, **options)
    copy = type(module).__new__(type(module))
    for name, value in vars(module).items():
        is_own = isinstance(value, MethodType) and value.__self__ is module
        vars(copy)[name] = MethodType(value.__func__, copy) if is_own else value
    vars(copy)["_modules"] = {name: _compile_regions(child, options) for name, child in module.named_children()}
    return copy


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compiles the repeated blocks, and what is beside them, in place."""
    if is_repeated_blocks(module) or has_repeated_blocks(module):
        for child in module.children():
            if is_repeated_blocks(module):
                child.compile(**compile_kwargs)
            else:
                compile_regions_deepspeed(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """The same, and gives the module."""
    compile_regions_deepspeed(module, **compile_kwargs)
    return module


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is shared out over a mesh."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """The number of processes that share the layers of a model of transformers, or None."""
    if (size := getattr(model, "tp_size", None)) is not None:
        return int(size)
    asked = getattr(getattr(model, "config", None), "distributed_config", None)
    return asked.get("tp_size") if isinstance(asked, dict) else getattr(asked, "tp_size", None)


def is_peft_model(model: nn.Module) -> bool:
    """Whether peft wraps the model; what distributes or compiles it does not matter."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), PeftModel)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model inside of what distributes it.

    Args:
        model: any object.
        keep_fp32_wrapper: has no effect on models that were prepared here, whose `forward` is their
            own. False takes away a wrapper that `_original_forward` says is there.
        keep_torch_compile: whether what `torch.compile` made stays around the model.
        recursive: whether every `module.module`, of submodules too, is unwrapped.
    """
    wrappers: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if is_deepspeed_available():
        from deepspeed import DeepSpeedEngine

        wrappers += (DeepSpeedEngine,)
    compiled, holder = (model, vars(model)) if isinstance(model, nn.Module) else (None, {})
    if is_compiled_module(model):
        holder, model = model._modules, model._orig_mod
    elif "_orig_mod" in holder:
        model = holder["_orig_mod"]
    else:
        compiled = None
    while isinstance(model, wrappers):
        model = model.module
    if recursive:
        model = _unwrap_all(model)
    if not keep_fp32_wrapper and (original := vars(model).pop("_original_forward", None)) is not None:
        forward: Any = model.forward
        while hasattr(forward, "__wrapped__") and forward != original:
            forward = forward.__wrapped__
        model.forward = MethodType(forward, model)
    if compiled is None or not keep_torch_compile:
        return model
    holder["_orig_mod"] = model
    return compiled


def _unwrap_all(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    for name, child in module.named_children():
        setattr(module, name, _unwrap_all(child))
    return module


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, each after those in it; with their names if asked for."""
    ordered: list[Any] = []
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        waiting += [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
        ordered.append((name, module) if return_fqns else module)
    return ordered[::-1]


def get_parameters_from_modules(modules: Iterable[nn.Module] | str, model: nn.Module, device: Any) -> set[nn.Parameter]:
    """The parameters of modules, moved to a device; a text is a pattern of whole names of modules."""
    import re

    chosen = modules
    if isinstance(modules, str):
        pattern = re.compile(modules)
        chosen = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in chosen for parameter in module.to(device).parameters()}  # type: ignore[union-attr]  # modules now
