"""Local SGD: every rank trains by itself, and parameters are averaged now and then instead of gradients at every step.

    with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(batch), target))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

It is for slow connections: what travels in 8 steps is the parameters once, where DDP sends 8 times
the gradients. It is another algorithm, and not a faster way to the same result: Stich, "Local SGD
Converges Fast and Communicates Little" (ICLR 2019), says how much the ranks may drift. With plain
SGD and `local_sgd_steps=1` the results are those of DDP.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accel_core.base.errors import CollectiveMismatchError
from accel_core.collectives import objects, reduce_gather
from accel_core.processes.watch.collective_scope import collective

if TYPE_CHECKING:
    from torch import nn

    from accel_core.accelerator import Accelerator
    from accel_core.processes.channel import Channel


class LocalSGD:
    """A block in which gradients stay local, and parameters are averaged over the data-parallel ranks every few steps.

    `step()` is a collective when an average is due, and so is the end of the block, after which all
    ranks hold the same model, bit by bit. An average is the mean of the parameters that are, or
    were, trained in the block. Buffers are those of the first rank, as under DDP; optimizers keep
    their own state. An exception leaves the block without communication.

    Args:
        accelerator: whose ranks train.
        model: a prepared model.
        local_sgd_steps: how many calls of `step()` make an average due, at least 1.
        enabled: False: the block does nothing, as in a world of one.

    Raises:
        TypeError, ValueError: if `local_sgd_steps` is no int of at least 1; if the model is not prepared
            for training, or, in a larger world, if the strategy does not keep whole parameters on every
            rank.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if type(local_sgd_steps) is not int or local_sgd_steps < 1:
            raise ValueError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps!r}): expected an integer of at least 1, the number of steps between two "
                f"averages. Pass enabled=False to train without LocalSGD."
            )
        self._accelerator = accelerator
        self._model = model
        self._steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        if enabled:
            _check_model(accelerator, model)
        if self.enabled:
            _check_strategy(accelerator)
        self._local = ExitStack()
        self._inside = False
        self._calls = self._averaged = 0
        self._trained: dict[int, nn.Parameter] = {}

    def __enter__(self) -> LocalSGD:
        self._inside = True
        self._calls = self._averaged = 0
        if self.enabled:
            self._stay_local()
            self._accelerator._prepared.drifted = True
            self._accelerator._prepared.apart = lambda: self._calls - self._averaged
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        self._local.close()
        self._accelerator._prepared.apart = None
        try:
            if self.enabled and error is None:
                self._average(ending=True)
        finally:
            self._trained.clear()

    def step(self) -> None:
        """Counts a step, and averages when `local_sgd_steps` were counted. Call it after `optimizer.step()`.

        Inside `accumulate` it may be called in every micro-batch: each call counts, and an average
        waits for the end of the window. Collective when it averages: all ranks call it equally
        often, or all raise `CollectiveMismatchError`. Raises `RuntimeError` outside of the block.
        """
        if not self._inside:
            raise RuntimeError(
                "LocalSGD.step() was called outside of its block, where gradients are averaged at every step. Call it "
                "inside `with LocalSGD(...) as local_sgd:`."
            )
        if not self.enabled:
            return
        self._calls += 1
        if self._accelerator.sync_gradients:
            # A strategy may have had to synchronise the first backward; then it did not take part in the block.
            self._stay_local()
            if self._calls - self._averaged >= self._steps:
                self._average()

    def _stay_local(self) -> None:
        self._local.close()
        self._local.enter_context(self._accelerator.no_sync(self._model))
        self._trained.update((id(each), each) for each in self._model.parameters() if each.requires_grad)

    def _average(self, ending: bool = False) -> None:
        """Makes the model the same on every rank. A collective over the data-parallel ranks."""
        world, group = self._accelerator._world, self._accelerator._layout.data_group
        if self._accelerator._feed.joining:
            raise RuntimeError(
                "LocalSGD averages over all ranks, and inside join_uneven_inputs() some may have ended. Leave the latter out, "
                "and give all ranks equally many batches (even_batches=True); or train without LocalSGD."
            )
        counted = torch.tensor([[self._calls, self._steps, ending]])
        _check_counts(reduce_gather.gather(counted, world, group).tolist())
        if self._calls == self._averaged > 0:
            return  # at the end of the block, and the last step was followed by an average
        self._averaged = self._calls
        parameters = list(self._trained.values())
        with torch.no_grad():
            means = reduce_gather.reduce_tree(
                [parameter.detach() for parameter in parameters], world, "mean", group=group
            )
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean)
            _take_from_first(list(self._model.buffers()), world.channel(group))
        # A loss scale shrinks on the rank whose gradients overflow; steps that ranks take together need one.
        for each in self._accelerator._scales():
            each.load_state_dict(objects.broadcast_object(each.state_dict(), world, group=group))


def _take_from_first(tensors: list[torch.Tensor], channel: Channel) -> None:
    """Overwrites tensors with those of the group's first rank: one collective per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1).to(channel.device) for tensor in same])
        with collective("LocalSGD"):
            dist.broadcast(flat, group=channel.group, group_src=0)
        for tensor, part in zip(same, flat.split([each.numel() for each in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _check_counts(ranks: list[list[int]]) -> None:
    if all(rank == ranks[0] for rank in ranks):
        return
    lines = [
        f"  rank {number}: {calls} calls of step(), {'at the end of the block' if ending else 'in the block'}, "
        f"local_sgd_steps={steps}"
        for number, (calls, steps, ending) in enumerate(ranks)
    ]
    raise CollectiveMismatchError(
        "LocalSGD averages when all data-parallel ranks have made the same number of steps, but they have not:\n"
        + "\n".join(lines)
        + "\nGive all ranks equally many batches (a prepared loader does, with even_batches=True), leave the loop at the "
        "same step, and pass the same local_sgd_steps."
    )


def _check_model(accelerator: Accelerator, model: nn.Module) -> None:
    record = accelerator._prepared.find_model(model)
    if record is None or record.evaluation or record.prepared is not model:
        raise ValueError(
            f"LocalSGD was given a {type(model).__name__} that this Accelerator has not prepared for training, so its "
            f"gradients could not be kept local. Pass what accelerator.prepare(model) returned."
        )


def _check_strategy(accelerator: Accelerator) -> None:
    strategy = accelerator._parts.strategy
    if not strategy.replicates_parameters:
        raise ValueError(
            f"LocalSGD averages whole parameters over the ranks, and the strategy {type(strategy).__name__} does not say "
            f"that every data-parallel rank holds them. Choose strategy='ddp', or pass enabled=False; a strategy that "
            f"does hold them declares `replicates_parameters = True` in its class."
        )
