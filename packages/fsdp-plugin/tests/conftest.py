"""Every test of accel-fsdp leaves its process as it was, and its ranks find their engine imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_testing import no_leaks, preload

preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "accel_fsdp.strategy")


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    with no_leaks():
        yield
