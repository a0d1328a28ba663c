"""Local SGD (Stich, ICLR 2019): ranks train alone, and average parameters, not gradients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from accel_core.base.errors import CollectiveMismatchError
from accel_core.collectives import objects, reduce_gather
from accel_core.collectives.broadcast import broadcast

if TYPE_CHECKING:
    from torch import nn

    from accel_core.accelerator import Accelerator


class LocalSGD:
    """A block with local gradients; data-parallel ranks average parameters every few steps.

    `step()`, behind `optimizer.step()`, is collective when an average is due, as is the end of the
    block, after which all ranks hold the same model: the mean of what was trained in it, and the
    buffers of the first rank. Not enabled, or in a world of one, it does nothing. `ValueError` for a
    model that is not prepared for training, or a strategy that keeps no whole parameters.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if type(local_sgd_steps) is not int or local_sgd_steps < 1:
            what = f"LocalSGD(local_sgd_steps={local_sgd_steps!r}):"
            raise ValueError(f"{what} expected an integer of at least 1, the number of steps between two averages.")
        self._accelerator, self._model, self._steps = accelerator, model, local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        record = accelerator._prepared.find_model(model)
        if enabled and (record is None or record.evaluation or record.prepared is not model):
            asked = f"LocalSGD was given a {type(model).__name__} that this Accelerator has not prepared for training."
            raise ValueError(f"{asked} Pass what accelerator.prepare(model) returned.")
        strategy = accelerator._parts.strategy
        if self.enabled and not strategy.replicates_parameters:
            raise ValueError(
                f"LocalSGD averages whole parameters, and the strategy {type(strategy).__name__} does not say that "
                f"every data-parallel rank holds them (replicates_parameters). Choose strategy='ddp', or pass "
                f"enabled=False."
            )
        self._local = ExitStack()
        self._inside = False
        self._trained: dict[int, nn.Parameter] = {}

    def __enter__(self) -> LocalSGD:
        self._inside = True
        self._calls = self._averaged = 0
        if self.enabled:
            self._stay_local()
            self._accelerator._prepared.drifted = True
            self._accelerator._prepared.apart = lambda: self._calls - self._averaged
        return self

    def __exit__(self, *raised: object) -> None:
        self._inside = False
        self._local.close()
        self._accelerator._prepared.apart = None
        try:
            if self.enabled and raised[0] is None:
                self._average(ending=True)
        finally:
            self._trained.clear()

    def step(self) -> None:
        """Counts a step, and averages after `local_sgd_steps`. Call it after `optimizer.step()`.

        Inside `accumulate` each micro-batch may call it; an average waits for the window's end.
        Ranks that have not called it equally often raise `CollectiveMismatchError`.
        """
        if not self._inside:
            raise RuntimeError("LocalSGD.step() was called outside of its block, `with LocalSGD(...) as local_sgd:`.")
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
            raise RuntimeError("LocalSGD averages over all ranks, and inside join_uneven_inputs() some may have ended.")
        ranks = reduce_gather.gather(torch.tensor([[self._calls, self._steps, ending]]), world, group).tolist()
        if any(rank != ranks[0] for rank in ranks):
            table = "".join(
                f"\n  rank {number}: {calls} calls of step(), {'at the end of' if ended else 'in'} the block, local_sgd_steps={steps}"
                for number, (calls, steps, ended) in enumerate(ranks)
            )
            raise CollectiveMismatchError(
                f"LocalSGD averages when all data-parallel ranks have made the same number of steps, but they have not:{table}\n"
                f"Give all ranks equally many batches, leave the loop at the same step, and pass the same local_sgd_steps."
            )
        if self._calls == self._averaged > 0:
            return  # at the end of the block, and the last step was followed by an average
        self._averaged = self._calls
        parameters = list(self._trained.values())
        with torch.no_grad():
            means = reduce_gather.reduce_tree([each.detach() for each in parameters], world, "mean", group=group)
            buffers = list(self._model.buffers())
            firsts = broadcast(buffers, world, group=group) if buffers else []
            for own, agreed in zip([*parameters, *buffers], [*means, *firsts], strict=True):
                own.copy_(agreed)
        # A loss scale shrinks on the rank whose gradients overflow; steps that ranks take together need one.
        for each in self._accelerator._scales():
            each.load_state_dict(objects.broadcast_object(each.state_dict(), world, group=group))
