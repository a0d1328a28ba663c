"""The base of the conformance suites: their declarations, and one launch of ranks per world."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from accel_testing.ranks import RanksFailed
from accel_testing.shared_launch import Raised, Subject, observe


class Suite:
    """Tests of one kind of component: a direct subclass is a suite, which plugin authors subclass.

    Attributes:
        worlds: the numbers of ranks with which the component is tested.
        lacks: for the name of an inherited test, `"test_…"`, or of one of its worlds,
            `"test_…[2]"`, why it fails.
        cpu: whether it is tested on the CPU, with gloo, although there is an accelerator.
        patience: seconds for a collective, and that ranks wait for each other after a job.
        timeout: seconds after which the ranks of one launch are killed.
    """

    worlds: ClassVar[Sequence[int]] = (1, 2)
    lacks: ClassVar[Mapping[str, str]] = {}
    cpu: ClassVar[bool] = True
    patience: ClassVar[float] = 15.0
    timeout: ClassVar[float] = 120.0

    _examined: ClassVar[str]  # the attribute that holds the component, which is what it is called in messages too
    _jobs: ClassVar[Sequence[Callable[[Any], Any]]]  # what the ranks of a launch do, each given the subject
    _launches: ClassVar[dict[int, dict[str, list[Any] | RanksFailed]]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._launches = {}

    def _subject(self, world: int) -> Subject:
        """The argument of the jobs in a world of this size."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Runs each test once per world, and expects those to fail that are declared as lacking."""
        if "world" in metafunc.fixturenames:
            test = metafunc.function.__name__
            metafunc.parametrize("world", [self._case(test, world) for world in self.worlds])

    def _case(self, test: str, world: int) -> Any:
        import pytest  # here, because the ranks import this package too

        reason = self.lacks.get(test, self.lacks.get(f"{test}[{world}]"))
        marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
        return pytest.param(world, id=str(world), marks=marks)

    def test_the_declarations_hold(self) -> None:
        """Tests are inherited, lacks have reasons, and the component can be made on a rank."""
        cls, kind = type(self), self._examined
        suite = cls.__mro__[cls.__mro__.index(Suite) - 1]
        inherited = _members(suite) | _members(Suite)
        overridden = [name for name in inherited - {*_SETTINGS, kind} if getattr(cls, name) is not getattr(suite, name)]
        known = {case for test in inherited if test.startswith("test_") for case in self._names(test)}
        require_declared(cls, suite, kind, overridden, known, ", or a test and a world: 'test_…[2]'")
        require(
            bool(self.worlds) and all(world > 0 for world in self.worlds),
            f"{cls.__name__}.worlds is {self.worlds!r}: give at least one number of ranks, such as (1, 2).",
        )
        require_travels(getattr(cls, kind), kind, f"{cls.__name__}.{kind}")

    def _names(self, test: str) -> list[str]:
        return [test, *(f"{test}[{world}]" for world in self.worlds)]

    def _facts(self, job: Callable[[Any], Any], world: int) -> list[Any]:
        """The facts of each rank in a job, by rank; the first call in a world runs all jobs."""
        launches = type(self)._launches
        if world not in launches:
            launches[world] = observe(self._subject(world), self._jobs, world, self.timeout)
        facts = launches[world][job.__name__]
        if isinstance(facts, RanksFailed):
            raise facts
        for rank, fact in enumerate(facts):
            require(not isinstance(fact, Raised), f"{job.__name__} raised on rank {rank}:\n{getattr(fact, 'text', '')}")
        return facts

    def _require_freed(self, job: Callable[[Any], Any], world: Any) -> None:
        """Fails unless the objects of a run that has ended are freed with its last reference."""
        for rank, alive in enumerate(self._facts(job, world)):
            require(
                not alive,
                f"After the end of a run and its last reference, {', '.join(alive)} still live on rank {rank}. Hold models and data "
                f"weakly, and nothing in modules or classes.",
            )


_SETTINGS = ("worlds", "lacks", "cpu", "patience", "timeout", "_launches")


def require(holds: bool, message: str) -> None:
    """Fails a test. Not by `assert`: pytest explains those of test files only."""
    if not holds:
        raise AssertionError(message)


def _members(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("__")}


def require_declared(
    cls: Any, suite: type, kind: str, overridden: Iterable[str], known: Iterable[str], more: str = ""
) -> None:
    """Fails unless nothing inherited is overridden, and what a subclass lacks are tests, with reasons."""
    found = sorted(overridden)
    require(
        not found,
        f"{cls.__name__} overrides {', '.join(found)} of {suite.__name__}, so what it proves is not the contract. "
        f"Rename what is your own; declare what the {kind} cannot do: lacks = {{'test_…': 'the reason'}}.",
    )
    unknown = sorted({*cls.lacks} - {*known})
    require(
        not unknown,
        f"{cls.__name__}.lacks names {', '.join(unknown)}, which the suite does not have. Give the name of one of its tests{more}.",
    )
    require_reasons(f"{cls.__name__}.lacks", cls.lacks)


def require_reasons(where: str, reasons: Mapping[str, str]) -> None:
    """Fails unless each of them has words."""
    silent = sorted(name for name, reason in reasons.items() if not reason.strip())
    require(not silent, f"{where} gives no reason for {', '.join(silent)}. Say why it cannot be done.")


def require_travels(value: object, kind: str, where: str) -> None:
    """Fails unless something can be pickled, as it is for the ranks."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(
            f"{where} has {value!r}, which cannot be sent to the ranks: {error}. Give the name of an installed {kind}, its class, or a "
            f"function at the level of a module that returns one."
        ) from error
