"""What messages say to type for a distribution that is missing."""

from __future__ import annotations

import pytest

from accel_core.base import installation
from accel_core.base.installation import how_to_install

CLONE = "of the accel repository, because {} is on no package index yet: pip install"


@pytest.fixture
def unpublished(monkeypatch):
    monkeypatch.setattr(installation, "UNPUBLISHED", {"accel-fsdp": "fsdp-plugin", "accel-trackers": "trackers"})


def test_what_no_index_has_is_installed_from_a_clone(unpublished):
    assert how_to_install("accel-fsdp") == (
        f"Type, in a clone {CLONE.format('accel-fsdp')} -r requirements/accel-fsdp.txt"
    )


def test_an_extra_of_it_by_the_folder_of_the_package(unpublished):
    assert how_to_install("accel-trackers[mlflow]") == (
        f"Type, in a clone {CLONE.format('accel-trackers')} './packages/trackers[mlflow]'"
    )


def test_a_newer_one_from_a_newer_clone(unpublished):
    said = how_to_install("accel-fsdp", upgrade=True)
    assert said.startswith(f"Type, in an up-to-date clone {CLONE.format('accel-fsdp')} -r")


@pytest.mark.parametrize(
    ("requirement", "upgrade", "expected"),
    [
        ("accel-data", False, "Type: pip install accel-data"),
        ("accel-data", True, "Type: pip install --upgrade accel-data"),
        ("accel-data[torchdata]", False, "Type: pip install 'accel-data[torchdata]'"),
        ("of-others", False, "Type: pip install of-others"),
    ],
)
def test_what_an_index_has_is_installed_by_its_name(unpublished, requirement, upgrade, expected):
    assert how_to_install(requirement, upgrade=upgrade) == expected
