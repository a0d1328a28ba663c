"""Activation checkpointing: what a unit computed is computed again for the backward.

Between forward and backward only the inputs of a unit stay in memory, for about a third more
computation. See Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from accel_core.api.component import ClassOverride, override_class

if TYPE_CHECKING:
    from torch import nn

_TAKEN = frozenset(inspect.signature(checkpoint).parameters) | {"preserve_rng_state"}


def checkpoint_units(units: Sequence[nn.Module | list[nn.Module]]) -> None:
    """Makes the forward of each unit run again in the backward, in its random state and autocast.

    It happens in place: names of parameters and buffers, `state_dict`, and the printed form stay
    what they are. Without gradients, nothing is different. A unit inside another one runs again
    with that one, and is not checkpointed itself. Call it before `fully_shard`, so that the hooks
    that gather parameters stay outside of what runs again.

    Args:
        units: as from `find_units`. Those that are checkpointed already are left as they are.

    Raises:
        ValueError: if there are no units, or one has a `forward` of its own on the instance, which
            a class cannot override.
    """
    modules = [module for unit in units for module in (unit if isinstance(unit, list) else [unit])]
    if not modules:
        raise ValueError(
            "FSDP(activation_checkpointing=True) was asked for, but the model has no units inside: everything would be kept "
            "until the whole model ran again. Name the classes of its blocks, FSDP(wrap=[...]), or leave it out."
        )
    inner = _inside(modules)
    outermost = [module for module in modules if module not in inner]
    for module in outermost:
        if "forward" in vars(module):
            raise ValueError(
                f"FSDP(activation_checkpointing=True) was asked for, but a {type(module).__name__} among the units has a forward "
                f"that was set on the object, and which would run without it. Override forward in a class, or leave "
                f"activation_checkpointing out."
            )
    for module in outermost:
        override_class(module, _Checkpointed)


class _Checkpointed(ClassOverride):
    """Runs `forward` again in the backward.

    It overrides `forward`, and not the call, so that hooks run once: those of `fully_shard`, which
    have gathered the parameters when the backward comes, and the user's own. And the compiler sees
    it as it sees a call of torch's `checkpoint`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        if _TAKEN.isdisjoint(kwargs):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # torch takes keywords of these names for its own options.
        return checkpoint(lambda named, *rest: forward(*rest, **named), kwargs, *args, use_reentrant=False)


def _inside(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Those that lie in any of `modules`, not counting themselves."""
    return {inner for module in modules for inner in module.modules() if inner is not module}
