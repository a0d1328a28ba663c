"""The module is found under the other project's name and version, and not beside it."""

from __future__ import annotations

import importlib
from importlib import metadata

import pytest

import accelerate


def test_libraries_find_the_version_whose_behaviour_is_offered():
    assert metadata.version("accelerate") == "1.15.0+accel"
    assert accelerate.__version__ == "1.15.0"
    assert "accelerate" in metadata.packages_distributions()["accelerate"]


def test_sentence_transformers_finds_the_owner_that_it_looks_for():
    assert "huggingface" in metadata.metadata("accelerate")["Home-page"]


def test_the_other_distribution_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.15.0")
    with pytest.raises(ImportError, match=r"accelerate 1\.15\.0 and accel-compat were installed in one environment"):
        importlib.reload(accelerate)


def test_a_name_that_nobody_knows_is_an_attribute_error():
    assert not hasattr(accelerate, "no_such_name")
