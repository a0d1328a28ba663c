"""Layouts of optimizer state, as data: by optimizer class, for every key of a parameter's state.

    elementwise   laid out like the parameter, so that it can be cut wherever the parameter is
    replicated    the same on every rank
    counter       replicated, a number of steps: on the CPU unless the optimizer needs the device
    factor        computed over a rank's part of the parameter: once that is cut, not cut again

A class inherits the layouts of the class above it. Whoever writes an optimizer declares its own, on
the class or the instance:

    accel_layouts = {"exp_avg": "elementwise", "step": "replicated"}

Nothing is concluded from a shape: the codes of an 8-bit optimizer have that of the parameter, and
mean nothing without scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_core import CheckpointError

ELEMENTWISE = "elementwise"
"""The layout of state that has an element for each of the parameter's."""

REPLICATED = "replicated"
"""The layout of state that is the same on every rank."""

COUNTER = "counter"
"""The layout of a number of steps."""

FACTOR = "factor"

_MOMENTS = {"exp_avg": ELEMENTWISE, "exp_avg_sq": ELEMENTWISE, "step": COUNTER}
_ADAM = {**_MOMENTS, "max_exp_avg_sq": ELEMENTWISE}

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "torch.optim:ASGD": {"ax": ELEMENTWISE, "eta": REPLICATED, "mu": REPLICATED, "step": REPLICATED},
    "torch.optim:Adadelta": {"acc_delta": ELEMENTWISE, "square_avg": ELEMENTWISE, "step": COUNTER},
    "torch.optim:Adafactor": {"col_var": FACTOR, "row_var": FACTOR, "variance": ELEMENTWISE, "step": COUNTER},
    "torch.optim:Adagrad": {"sum": ELEMENTWISE, "step": COUNTER},
    "torch.optim:Adam": _ADAM,
    "torch.optim:AdamW": _ADAM,
    "torch.optim:Adamax": {"exp_avg": ELEMENTWISE, "exp_inf": ELEMENTWISE, "step": COUNTER},
    "torch.optim:LBFGS": {},
    "torch.optim:Muon": {"momentum_buffer": ELEMENTWISE},
    "torch.optim:NAdam": {**_MOMENTS, "mu_product": COUNTER},
    "torch.optim:RAdam": _MOMENTS,
    "torch.optim:RMSprop": {
        **dict.fromkeys(("grad_avg", "momentum_buffer", "square_avg"), ELEMENTWISE),
        "step": COUNTER,
    },
    "torch.optim:Rprop": {"prev": ELEMENTWISE, "step_size": ELEMENTWISE, "step": COUNTER},
    "torch.optim:SGD": {"momentum_buffer": ELEMENTWISE},
    "torch.optim:SparseAdam": _MOMENTS,
}

SPANNING = frozenset({"torch.optim:LBFGS"})
"""Those that keep under their first parameter what belongs to all of them."""

OF_SCHEDULERS = frozenset({"base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"})
"""Options that torch's schedulers put into the groups: a scheduler may be made after its optimizer was loaded."""

OF_THIS_PROCESS = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""Options that say how an optimizer computes, and not what: a checkpoint does not change them."""


def kind_of(optimizer: object) -> str:
    """The name of an optimizer's class in a checkpoint: "module:QualName"."""
    return _name(type(optimizer))


def same_kind(here: str, saved: str) -> bool:
    """Whether two kinds are of one class; a script's has another module if it is imported."""
    (module, name), (saved_module, saved_name) = here.split(":", 1), saved.partition(":")[::2]
    of_a_script = {module, saved_module} & {"__main__", "__mp_main__"}
    return name == saved_name and (module == saved_module or bool(of_a_script))


def is_known(optimizer: object) -> bool:
    """Whether the layouts of this class, or of one above it, are in the table."""
    return any(_name(cls) in LAYOUTS for cls in type(optimizer).__mro__)


def is_spanning(optimizer: object) -> bool:
    """Whether the state of one parameter is about others too."""
    return any(_name(cls) in SPANNING for cls in type(optimizer).__mro__)


def is_partitioned(optimizer: object) -> bool:
    """Whether this is torch's ZeroRedundancyOptimizer, with a parameter's state on one rank."""
    # By its name: to import it takes seconds.
    return any(
        cls.__qualname__ == "ZeroRedundancyOptimizer" and cls.__module__.startswith("torch.distributed.")
        for cls in type(optimizer).__mro__
    )


def layouts_of(optimizer: object) -> dict[str, str]:
    """The declared layout of each key: the table, overridden by `accel_layouts` if there is one."""
    known = next((LAYOUTS[_name(cls)] for cls in type(optimizer).__mro__ if _name(cls) in LAYOUTS), {})
    declared: Any = getattr(optimizer, "accel_layouts", {})
    if not isinstance(declared, Mapping) or not set(declared.values()) <= {ELEMENTWISE, REPLICATED}:
        raise CheckpointError(
            f"The state of {type(optimizer).__name__} is laid out as its accel_layouts says, but that is {declared!r:.200}. Give "
            f'a dict from keys of its state to "elementwise" (laid out like the parameter) or "replicated" (the same everywhere).'
        )
    steps = {"step": COUNTER} if declared.get("step") == REPLICATED else {}
    return {**known, **declared, **steps}


def _name(cls: type) -> str:
    # Which of its modules a class of torch is in varies from version to version.
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{module}:{cls.__qualname__}"
