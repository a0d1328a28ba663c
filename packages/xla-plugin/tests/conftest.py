"""XLA on the CPU, with a mesh of four devices; tests that need no torch_xla run without it too."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accel_testing import no_leaks

os.environ.setdefault("PJRT_DEVICE", "CPU")  # before the server of ranks starts, which inherits it
os.environ.setdefault("CPU_NUM_DEVICES", "4")


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
