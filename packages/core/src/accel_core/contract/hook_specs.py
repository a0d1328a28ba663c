"""Every hook, in one place. The loop in the docstring of `HookSpecs` shows when each hook runs.

A hook has either **one owner** or **many listeners**:

- `@owner`: exactly one active component may implement it, else the core's default serves
  (`accel_core.facade.default_hooks`). Two implementations are an error that names both. What the
  owner returns is the answer, `None` included.
- `@listener`: everyone who implements it is called, in the order of registration. A listener that
  raises is switched off with one warning; the run goes on.

A plugin implements a hook by a method of the same name marked with `@hookimpl`, taking the
arguments that it needs, by name, and leaving out the others.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.strategy import Layout, Shard
    from accel_core.contract.tensor_layouts import GradientState, OptimizerState, SavedOptimizer, State
    from accel_core.loop.preparation import PrepareRequest
    from accel_core.loop.run import Asynchronous, Run
    from accel_core.processes.world import World

PROJECT = "accel"

LAYOUT_HOOKS = ("model_state", "optimizer_state", "optimizer_misfits", "load_optimizer_state")
"""A strategy that does not replicate parameters implements these, so that it can be saved."""

CHECKPOINT_HOOKS = ("save_checkpoint", "load_checkpoint", "wait_for_checkpoint")
"""What one plugin implements that has a format of checkpoints; the last one if it writes behind."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method that takes over the hook of the same name."""

Kind = Literal["owner", "listener"]
F = TypeVar("F", bound=Callable[..., Any])


def owner(function: F, kind: Kind = "owner") -> F:
    """Declares a hook that has exactly one implementation."""
    function.accel_kind = kind  # type: ignore[attr-defined]
    return hookspec(function)


def listener(function: F) -> F:
    """Declares a hook to which everyone may listen; its calls return nothing."""
    return owner(function, "listener")


