"""The checkpoints of one Accelerator: their places, how many are kept, and the current save."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_checkpoint.background import Background, Mode
from accel_checkpoint.collective_steps import everywhere, on_main_rank
from accel_checkpoint.files import retention
from accel_checkpoint.importing.opened import holds_none
from accel_checkpoint.loading import load
from accel_checkpoint.record import set_up
from accel_checkpoint.run_state import stateful
from accel_checkpoint.saving import SaveRequest, save
from accel_core import CheckpointError

if TYPE_CHECKING:
    import os

    from accel_core.api.checkpoint import Asynchronous, Run

FOLDER = "checkpoints"  # the folder of automatic names, in the project's


class Checkpoints:
    """Saves and loads one run, which whoever calls a method holds on to."""

    def __init__(self, run: Run) -> None:
        self._reference = weakref.ref(run)
        self._project = run.project
        self._set_up = set_up(run.world, run.explain())
        # What a checkpoint that was loaded said of trackers, for the next one, where there are none here.
        self._recorded: Sequence[Any] = ()
        self._background = Background(run.world)
        self._seen = set[int]()  # numbers in the folder of automatic names that this run has saved, or found on loading

    @property
    def _run(self) -> Run:
        run = self._reference()
        assert run is not None, "whoever calls holds on to it"
        return run

    @torch.inference_mode(False)  # what is made here is used outside of it, by the next save for one
    def save(self, output_dir: str | os.PathLike[str] | None, asynchronous: Asynchronous) -> str:
        """Saves, or begins to, and returns the folder. A collective."""
        world = self._run.world
        mode = _mode(asynchronous)
        if getattr(torch.get_device_module(world.device), "is_current_stream_capturing", bool)():
            raise CheckpointError(
                "save_state() was called while a graph is captured, which would only have the copies in it. Call it before, or behind."
            )
        world.arrive("save_state()" if mode is None else f"save_state(asynchronous={mode!r})")
        self.wait()
        automatic = self._project.automatic_checkpoint_naming
        if not (stateful(self._run) or self._run.models() or self._run.prepared.optimizers):
            raise ValueError(
                "save_state() was called, but nothing is prepared or registered. Call prepare() before it, also after free_memory()."
            )
        if mode == "lazy" and self._run.prepared.fused:
            raise ValueError(
                "save_state(asynchronous='lazy') was asked for, but an optimizer updates parameters during the backward, where "
                "nothing can wait for the copies. Use asynchronous='eager'."
            )
        folder = self._folder_to_save(output_dir)
        record = {
            **self._set_up,
            "iteration": self._project.iteration if automatic else None,
            "tracking": self._tracking(),
        }
        hooks, published = tuple(self._run.save_hooks.values()), partial(self._enforce_limit, folder)
        request = SaveRequest(folder, self._project.save_on_each_node, mode, record, hooks, published)
        save(self._run, request, self._background)
        self._run.prepared.copy_behind(self._background.copying)
        if automatic:
            self._seen.add(self._project.iteration)
            self._project.iteration += 1
        return str(folder)

    @torch.inference_mode(False)  # an optimizer could not go on with a state of such tensors
    def load(self, input_dir: str | os.PathLike[str] | None, missing_ok: bool = False) -> bool:
        """Restores a run, and returns whether there was a checkpoint. A collective."""
        world = self._run.world
        world.arrive("load_state(missing_ok=True)" if missing_ok else "load_state()")
        self.wait()
        if missing_ok and all(everywhere(world, "to look for a checkpoint", lambda: self._is_missing(input_dir))):
            return False
        folder = self._folder_to_load(input_dir)
        record = load(self._run, folder, tuple(self._run.load_hooks.values()))
        self._recorded = record.get("tracking", ())
        if self._run.recorder is not None and world.rank < len(self._recorded):
            self._run.recorder.resume(self._recorded[world.rank])
        if self._project.automatic_checkpoint_naming and all(
            everywhere(world, "to count on", lambda: folder.parent.resolve() == self._root().resolve())
        ):
            self._project.iteration = self._next_number(record)
        return True

    def _tracking(self) -> Sequence[Any]:
        """The tracking state by rank: the main process's, or a collective if every rank records."""
        if self._run.recorder is None:
            return self._recorded
        if not self._run.recorder.on_every_rank:
            return [self._run.recorder.state()]  # that of the main process is written
        return everywhere(self._run.world, "for trackers to say what they record", self._run.recorder.state)

    def wait(self) -> None:
        """Returns when the save under way is published, or raises its error; then collective."""
        self._run.prepared.await_copies()
        self._background.wait()

    def _next_number(self, record: Mapping[str, Any]) -> int:
        """Above all that are there, so that the newest is always that of the latest training."""
        numbers = everywhere(self._run.world, "for the highest number", lambda: retention.numbers(self._root()))
        saved = record["iteration"] if record["iteration"] is not None else -1
        self._seen.update(*numbers)
        return max([saved, *self._seen]) + 1

    def _root(self) -> Path:
        assert self._project.project_dir is not None, "automatic names were asked for"
        return Path(self._project.project_dir).absolute() / FOLDER

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state() was called without a folder. Type save_state('my_checkpoint'), or let folders be named for "
                    "you: Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
                )
            return Path(output_dir).absolute()
        if output_dir is not None:
            raise ValueError(
                f"save_state({str(output_dir)!r}) was given a folder, and automatic_checkpoint_naming=True names them: "
                f"{self._root()}/checkpoint_<iteration>. Leave one of the two out."
            )
        number = self._project.iteration
        world, next_path = self._run.world, partial(retention.next_path, self._root(), number, self._seen)
        if self._project.save_on_each_node:
            everywhere(world, "for the next number", next_path)
        else:
            on_main_rank(world, next_path)
        return self._root() / retention.name(number)

    def _folder_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).absolute()
        if not self._project.automatic_checkpoint_naming:
            raise ValueError(
                "load_state() was called without a folder, and checkpoints have no automatic names of which the newest could be "
                "taken. Type load_state('my_checkpoint'), or the ProjectConfiguration of the run that saved it."
            )
        if self._project.save_on_each_node:
            newest = partial(retention.newest, self._root())
            found = everywhere(
                self._run.world, "for the newest checkpoint", lambda: int(newest().name.rpartition("_")[2])
            )
            number = min(found)
            return self._root() / retention.name(number)  # which is another folder on each node, perhaps
        return on_main_rank(self._run.world, lambda: retention.newest(self._root()))

    def _is_missing(self, input_dir: str | os.PathLike[str] | None) -> bool:
        """Whether no save was ever finished where this rank would load from, ours or another library's."""
        if input_dir is not None:
            return holds_none(Path(input_dir))
        root = self._root() if self._project.automatic_checkpoint_naming else None
        return root is not None and all(holds_none(root / retention.name(each)) for each in retention.numbers(root))

    def _enforce_limit(self, folder: Path) -> None:
        if self._project.total_limit is not None:
            retention.enforce(self._root(), self._project.total_limit, folder)


def _mode(asynchronous: object) -> Mode | None:
    if asynchronous is False:
        return None
    if asynchronous is True:
        return "eager"
    if asynchronous in ("eager", "lazy"):
        return asynchronous
    raise ValueError(
        f"save_state(asynchronous={asynchronous!r}): expected False, True, 'eager' (everything is copied before it returns) or "
        f"'lazy' (the next step of an optimizer waits for the copies)."
    )
