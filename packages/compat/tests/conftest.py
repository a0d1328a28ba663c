"""Every test of accel-compat leaves its process as it was, and begins without a state of the process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accel_testing import no_leaks
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        before = dict(os.environ)  # option classes write what the libraries read
        yield
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
