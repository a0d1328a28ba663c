"""Which wrong components a run of the tests tries: a few of them always; when suites change, enough to see every test fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

NARROW = 4
"""How many tests may catch a component that says something about each of them: one that breaks everything says little."""

ALWAYS = 2
"""How many of the wrong ones every run tries, whatever has changed."""


def sampled(caught_by: Mapping[Any, Collection[str]]) -> list[Any]:
    """The components as parameters: those that cover the suite are marked `full` but for a few, the others `soak`.

    Args:
        caught_by: component → the names of the tests that catch it; none for one that is right.
    """
    chosen = {kind for kind, tests in caught_by.items() if not tests}
    covered: set[str] = set()
    for most in (NARROW, len(set().union(*caught_by.values()))):
        candidates = [kind for kind, tests in caught_by.items() if len(tests) <= most]
        while candidates:
            best = max(candidates, key=lambda kind: len(set(caught_by[kind]) - covered))
            if not set(caught_by[best]) - covered:
                break
            chosen.add(best)
            covered |= set(caught_by[best])
    wrong = [kind for kind, tests in caught_by.items() if tests and kind in chosen]
    marks = {kind: pytest.mark.full(group="suites") for kind in wrong[ALWAYS:]}
    return [pytest.param(kind, marks=marks.get(kind, ()) if kind in chosen else pytest.mark.soak) for kind in caught_by]
