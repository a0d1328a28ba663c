"""The speed and memory use of a training loop, measured on request, recorded by trackers.

meter = Throughput(accelerator, every=10)
for batch, target in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_fn(model(batch), target))
        optimizer.step()
        optimizer.zero_grad()
    meter.update(samples=len(batch))
with meter.paused():
    evaluate(model)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from accel_core.api.tracker import call_allocator
from accel_trackers.peak_flops import peak_flops as known_peak

if TYPE_CHECKING:
    from accel_core import Accelerator

_GIB = 1 << 30
_PAGES = Path("/proc/self/statm")


class Throughput:
    """Measures a loop, and logs the results every few optimizer steps with `accelerator.log`.

    No collective, and no waiting for the device: this rank counts for itself, and totals are its
    counts times the number of data-parallel parts, which is exact where all ranks have batches of
    one size. Time is that of the host between two reports, so with `every=1` single values jump.

    Recorded, each behind `prefix`:

    - `samples_per_second`, and `tokens_per_second` where tokens are counted, of the whole run;
    - `step_seconds`: of one optimizer step;
    - `memory_gib`: on an accelerator the most that tensors of this process took since the last
      report, as its allocator counts; on the CPU the memory of this process at the report, under
      Linux. Left out elsewhere;
    - `gradient_norm`, where `update` is given one;
    - `model_flops_per_second` and `mfu`, with `flops_per_sample`: what the model needs, without
      what is computed again to save memory, and its share of what all devices can do (Chowdhery et
      al., "PaLM", 2022, appendix B).

    To go on counting steps in a run that is resumed:
    `accelerator.register_for_checkpointing(meter)`.

    Args:
        accelerator: whose loop it is. Not kept alive.
        every: optimizer steps between two reports, at least 1.
        flops_per_sample: floating-point operations that one sample takes, forward and backward
            together: about 6 * parameters * tokens for a transformer.
        peak_flops: what one device can do per second, in the dtype of the matrix products. None:
            from the data sheet of the device, for the precision of the Accelerator; if that is not
            known, a warning says so and `mfu` is left out. Only used with `flops_per_sample`.
        prefix: stands before the names under which values are logged.
        warmup: optimizer steps that are not measured, while things are compiled and workers start.
            0: the clock starts now.
        memory: whether memory is told. On an accelerator each report begins the peak of torch's
            allocator anew (`torch.accelerator.reset_peak_memory_stats`), which others may be
            watching.

    Attributes:
        steps: optimizer steps so far.
        values: what was reported last, by names without the prefix; empty before the first report.
            For progress bars.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        every: int = 10,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        prefix: str = "throughput/",
        warmup: int = 1,
        memory: bool = True,
    ) -> None:
        # Weak: an Accelerator that has the meter registered would otherwise keep itself alive.
        self._accelerator: Accelerator = weakref.proxy(accelerator)
        self._shards = accelerator.layout.shard.count
        self._device = accelerator.device
        self._every, self._warmup, self._prefix, self._memory = every, warmup, prefix, memory
        self._flops = flops_per_sample
        if flops_per_sample is not None:
            one = peak_flops or known_peak(accelerator.device, accelerator.mixed_precision)
            self._peak = None if one is None else one * accelerator.num_processes
        self.steps = 0
        self.values: Mapping[str, Any] = {}
        self._pauses = 0
        self._start()

    def update(
        self,
        samples: int,
        tokens: int = 0,
        *,
        gradient_norm: torch.Tensor | float | None = None,
        step: int | None = None,
    ) -> None:
        """Counts a batch; reports at the end of an optimizer step that is due. No collective.

        Call it on every rank, once per batch, after `optimizer.step()` or the `accumulate` block,
        with the samples and tokens (0: not counted) of this rank's batch. `gradient_norm` is the
        result of `clip_grad_norm_`, read by trackers alone: the device is not waited for. Values
        have the step `step`; None: the number of optimizer steps. A paused meter counts nothing.
        """
        if self._pauses:
            return
        self._samples += samples
        self._tokens += tokens
        if not self._accelerator.sync_gradients:
            return
        self.steps += 1
        if self.steps >= self._due:
            self._finish_interval(gradient_norm, self.steps if step is None else step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count: an evaluation, a checkpoint."""
        self._pauses += 1
        began = perf_counter()
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._began += perf_counter() - began

    def state_dict(self) -> dict[str, int]:
        """The number of optimizer steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on counting there. What is measured begins anew, with its warm-up."""
        self.steps = state["steps"]
        self._start()

    def _start(self) -> None:
        """Begins to measure, or, with a warm-up, to wait."""
        self._begin_interval()
        self._warm = self.steps + self._warmup
        self._due = self._warm if self._warmup else self._next()

    def _begin_interval(self) -> None:
        self._samples = self._tokens = 0
        self._first = self.steps
        if self._memory and self._device.type != "cpu":
            call_allocator("reset_peak_memory_stats", self._device)
        self._began = perf_counter()

    def _next(self) -> int:
        """The next step after the present one at which a report is due."""
        return (self.steps // self._every + 1) * self._every

    def _finish_interval(self, gradient_norm: torch.Tensor | float | None, step: int) -> None:
        if self.steps > self._warm or not self._warmup:
            values = self._measured(perf_counter() - self._began)
            self.values = values if gradient_norm is None else {**values, "gradient_norm": gradient_norm}
            self._accelerator.log({f"{self._prefix}{name}": value for name, value in self.values.items()}, step)
        self._due = self._next()
        self._begin_interval()

    def _measured(self, seconds: float) -> dict[str, Any]:
        seconds = max(seconds, 1e-9)  # clocks of some systems stand still for longer than an empty step
        rate = self._samples * self._shards / seconds
        values: dict[str, Any] = {"samples_per_second": rate, "step_seconds": seconds / (self.steps - self._first)}
        if self._tokens:
            values["tokens_per_second"] = self._tokens * self._shards / seconds
        memory = _memory(self._device) if self._memory else None
        if memory is not None:
            values["memory_gib"] = memory / _GIB
        if self._flops is not None:
            values["model_flops_per_second"] = rate * self._flops
            if self._peak is not None:
                values["mfu"] = rate * self._flops / self._peak
        return values


def _memory(device: torch.device) -> int | None:
    """In bytes; None where nobody says."""
    if device.type != "cpu":
        return call_allocator("max_memory_allocated", device) or None
    if not _PAGES.exists():
        return None
    import mmap

    return int(_PAGES.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
