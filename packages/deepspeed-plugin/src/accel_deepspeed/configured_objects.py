"""The optimizer and schedule of a configuration, for a `DummyOptim` and a `DummyScheduler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import optim

from accel_deepspeed.configured_names import SCHEDULERS
from accel_deepspeed.placeholders import DEFAULT_LR, DummyOptim, DummyScheduler, begin_schedules, has_scheduler

if TYPE_CHECKING:
    from accel_deepspeed.configuration import Configuration

_CONFIGURED = "_accel_deepspeed_configured"
_ON_CPUS = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
_FORMS = ("foreach", "fused", "capturable", "differentiable")


def realise(optimizer: optim.Optimizer, configuration: Configuration, device_type: str) -> None:
    """Turns a `DummyOptim` into the configured optimizer, in place, and begins its schedules.

    To be called for every optimizer of a model, before anything else is done with it. A second call
    changes nothing.

    Args:
        optimizer: any optimizer.
        configuration: what was read.
        device_type: where the parameters are trained.

    Raises:
        ValueError: the configuration names no optimizer for it, or the script has another; options
            of the two contradict each other.
    """
    if isinstance(optimizer, DummyOptim):
        _become_real(optimizer, configuration, device_type)
    elif configuration.optimizer is not None and _CONFIGURED not in vars(optimizer):
        raise ValueError(
            f"{configuration.source} has a section 'optimizer' ({configuration.optimizer['type']}), and the script prepares a "
            f"{type(optimizer).__name__}. Take the section out; or write DummyOptim(model.parameters()) in the script."
        )
    begin_schedules(optimizer, lambda scheduler: _schedule(scheduler, configuration))


def compiled_for(optimizer: optim.Optimizer | None, configuration: Configuration) -> list[str]:
    """DeepSpeed's operators that `realise`, an engine or a model built in parts would compile."""
    names = []
    if isinstance(optimizer, DummyOptim) and configuration.offload_optimizer != "none" and configuration.optimizer:
        section = configuration.optimizer
        if not section.get("params", {}).get("torch_adam"):
            names.append(_ON_CPUS.get(section["type"].lower(), ""))
    if configuration.offload_param == "nvme":
        names.append("async_io")
    if any(value for name, value in configuration.values["zero_optimization"].items() if "quantized" in name):
        names.append("quantizer")
    return [name for name in names if name]


def check_schedule(optimizer: optim.Optimizer, configuration: Configuration) -> None:
    """Raises before a step if the configuration has a schedule, but nothing steps it.

    Raises:
        RuntimeError: there is no `DummyScheduler` over the optimizer.
    """
    if configuration.scheduler is not None and not has_scheduler(optimizer):
        raise RuntimeError(
            f"{configuration.source} has a section 'scheduler' ({configuration.scheduler['type']}), and nothing steps it. Write "
            f"scheduler = accelerator.prepare(DummyScheduler(optimizer)), and scheduler.step() in the loop; or take the section "
            f"out, and prepare a scheduler of your own."
        )


def optimizer_kind(
    name: str, params: Mapping[str, Any], offloaded: bool, device_type: str
) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """The class for a name of the section `optimizer`, and its options.

    Where optimizer state is offloaded these are DeepSpeed's classes for CPUs. Else Adam is torch's,
    fused on accelerators: it needs no compiler, and its state is that of every other strategy.
    """
    options = {option: tuple(value) if option == "betas" else value for option, value in params.items()}
    lowered = name.lower()
    if lowered in ("adam", "adamw"):
        decoupled = options.pop("adam_w_mode", True) or lowered == "adamw"
        if not options.pop("torch_adam", False):
            if offloaded:
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                return DeepSpeedCPUAdam, {**options, "adamw_mode": decoupled}
            options.setdefault("weight_decay", 0.0)  # DeepSpeed's default, where torch's AdamW has 0.01
        if device_type != "cpu" and not any(form in options for form in _FORMS) and not offloaded:
            options["fused"] = True
        return optim.AdamW if decoupled else optim.Adam, _of_torch(name, options)
    if lowered == "adagrad":
        if offloaded:
            from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

            return DeepSpeedCPUAdagrad, options
        return optim.Adagrad, _of_torch(name, options)
    if lowered == "lamb":
        from deepspeed.ops.lamb import FusedLamb

        return FusedLamb, options
    if lowered == "lion":
        from deepspeed.ops import lion

        return lion.DeepSpeedCPULion if offloaded else lion.FusedLion, options
    kind: type[optim.Optimizer] = getattr(optim, name)
    return kind, options


