"""`FullyShardedDataParallelPlugin`: the options of both generations of FSDP, as `FSDP` of accel-fsdp.

The second generation is what there is. What the first one calls otherwise is translated; options about memory and speed that have no
place in the second have no effect.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_compat.plugins.module_classes import get_module_class_from_name
from accel_compat.plugins.variables import fill, flag, str_to_bool, variable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch

    from accel_core import Precision
    from accel_fsdp import FSDP

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_BACKWARD_PREFETCH = ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

_logger = logging.getLogger(__name__)


def _fsdp() -> Any:
    """torch's module, which takes long to import: not before a plugin is made."""
    import torch.distributed.fsdp.wrap

    return torch.distributed.fsdp


def _listed(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _member(kind: Any, value: Any, names: list[str]) -> Any:
    """A member of one of torch's enums by itself, its name, or its number from 1 on."""
    if isinstance(value, kind) or value is None:
        return value
    word = str(value).upper()
    if word in names:
        word = str(names.index(word) + 1)
    return kind(int(word)) if word.isdigit() else kind[word]


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of FSDP under the names of both generations. See `accel_fsdp.FSDP` for what they do.

    Attributes:
        fsdp_version: 1 takes the first generation's values for `reshard_after_forward`, the offload
            and the dtypes; both are trained by the second.
        sharding_strategy: "FULL_SHARD", "SHARD_GRAD_OP" (gathered weights are kept until the
            backward), "HYBRID_SHARD" (replicas on the machines), "NO_SHARD" (each rank has a replica).
        reshard_after_forward: the same, for version 1; a truth value for version 2.
        auto_wrap_policy: units: "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", or a
            function: torch's policies, or one of a module and its name. Nothing: repeated blocks.
        state_dict_type: what `save_fsdp_model` writes. `save_state` knows no types.
    """

    fsdp_version: int = variable("FSDP_VERSION", int, 1)
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = variable("FSDP_BACKWARD_PREFETCH")
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = variable("FSDP_AUTO_WRAP_POLICY")
    cpu_offload: Any = variable("FSDP_OFFLOAD_PARAMS", flag, False)
    ignored_modules: Iterable[nn.Module] | str | None = variable("FSDP_IGNORED_MODULES")
    state_dict_type: Any = variable("FSDP_STATE_DICT_TYPE")
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = variable("FSDP_USE_ORIG_PARAMS", flag, False)
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = variable("FSDP_SYNC_MODULE_STATES", flag, False)
    forward_prefetch: bool | None = variable("FSDP_FORWARD_PREFETCH", flag, False)
    activation_checkpointing: bool | None = variable("FSDP_ACTIVATION_CHECKPOINTING", flag, False)
    activation_checkpointing_offload: bool | None = variable("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", flag, False)
    cpu_ram_efficient_loading: bool | None = variable(RAM_EFFICIENT, flag, False)
    transformer_cls_names_to_wrap: Any = variable("FSDP_TRANSFORMER_CLS_TO_WRAP", _listed)
    min_num_params: int | None = variable("FSDP_MIN_NUM_PARAMS", int)

    def __post_init__(self) -> None:
        if self.cpu_ram_efficient_loading is not None:  # transformers looks there when it loads a model
            os.environ[RAM_EFFICIENT] = str(self.cpu_ram_efficient_loading)
        self._own_dtypes = self.mixed_precision_policy is not None
        fill(self)
        second = self.fsdp_version == 2
        self._translate_sharding(second=second)
        self.backward_prefetch = self._prefetch(second=second)
        self.set_state_dict_type()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._choose_policy()
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        elif isinstance(self.mixed_precision_policy, dict):
            self._policy_of_dict(self.mixed_precision_policy)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        if self.activation_checkpointing_offload and not (self.activation_checkpointing and second):
            raise ValueError(
                "activation_checkpointing_offload=True takes activation_checkpointing=True and fsdp_version=2."
            )
        if second:
            if self.forward_prefetch:
                raise ValueError("forward_prefetch=True is of fsdp_version=1: leave it out.")
            self.use_orig_params = self.sync_module_states = self.forward_prefetch = None
        elif self.cpu_ram_efficient_loading:
            self.sync_module_states = True

    def _translate_sharding(self, *, second: bool) -> None:
        if not second and self.sharding_strategy is None and self.reshard_after_forward is None:
            self.sharding_strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        if not second:
            self.sharding_strategy = _member(_fsdp().ShardingStrategy, self.sharding_strategy, FSDP_SHARDING_STRATEGY)
        given = self.reshard_after_forward
        if given is None and self.sharding_strategy is None:
            given = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
        if second:
            if isinstance(given, str):
                given = str_to_bool(given, to_bool=True)
            if given is None and self.sharding_strategy is not None:
                kind = _member(_fsdp().ShardingStrategy, self.sharding_strategy, FSDP_SHARDING_STRATEGY)
                given = kind in (_fsdp().ShardingStrategy.FULL_SHARD, _fsdp().ShardingStrategy.HYBRID_SHARD)
            if not isinstance(given, bool):
                raise ValueError(f"reshard_after_forward={given!r}: expected True or False for fsdp_version=2.")
        elif isinstance(given, bool):
            raise ValueError(
                f"reshard_after_forward={given!r}: expected a sharding strategy, such as 'FULL_SHARD', for fsdp_version=1."
            )
        self.reshard_after_forward = (
            given if second else _member(_fsdp().ShardingStrategy, given, FSDP_SHARDING_STRATEGY)
        )

    def _prefetch(self, *, second: bool) -> BackwardPrefetch | None:
        if second or str(self.backward_prefetch).upper() == "NO_PREFETCH":
            return None
        prefetch: BackwardPrefetch | None = _member(
            _fsdp().BackwardPrefetch, self.backward_prefetch, FSDP_BACKWARD_PREFETCH
        )
        return prefetch

    def _choose_policy(self) -> None:
        name = self.auto_wrap_policy
        self._whole = isinstance(name, str) and name.upper() == "NO_WRAP"
        if not isinstance(name, str):
            return
        if name.upper() not in FSDP_AUTO_WRAP_POLICY:
            raise ValueError(f"auto_wrap_policy={name!r} is none of {', '.join(FSDP_AUTO_WRAP_POLICY)}.")
        by_class, by_size, _ = FSDP_AUTO_WRAP_POLICY
        policies = {
            by_class: _fsdp().wrap.transformer_auto_wrap_policy,
            by_size: _fsdp().wrap.size_based_auto_wrap_policy,
        }
        self.auto_wrap_policy = policies.get(name.upper())
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = _listed(self.transformer_cls_names_to_wrap)
        if name.upper() == by_size:
            self.min_num_params = 0 if self.min_num_params is None else self.min_num_params
            if not isinstance(self.min_num_params, int):
                raise ValueError(f"min_num_params={self.min_num_params!r}: expected an integer.")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Sets the kind of files that `save_fsdp_model` writes, and torch's options for it."""
        asked = state_dict_type if state_dict_type is not None else self.state_dict_type
        if asked is None:
            asked = "SHARDED_STATE_DICT" if self.fsdp_version == 2 else "FULL_STATE_DICT"
        self.state_dict_type = _member(_fsdp().StateDictType, asked, [])
        kinds: dict[Any, tuple[Any, Any, dict[str, bool]]] = {
            _fsdp().StateDictType.FULL_STATE_DICT: (
                _fsdp().FullStateDictConfig,
                _fsdp().FullOptimStateDictConfig,
                {"rank0_only": True},
            ),
            _fsdp().StateDictType.SHARDED_STATE_DICT: (
                _fsdp().ShardedStateDictConfig,
                _fsdp().ShardedOptimStateDictConfig,
                {},
            ),
        }
        if self.state_dict_type in kinds:
            model, optimizer, options = kinds[self.state_dict_type]
            self.state_dict_config = self.state_dict_config or model(offload_to_cpu=True, **options)
            self.optim_state_dict_config = self.optim_state_dict_config or optimizer(offload_to_cpu=True, **options)
        elif self.fsdp_version == 2:
            raise ValueError(
                "LOCAL_STATE_DICT is of fsdp_version=1: write state_dict_type='SHARDED_STATE_DICT' or 'FULL_STATE_DICT'."
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Binds a policy of torch's to the classes of the model, or to the size."""
        if self.auto_wrap_policy is _fsdp().wrap.transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or ())
            kinds = {name: get_module_class_from_name(model, name) for name in self.transformer_cls_names_to_wrap}
            if missing := [name for name, kind in kinds.items() if kind is None]:
                raise ValueError(f"Could not find the transformer layer class {', '.join(missing)} in the model.")
            self.auto_wrap_policy = functools.partial(
                _fsdp().wrap.transformer_auto_wrap_policy,
                transformer_layer_cls=set(kinds.values()),
            )
        elif self.auto_wrap_policy is _fsdp().wrap.size_based_auto_wrap_policy:
            size = self.min_num_params
            self.auto_wrap_policy = (
                functools.partial(_fsdp().wrap.size_based_auto_wrap_policy, min_num_params=size) if size else None
            )

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Sets the dtypes of torch's policy for a word, unless there is a policy."""
        dtype = DTYPES.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        if dtype not in DTYPES.values():
            raise ValueError(f"Invalid mixed precision {mixed_precision!r}: expected one of {', '.join(DTYPES)}.")
        if isinstance(self.mixed_precision_policy, dict):
            self._policy_of_dict(self.mixed_precision_policy)
        elif override or self.mixed_precision_policy is None:
            last = {"output_dtype": dtype}
            if self.fsdp_version != 2:
                last = {"buffer_dtype": torch.float32 if buffer_autocast else dtype}
            self.mixed_precision_policy = self._policy_class()(param_dtype=dtype, reduce_dtype=dtype, **last)

    def _policy_class(self) -> Any:
        return _fsdp().MixedPrecisionPolicy if self.fsdp_version == 2 else _fsdp().MixedPrecision

    def _policy_of_dict(self, values: dict[str, torch.dtype]) -> None:
        wanted = ("param_dtype", "reduce_dtype", "output_dtype" if self.fsdp_version == 2 else "buffer_dtype")
        if any(name not in values for name in wanted) or any(value not in DTYPES.values() for value in values.values()):
            raise ValueError(
                f"Invalid mixed precision policy {values!r}: expected {', '.join(wanted)}, each one of "
                f"{', '.join(map(str, dict.fromkeys(DTYPES.values())))}."
            )
        self.mixed_precision_policy = self._policy_class()(**values)

    def validate_mixed_precision_policy(self) -> None:
        """Raises `ValueError` for a policy of the other generation."""
        kind = self._policy_class()
        if not isinstance(self.mixed_precision_policy, kind):
            raise ValueError(
                f"mixed_precision_policy must be an instance of torch.distributed.fsdp.{kind.__name__} for fsdp_version="
                f"{self.fsdp_version}, not {self.mixed_precision_policy!r}."
            )

    def set_cpu_offload(self) -> None:
        """Makes torch's object of a truth value."""
        if isinstance(self.cpu_offload, bool):
            second = _fsdp().CPUOffloadPolicy() if self.cpu_offload else _fsdp().OffloadPolicy()
            self.cpu_offload = second if self.fsdp_version == 2 else _fsdp().CPUOffload(offload_params=self.cpu_offload)

    def validate_cpu_offload(self) -> None:
        """Raises `ValueError` for an object of the other generation."""
        kind: Any = _fsdp().OffloadPolicy if self.fsdp_version == 2 else _fsdp().CPUOffload
        if not isinstance(self.cpu_offload, kind):
            raise ValueError(
                f"cpu_offload must be a truth value or an instance of torch.distributed.fsdp.{kind.__name__} for fsdp_version="
                f"{self.fsdp_version}, not {self.cpu_offload!r}."
            )

    def ours(self, world_size: int, replicate: int | None = None, context_parallel: int = 1) -> FSDP:
        """The strategy.

        Args:
            world_size: the number of processes.
            replicate: how many replicas there are; None: what the sharding strategy says.
            context_parallel: how many processes share each sequence.
        """
        from accel_fsdp import FSDP

        kind = self.sharding_strategy if self.fsdp_version != 2 else None
        kind = kind or (
            self.reshard_after_forward if isinstance(self.reshard_after_forward, _fsdp().ShardingStrategy) else None
        )
        reshard = self.reshard_after_forward if isinstance(self.reshard_after_forward, bool) else None
        if reshard is None:
            reshard = kind not in (
                _fsdp().ShardingStrategy.SHARD_GRAD_OP,
                _fsdp().ShardingStrategy._HYBRID_SHARD_ZERO2,
            )  # its name
        if self.activation_checkpointing_offload:
            _logger.warning("activation_checkpointing_offload has no effect: inputs of units stay on their device.")
        return FSDP(
            reshard_after_forward=reshard,
            replicate=_replicas(kind, world_size) if replicate is None else replicate,
            context_parallel=context_parallel,
            wrap=self._wrap(),
            cpu_offload=isinstance(self.cpu_offload, _fsdp().CPUOffloadPolicy)
            or bool(getattr(self.cpu_offload, "offload_params", False)),
            activation_checkpointing=bool(self.activation_checkpointing),
            ignored_modules=self._ignored(),
        )

    def precision(self) -> Precision | None:
        """The precision that `mixed_precision_policy` asks for; None: none was given, or it is float32.

        It computes as autocast does, whatever strategy trains, and so keeps norms in float32.
        """
        policy = self.mixed_precision_policy
        if not self._own_dtypes or policy is None or policy.param_dtype not in (torch.bfloat16, torch.float16):
            return None
        from accel_precision import BF16, FP16

        kind: Any = BF16 if policy.param_dtype is torch.bfloat16 else FP16
        made: Precision = kind(reduce_dtype=policy.reduce_dtype)
        return made

    def _wrap(self) -> Any:
        policy = self.auto_wrap_policy
        if self._whole:
            return "none"
        if policy is _fsdp().wrap.transformer_auto_wrap_policy:
            return self.transformer_cls_names_to_wrap or None
        if policy is _fsdp().wrap.size_based_auto_wrap_policy:
            return self.min_num_params or None
        return policy if policy is None else _chooser(policy)

    def _ignored(self) -> Any:
        if not isinstance(self.ignored_modules, str):
            return None if self.ignored_modules is None else list(self.ignored_modules)
        pattern = re.compile(self.ignored_modules)
        return lambda _, name: pattern.fullmatch(name) is not None


def _replicas(kind: Any, world_size: int) -> int:
    if kind is _fsdp().ShardingStrategy.NO_SHARD:
        return world_size
    if kind not in (_fsdp().ShardingStrategy.HYBRID_SHARD, _fsdp().ShardingStrategy._HYBRID_SHARD_ZERO2):  # its name
        return 1
    of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if of_machine < 1 or world_size % of_machine:
        raise ValueError(
            f"sharding_strategy='{kind.name}' has a replica on each machine, but LOCAL_WORLD_SIZE={of_machine} does not say how "
            f"{world_size} processes are spread. Write FSDP(replicate=n), with FSDP of accel_fsdp."
        )
    return world_size // of_machine


def _chooser(policy: Callable[..., Any]) -> Any:
    """A function of a module and its name for a policy of torch's, for which names say nothing."""
    if isinstance(policy, functools.partial):
        if kinds := policy.keywords.get("transformer_layer_cls"):
            return lambda module, _: isinstance(module, tuple(kinds))
        if policy.func is _fsdp().wrap.size_based_auto_wrap_policy and "min_num_params" in policy.keywords:
            return int(policy.keywords["min_num_params"])
    from inspect import signature

    try:
        signature(policy).bind(None, recurse=False, nonwrapped_numel=0)
    except TypeError:
        return policy
    return lambda module, _: bool(
        policy(module, recurse=False, nonwrapped_numel=sum(parameter.numel() for parameter in module.parameters()))
    )
