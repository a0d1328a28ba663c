"""A whole window of accumulation in one call: the default of the hook `forward_backward`.

Every micro-batch gives a *sum* and a *weight*, and the gradient is that of (sum of sums) / (sum of
weights) over the window and data-parallel ranks. The total is known only after the last forward,
and all graphs until then would cost memory. So each backward runs at once, divided by a reference
(the mean weight per rank of the window before), and reference / total multiplies once at the end.
Sums stay on a device, so that nothing waits for it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core.collectives.reduce_gather import channel_of, gather, reduce_tree
from accel_core.loading.index_source import looked_ahead

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.strategy import Layout
    from accel_core.loop.preparation import Prepared
    from accel_core.plugins import Relay
    from accel_core.processes.world import World

LossFn = Callable[[Any, Any], tuple[torch.Tensor, "torch.Tensor | float"]]
Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]

Part = tuple[torch.Tensor, "torch.Tensor | float"]  # the sum of one micro-batch, and its weight

_EMPTY = "forward_backward() was given no micro-batch, and a window has at least one. Leave the call out, on all ranks alike."


class WindowLoop:
    """Forward and backward over the micro-batches of a window, one after the other.

    With `together` all ranks run equally many, as forwards communicate: ranks that have fewer run
    their last one again, weighing nothing, which draws random numbers and moves statistics anew.
    """

    def __init__(self, relay: Relay, prepared: Prepared, world: World, layout: Layout, together: bool = False) -> None:
        self._together = together and world.size > 1
        self._relay = weakref.ref(relay)  # which holds this loop, through the default of its own hook
        self._prepared = weakref.ref(prepared)
        self._world = world
        self._group = layout.gradient_group or layout.data_group
        self._ranks = layout.shard.count if layout.gradient_group is None else layout.gradient_group.size()
        # Like all numbers here, a 0-d tensor where reading it would be a wait for the device.
        self._reference: Any = None

    def run(self, model: nn.Module, micro_batches: Iterable[Any], loss_fn: LossFn, inputs: Inputs) -> torch.Tensor:
        """See `Accelerator.forward_backward`. Collective over the data-parallel ranks."""
        batches = self._evened(micro_batches) if self._together else ((batch, True) for batch in micro_batches)
        relay, prepared = self._relay(), self._prepared()
        assert relay is not None, "the relay calls this"
        assert prepared is not None, "the Accelerator calls this"
        # The loss may go through other models and learn from them: all that is trained counts.
        parameters = prepared.learned(model)
        trained = prepared.trained()
        models = trained if any(model is each for each in trained) else [*trained, model]
        if prepared.gradients.are_elsewhere and any(map(torch.any, prepared.gradients.waiting())):
            what = "forward_backward() weighs a whole window, but gradients of backwards inside no_sync() wait"
            raise RuntimeError(f"{what} to travel. Synchronise them, or drop them by optimizer.zero_grad().")
        earlier = prepared.gradients.set_aside(parameters)
        try:
            parts = []
            for (batch, counts), following in looked_ahead(batches, 1):
                with ExitStack() as local:
                    for each in models if following else ():
                        local.enter_context(relay.no_sync(each))
                    args, kwargs = inputs(batch)
                    loss, weight = _checked(loss_fn(model(*args, **kwargs), batch))
                    if not counts:
                        # Zero also if the loss is not finite, which `loss * 0` is not.
                        loss, weight = loss.masked_fill(loss.new_ones((), dtype=torch.bool), 0.0), 0.0
                    parts.append((loss.detach(), weight))
                    if torch.is_grad_enabled():
                        self._backward(relay, loss, parts, closes=not following)
                    del loss  # its graph is not to last through the next forward
            if not parts:
                raise ValueError(_EMPTY)
            if torch.is_grad_enabled():
                relay.synchronise_gradients()
                self._reference, factor, mean = self._corrected(self._reference, *self._total(parts))
                prepared.gradients.scale(parameters, factor)
            else:
                mean = self._corrected(1.0, *self._total(parts))[2]
        except BaseException:
            prepared.gradients.drop(parameters, earlier)  # half a window is none: the call may be repeated
            raise
        finally:
            prepared.gradients.bring_back(earlier)
        exact = any(loss.dtype is torch.float64 for loss, _ in parts)
        return torch.as_tensor(mean, dtype=torch.float64 if exact else torch.float32, device=self._world.device)

    def _backward(self, relay: Relay, loss: torch.Tensor, parts: list[Part], *, closes: bool) -> None:
        """The backward of the last of these parts, divided by the reference; the first part gives that."""
        if self._reference is None:
            self._reference = self._corrected(1.0, *self._total(parts))[0]
        factor = 1.0 / self._reference
        if isinstance(factor, torch.Tensor):
            # At least in single precision: float16 does not hold one over many tokens.
            loss = loss * factor.to(loss.device, torch.promote_types(loss.dtype, torch.float32))
            factor = 1.0
        relay.backward(relay.scale_loss(loss), factor, closes, {})

    def _evened(self, micro_batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Equally many micro-batches on every rank, and whether each counts. A collective."""
        if isinstance(micro_batches, Sequence):
            count = len(micro_batches)
            own: Iterator[Any] = map(micro_batches.__getitem__, range(count))
        else:
            given = list(micro_batches)
            count, own = len(given), _let_go(given)
        lengths = gather(torch.tensor([count]), self._world).tolist()
        if not all(lengths):
            lacking = [str(rank) for rank, length in enumerate(lengths) if not length]
            raise ValueError(f"{_EMPTY} Ranks without: {', '.join(lacking)}.")
        return _filled(own, max(lengths) - count)

    def _corrected(self, reference: Any, loss: Any, weight: Any) -> tuple[Any, Any, Any]:
        """The next reference, the factor of the gradients, and the mean loss."""
        # Without a weight, the gradient is zero, and there is no mean.
        now = weight / self._ranks  # for the strategy averages over the ranks what is to be summed
        if not isinstance(weight, torch.Tensor):
            return (now, reference / now, loss / weight) if weight else (reference, 1.0, math.nan)
        none = weight == 0
        factor, mean = (reference / now).masked_fill(none, 1.0), (loss / weight).masked_fill(none, math.nan)
        return torch.where(none, reference, now), factor, mean

    def _total(self, parts: list[Part]) -> Any:
        """The sums of losses and weights over parts and ranks, the same on all of them."""
        device, wide = self._world.device, self._world.widest
        losses = torch.stack([loss.to(device) for loss, _ in parts]).sum(dtype=wide)
        weights = torch.zeros_like(losses)
        for _, weight in parts:  # a number is given to the kernel, where a copy would be awaited
            weights += weight.to(device, wide) if isinstance(weight, torch.Tensor) else weight
        total, channel = torch.stack([losses, weights]), channel_of(self._world, self._group)
        if channel is None or channel.message_device == device:
            total = reduce_tree(total, self._world, "sum", group=self._group)
        else:  # queued on the device: two numbers, which nobody has to compare first
            dist.all_reduce(total, group=channel.group)
        return total.tolist() if total.is_cpu else total.unbind()


