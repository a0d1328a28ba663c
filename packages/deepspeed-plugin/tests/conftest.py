"""Every test of accel-deepspeed leaves its process as it was, and its ranks find their engine imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accel_deepspeed.operators import chosen_accelerator
from accel_testing import no_leaks, preload

# Else DeepSpeed asks the driver when it is imported, after which no process that is forked can use a GPU: tests/test_forking.py.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
with chosen_accelerator():  # which puts back what DeepSpeed sets in the environment when it is imported
    import deepspeed  # noqa: F401

preload("deepspeed", "accel_deepspeed.strategy")


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
