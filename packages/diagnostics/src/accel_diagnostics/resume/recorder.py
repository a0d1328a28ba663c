"""Writes down what one Accelerator does, step by step, without a change of what it does.

It stands around bound hooks, as the search for values that are not finite does. Nothing here is a
collective but the checkpoint at the end, and nothing draws a random number.
"""

from __future__ import annotations

import os
import re
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_core import CheckpointError, ProjectConfiguration
from accel_core.api.checkpoint import find_default
from accel_core.api.component import flatten, override_class
from accel_diagnostics.batch_tracking import CountingFeed, Window
from accel_diagnostics.findings import sample_ids
from accel_diagnostics.resume.digests import Unprepared, bits, digest_state, find_unprepared, hashed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Feed
    from accel_core.api.checkpoint import Run
    from accel_diagnostics.resume.journal import Writer

NEVER = -1


class Recorder:
    """Watches a run. Before its window number `kill_at` (from 0; `NEVER`) it kills this process."""

    def __init__(self, run: Run, feed: Feed, journal: Writer, kill_at: int) -> None:
        self._run, self._feed, self._journal, self._kill_at = run, feed, journal, kill_at
        self._steps = 0
        self._rows: list[str] = []
        self._loss = 0.0
        self._noted = False  # whether the state before the present window is written
        self._unprepared: Unprepared | None = None
        self._window: Window | None = None
        self._ended = False
        self._install()

    def _install(self) -> None:
        relay = self._run.relay
        hooks = ("prepare_model", "scale_loss", "backward", "forward_backward", "save_checkpoint", "load_checkpoint")
        self._hooks: dict[str, Callable[..., Any]] = {name: getattr(relay, name) for name in hooks}
        for name in hooks:
            setattr(relay, name, getattr(self, name))
        if not isinstance(self._feed, CountingFeed):  # the search for nan makes it one, too
            override_class(self._feed, CountingFeed)

    def prepare_model(self, model: nn.Module, optimizers: list[Optimizer], request: Any) -> nn.Module:
        """The hook; looks at what a model that is trained is called with."""
        prepared: nn.Module = self._hooks["prepare_model"](model, optimizers, request)
        if not request.evaluation:
            prepared.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True)
        return prepared

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The hook; keeps the loss as it is before scaling."""
        self._loss = float(loss.detach().double().mean())
        scaled: torch.Tensor = self._hooks["scale_loss"](loss)
        return scaled

    def backward(self, loss: torch.Tensor, weight: float, closes: bool, options: dict[str, Any]) -> None:
        """The hook; writes down the micro-batch."""
        self._before_window()
        used = self._ids(self._feed.current_drawn() if self._window is None else self._window.used)
        self._journal.write("micro", closes=closes, loss=self._loss, ids=used, rows=self._rows)
        self._rows = []
        self._hooks["backward"](loss, weight, closes, options)
        if closes:
            self._close()

    def forward_backward(
        self, model: nn.Module, micro_batches: Iterable[Any], loss_fn: Any, inputs: Any, scale_loss: Any
    ) -> torch.Tensor:
        """The hook; writes down the loss of the whole window."""
        self._before_window()
        before, self._window = self._steps, Window(self._feed, micro_batches, inputs)
        try:
            loss: torch.Tensor = self._hooks["forward_backward"](
                model, self._window, loss_fn, self._window.inputs, scale_loss
            )
        finally:
            used, self._window = self._ids(self._window.used), None
        self._journal.write("window", loss=float(loss.double()), ids=used, rows=self._rows)
        self._rows = []
        if self._steps == before:  # an engine ran it, without our backward
            self._close()
        return loss

    def save_checkpoint(self, run: Run, folder: Any, asynchronous: Any) -> str:
        """The hook; writes down where."""
        saved: str = self._hooks["save_checkpoint"](run, folder, asynchronous)
        self._journal.write("save", step=self._steps, folder=str(Path(saved).resolve()))
        return saved

    def load_checkpoint(self, run: Run, folder: Any, missing_ok: bool) -> bool | None:
        """The hook; writes down from where."""
        source = _newest(run.project) if folder is None else Path(folder)
        loaded: bool | None = self._hooks["load_checkpoint"](run, folder, missing_ok)
        if loaded is not False:
            self._journal.write("load", step=self._steps, folder=None if source is None else str(source.resolve()))
            self._noted = False
        return loaded

    def finish(self, final: Path | None) -> None:
        """Writes down the state at the end, and saves it in `final`, if given: then a collective."""
        if self._ended or not self._steps:
            return
        self._ended = True
        state, note = self._digest(), None
        if final is not None:
            run = replace(self._run, project=ProjectConfiguration(), save_hooks=OrderedDict())
            try:
                find_default("accel.checkpoints", "neutral", "verify-resume").load()().save_checkpoint(
                    run, final, False
                )
            except (CheckpointError, ValueError) as error:
                final, note = None, str(error)
        self._journal.write("end", state=state, final=None if final is None else str(final), note=note)

    def _called(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._before_window()
            self._rows += row_hashes((arguments, keywords))

    def _before_window(self) -> None:
        if self._noted:
            return
        self._noted = True
        if self._unprepared is None:
            self._unprepared = find_unprepared(self._run)
        if self._steps == self._kill_at:
            self._journal.write("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        self._journal.write("state", state=self._digest())

    def _close(self) -> None:
        self._steps += 1
        self._noted = False

    def _digest(self) -> dict[str, str]:
        return digest_state(self._run, self._unprepared or Unprepared([], []))

    def _ids(self, used: Any) -> list[Any] | None:
        """The samples of a micro-batch but for filling; None if a loader does not say."""
        found = [sample_ids(drawn, rows) for drawn, rows in used]
        if None in found:
            return None
        return [each for ids in found if ids is not None for each in ids.ids[: ids.real]]


def row_hashes(batch: Any) -> list[str]:
    """A hash for each row of what a model is called with; one for all of it if it has no rows."""
    tensors = [each for each in flatten(batch)[0] if isinstance(each, torch.Tensor)]
    count = next((each.size(0) for each in tensors if each.dim()), 0)
    rows = [each for each in tensors if each.dim() and each.size(0) == count]
    if not count:
        return [hashed(b"|".join(map(bits, tensors)))]
    host = [each.detach().cpu() for each in rows]
    return [hashed(b"|".join(bits(each[row]) for each in host)) for row in range(count)]


def _newest(project: ProjectConfiguration) -> Path | None:
    """The newest complete checkpoint of the automatic names."""
    root = Path(project.project_dir or ".") / "checkpoints"
    found = [each for each in root.glob("checkpoint_*") if re.fullmatch(r"checkpoint_\d+", each.name)]
    complete = [each for each in found if (each / "manifest.json").exists()]
    return max(complete, key=lambda each: int(each.name.rpartition("_")[2]), default=None)