def _become_real(optimizer: DummyOptim, configuration: Configuration, device_type: str) -> None:
    section, source = configuration.optimizer, configuration.source
    if section is None:
        raise ValueError(
            f'A DummyOptim was given, but {source} has no section \'optimizer\'. Write "optimizer": {{"type": "AdamW", '
            f'"params": {{"lr": "auto"}}}} in it, or prepare a real optimizer.'
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "A scheduler was made from a DummyOptim, whose learning rate is not the configured one yet. Write "
            "DummyScheduler(optimizer, lr_scheduler_callable=make_scheduler), which calls make_scheduler(optimizer) in time."
        )
    given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    defaults = {"lr": DEFAULT_LR, "weight_decay": 0}
    asked = {option: value for option, value in given.items() if value != defaults.get(option)}
    params = _merged("DummyOptim", "optimizer", section.get("params", {}), asked, source)
    params = {
        option: given.get(option) if value == "auto" else value
        for option, value in params.items()
        if value != "auto" or option in given  # else the class has a default
    }
    kind, options = optimizer_kind(section["type"], params, configuration.offload_optimizer != "none", device_type)
    groups = optimizer.param_groups
    for group, own in zip(groups, optimizer.own_options, strict=True):
        for option in given.keys() - own:
            group.pop(option, None)
    for name in ("lr", "weight_decay", "kwargs", "own_options"):
        del vars(optimizer)[name]
    # In place, for the script, schedulers and the core hold the object. What they have set on it stays.
    hooks = {name: kept for name, kept in vars(optimizer).items() if name.endswith("_hooks")}
    optimizer.__class__ = kind  # type: ignore[assignment]
    kind.__init__(optimizer, groups, **options)
    vars(optimizer).update(hooks, **{_CONFIGURED: True})


def _schedule(scheduler: DummyScheduler, configuration: Configuration) -> Any:
    section, source = configuration.scheduler, configuration.source
    make = scheduler.lr_scheduler_callable
    if (section is None) == (make is None):
        found = (
            "has no section 'scheduler'"
            if section is None
            else "has a section 'scheduler', beside lr_scheduler_callable"
        )
        raise ValueError(
            f'A DummyScheduler was given, but {source} {found}. Write one of the two: "scheduler": {{"type": "WarmupLR"}} in '
            f"the configuration, or DummyScheduler(optimizer, lr_scheduler_callable=make_scheduler)."
        )
    if section is None:
        assert make is not None, "one of the two is given"
        return make(scheduler.optimizer)
    kind = section["type"]
    counts = {"total_num_steps": scheduler.total_num_steps, "warmup_num_steps": scheduler.warmup_num_steps or None}
    asked = {name: value for name, value in counts.items() if value is not None and name in SCHEDULERS[kind]}
    params = _merged("DummyScheduler", "scheduler", section.get("params", {}), asked | scheduler.kwargs, source)
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    filled = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": rates,
        "warmup_num_steps": 1,
    }  # DeepSpeed takes no warm-up of zero steps
    params = {name: filled.get(name, value) if value == "auto" else value for name, value in params.items()}
    left = [name for name, value in params.items() if value == "auto"]
    if left:
        raise ValueError(
            f'{source} has "auto" for {", ".join(f"scheduler.params.{name}" for name in left)}, and the DummyScheduler does not '
            f"say it. Write DummyScheduler(optimizer, {left[0]}=...), or a value in the configuration."
        )
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, kind)(scheduler.optimizer, **params)


def _merged(
    owner: str, section: str, params: Mapping[str, Any], asked: Mapping[str, Any], source: str
) -> dict[str, Any]:
    """The options of a section; those of the script replace "auto" and missing ones."""
    for option, value in asked.items():
        found = params.get(option, "auto")
        if found != "auto" and _listed(found) != _listed(value):
            raise ValueError(
                f"{owner}({option}={value!r}) was given, but {source} has '{section}.params.{option}' with {found!r}. Write "
                f'"auto" in the configuration, or leave {option} out in the script.'
            )
    return {**params, **asked}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value  # JSON has no tuples


def _of_torch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options for torch's class, without DeepSpeed's own. ValueError for one torch cannot do."""
    for option in ("bias_correction", "fp32_optimizer_states"):
        if not options.pop(option, True):
            raise ValueError(
                f"'optimizer.params.{option}' is false, which {name} can do with offloaded optimizer state alone. Write "
                f"DeepSpeed(offload_optimizer='cpu'), or leave the option out."
            )
    return options
