"""Every test of accel-compat leaves its process as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_testing import no_leaks


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
