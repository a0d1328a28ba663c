"""`accel test` on one rank: started by a launcher like any script, as the module `accel_launch.checking.setup_job`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import Accelerator, PluginError, ProjectConfiguration, World, WorldError, hookimpl
from accel_core.api.launcher import read_place
from accel_launch.checking.communication import check_collectives, check_processes
from accel_launch.checking.reading import check_order
from accel_launch.checking.saving import check_checkpoint
from accel_launch.checking.steps import Steps
from accel_launch.checking.training import check_training
from accel_launch.output import BAD, GOOD, mark, say, warn

if TYPE_CHECKING:
    from accel_core import Layout

WORKS, FAILS = "works", "fails"


class _Listener:
    """Learns where the strategy puts this rank."""

    layout: Layout
    world: World
    replicated: bool

    @hookimpl
    def start(self, world: World, layout: Layout, replicated: bool) -> None:
        self.world, self.layout, self.replicated = world, layout, replicated


class Check:
    """The checks in order, each under an Accelerator as the configuration asks for it.

    Args:
        folder: for a checkpoint; None: one for temporary files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._listener = _Listener()
        self.accelerator = self._accelerator()
        self._world = self._listener.world
        self._steps = Steps(self._world)

    def run(self) -> bool:
        """Prints what comes of each check, and the verdict. Returns whether all have passed. Collective."""
        steps, world = self._steps, self._world
        shard = self._listener.layout.shard
        steps.run("processes", partial(check_processes, world))
        steps.run("collectives", partial(check_collectives, world))
        steps.run("data order", lambda: check_order(self._accelerator(), shard))
        steps.run("training", lambda: check_training(self._accelerator(), shard))
        steps.run("accumulation", lambda: check_training(self._accelerator(2), shard, 2))
        steps.run("checkpoint", lambda: check_checkpoint(self._accelerator_of, self._listener, self._folder))
        self._conclude()
        return not steps.failed

    def _accelerator(self, steps: int = 1, each_node: bool = False) -> Accelerator:
        project = ProjectConfiguration(save_on_each_node=True) if each_node else None
        return Accelerator(gradient_accumulation_steps=steps, plugins=[self._listener], project_config=project)

    def _accelerator_of(self, each_node: bool) -> Accelerator:
        return self._accelerator(each_node=each_node)

    def _conclude(self) -> None:
        if not self._world.is_main:
            return
        count = self._world.size
        strategy = next(part.name for part in self.accelerator.explain().parts if part.role == "strategy")
        words = (
            f"{count} {'process' if count == 1 else 'processes'}, {strategy}, {self.accelerator.mixed_precision}, "
            f"{self._world.device.type}"
        )
        if self._steps.failed:
            say(f"This set-up does not work: {words}. Failed: {', '.join(self._steps.failed)}.", BAD)
        else:
            say(f"This set-up works: {words}.", GOOD)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks on this rank and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m accel_launch.checking.setup_job", description=__doc__)
    parser.add_argument("--folder", type=Path, help="in which a checkpoint is saved")
    parser.add_argument("--verdict", type=Path, help="the file into which it is written, for the process --launcher")
    parser.add_argument("--launcher", type=int, help="the id of the process that reads --verdict")
    given = parser.parse_args(arguments)
    works = _works(given.folder)
    if given.launcher in {None, os.getpid()}:
        return 0 if works else 1
    # The launcher still runs, and would take another status for a rank that broke down.
    if read_place(os.environ).local_rank == 0:
        given.verdict.write_text(WORKS if works else FAILS, encoding="ascii")
    return 0


def _works(folder: Path | None) -> bool:
    try:
        check = Check(folder)
    except (ValueError, TypeError, PluginError, WorldError) as error:
        rank = read_place(os.environ).rank
        if rank == 0:
            say(
                f"{mark(BAD)} configuration: {error}\nThis set-up does not work: nothing can be started as configured.",
                BAD,
            )
        else:
            warn(f"rank {rank}: {str(error).partition(chr(10))[0]}")
        return False
    works = check.run()
    check.accelerator.end_training()
    return works


if __name__ == "__main__":
    raise SystemExit(main())
