"""`FullyShardedDataParallelPlugin`: the options of `FSDP` under their older names.

What stands for an option of `FSDP` is translated. What only the first generation of FSDP had
(torch's `FullyShardedDataParallel` class) is an error that says what to write instead, or why
nothing has to be written.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_fsdp.strategy import FSDP
from accel_fsdp.wrapping import NONE

if TYPE_CHECKING:
    from torch import nn

    from accel_fsdp.wrapping import Ignored, Wrap

NAME = "FullyShardedDataParallelPlugin"

SHARDING_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "FULL_SHARD": "reshard_after_forward=True, which is the default",
        "SHARD_GRAD_OP": "reshard_after_forward=False",
        "HYBRID_SHARD": "strategy=FSDP(replicate=n), with n copies, one for each machine for instance",
        "_HYBRID_SHARD_ZERO2": "strategy=FSDP(replicate=n, reshard_after_forward=False)",
        "NO_SHARD": "strategy='ddp'",
    }
)
"""What the sharding strategies of the first generation are called now."""

NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "backward_prefetch": "The next parameters are gathered while gradients are computed; leave it out",
        "forward_prefetch": "The next parameters are gathered while the forward computes; leave it out",
        "limit_all_gathers": "What is gathered ahead is limited by itself, without stopping the CPU; leave it out",
        "use_orig_params": "Parameters are always the model's own, with their names and shapes; leave it out",
        "sync_module_states": "All ranks always begin with the weights and buffers of rank 0; leave it out",
        "param_init_fn": "Build a model that is too large for one process with accelerator.build_model(factory)",
        "mixed_precision_policy": (
            "Dtypes belong to the precision, under every strategy: Accelerator(mixed_precision='bf16'), or an object with a "
            "policy of its own"
        ),
    }
)
"""Options that have no successor here, and why."""

WITHOUT_EFFECT = ("state_dict_type", "state_dict_config", "optim_state_dict_config")


class _Configures(type):
    """Makes every `FSDP` an instance of its older name."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FSDP)


class FullyShardedDataParallelPlugin(metaclass=_Configures):
    """An `FSDP` that is configured by older names: `Accelerator(fsdp_plugin=...)`.

    The result is an `FSDP` like any other, and
    `isinstance(strategy, FullyShardedDataParallelPlugin)` is true of every `FSDP`. Nothing is read
    from the environment: the object is complete. None stands for "not given" everywhere.

    Args:
        fsdp_version: 2, which is what there is.
        sharding_strategy: of the first generation; see `SHARDING_STRATEGIES`.
        reshard_after_forward: as in `FSDP`.
        backward_prefetch: see `NOT_NEEDED`, for this and for everything else that is an error
            whatever its value.
        mixed_precision_policy: see `NOT_NEEDED`.
        auto_wrap_policy: "transformer_based_wrap" (with `transformer_cls_names_to_wrap`; without,
            the repeated blocks), "size_based_wrap" (with `min_num_params`) or "no_wrap";
            `functools.partial` of torch's `transformer_auto_wrap_policy` or
            `size_based_auto_wrap_policy`; or a function (module, name) -> bool. None: what
            `transformer_cls_names_to_wrap` or `min_num_params` say, else the repeated blocks.
        cpu_offload: as in `FSDP`.
        ignored_modules: modules; or a text: a regular expression that matches the whole names of
            those that are ignored.
        state_dict_type: without effect, with a warning: a checkpoint knows no types, any strategy
            loads it. The same holds for `state_dict_config` and `optim_state_dict_config`.
        limit_all_gathers: see `NOT_NEEDED`.
        use_orig_params: see `NOT_NEEDED`.
        param_init_fn: see `NOT_NEEDED`.
        sync_module_states: see `NOT_NEEDED`.
        forward_prefetch: see `NOT_NEEDED`.
        activation_checkpointing: as in `FSDP`.
        activation_checkpointing_offload: not offered; only False is accepted.
        cpu_ram_efficient_loading: only False is accepted; `accelerator.build_model` does what True
            asks for.
        transformer_cls_names_to_wrap: names of the classes of units.
        min_num_params: how many parameters a unit has at least; 0: not given.

    Raises:
        TypeError: for a value of another type.
        ValueError: for an option of the first generation, with what to write instead; for options
            that contradict each other.
    """

    def __new__(  # type: ignore[misc]  # the object is an FSDP, so that nothing else has to know the older names
        cls,
        fsdp_version: int | None = None,
        sharding_strategy: object = None,
        reshard_after_forward: bool | int | None = None,
        backward_prefetch: object = None,
        mixed_precision_policy: object = None,
        auto_wrap_policy: object = None,
        cpu_offload: bool | None = None,
        ignored_modules: Iterable[nn.Module] | str | None = None,
        state_dict_type: object = None,
        state_dict_config: object = None,
        optim_state_dict_config: object = None,
        limit_all_gathers: bool | None = None,
        use_orig_params: bool | None = None,
        param_init_fn: object = None,
        sync_module_states: bool | None = None,
        forward_prefetch: bool | None = None,
        activation_checkpointing: bool | None = None,
        activation_checkpointing_offload: bool | None = None,
        cpu_ram_efficient_loading: bool | None = None,
        transformer_cls_names_to_wrap: Iterable[str] | str | None = None,
        min_num_params: int | None = None,
    ) -> FSDP:
        """Translates what is given, and gives the `FSDP`."""
        given = {name: value for name, value in locals().items() if name != "cls" and value is not None}
        _refuse_first_generation(given)
        _refuse_offload_and_loading(given)
        _warn_without_effect(given)
        options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "cpu_offload": cpu_offload,
            "activation_checkpointing": activation_checkpointing,
            "ignored_modules": None if ignored_modules is None else _ignored(ignored_modules),
            "wrap": _wrap(auto_wrap_policy, transformer_cls_names_to_wrap, min_num_params),
        }
        return FSDP(**{name: value for name, value in options.items() if value is not None})


