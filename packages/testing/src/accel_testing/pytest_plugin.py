"""The plugin that pytest loads by itself: a fixture, and suite assertions that show values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fails a test that changes its process: see `accel_testing.no_leaks`."""
    from accel_testing.leaks import no_leaks  # every run of pytest in this environment imports this module

    with no_leaks():
        yield