class HookSpecs:
    """The training loop, with the hooks in the order in which they run.

        accelerator = Accelerator(...)              # layout, start
        model = accelerator.build_model(factory)    # build_model; or however the user builds it
        model, optimizer, loader, scheduler = accelerator.prepare(...)
                                                    # convert_model, prepare_model (per model),
                                                    # prepare_loader, check_optimizer (of each)
        for batch in loader:
            with accelerator.accumulate(model):     # no_sync, unless this closes the window
                loss = model(batch)
                accelerator.backward(loss)          # scale_loss, backward, synchronise_gradients
                accelerator.clip_grad_norm_(...)    # unscale_gradients, clip_gradients
                optimizer.step()                    # once per window: check_gradients, then
                                                    # optimizer_step, and in it apply_step
                scheduler.step()
                optimizer.zero_grad()               # gradient_state
            accelerator.save_state(folder)          # save_checkpoint, and in it model_state
                                                    # (per model), optimizer_state (per optimizer)
            accelerator.load_state(folder)          # load_checkpoint, and in it model_state,
                                                    # model_loaded, optimizer_misfits,
                                                    # load_optimizer_state
        accelerator.end_training()                  # release_model (per model), finish
        accelerator.free_memory()                   # release_model, unless ended; revert_model

        # or a whole window in one call, in which a pipeline can run:
        loss = accelerator.forward_backward(model, micro_batches, loss_fn)   # forward_backward

    Each docstring says when the hook runs, who usually owns it (the strategy, if it names nobody),
    what it is given and returns, and what the core does by default: nothing, if it names none.
    """

    @listener
    def start(self, world: World, layout: Layout, replicated: bool) -> None:
        """The Accelerator is about to be ready.

        When: at the end of the constructor, on every rank.
        Arguments: the processes; the part of the data that this one reads; whether every
            data-parallel rank holds all parameters, so that all of them see the same gradients.
        """

    @listener
    def finish(self) -> None:
        """Training ends: once, in `end_training`, on every rank, before the process group may."""

    @owner
    def layout(self, world: World) -> Layout:
        """Says which part of the data this process reads.

        When: in the constructor. May make groups by `world.subgroup`, the same on every rank.
        Default: pure data parallelism.
        """

    @owner
    def build_model(self, factory: Callable[[], nn.Module], checkpoint: Path | None) -> nn.Module:
        """Builds a model that may be too large for one process.

        When: in `accelerator.build_model`.
        Arguments: what builds the model; a file or folder of weights, None to keep its own.
        Returns: a model of that class; its parameters may have no data until `prepare_model`.
        Default: `factory()`, then the weights are loaded.
        """

    @owner
    def convert_model(self, model: nn.Module, evaluation: bool) -> None:
        """Replaces modules of a model by others that compute in another way, in place.

        When: once per model in `prepare`, before `prepare_model`. Usual owner: the precision.
        Arguments: the user's model; whether it is only evaluated. The model and the names of its
            parameters and state stay. Optimizers get the new parameter of the same name.
        """

    @owner
    def revert_model(self, model: nn.Module) -> None:
        """Undoes `convert_model`, in `free_memory`, for every prepared model. Owner: as there."""

    @owner
    def release_model(self, model: nn.Module, prepared: nn.Module) -> None:
        """Lets go of what `prepare_model` made beside the user's model, which stays usable.

        When: in `free_memory` and `end_training`, once per prepared model, before `revert_model`
            and the end of the process group. No collective.
        """

    @owner
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:
        """Makes a model ready to be trained, or only evaluated, under the strategy.

        When: once per model in `prepare`, before optimizers. No default.
        Arguments: the user's model; every known optimizer that holds one of its parameters
            (re-point `group["params"][:]` in place where parameters are replaced, and refuse an
            optimizer that has stepped, or re-point its state); the request. A policy it cannot
            honour raises.
        Returns: the module to call. All ranks start from rank 0's weights. After the closing
            backward each gradient (see `gradient_state`) is the mean over the data-parallel ranks.
            A frozen or only evaluated model can be called by one rank alone.
        """

    @owner
    def prepare_loader(
        self,
        loader: DataLoader[Any],
        shard: Shard,
        feed: Feed,
        device: torch.device | None,
        seed: int,
        number: int,
        group: ProcessGroup | None,
        slice_fn: Callable[..., Any] | None,
    ) -> DataLoader[Any]:
        """Makes a loader yield this process's part of each global batch.

        When: once per loader in `prepare`. Usual owner: the loader component.
        Arguments: the user's loader, which stays as it is; the part to read; the feed to which
            iterators report; the device for batches, or None; the run's seed; how many loaders came
            before (`loader_seed(seed, number)` gives each its order); the ranks of a global batch
            in shard order, None for all; the user's function that cuts batches, or None.
        Returns: a loader of the same class, attributes and workers, which draw by shard and epoch.
            `behind(n)` serves `skip_first_batches`; `state_dict()`, `load_state_dict(state)` resume.
        Default: in a world of one, batches are placed and reported; a larger world raises.
        """

    @owner
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises `ValueError` for an optimizer that cannot step the parameters that it holds.

        When: once per optimizer in `prepare`, after the models of that call; its model may come
            later, and an engine that needs both can be built here.
        """

    @owner
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Around micro-batches that do not close a window: no gradients are synchronised. Hot."""

    @owner
    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the next backward of a model synchronises, though its forward was in `no_sync`."""

    @owner
    def synchronise_gradients(self) -> None:
        """Synchronises what backwards have left local, such as a second one through the same graph.

        When: after each `accelerator.backward` that closes a window, in a larger world, and at the
            end of the default `forward_backward`. Hot. A collective if all ranks find any, else none.
        """

    @owner
    def check_gradients(self, optimizer: Optimizer) -> None:
        """Raises `RuntimeError` if an optimizer is to step with unsynchronised gradients.

        When: before every step of any optimizer, but not inside `LocalSGD`. Hot. No collective.
        """

    @owner
    def gradient_state(self, model: nn.Module, prepared: nn.Module) -> GradientState:
        """Says where the gradients of a model are, and how they lie on the ranks.

        When: wherever gradients are read or changed, a few times per step. Hot. No collective.
        Usual owner: the strategy, if it keeps gradients elsewhere than in `.grad`; one whose ranks
            have parts of them owns `clip_gradients` too.
        Arguments: the user's model, which is trained, and what the loop calls.
        Returns: by the name of a parameter (one of them, if tied), the live terms whose sum is its
            gradient: `Elementwise`, the mean over the data-parallel ranks, and `Partial`, this
            rank's own. What was made zero stays so until a backward. Others have none. Default: `.grad`.
        """

    @owner
    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor],
        buffer_seq_dims: Sequence[int],
        no_restore_buffers: Collection[torch.Tensor],
    ) -> AbstractContextManager[None]:
        """Inside, tensors hold this rank's part of a sequence, and attention spans all peers.

        When: in `accelerator.maybe_context_parallel`. Entering is a collective over the peers.
        Arguments: tensors, changed in place; the dim of the sequence in each; those not restored.
        """

    @owner
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies the loss, of any shape, so that small gradients survive a narrow dtype.

        When: before every backward; in a pipeline once per window, on all ranks, of a 1. Owner: the
            precision's scaler, or an engine. Default: the loss.
        """

    @owner
    def backward(self, loss: torch.Tensor, weight: float, closes: bool, options: dict[str, Any]) -> None:
        """Runs the backward pass of one micro-batch.

        When: in `accelerator.backward`, and in the default `forward_backward`.
        Arguments: the (scaled) loss; a positive factor for its gradient (1/k inside `accumulate`,
            any from `forward_backward`, on a CPU); whether this micro-batch closes its window; keyword
            arguments of `torch.Tensor.backward`. Default: `loss.backward()` with that factor.
        """

    @owner
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divides gradients by the factor of `scale_loss`, at most once per step. Owner: as there."""

    @owner
    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scales the gradients in place so that their joint norm is at most `max_norm`.

        When: in `accelerator.clip_grad_norm_`, at the end of a window, synchronised and unscaled;
            with `max_norm` infinite also in an open one, for the norm of what is pending.
        Returns: the norm before clipping, 0-d, over all shards.
        Default: torch's own, over what `gradient_state` names, where every rank has all of it.
        """

    @owner
    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Decides whether an optimizer steps: takes the step, or leaves it out.

        When: in `optimizer.step()`, at the end of a window. Usual owner: the precision's scaler.
        Arguments: the optimizer, whose `step()` is its own when called from inside; `step`, which
            takes the step (`apply_step`) with the user's closure bound, as a `functools.partial`.
        Returns: what `step()` returned, the default; `accel_core.SKIPPED` if nothing was changed;
            `SkippedIf(tensor)`, with a 0-d bool tensor, if only the device knows.
        """

    @owner
    def apply_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Takes a step of an optimizer that was decided on; gradients are unscaled and clipped.

        When: where the owner of `optimizer_step` calls its `step`. Usual owner: the strategy, if an
            engine steps instead, or parameters are sent afterwards.
        The rest: as for `optimizer_step`; `step` is the optimizer's own, which need not be called.
        """

    @owner
    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | float]],
        inputs: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Runs one whole window: forward and backward of every micro-batch.

        When: in `accelerator.forward_backward`. Usual owner: the strategy, as a pipeline.
        Arguments: a prepared model; this rank's micro-batches; `loss_fn(output, batch)` giving the
            summed loss (0-d) and its weight; `inputs(batch)` giving the model's positional and
            keyword arguments; `scale_loss(loss)`, called before every backward, or once on all ranks.
        Returns: the weighted mean loss over the window and all data-parallel ranks, 0-d, detached,
            not scaled; its scaled gradient is added to what was there. Counts as one backward.
            Without gradients enabled it runs forwards alone, and `loss_fn` where outputs are.
        Default: a loop over the window (`accel_core.loop.forward_backward`).
        """

    @owner
    def save_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None, asynchronous: Asynchronous) -> str:
        """Saves all of a run, and returns the folder.

        When: in `save_state`, on every rank. A collective. Owner: a plugin with a format of its
            own, which owns `load_checkpoint`, and `wait_for_checkpoint` if it writes behind, too.
        Arguments: the run; the folder, None for an automatic name; whether it is written behind:
            "eager" (or True) returns once all is copied, "lazy" at once, having told
            `run.prepared.copy_behind` what the next step and `free_memory` wait for.
        Default: the neutral checkpoint of accel-checkpoint; without it `NotInstalledError`.
        """

    @owner
    def load_checkpoint(self, run: Run, folder: str | os.PathLike[str] | None, missing_ok: bool) -> bool | None:
        """Restores a run from a folder; None: the newest of those that are named automatically.

        When: in `load_state`, on every rank. A collective. The rest: as for `save_checkpoint`.
        Returns: False if there is none, which raises unless `missing_ok`; else nothing, or True.
        """

    @owner
    def wait_for_checkpoint(self, run: Run) -> None:
        """Returns when what `save_checkpoint` began is complete, or raises what made it fail.

        When: in `wait_for_checkpoint` and `end_training`, on every rank. A collective, if something
            is being saved. The rest: as for `save_checkpoint`.
        """

    @owner
    def model_state(self, model: nn.Module, prepared: nn.Module) -> State:
        """Says what a checkpoint holds of a model, and how it lies on the ranks.

        When: in `save_state`, `load_state` and `get_state_dict`, on every rank, anywhere in the
            loop. No collective. Usual owner: a strategy that lays out parameters in its own way; it
            first brings them into the form in which optimizers hold them.
        Arguments: the user's model, and what the loop calls.
        Returns: entries of `accel_core.api.layouts` by the names of the user's `state_dict()`, live
            (`load_state` reads into their memory), of a parameter its most precise copy.
        Default: all is whole on every rank, buffers are rank 0's; needs `replicates_parameters`.
        """

    @owner
    def model_loaded(self, model: nn.Module, prepared: nn.Module) -> None:
        """The state that `model_state` named, with these arguments, has been read.

        When: in `load_state`, on every rank, before optimizers are loaded. May be a collective.
        Usual owner: the strategy, to fill the copies that it computes with, to compute buffers that
            are not persistent, and to drop gradients that it holds back.
        """

    @owner
    def optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerState:
        """Says what a checkpoint holds of an optimizer, and how it lies on the ranks.

        When: in `save_state`, on every rank. No collective. Usual owner: that of `model_state`.
        Arguments: the optimizer; names by `id` of all models' parameters, such as "0.weight".
        Returns: what `accel_checkpoint.capture_optimizer` makes of a `Sharding`. Default: all whole.
        """

    @owner
    def optimizer_misfits(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> list[str]:
        """The reasons why an optimizer cannot be given its state of a checkpoint, a line each.

        When: in `load_state`, on every rank, before anything is changed. No collective.
        Arguments: what was saved, under any strategy in any world; the rest: as for
            `optimizer_state`. See `accel_checkpoint.list_misfits`.
        """

    @owner
    def load_optimizer_state(self, optimizer: Optimizer, names: Mapping[int, str], saved: SavedOptimizer) -> None:
        """Gives an optimizer the state that a checkpoint holds of it.

        When: in `load_state`, on every rank, after the models, if `optimizer_misfits` found none.
            No collective. `saved.read` may fill tensors as late as `load_state` returns.
        The rest: as for `optimizer_misfits`. See `accel_checkpoint.restore_optimizer`.
        """