def _refuse_first_generation(given: Mapping[str, Any]) -> None:
    version = given.get("fsdp_version", 2)
    if version != 2:
        raise ValueError(
            f"{NAME}(fsdp_version={version!r}) was asked for, and only 2 is offered: torch's fully_shard, which keeps parameters "
            f"as they are. Write fsdp_version=2, or leave it out."
        )
    if "sharding_strategy" in given:
        raise _older_sharding("sharding_strategy", given["sharding_strategy"])
    reshard = given.get("reshard_after_forward")
    if reshard is not None and not isinstance(reshard, int):
        raise _older_sharding("reshard_after_forward", reshard)
    for name, reason in NOT_NEEDED.items():
        if name in given:
            raise ValueError(
                f"{NAME}({name}={given[name]!r}) was given, which is an option of the first generation of FSDP and has no place "
                f"in this one. {reason}."
            )


def _older_sharding(option: str, value: object) -> ValueError:
    names = list(SHARDING_STRATEGIES)
    name = str(getattr(value, "name", value)).upper()
    if name.isdecimal() and 1 <= int(name) <= len(names):
        name = names[int(name) - 1]  # they were numbered, too
    known = {name: SHARDING_STRATEGIES[name]} if name in SHARDING_STRATEGIES else SHARDING_STRATEGIES
    listing = "; ".join(f"for {older} write {newer}" for older, newer in known.items())
    return ValueError(
        f"{NAME}({option}={value!r}) was given, which chooses among the sharding strategies of the first generation of FSDP. "
        f"In this one: {listing}."
    )


def _refuse_offload_and_loading(given: Mapping[str, Any]) -> None:
    offload = given.get("cpu_offload", False)
    if not isinstance(offload, bool):
        raise TypeError(
            f"{NAME}(cpu_offload={offload!r}) is a {type(offload).__name__}: give True to keep parameters, gradients and "
            f"optimizer state in the memory of the CPU, or False."
        )
    if given.get("activation_checkpointing_offload"):
        raise ValueError(
            f"{NAME}(activation_checkpointing_offload=True) was asked for, but what is kept of a checkpointed unit, its inputs, "
            f"stays on its device here. Leave it out; activation_checkpointing=True alone is offered."
        )
    if given.get("cpu_ram_efficient_loading"):
        raise ValueError(
            f"{NAME}(cpu_ram_efficient_loading=True) was asked for, but who holds weights while a model is built is decided where "
            f"it is built. Write model = accelerator.build_model(factory, checkpoint), and leave it out."
        )


