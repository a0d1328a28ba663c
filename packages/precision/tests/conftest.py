"""Every test of accel-precision leaves its process as it was, and its ranks find the package imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_testing import no_leaks, preload

preload("accel_precision.amp")


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
