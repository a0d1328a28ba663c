"""`accel test` on one rank: a launcher starts `accel_launch.checking.setup_job` as a module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import Accelerator, PluginError, ProjectConfiguration, World, WorldError, hookimpl
from accel_core.api.launcher import read_place
from accel_launch.checking import verdict
from accel_launch.checking.communication import check_collectives, check_processes
from accel_launch.checking.reading import check_order
from accel_launch.checking.saving import check_checkpoint
from accel_launch.checking.steps import Steps
from accel_launch.checking.training import check_training
from accel_launch.output import BAD, GOOD, mark, say, warn

if TYPE_CHECKING:
    from accel_core import Layout


class Listener:
    """Notes this rank's world and layout, and whether all ranks have all parameters."""

    layout: Layout
    world: World
    replicated: bool

    @hookimpl
    def start(self, world: World, layout: Layout, replicated: bool) -> None:
        """Remembers it."""
        self.world, self.layout, self.replicated = world, layout, replicated


class Check:
    """The checks in order, each under an Accelerator as the configuration asks for it.

    A checkpoint is saved in `folder`; None: in one for temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._listener = folder, Listener()
        self.accelerator = self._accelerator()

    def run(self) -> bool:
        """Prints each check's result, and the verdict. Returns whether all pass. Collective."""
        rank = self._listener
        world, shard, steps = rank.world, rank.layout.shard, Steps(rank.world)
        steps.run("processes", partial(check_processes, world))
        steps.run("collectives", partial(check_collectives, world))
        steps.run("data order", lambda: check_order(self._accelerator(), shard))
        steps.run("training", lambda: check_training(self._accelerator(), shard))
        steps.run("accumulation", lambda: check_training(self._accelerator(2), shard, 2))
        apart = lambda each_node: self._accelerator(each_node=each_node)  # noqa: E731
        steps.run("checkpoint", lambda: check_checkpoint(apart, world, shard, rank.replicated, self._folder))
        if world.is_main:
            count = f"{world.size} {'process' if world.size == 1 else 'processes'}"
            strategy = next(part.name for part in self.accelerator.explain().parts if part.role == "strategy")
            words = f"{count}, {strategy}, {self.accelerator.mixed_precision}, {world.device.type}"
            if steps.failed:
                say(f"This set-up does not work: {words}. Failed: {', '.join(steps.failed)}.", BAD)
            else:
                say(f"This set-up works: {words}.", GOOD)
        return not steps.failed

    def _accelerator(self, steps: int = 1, each_node: bool = False) -> Accelerator:
        project = ProjectConfiguration(save_on_each_node=True) if each_node else None
        return Accelerator(gradient_accumulation_steps=steps, plugins=[self._listener], project_config=project)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks on this rank and returns the exit status."""
    parser = verdict.options()
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args(arguments)
    return verdict.leave(given, is_good=_works(given.folder))


def _works(folder: Path | None) -> bool:
    try:
        check = Check(folder)
    except (ValueError, TypeError, PluginError, WorldError) as error:
        rank = read_place(os.environ).rank
        if rank == 0:
            about = "This set-up does not work: nothing can be started as configured."
            say(f"{mark(BAD)} configuration: {error}\n{about}", BAD)
        else:
            warn(f"rank {rank}: {str(error).partition(chr(10))[0]}")
        return False
    works = check.run()
    check.accelerator.end_training()
    return works


if __name__ == "__main__":
    raise SystemExit(main())