def _warn_without_effect(given: Mapping[str, Any]) -> None:
    kind = str(getattr(given.get("state_dict_type"), "name", given.get("state_dict_type", ""))).upper()
    if kind not in ("", "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        raise ValueError(
            f"{NAME}(state_dict_type={given['state_dict_type']!r}) was given; known are 'FULL_STATE_DICT' and "
            f"'SHARDED_STATE_DICT', and neither has an effect: a checkpoint knows no types. Leave it out."
        )
    names = [name for name in WITHOUT_EFFECT if name in given]
    if names:
        warnings.warn(
            f"{NAME}({', '.join(names)}) has no effect: a checkpoint of save_state() is written by all ranks and loads under any "
            f"strategy, and get_state_dict() and save_model() give whole weights. Leave it out.",
            stacklevel=3,  # whoever makes the object
        )


def _wrap(policy: object, names: Iterable[str] | str | None, least: int | None) -> Wrap:
    """The value of `FSDP(wrap=...)` for the three options that choose the units."""
    listed = names if names is None or isinstance(names, str) else list(names)
    options: dict[str, tuple[str, Wrap]] = {
        "transformer_based_wrap": ("transformer_cls_names_to_wrap", listed or None),
        "size_based_wrap": ("min_num_params", least or None),
        "no_wrap": ("", NONE),
    }
    if policy is not None and not callable(policy) and policy not in tuple(options):
        raise ValueError(
            f"{NAME}(auto_wrap_policy={policy!r}) is none of {', '.join(map(repr, options))}. Choose one of these, or give a "
            f"function (module, name) -> bool."
        )
    given = {kind: value for kind, (option, value) in options.items() if option and value is not None}
    if policy is None and len(given) == 1:
        policy = next(iter(given))
    if len(given.keys() | ({policy} if given else set())) > 1:
        found = ", ".join(f"{options[kind][0]}={value!r}" for kind, value in given.items())
        raise ValueError(
            f"{NAME}(auto_wrap_policy={policy!r}, {found}) says in more than one way which modules are units. Keep one of them."
        )
    if callable(policy):
        return _of_function(policy)
    wrap = None if policy is None else options[str(policy)][1]
    if policy == "size_based_wrap" and wrap is None:
        raise ValueError(
            f"{NAME}(auto_wrap_policy='size_based_wrap') was given without min_num_params. Say how many parameters a unit has at "
            f"least, such as min_num_params=100_000_000."
        )
    return wrap


def _of_function(policy: Callable[..., Any]) -> Wrap:
    """Torch's two policies by what they were given; functions of ours as they are."""
    if isinstance(policy, partial) and policy.func.__module__ == "torch.distributed.fsdp.wrap":
        kinds = policy.keywords.get("transformer_layer_cls")
        if policy.func.__name__ == "transformer_auto_wrap_policy" and kinds:
            return sorted(kind.__name__ for kind in kinds)
        if policy.func.__name__ == "size_based_auto_wrap_policy" and "min_num_params" in policy.keywords:
            return int(policy.keywords["min_num_params"])
    signature = inspect.signature(policy)
    try:
        signature.bind(None, "")
    except TypeError:
        ours = False
    else:
        ours = "recurse" not in signature.parameters
    if not ours:
        raise ValueError(
            f"{NAME}(auto_wrap_policy={policy!r}) takes {signature}, as policies of the first generation of FSDP do. Give a "
            f"function (module, name) -> bool that is true of units, or names of classes: transformer_cls_names_to_wrap=[...]."
        )
    return policy


def _ignored(modules: Iterable[nn.Module] | str) -> Ignored:
    if not isinstance(modules, str):
        return list(modules)
    pattern = re.compile(modules)
    return lambda module, name: pattern.fullmatch(name) is not None  # noqa: ARG005
