"""Methods for what ranks share: tensors, objects for metrics, flags, and signals to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from accel_core.base.deprecation import Deprecation
from accel_core.collectives import metrics, reduce_gather
from accel_core.facade.accelerator_parts import AcceleratorParts

if TYPE_CHECKING:
    import signal

    from accel_core.collectives.reduce_gather import Reduction

T = TypeVar("T")
_CHECK_BREAKPOINT = Deprecation("check_breakpoint()", "check_trigger()", removed_in="1.0")


class CollectiveMethods(AcceleratorParts):
    """The methods that ranks call together."""

    def set_trigger(self) -> None:
        """Sets a flag that all see at `check_trigger`. No collective; for signal handlers too."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Whether any rank called `set_trigger` since this was true; same on all. Collective."""
        return self._trigger.check()

    def check_breakpoint(self) -> bool:
        """An older spelling of `check_trigger`. Collective."""
        _CHECK_BREAKPOINT.warn()
        return self._trigger.check()

    def stop_on_signal(self, *signals: signal.Signals | int | str) -> None:
        """From now on a signal makes `should_stop` true, and ends no process. No collective.

        `signals` are such as "SIGUSR1"; none: SIGTERM. One that arrives 5 seconds after the first,
        or later, does what it did before. Raises for what cannot be caught here, as `signal` does.
        """
        self._preemption.watch(*signals)

    def should_stop(self) -> bool:
        """Whether a signal of `stop_on_signal` arrived on any rank; the same on all. Collective.

        if accelerator.should_stop():
            accelerator.save_state(folder)          # on all ranks, at the same step
            break
        """
        return self._preemption.check()

    def gather(self, tensor: T) -> T:
        """Concatenates tensors of all ranks along dim 0, in rank order. Collective.

        Takes and returns tensors in nested tuples, lists and dicts, detached; a 0-d one gives an
        element per rank. Unless all but dim 0 agrees, all ranks raise `CollectiveMismatchError`.
        """
        return reduce_gather.gather(tensor, self._world)

    def reduce(self, tensor: T, reduction: Reduction = "sum", scale: float = 1.0) -> T:
        """Combines tensors over ranks: "sum", "mean", "max", or "none"; times `scale`. Collective.

        Takes a tensor, or nested tuples, lists and dicts of them. Raises `CollectiveMismatchError`
        on every rank if structures, dtypes or shapes differ.
        """
        return reduce_gather.reduce_tree(tensor, self._world, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors to the ranks' largest size in one dim, to be gathered. Collective.

        Takes a tensor, or nested tuples, lists and dicts; tensors without that `dim` stay as they
        are. `pad_index` is the value that fills up, before the values with `pad_first`.
        """
        from accel_core.collectives.padding import pad_across_processes

        return pad_across_processes(tensor, self._world, dim, pad_index, pad_first)

    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...
    @overload
    def gather_for_metrics(self, input_data: Sequence[T], use_gather_object: Literal[True]) -> list[T]: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers per-sample results of data-parallel ranks, each sample exactly once. Collective.

        Takes tensors whose dim 0 is the batch's, in nested tuples, lists and dicts; or a list of
        objects, one per sample, which `use_gather_object` says where they hold tensors. Samples
        that only fill the last batch are left out: call it before the next batch is drawn. Raises
        `ValueError` in a larger world for another number of rows than the batch's,
        `CollectiveMismatchError` on every rank for what differs.
        """
        rows = self._feed.current_rows()
        return metrics.gather_for_metrics(input_data, rows, self._world, self._layout.data_group, use_gather_object)