def _let_go(batches: list[Any]) -> Iterator[Any]:
    """The elements of a list, each of which is forgotten when it is due."""
    batches.reverse()
    while batches:
        yield batches.pop()


def _filled(batches: Iterable[Any], missing: int) -> Iterator[tuple[Any, bool]]:
    """Micro-batches, the last of which comes again so many times; and whether each counts."""
    batch = None
    for batch in batches:
        yield batch, True
    for _ in range(missing):
        yield batch, False


def default_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model's arguments: a mapping as keywords, a tuple's or list's first, or it."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return (batch[0],), {}
    return (batch,), {}


def _checked(result: object) -> Part:
    if not (isinstance(result, tuple) and len(result) == 2):
        what = f"loss_fn(output, batch) returned {type(result).__name__}, expected a tuple (sum, weight):"
        raise TypeError(f"{what} (cross_entropy(output, y, reduction='sum'), y.numel()), say.")
    loss, weight = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        what = f"loss_fn(output, batch) returned a sum of {found}, expected a scalar tensor."
        raise ValueError(f"{what} Sum the loss: loss.sum().")
    if hasattr(loss, "full_tensor"):  # of a DTensor, which no plain tensor can be added to
        loss = loss.full_tensor()
    on_device = isinstance(weight, torch.Tensor) and not weight.is_cpu
    return loss.reshape(()), weight.detach().reshape(()) if on_device else float(weight)
