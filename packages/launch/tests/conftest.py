"""Every test of accel-launch leaves its process as it was, and can be interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from accel_testing import no_leaks


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> Iterator[None]:
    """Whoever runs the tests may have signals ignored, as nohup and background jobs of shells do; what is started would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
