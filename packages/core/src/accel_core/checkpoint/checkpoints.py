"""The checkpoints of one Accelerator: what is registered, where they go, how many are kept, and the save that is under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from accel_core.checkpoint.background import Background, Mode
from accel_core.checkpoint.collective_steps import everywhere, on_main_rank
from accel_core.checkpoint.files import retention
from accel_core.checkpoint.loading import LoadHook, LoadRequest, load
from accel_core.checkpoint.record import whereabouts
from accel_core.checkpoint.run_state import Run, has_state
from accel_core.checkpoint.saving import SaveHook, SaveRequest, save

if TYPE_CHECKING:
    import os

    from accel_core.options.project import ProjectConfiguration
    from accel_core.tracking.trackers import Trackers

FOLDER = "checkpoints"
"""The folder of automatic names, in the project's."""

Asynchronous = bool | Literal["eager", "lazy"]


class Checkpoints:
    """Saves and loads.

    Args:
        run: what is saved. `run.registered` grows by `register`.
        project: where automatic names are; its `iteration` is counted on.
        record: what manifests say of the run, wherever it stands, as JSON.
        trackers: where the run is recorded, which a run that is resumed goes on with.
    """

    def __init__(
        self, run: Run, project: ProjectConfiguration, record: Mapping[str, Any], trackers: Trackers | None = None
    ) -> None:
        self._run = run
        self._project = project
        self._record = record
        self._trackers = trackers
        # What a checkpoint that was loaded said of trackers, for the next one, where there are none here.
        self._recorded: Sequence[Any] = ()
        self._registered: list[Any] = run.registered  # type: ignore[assignment]
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background = Background(run.world)
        self._known = False  # whether this run has saved to, or loaded from, the folder of automatic names

    def register(self, objects: Sequence[Any]) -> None:
        """See `Accelerator.register_for_checkpointing`."""
        bad = [f"{index}: a {type(each).__name__}" for index, each in enumerate(objects) if not has_state(each)]
        if bad:
            raise ValueError(
                f"register_for_checkpointing() takes objects with state_dict() and load_state_dict(), which these have not "
                f"(by position in the call): {', '.join(bad)}. Give them these two methods, or leave them out."
            )
        known = [each for each in objects if any(each is other for other in self._registered)]
        if known:
            raise ValueError(
                f"register_for_checkpointing() was given a {type(known[0]).__name__} that is registered already, and would be "
                f"saved twice. Leave it out."
            )
        self._registered.extend(objects)

    def on_save(self, hook: SaveHook) -> RemovableHandle:
        """See `Accelerator.register_save_state_pre_hook`."""
        return _registered(self._save_hooks, hook, "register_save_state_pre_hook(hook)", "models, weights, output_dir")

    def on_load(self, hook: LoadHook) -> RemovableHandle:
        """See `Accelerator.register_load_state_pre_hook`."""
        return _registered(self._load_hooks, hook, "register_load_state_pre_hook(hook)", "models, input_dir")

    @torch.inference_mode(False)  # what is made here is used outside of it, by the next save for one
    def save(self, output_dir: str | os.PathLike[str] | None, asynchronous: Asynchronous) -> str:
        """Saves, or begins to, and returns the folder. A collective."""
        world = self._run.world
        mode = _mode(asynchronous)
        world.arrive("save_state()" if mode is None else f"save_state(asynchronous={mode!r})")
        self.wait()
        automatic = self._project.automatic_checkpoint_naming
        if not (self._run.stateful() or self._run.models() or self._run.prepared.optimizers):
            raise ValueError(
                "save_state() was called, but nothing is prepared or registered that it could save. Call prepare() before it; after "
                "free_memory() that is to be done again."
            )
        if mode == "lazy" and self._run.prepared.fused:
            raise ValueError(
                "save_state(asynchronous='lazy') was asked for, but an optimizer updates parameters during the backward, where "
                "nothing can wait for the copies. Use asynchronous='eager'."
            )
        folder = self._folder_to_save(output_dir)
        request = SaveRequest(
            folder=folder,
            each_node=self._project.save_on_each_node,
            mode=mode,
            record={
                **self._record,
                **whereabouts(self._run.prepared, self._run.accumulation),
                "iteration": self._project.iteration if automatic else None,
                "tracking": self._tracking(),
            },
            hooks=tuple(self._save_hooks.values()),
            published=lambda: self._enforce_limit(folder),
        )
        save(self._run, request, self._background)
        self._run.prepared.copy_behind(self._background.copying)
        if automatic:
            self._known = True
            self._project.iteration += 1
        return str(folder)

    @torch.inference_mode(False)  # an optimizer could not go on with a state of such tensors
    def load(self, input_dir: str | os.PathLike[str] | None) -> None:
        """Restores a run. A collective."""
        world = self._run.world
        world.arrive("load_state()")
        self.wait()
        folder = self._folder_to_load(input_dir)
        record = load(self._run, LoadRequest(folder, tuple(self._load_hooks.values())))
        self._resume_tracking(record.get("tracking", ()))
        if self._project.automatic_checkpoint_naming and all(
            everywhere(world, "to count on", lambda: self._is_managed(folder))
        ):
            self._known = True
            self._project.iteration = self._next_number(record)

    def _tracking(self) -> Sequence[Any]:
        """Where the run is recorded, by rank: by the main process alone, unless trackers say otherwise. Then it is a collective."""
        if self._trackers is None:
            return self._recorded
        if not self._trackers.on_every_rank:
            return [self._trackers.state()]  # that of the main process is written
        return everywhere(self._run.world, "for trackers to say what they record", self._trackers.state)

    def _resume_tracking(self, recorded: Sequence[Any]) -> None:
        self._recorded = recorded
        rank = self._run.world.rank
        if self._trackers is not None and rank < len(recorded):
            self._trackers.resume(recorded[rank])

    def wait(self) -> None:
        """Returns when the save that is under way is published; raises what made it fail. A collective, if one is."""
        self._run.prepared.await_copies()
        self._background.wait()

    def _next_number(self, record: Mapping[str, Any]) -> int:
        """Above all that are there, so that the newest is always that of the latest training."""
        highest = everywhere(
            self._run.world, "for the highest number", lambda: max(retention.numbers(self._root()), default=-1)
        )
        return max(*highest, record["iteration"] if record["iteration"] is not None else -1) + 1

    def _is_managed(self, folder: Path) -> bool:
        return folder.parent.resolve() == self._root().resolve()

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
        number, known = self._project.iteration, self._known
        world, next_path = self._run.world, partial(retention.next_path, self._root(), number, known)
        if self._each_node:
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
        if self._each_node:
            number = min(
                everywhere(
                    self._run.world, "for the newest checkpoint", lambda: _number(retention.newest(self._root()))
                )
            )
            return self._root() / retention.name(number)  # which is another folder on each node, perhaps
        return on_main_rank(self._run.world, lambda: retention.newest(self._root()))

    @property
    def _each_node(self) -> bool:
        return self._project.save_on_each_node

    def _enforce_limit(self, folder: Path) -> None:
        if self._project.total_limit is not None:
            retention.enforce(self._root(), self._project.total_limit, folder)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


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


def _registered(hooks: OrderedDict[int, Any], hook: Any, call: str, arguments: str) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"{call} was given a {type(hook).__name__}, expected a function: hook({arguments}).")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
