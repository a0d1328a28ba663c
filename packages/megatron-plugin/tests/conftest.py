"""Every test of accel-megatron leaves its process as it was, and its ranks find their engine imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_testing import no_leaks, preload

preload("megatron_cpu", "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.models.gpt")


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
