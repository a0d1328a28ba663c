"""The core's own implementations of the hooks that no component owns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from accel_core.base.errors import NotInstalledError
from accel_core.base.installation import how_to_install
from accel_core.contract.default_components import CHECKPOINTS
from accel_core.contract.hook_specs import hookimpl
from accel_core.contract.strategy import Layout
from accel_core.plugins.offers import find_default

if TYPE_CHECKING:  # the hook specs have the types of the other arguments
    from accel_core.contract.default_components import CheckpointComponent
    from accel_core.contract.tensor_layouts import GradientState
    from accel_core.loop.forward_backward import WindowLoop
    from accel_core.processes.world import World

_NOTHING = nullcontext()


class CoreDefaults:
    """The core's own implementations. `prepare_model` is missing: a strategy must have it."""

    window_loop: WindowLoop  # set once the hooks are bound, for it calls them

    def __init__(self) -> None:
        self._checkpoints: CheckpointComponent | None = None
        self._seeds: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    @hookimpl
    def layout(self, world: World) -> Layout:
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_loader(self, loader: Any, shard: Any, feed: Any, device: Any) -> Any:
        from accel_core.loading.prepared_loader import prepare_local_loader

        if shard.count > 1:
            raise NotInstalledError(
                f"prepare() was given a {type(loader).__name__} on {shard.count} data-parallel ranks, but no loader plugin is installed, so "
                f"all of them would read the same batches. {how_to_install('accel-data')}."
            )
        return prepare_local_loader(loader, feed, device)

    @hookimpl
    def build_model(self, factory: Callable[[], Any], checkpoint: Any) -> Any:
        model = factory()
        if checkpoint is not None:
            self.checkpoints("build_model(checkpoint=...)").load_checkpoint_in_model(model, checkpoint)
        return model

    @hookimpl
    def gradient_state(self, model: Any) -> GradientState:
        """`.grad`: the mean itself, or a term of it."""
        from accel_core.contract.tensor_layouts import Partial

        named = model.named_parameters()
        return {name: [Partial(parameter.grad)] for name, parameter in named if parameter.grad is not None}

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    @hookimpl
    def backward(self, loss: torch.Tensor, weight: float, options: dict[str, Any]) -> None:
        """`loss.backward()`, with the factor as its seed, which is exact and costs no kernel."""
        if weight == 1.0:
            loss.backward(**options)
        elif loss.dim() or "gradient" in options:
            (loss * weight).backward(**options)
        else:
            loss.backward(self._seed(loss, weight), **options)

    @hookimpl
    def clip_gradients(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @hookimpl
    def optimizer_step(self, step: Callable[[], Any]) -> Any:
        return step()

    apply_step = optimizer_step

    @hookimpl
    def convert_model(self) -> None:
        """Does nothing: no module changes, none is local or scaled, any gradient may be used."""

    revert_model = release_model = model_loaded = convert_model
    check_optimizer = check_gradients = synchronise_gradients = unscale_gradients = convert_model

    @hookimpl
    def no_sync(self) -> AbstractContextManager[None]:
        return _NOTHING

    trigger_sync_in_backward = context_parallel = no_sync

    @hookimpl
    def forward_backward(self, model: Any, micro_batches: Any, loss_fn: Any, inputs: Any) -> torch.Tensor:
        return self.window_loop.run(model, micro_batches, loss_fn, inputs)

    @hookimpl
    def save_checkpoint(self, run: Any, folder: Any, asynchronous: Any) -> Any:
        return self.checkpoints("save_state()").save_checkpoint(run, folder, asynchronous)

    @hookimpl
    def load_checkpoint(self, run: Any, folder: Any, missing_ok: Any) -> Any:
        return self.checkpoints("load_state()").load_checkpoint(run, folder, missing_ok)

    @hookimpl
    def wait_for_checkpoint(self, run: Any) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait_for_checkpoint(run)

    @hookimpl
    def model_state(self, model: Any) -> Any:
        return self.checkpoints("The state of a model").capture_model(model)

    @hookimpl
    def optimizer_state(self, optimizer: Any, names: Any) -> Any:
        return self.checkpoints("The state of an optimizer").capture_optimizer(optimizer, names)

    @hookimpl
    def optimizer_misfits(self, optimizer: Any, names: Any, saved: Any) -> list[str]:
        return self.checkpoints("The state of an optimizer").optimizer_problems(optimizer, names, saved)

    @hookimpl
    def load_optimizer_state(self, optimizer: Any, names: Any, saved: Any) -> None:
        self.checkpoints("The state of an optimizer").restore_optimizer(optimizer, names, saved)

    def checkpoints(self, call: str) -> CheckpointComponent:
        """The checkpoint component; raises `NotInstalledError`, naming `call`, if there is none."""
        if self._checkpoints is None:
            self._checkpoints = find_default(*CHECKPOINTS, call).load()()
        return self._checkpoints

    def _seed(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        seed = self._seeds.get(key := (weight, loss.dtype, loss.device))
        if seed is None:
            if len(self._seeds) >= 64:  # weights by token count are new in nearly every window
                self._seeds.clear()
            seed = self._seeds[key] = torch.tensor(weight, dtype=loss.dtype, device=loss.device)
        return seed
