"""All of a run, and the weights of a model: saved and loaded, by whoever owns the hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_core.contract.hook_specs import LAYOUT_HOOKS
from accel_core.facade.older_arguments import refuse_keywords
from accel_core.facade.preparation_methods import PreparationMethods
from accel_core.loop.preparation import require

if TYPE_CHECKING:
    import os

    from torch.utils.hooks import RemovableHandle

    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.tensor_layouts import State
    from accel_core.loop.run import Asynchronous, LoadHook, Run, SaveHook


class CheckpointMethods(PreparationMethods):
    """The methods that save and load."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state of a model, under the user's parameter names. Collective under every strategy.

        Live and on every rank where the strategy replicates parameters; else, and if offloaded, all
        in the CPU memory of the main process, none elsewhere. `unwrap=False`: names of a wrapper.
        """
        self._world.arrive("get_state_dict()")
        if unwrap and (shown := self._presenting(model)) is not None:
            checkpoints = self._parts.defaults.checkpoints("get_state_dict()")
            return checkpoints.gather_state_dict(shown[0], self._world, shown[1])
        return (self.unwrap_model(model) if unwrap else model).state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model's weights as plain files for any library. Collective; main process writes.

        Other files in the folder are left alone. `max_shard_size` is the largest size of a file, in
        bytes or as text: "10GB", "10GiB". `safe_serialization=False` writes torch's format.
        """
        require("save_model()", model, nn.Module, "a torch.nn.Module")
        checkpoints = self._parts.defaults.checkpoints("save_model()")
        self._world.arrive("save_model()")
        weights, prefix = self._presenting(model) or (self.unwrap_model(model), "")
        checkpoints.save_weights(weights, save_directory, max_shard_size, safe_serialization, self._world, prefix)

    def save(self, obj: object, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object on the main process alone: serves as `save_function=`. No collective.

        `safe_serialization` writes a dict of tensors as safetensors, else `torch.save` writes. With
        `ProjectConfiguration(save_on_each_node=True)` the first process of each machine writes.
        """
        each_node = self._project.save_on_each_node
        self._parts.defaults.checkpoints("save()").save_object(obj, f, safe_serialization, self._world, each_node)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Asynchronous = False,
        **save_model_func_kwargs: object,
    ) -> str:
        """Saves all of the run, for any strategy and number of processes. Collective; all write.

        Saved are prepared objects, positions of loaders, what was registered, random streams, and
        gradients of an open window. A kill or a full disk leaves what was saved before.
        `asynchronous`: True or "eager" returns when all is copied; "lazy" at once, and the next
        step of an optimizer waits; the next of these calls raises a failure. Returns the folder.
        Raises on every rank: `CheckpointError`, `OSError`, `ValueError` for a missing folder.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization=False: a pickled checkpoint is never loaded. Leave it out.")
        refuse_keywords("save_state()", save_model_func_kwargs)
        saves, waits = (self._parts.activation.owners[hook] for hook in ("save_checkpoint", "wait_for_checkpoint"))
        if saves is not None:  # the neutral format says more where it arrives: how it writes
            if asynchronous and waits is None:
                what = f"save_state(asynchronous={asynchronous!r}) was asked for,"
                raise ValueError(f"{what} and {saves.describe()} has no wait_for_checkpoint(). Leave asynchronous out.")
            self._world.arrive("save_state()")
        return self._relay.save_checkpoint(self._run, output_dir, asynchronous)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        missing_ok: bool = False,
        **load_model_func_kwargs: object,
    ) -> bool:
        """Restores what `save_state` saved, under any strategy and number of processes. Collective.

        Prepare and register the same objects first, in the same order. Loaders go on at their
        positions; ranks that were not there get new random streams. `input_dir` None: the newest
        complete one of the automatic names. Returns True; with `missing_ok`, False on every rank if
        no save was finished there. `map_location` has no effect; other keywords are refused. Raises
        `CheckpointError`, on every rank, for what is missing, incomplete or damaged, and, before
        anything is changed, for what does not fit.
        """
        given = {**(load_kwargs or {}), **load_model_func_kwargs}
        given.pop("map_location", None)
        refuse_keywords("load_state()", given)
        if self._parts.activation.owners["load_checkpoint"] is not None:
            self._world.arrive("load_state()")
        return self._relay.load_checkpoint(self._run, input_dir, missing_ok) is not False

    def wait_for_checkpoint(self) -> None:
        """Returns when the asynchronous save is complete on all ranks. Collective, if there is one.

        Raises its `CheckpointError` or `OSError` on every rank, if it failed.
        """
        if self._run_made is not None:
            self._relay.wait_for_checkpoint(self._run_made)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Has the user's objects saved by `save_state` and restored by `load_state`, in this order.

        Each has `state_dict()`, of plain data, tensors and arrays, and `load_state_dict(state)`.
        """
        self._run.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Has `hook(models, weights, output_dir)` called by `save_state` first, on every rank.

        `weights[i]` is `get_state_dict(models[i])`, gathered as it is read. What the hook takes out
        of `weights`, on the main process, is left to it. Returns a handle with `remove()`.
        """
        return self._run.on_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Has `hook(models, input_dir)` called by `load_state` on every rank, before any loading.

        A model that the hook takes out of `models` is left to it. Returns a handle with `remove()`.
        """
        return self._run.on_load(hook)

    @property
    def _run(self) -> Run:
        if self._run_made is None:
            from accel_core.loop.run import Run

            parts = self._parts
            plugins = [choice.selected.component for choice in parts.choices if choice.role == "plugin"]
            named = {f"plugin.{number}": plugin for number, plugin in enumerate(plugins)}
            self._run_made = Run(
                world=self._world,
                relay=self._relay,
                prepared=self._prepared,
                accumulation=self._accumulation,
                strategy=parts.strategy,
                layout=self._layout,
                components={"precision": parts.precision, "strategy": parts.strategy, **named},
                project=self._project,
                recorder=self._trackers,
                declares_layout=all(parts.activation.owners[hook] is not None for hook in LAYOUT_HOOKS),
                explain=parts.explain,
            )
        return self._run_made

    def _presenting(self, model: nn.Module) -> tuple[Callable[[], State], str] | None:
        """The state of a model that is laid out by the strategy, or offloaded, and its names' prefix; or None."""
        found = self._prepared.find_part(model) if self._run.declares_layout else None
        if found is not None:
            return partial(self._relay.model_state, found[0].original, found[0].prepared), found[1]
        offloaded = any(each.is_meta for each in (*model.parameters(), *model.buffers()))
        return (partial(self._parts.defaults.model_state, self.unwrap_model(model)), "") if offloaded else None


def run_and_feed(accelerator: CheckpointMethods) -> tuple[Run, Feed]:
    """What an Accelerator runs, with its bound hooks, and where its loaders report: to observe it."""
    return accelerator._run, accelerator._feed
