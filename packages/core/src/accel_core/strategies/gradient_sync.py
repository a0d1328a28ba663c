"""A record of the gradients of a DDP model that have been averaged since their last backward.

torch's reducer averages in the first backward behind a forward of its wrapper, and ignores every
other, and a step with such gradients lets the ranks drift apart. So every parameter notes that its
gradient has changed, by a hook that is the bound method of a deque: no Python runs in the backward
(0.06 µs for each parameter, against 0.8 µs for a Python function).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from accel_core.base.suggestions import listed
from accel_core.collectives import reduce_gather
from accel_core.loop.optimizer_gate import held_by

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from accel_core.processes.world import World

_KEPT = 8  # so many backwards are told apart: more than one step needs
SYNC = "_accel_gradient_sync"
_requires_grad = attrgetter("requires_grad")


class GradientSync:
    """The state of a wrapper's gradients, averaged for parameters that require one now."""

    def __init__(self, wrapper: DistributedDataParallel, earlier: GradientSync | None = None) -> None:
        named = wrapper.module.named_parameters()
        own = [parameter for name, parameter in named if name not in wrapper.parameters_to_ignore]
        self.known = tuple(each for each in own if each.requires_grad)  # what the reducer averages
        self.frozen = tuple(each for each in own if not each.requires_grad)
        self._all_change = not (wrapper.find_unused_parameters or wrapper.static_graph)  # in every backward, once
        self._may_repeat = bool(wrapper.static_graph)
        # Those whose gradients have changed since the last forward of the wrapper, in order.
        self.changed: deque[nn.Parameter] = deque(maxlen=_KEPT * len(self.known))
        self._local: set[nn.Parameter] = set()  # those that had changed before it, and were not averaged
        self._waiting = False  # whether the next backward averages
        self.averaged = False  # whether a backward has, since the last step
        self.withheld = False  # whether the last forward of the wrapper ran inside `no_sync`
        if earlier is not None:
            self._local.update(earlier._local, earlier.changed)
            earlier.close()
        handles = [each.register_post_accumulate_grad_hook(self.changed.append) for each in self.known]
        self.close: Any = weakref.finalize(self, lambda: [each.remove() for each in handles])  # takes the hooks off
        self.close.atexit = False

    def announce(self, wrapper: DistributedDataParallel) -> None:
        """A forward has run behind which the first backward averages."""
        if self.changed:
            self.settle(wrapper)
            self._local.update(self.changed)
            self.changed.clear()
        self._waiting, self.withheld = True, False

    @property
    def is_first_backward(self) -> bool:
        """Whether all that changed since the last step can be of one averaging backward. Hot."""
        return self._waiting and self._all_change and not self._local and len(self.changed) <= len(self.known)

    def is_thawed(self) -> bool:
        """Whether parameters unknown to the reducer require a gradient. 50 ns per frozen one."""
        return bool(self.frozen) and any(map(_requires_grad, self.frozen))

    def in_doubt(self) -> bool:
        """Whether there is anything to settle."""
        return bool(self.changed or self._local) or self.is_thawed()

    def settle(self, wrapper: DistributedDataParallel) -> None:
        """Forgets what the reducer has averaged."""
        if not (self._waiting and self.changed) or not is_finished(wrapper):
            return
        self._local.clear()  # the reducer averages all that is in `.grad`
        if not self._all_change or len(self.changed) > len(self.known):
            self._local.update(behind_the_first_backward(list(self.changed), self._may_repeat))
        self.changed.clear()
        self._waiting, self.averaged = False, True

    def average(self, wrapper: Any, world: World) -> None:
        """Averages what another backward of a forward left local. Collective if there is any."""
        if self._waiting or self.withheld or not self.averaged or wrapper._join_config.enable:
            return  # ranks that have ended take part in what the reducer does, and in nothing else
        sparse = any(each.grad is not None and each.grad.is_sparse for each in self.known)
        if sparse or not (self.changed or self._local):
            return
        # The mean over the ranks of what is a mean already is that mean: so all gradients are averaged.
        used = torch.tensor([float(each.grad is not None) for each in self.known], device=self.known[0].device)
        sent = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.known]
        with torch.no_grad():
            means, used = reduce_gather.reduce_tree((sent, used), world, "mean")
            for parameter, mean, share in zip(self.known, means, used.tolist(), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean)
                elif share:
                    parameter.grad = mean
        self.changed.clear()
        self._local.clear()

    def local(self) -> set[nn.Parameter]:
        """The parameters whose gradients differ from rank to rank, as far as is known."""
        found = self._local.union(self.changed, filter(_requires_grad, self.frozen))
        return {each for each in found if each.grad is not None and (each.grad.is_sparse or each.grad.any())}

    def left_out(self, wrapper: DistributedDataParallel) -> list[str]:
        """The parameters for which the reducer still waits, having begun, by name."""
        if not self._waiting or not self.changed or is_finished(wrapper):
            return []
        changed = set(self.changed)
        return [name for name, each in wrapper.module.named_parameters() if each in set(self.known) - changed]


def behind_the_first_backward(changed: Sequence[nn.Parameter], may_repeat: bool) -> Sequence[nn.Parameter]:
    """The parameters that later backwards have changed: from the first that changes again on."""
    # With `may_repeat` (a static graph that is recomputed) only a backward that changes all of them is a later one.
    seen: set[nn.Parameter] = set()
    for index, each in enumerate(changed):
        if each in seen:
            again = not may_repeat or set(changed[index : 2 * index]) == seen
            return changed[index:] if again else ()
        seen.add(each)
    return ()


def is_finished(wrapper: DistributedDataParallel) -> bool:
    """Whether the reducer has averaged all that it has begun to."""
    try:
        wrapper._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def sync_of(wrapper: Any) -> GradientSync | None:
    """That of a prepared wrapper; None for any other."""
    found: GradientSync | None = vars(wrapper).get(SYNC)
    return found


def check(optimizer: Optimizer, models: Sequence[tuple[DistributedDataParallel, GradientSync]]) -> None:
    """Raises if an optimizer holds parameters with gradients that were not averaged."""
    if not any(sync.local() for _, sync in models):
        return
    # Two models may share a parameter: one of them has averaged it.
    averaged = {each for _, sync in models for each in set(sync.known) - sync.local()}
    held = set(held_by(optimizer))
    for wrapper, sync in models:
        local = (sync.local() - averaged) & held
        if local and (left_out := sync.left_out(wrapper)):
            raise RuntimeError(left_out_of_loss(left_out, "this window"))
        if local:
            names = [name for name, each in wrapper.module.named_parameters() if each in local]
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called, but gradients of {len(names)} of its parameters have "
                f"not been averaged over the ranks since their last backward: {listed(names)}. They are in the first "
                f"backward behind a call of the model that prepare() returned: call that, and neither the model inside "
                f"it (accelerator.unwrap_model) nor a part of it, outside of no_sync(); "
                f"accelerator.mark_forward_method(model, name) is for other methods, accelerator.backward(loss) for a "
                f"second backward."
            )


def left_out_of_loss(names: Sequence[str], where: str) -> str:
    """The message for parameters without which the reducer does not end."""
    return (
        f"{len(names)} parameters took no part in the loss of {where}, so the gradients of the others never arrived: "
        f"{listed(names)}. Use them, set requires_grad_(False) on them before prepare(), or pass "
        f"kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]."
    )
