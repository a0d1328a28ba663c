"""Every test of accel-testing leaves its process as it was."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leak_police(leak_check): ...
