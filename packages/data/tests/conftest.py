"""The ranks of these tests find the package imported."""

from __future__ import annotations

from accel_testing import preload

preload("accel_data.preparing")
