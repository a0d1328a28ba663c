"""Rules about names, arguments and attributes, by what is installed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from accel_compat.missing_names import ADVICE
from accel_compat.script_check.finding import Finding, at
from accel_compat.script_check.script import Script, constant, keyword, last

_PACKAGES = (
    "accel_core",
    "accel_data",
    "accel_precision",
    "accel_fsdp",
    "accel_launch",
    "accel_big_model",
    "accel_checkpoint",
    "accel_trackers",
    "accel_deepspeed",
)
_FIRST_FSDP = {
    "sharding_strategy": "reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, replicate=n for the hybrid ones",
    "reshard_after_forward": "",
    "backward_prefetch": "leave it out",
    "forward_prefetch": "leave it out",
    "auto_wrap_policy": "wrap=",
    "transformer_cls_names_to_wrap": "wrap=",
    "min_num_params": "wrap=",
    "mixed_precision_policy": "mixed_precision= of the Accelerator",
    "use_orig_params": "leave it out",
    "sync_module_states": "leave it out",
    "limit_all_gathers": "leave it out",
    "param_init_fn": "accelerator.build_model(factory)",
    "cpu_ram_efficient_loading": "accelerator.build_model(factory)",
    "state_dict_type": "leave it out",
    "state_dict_config": "leave it out",
    "optim_state_dict_config": "leave it out",
    "fsdp_version": "leave it out",
}
_NAMES = {
    "ParallelismConfig": "FSDP(replicate=, shard=, tensor_parallel=, context_parallel=) of accel_fsdp",
    "DistributedOperationException": "CollectiveMismatchError of accel_core",
    "AlignDevicesHook": "dispatch_model of accel_big_model",
}
_ATTRIBUTES = {
    "gradient_state": "accelerator.sync_gradients says whether the window closes; accelerator.running_loader which loader runs",
    "is_fsdp2": "accelerator.explain() shows the strategy",
    "native_amp": "accelerator.mixed_precision",
    "fp8_backend": "accelerator.explain() shows it",
    "parallelism_config": "accelerator.explain() shows the mesh",
    "torch_device_mesh": "accelerator.explain() shows the mesh",
    "deepspeed_config": "accelerator.explain() shows it",
    "use_fp16": 'accelerator.mixed_precision == "fp16"',
}


@cache
def where(name: str) -> str:
    """The package of ours that has a public name; empty if none that is installed has it."""
    for package in _PACKAGES:
        try:
            if name in getattr(import_module(package), "__all__", ()):
                return package
        except ImportError:
            continue
    return ""


def _hint(name: str) -> str:
    """What to use for a name that is nowhere here."""
    if name.startswith("is_") and name.endswith("_available"):
        return "Ask importlib.util.find_spec, or torch"
    advice = _NAMES.get(name) or ADVICE.get(name)
    return f"Use {advice}" if name in _NAMES else advice or "It stays with accel-compat, or is to be written anew"


def _is_in_compat(module: str, name: str) -> bool:
    try:
        found = import_module(module)
        return hasattr(found, name) or _is_module(f"{module}.{name}")
    except ImportError:
        return False


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def imported_names(script: Script) -> Iterator[Finding]:
    """Names that are imported from `accelerate` and are elsewhere here, or nowhere."""
    for node, module, name, _ in script.imports:
        package = where(name)
        if package == "accel_core" or name == "*":
            continue
        missing = not _is_in_compat(module, name)
        here = f"write: from {package} import {name}" if package else f"there is no such name. {_hint(name)}"
        through = " Through accel-compat there is none either." if missing else ""
        yield at(node, "name", f"{name} is imported from {module}.", f"{here}.{through}", compat=missing)


def arguments(script: Script) -> Iterator[Finding]:
    """Arguments that a class of ours of the same name does not take."""
    if not script.is_of_peer:
        return
    for _, _, name, _ in script.imports:
        package = where(name)
        if not package or name == "FullyShardedDataParallelPlugin":
            continue
        try:
            found = inspect.signature(getattr(import_module(package), name)).parameters
        except (TypeError, ValueError):
            continue
        known = {*found, *_older(found)}
        for call in script.called(name):
            for each in call.keywords:
                if each.arg and each.arg not in known:
                    yield at(
                        call,
                        "argument",
                        f"{name} takes {each.arg}.",
                        f"a TypeError: {name} of {package} has no such argument. See the differences for what to write.",
                    )


def _older(found: Any) -> tuple[str, ...]:
    """The older arguments that the Accelerator takes by `**`: names end in _plugin or are deprecated."""
    several = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
    older = "deepspeed_plugin deepspeed_plugins fsdp_plugin megatron_lm_plugin kwarg_handler step_with_optimizer"
    return tuple(older.split()) if several else ()


def first_generation(script: Script) -> Iterator[Finding]:
    """Options of FSDP that only its first generation has."""
    known: set[str] = set()
    if where("FullyShardedDataParallelPlugin"):
        found = import_module(where("FullyShardedDataParallelPlugin")).FullyShardedDataParallelPlugin
        known = {*inspect.signature(found).parameters}
    for call in script.called("FullyShardedDataParallelPlugin"):
        for each in call.keywords:
            if each.arg in _FIRST_FSDP and _FIRST_FSDP[each.arg] and (script.is_of_peer or each.arg not in known):
                yield at(
                    call,
                    "fsdp-option",
                    f"{each.arg} is an option of torch's first FSDP.",
                    f"a ValueError, because there is one FSDP, fully_shard: {_FIRST_FSDP[each.arg]}.",
                )


def attributes(script: Script) -> Iterator[Finding]:
    """Attributes of the Accelerator that ours does not have, and what hides in wrappers there."""
    if not script.is_of_peer:
        return
    ours, theirs = {*dir(import_module("accel_core").Accelerator)}, {*dir(_compat_accelerator())}
    written = {ast.unparse(node) for node in script.all(ast.Attribute) if _is_written(node)}
    for node in script.all(ast.Attribute):
        if not isinstance(node, ast.Attribute) or node.attr.startswith("_"):
            continue
        if script.is_accelerator(node.value) and not _is_of_self(node) and node.attr not in ours:
            if ast.unparse(node) in written:
                continue
            here = _ATTRIBUTES.get(node.attr, "see the differences for what to write")
            before = f"the Accelerator has {node.attr}."
            yield at(node, "attribute", before, f"an AttributeError: {here}.", compat=node.attr not in theirs)
        elif (
            node.attr in {"optimizer", "scheduler"}
            and node.attr[:3] in last(node.value)[-9:]
            and script.is_prepared(node.value)
        ):
            plain = ast.unparse(node.value)
            yield at(
                node,
                "wrapped-object",
                f"{plain} is a wrapper, and {ast.unparse(node)} is what was given to prepare.",
                f"an AttributeError: the same object comes back from prepare. Write {plain}.",
            )


def _is_of_self(node: ast.Attribute) -> bool:
    """`self.accelerator` is the Accelerator of a class, and its attribute no name that is asked for."""
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_written(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _compat_accelerator() -> type:
    try:
        found: type = import_module("accelerate").Accelerator
    except (ImportError, AttributeError):
        found = import_module("accel_core").Accelerator
    return found


def writes(script: Script) -> Iterator[Finding]:
    """Attributes of the state that are assigned."""
    for node in script.all(ast.Attribute):
        if not _is_written(node) or not isinstance(node, ast.Attribute):
            continue
        holder = node.value
        if (
            isinstance(holder, ast.Attribute)
            and holder.attr in {"state", "gradient_state"}
            and script.is_accelerator(holder.value)
        ):
            yield at(
                node,
                "state-write",
                f"{ast.unparse(node)} is assigned, for all Accelerators of the process.",
                "accelerator.state is read-only, and there is no gradient_state. Give it to Accelerator(...); a loop that "
                "counts itself says accelerator.accumulate(model, closes=True).",
            )
        elif script.is_accelerator(holder) and node.attr == "sync_gradients":
            yield at(
                node,
                "state-write",
                "sync_gradients is assigned.",
                "it is read-only. A loop that counts itself says accelerator.accumulate(model, closes=True).",
            )


def states(script: Script) -> Iterator[Finding]:
    """`AcceleratorState()` and `GradientState()`."""
    for name in ("AcceleratorState", "GradientState"):
        for call in script.called(name) if script.is_of_peer else ():
            yield at(
                call,
                "shared-state",
                f"{name}() is the one state of the process.",
                "it raises: there is no shared state. Use accelerator.state.",
            )


def functions(script: Script) -> Iterator[Finding]:
    """Calls whose arguments mean something else."""
    names = {local for _, _, name, local in script.imports if name == "reduce"}
    for call in script.calls:
        if (
            isinstance(call.func, ast.Name)
            and call.func.id in names
            and len(call.args) < 2
            and not keyword(call, "reduction")
        ):
            yield at(
                call, "reduce-default", "the function reduce averages.", 'it has no default: write reduce(x, "mean").'
            )
    for call in script.methods("unwrap_model"):
        if keyword(call, "keep_torch_compile") is not None:
            yield at(call, "argument", "unwrap_model takes keep_torch_compile.", "a TypeError: leave it out.")
    for call in script.methods("reduce"):
        reduction = keyword(call, "reduction") or (call.args[1] if len(call.args) > 1 else None)
        if constant(reduction) == "none":
            yield at(
                call, "reduce-none", 'reduce(x, "none") sums.', 'it returns x: write reduce(x, "sum").', compat=True
            )
    for call in script.methods("autocast"):
        if call.args and last(call.args[0]) not in {"True", "False"} and constant(call.args[0]) is None:
            yield at(call, "argument", "autocast takes a handler by position.", "write autocast(autocast_handler=...).")


RULES = (imported_names, arguments, first_generation, attributes, writes, states, functions)
