"""One process: the model is placed, and otherwise left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_core.base.errors import WorldError
from accel_core.base.vocabulary import ONE_PROCESS
from accel_core.contract.hook_specs import hookimpl
from accel_core.contract.strategy import Layout, Strategy
from accel_core.strategies.placement import place_model

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core.loop.preparation import PrepareRequest
    from accel_core.processes.world import World


class Single(Strategy):
    """Trains in one process."""

    distributed_type = ONE_PROCESS
    replicates_parameters = True

    @hookimpl
    def layout(self, world: World) -> Layout:
        """The whole of the data. Raises `WorldError` if several processes were started."""
        if world.size > 1:
            what = f"strategy 'single' was asked for, but the launcher ({world.source}) started {world.size} processes,"
            what = f"{what} which would train {world.size} separate models"
            raise WorldError(f"{what}. Leave strategy= out, or start one process.")
        return Layout.data_parallel(world)

    @hookimpl
    def prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer], request: PrepareRequest) -> nn.Module:  # noqa: ARG002
        """Places, casts and compiles the model in place; any `reduce` dtype holds."""
        place_model(model, request)
        return model
