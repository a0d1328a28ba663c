"""What a check is, and what it needs: functions with a decorator.

    @check(devices=ALL, on="cuda", package="deepspeed", seconds=120)
    def zero(run: Run) -> str:
        "ZeRO trains what one device trains."
        ...
        return "12 GB/s"          # stands on its line; or nothing

It runs in as many processes as devices take part. What it asserts decides; `skip("reason")` says that it cannot be decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

    from accel_core import Accelerator, World
    from accel_testing import RankReport

TOPICS = (
    "setting",
    "collectives",
    "waits",
    "numerics",
    "optimizers",
    "checkpoints",
    "loading",
    "compiling",
    "memory",
    "watch",
    "large_models",
    "throughput",
)
"""Modules of `checks`, in the order in which they run."""

ANY = "any"
"""As many devices as take part."""

ALL = "all"
"""The same, two at least."""

EVEN = "even"
"""The largest even number of these."""


class Skipped(Exception):
    """The check cannot be decided here, for this reason."""


def skip(reason: str) -> NoReturn:
    raise Skipped(reason)


@dataclass
class Run:
    """What a check finds on its rank.

    Args:
        device, rank, size: where this process computes, which one it is, and how many there are.
        stage: 0, 1, …: how many times the check ran before, in other processes.
        folder: of this check, on the disk, the same for all ranks and stages.
    """

    device: torch.device
    rank: int
    size: int
    stage: int
    folder: Path
    cpu: bool
    quick: bool

    def accelerator(self, **options: Any) -> Accelerator:
        from accel_core import Accelerator

        return Accelerator(cpu=self.cpu or None, **options)

    def world(self) -> World:
        from accel_core import World

        return World.current(cpu=self.cpu)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


Function = Callable[[Run], str | None]
Judge = Callable[["Sequence[RankReport]"], str | None]


@dataclass(frozen=True)
class Check:
    """A function, in how many processes it runs, and what has to be there. See `check`."""

    name: str
    function: Function
    devices: int | str
    seconds: float
    on: str | None
    package: str | None
    stages: int
    long: bool
    judge: Judge | None
    environment: Callable[[int, str], Mapping[str, str]] | None = field(repr=False)

    @property
    def summary(self) -> str:
        return (self.function.__doc__ or "").partition("\n")[0]

    @property
    def needs(self) -> str:
        found = [f"devices={self.devices}", *(filter(None, [self.on, self.package])), *(["long"] if self.long else [])]
        return " ".join(found)

    def size(self, available: int) -> int:
        """How many processes it runs in; 0: not here."""
        if isinstance(self.devices, int):
            return self.devices if self.devices <= available else 0
        found = available - available % 2 if self.devices == EVEN else available
        return found if found >= 2 or self.devices == ANY else 0

    def lacks(self, machine: Mapping[str, Any]) -> str:
        """Why it cannot run on this machine; empty if it can."""
        if not self.size(machine["devices"]):
            return f"needs two devices or more, {machine['devices']} take part"
        if self.on == "accelerator" and machine["kind"] == "cpu":
            return "needs an accelerator"
        if self.on not in (None, "accelerator", machine["kind"]):
            return f"needs {self.on}"
        if self.package is not None and self.package not in machine["packages"]:
            return f"{self.package} is not installed"
        if self.long and machine["quick"]:
            return "takes long, and --quick was asked for"
        return ""


CHECKS: dict[str, Check] = {}


def check(
    *,
    devices: int | str = 1,
    seconds: float = 90,
    on: str | None = None,
    package: str | None = None,
    stages: int = 1,
    long: bool = False,
    name: str | None = None,
    judge: Judge | None = None,
    environment: Callable[[int, str], Mapping[str, str]] | None = None,
) -> Callable[[Function], Function]:
    """Adds a check.

    Args:
        devices: in how many processes it runs, each with a device of its own: a number, `ANY`, `ALL`, `EVEN`.
        seconds: how long it may take, from the start of the processes to their end.
        on: "accelerator", or the type of a device such as "cuda".
        package: the import name of a distribution that has to be installed.
        stages: how often it is called, each time in new processes: the second resumes, say.
        long: whether `--quick` leaves it out.
        name: behind the topic; not given: that of the function.
        judge: decides by how all ranks ended, where they are not meant to return. It asserts, too.
        environment: further variables of a rank, by its number and the kind of device.
    """

    def add(function: Function) -> Function:
        topic = function.__module__.rpartition(".")[2]
        full = f"{topic}.{name or function.__name__}"
        assert full not in CHECKS, f"two checks are called {full}"
        CHECKS[full] = Check(full, function, devices, seconds, on, package, stages, long, judge, environment)
        return function

    return add


def chosen(only: Sequence[str], left_out: Sequence[str]) -> list[Check]:
    """The checks that are asked for, by topic or by name. `SystemExit` for a name that fits none."""

    def fits(each: Check, names: Sequence[str]) -> bool:
        return each.name in names or each.name.partition(".")[0] in names

    known = {*CHECKS, *(name.partition(".")[0] for name in CHECKS)}
    if unknown := sorted({*only, *left_out} - known):
        raise SystemExit(f"There is no check and no topic {', '.join(unknown)}: --list shows them.")
    return [each for each in CHECKS.values() if (not only or fits(each, only)) and not fits(each, left_out)]
