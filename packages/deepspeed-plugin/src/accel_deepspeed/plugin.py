"""`DeepSpeedPlugin`: the options of `DeepSpeed` under their older names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_deepspeed.configuration_file import load
from accel_deepspeed.older_names import HfDeepSpeedConfig, OlderAttributes

if TYPE_CHECKING:
    from pathlib import Path

    from accel_deepspeed.strategy import DeepSpeed

NAME = "DeepSpeedPlugin"


class _Configures(type):
    """Makes every `DeepSpeed` an instance of its older name."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, OlderAttributes)


class DeepSpeedPlugin(metaclass=_Configures):
    """A `DeepSpeed` by older names: `Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))`.

    The result is a `DeepSpeed` like any other, and `isinstance(strategy, DeepSpeedPlugin)` is true
    of every `DeepSpeed`. Nothing is read from the environment: the object is complete. None stands
    for "not given" everywhere.

    Args:
        hf_ds_config: `config` of `DeepSpeed`: a dictionary, the path of a JSON file, or an
            `HfDeepSpeedConfig`, whose later changes hold too.
        gradient_accumulation_steps: has to be that of the Accelerator, which accumulates.
        gradient_clipping: as in `DeepSpeed`.
        zero_stage: as in `DeepSpeed`.
        is_train_batch_min: without effect: DeepSpeed only makes figures of the batch size.
        offload_optimizer_device: `offload_optimizer` of `DeepSpeed`.
        offload_param_device: `offload_param` of `DeepSpeed`.
        offload_optimizer_nvme_path: the folder for optimizer state on NVMe.
        offload_param_nvme_path: the folder for parameters on NVMe.
        zero3_init_flag: only False is accepted; `accelerator.build_model` does what True asks for.
        zero3_save_16bit_model: without effect: weights are always gathered for saving.
        transformer_moe_cls_names: `moe_leaf_modules` of `DeepSpeed`, as a text with commas.
        enable_msamp: not offered; only False is accepted.
        msamp_opt_level: not offered.

    Raises:
        ValueError: for an option that is not offered, with what to write instead; for options that
            contradict each other.
    """

    def __new__(  # type: ignore[misc]  # the object is a DeepSpeed, so that nothing else has to know the older names
        cls,
        hf_ds_config: Mapping[str, Any] | str | Path | HfDeepSpeedConfig | None = None,
        gradient_accumulation_steps: int | None = None,
        gradient_clipping: float | None = None,
        zero_stage: int | None = None,
        is_train_batch_min: bool = True,  # noqa: ARG004  # either way nothing follows from it
        offload_optimizer_device: str | None = None,
        offload_param_device: str | None = None,
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool | None = None,
        transformer_moe_cls_names: str | None = None,
        enable_msamp: bool | None = None,
        msamp_opt_level: str | None = None,
    ) -> DeepSpeed:
        """Translates what is given, and gives the `DeepSpeed`."""
        from accel_deepspeed.strategy import DeepSpeed

        _refuse_not_offered(zero3_init_flag, enable_msamp or msamp_opt_level)
        if zero3_save_16bit_model is False:
            warnings.warn(
                f"{NAME}(zero3_save_16bit_model=False) has no effect: get_state_dict() and save_model() always gather whole "
                f"weights. Leave it out.",
                stacklevel=2,
            )
        paths = {
            "offload_optimizer": (offload_optimizer_device, offload_optimizer_nvme_path),
            "offload_param": (offload_param_device, offload_param_nvme_path),
        }
        given: dict[str, Any] = {
            "config": _config(hf_ds_config, gradient_accumulation_steps, zero_stage, paths),
            "gradient_clipping": gradient_clipping,
            "zero_stage": zero_stage,
            "offload_optimizer": offload_optimizer_device,
            "offload_param": offload_param_device,
            "moe_leaf_modules": _names(transformer_moe_cls_names),
        }
        strategy = DeepSpeed(**{name: value for name, value in given.items() if value is not None})
        if isinstance(getattr(hf_ds_config, "config", None), Mapping):
            strategy.hf_ds_config = hf_ds_config  # type: ignore[assignment]  # the object itself: a trainer fills in more of it later
        return strategy


def get_active_deepspeed_plugin(state: object) -> DeepSpeed:
    """The strategy of a run under DeepSpeed.

    Args:
        state: an Accelerator, or its `state`.

    Raises:
        ValueError: the run is under another strategy.
    """
    found = getattr(state, "deepspeed_plugin", None)
    if found is None:
        raise ValueError(
            f"get_active_deepspeed_plugin() was given a {type(state).__name__} of a run without DeepSpeed. Write "
            f"Accelerator(strategy='deepspeed')."
        )
    strategy: DeepSpeed = found
    return strategy


def _refuse_not_offered(builds_sharded: bool | None, msamp: object) -> None:
    if builds_sharded:
        raise ValueError(
            f"{NAME}(zero3_init_flag=True) was asked for, but a model is shared out where it is built. Write "
            f"model = accelerator.build_model(factory), and leave it out."
        )
    if msamp:
        raise ValueError(
            f"{NAME}(enable_msamp=..., msamp_opt_level=...) asks for MS-AMP, which is not offered. Write "
            f"Accelerator(mixed_precision='fp8'), and leave them out."
        )


def _config(
    given: object, steps: int | None, stage: int | None, paths: Mapping[str, tuple[str | None, str | None]]
) -> object:
    """The given configuration, with options that `DeepSpeed` takes only from there."""
    folders = {name: path for name, (_, path) in paths.items() if path is not None}
    if steps is None and not folders:
        return given
    config, source = ({}, "") if given is None else load(given)
    if given is None:
        config["zero_optimization"] = {"stage": "auto" if stage is None else stage}
    zero = config.setdefault("zero_optimization", {})
    entries: list[tuple[dict[str, Any], str, str, Any]] = []
    if steps is not None:
        entries.append((config, "gradient_accumulation_steps", "gradient_accumulation_steps", steps))
    for name, path in folders.items():
        section = zero.setdefault(name, {"device": paths[name][0] or "none"})
        entries.append((section, "nvme_path", f"{name}_nvme_path", path))
    for section, key, option, value in entries:
        found = section.get(key, "auto")
        if found not in ("auto", value):
            raise ValueError(
                f"{NAME}({option}={value!r}) was given, but {source} has {key!r} with {found!r}. Keep one of them."
            )
        section[key] = value
    return config


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())
