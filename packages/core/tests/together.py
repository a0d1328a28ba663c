"""Functions that share one launch of ranks, because fresh ranks are what a test costs.

ON_TWO = Together(2)

@ON_TWO
def mean_of_ranks():
    ...

def test_mean():
    first, second = ON_TWO.run(mean_of_ranks)

They run one after the other in a world that stays, each with Accelerators of its own; the first `run` launches all. A function
that ends the world, that counts what is left behind, or that only some ranks survive has a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from accel_testing.ranks import RanksFailed
from accel_testing.shared_launch import Raised, Subject, observe

_SUBJECT = Subject("ddp", patience=timedelta(seconds=60))

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Job:
    """A call as `observe` makes it, which has a subject for each."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}{self.args}"

    def __call__(self, subject: Subject) -> Any:
        return self.function(*self.args)


class Together:
    """The calls of a module that run in one launch.

    Args:
        world: the number of ranks.
        timeout: seconds that all of them may take together.
    """

    def __init__(self, world: int, timeout: float = 100.0) -> None:
        self._world, self._timeout = world, timeout
        self._jobs: list[_Job] = []
        self._found: dict[str, list[Any] | RanksFailed] | None = None

    def __call__(self, function: F) -> F:
        """Adds a function that takes no arguments."""
        self.add(function)
        return function

    def add(self, function: Callable[..., Any], *args: Any) -> None:
        """Adds a call."""
        self._jobs.append(_Job(function, args))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a call that was added returned, in rank order.

        Raises:
            RanksFailed: it broke the launch.
            AssertionError: it raised on all ranks; with the traceback of each.
        """
        if self._found is None:
            self._found = observe(_SUBJECT, self._jobs, self._world, self._timeout)  # type: ignore[arg-type]
        facts = self._found[_Job(function, args).__name__]
        if isinstance(facts, RanksFailed):
            raise facts
        raised = [f"rank {rank} raised:\n{fact.text}" for rank, fact in enumerate(facts) if isinstance(fact, Raised)]
        assert not raised, "\n".join(raised)
        return facts
