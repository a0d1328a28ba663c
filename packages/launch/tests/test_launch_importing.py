"""Files of Accelerate's: recognised here, and translated by an importer that another distribution offers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_core import NotInstalledError
from accel_core.api.component import how_to_install
from accel_launch.errors import SettingsError
from accel_launch.importing import foreign
from accel_launch.importing.command import import_file
from accel_launch.importing.foreign import Carried, Imported, Left
from accel_launch.settings.files import load, read

THEIRS = "compute_environment: LOCAL_MACHINE\nuse_cpu: true\ntpu_zone: here\n"


def importer(data: Mapping[str, Any]) -> Imported:
    """Carries over `num_processes` and `use_cpu`, and leaves all else."""
    names = {"num_processes": "num_processes", "use_cpu": "cpu", "strategy": "strategy", "compute_environment": ""}
    carried = [Carried(key, names[key], value) for key, value in data.items() if key in names]
    left = [Left(key, value, "there is none here") for key, value in data.items() if key not in names]
    return Imported({each.new: each.value for each in carried if each.new}, carried, left)


@pytest.fixture(autouse=True)
def _importer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offer:
        def load(self) -> foreign.Importer:
            return importer

    monkeypatch.setattr(foreign, "find", lambda group, name: Offer())


@pytest.fixture
def none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_core.api.launcher import find

    monkeypatch.setattr(foreign, "find", lambda group, name: find(group, name, []))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text(THEIRS)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a file of Accelerate's where it keeps it, and none of ours."""
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(THEIRS)
    return path


def test_a_file_of_accelerate_is_read_where_it_lies_and_it_is_said(home: Path):
    file = load(None, os.environ)
    assert file is not None
    assert (file.path, file.data) == (home, {"cpu": True})
    assert "is in Accelerate's format: 1 of its options were carried over, 1 were not:" in file.notes[0]
    assert "tpu_zone: 'here' was left out: there is none here" in file.notes[0]
    assert "Type `accel config import`" in file.notes[0]


@pytest.mark.usefixtures("none_is_installed")
def test_without_an_importer_a_file_that_was_asked_for_says_what_to_install(theirs: Path):
    with pytest.raises(SettingsError, match=r"(?s)is in Accelerate's format.*" + how_to_install("accel-compat")):
        load(str(theirs), os.environ)
    with pytest.raises(NotInstalledError, match=how_to_install("accel-compat")):
        import_file(theirs, theirs.with_name("config.yaml"))


@pytest.mark.usefixtures("none_is_installed")
def test_without_an_importer_a_file_that_lies_there_is_left_out_with_a_note(home: Path):
    file = load(None, os.environ)
    assert file is not None
    assert file.data == {}
    assert f"{home} is in Accelerate's format, and was not read: {how_to_install('accel-compat')}" in file.notes[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert import_file(*arguments) == 0
    return capsys.readouterr().out


def test_the_command_lists_what_it_did_and_what_to_type_next(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "config.yaml"
    out = run(capsys, theirs, target)
    assert re.search(r"use_cpu +cpu +true", out)
    assert re.search(r"tpu_zone +here +there is none here", out)
    assert "Says nothing, or what is so here in any case: compute_environment" in out
    assert f"accel launch --config-file {target} script.py" in out.splitlines()[-1]
    assert read(target).data == {"cpu": True}
    assert "# " in target.read_text()


def test_the_command_repeated_changes_nothing_and_never_overwrites(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "config.yaml"
    run(capsys, theirs, target)
    before = target.stat()
    assert "says so already: nothing was changed" in run(capsys, theirs, target)
    assert target.stat().st_mtime_ns == before.st_mtime_ns
    theirs.write_text(THEIRS + "num_processes: 2\n")
    with pytest.raises(ValueError, match=r"exists and says something else: nothing was written. Add --force"):
        import_file(theirs, target)
    assert read(target).data == {"cpu": True}
    assert "is written" in run(capsys, theirs, target, True)
    assert read(target).data == {"cpu": True, "num_processes": 2}


def test_the_command_says_what_the_file_needs_and_is_not_installed(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    theirs.write_text(THEIRS + "strategy: megatron_lm\n")
    assert "Type 'megatron' if that was meant" in run(capsys, theirs, tmp_path / "config.yaml")


def test_the_command_finds_the_file_where_accelerate_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    places = {
        "HOME": tmp_path / "home" / ".cache" / "huggingface",
        "XDG_CACHE_HOME": tmp_path / "cache" / "huggingface",
        "HF_HOME": tmp_path / "hub",
    }
    for name in places:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(
        ValueError, match=r"(?s)none was found. Looked for:.*default_config.yaml.*accel config import FILE"
    ):
        import_file(None, tmp_path / "config.yaml")
    for name, folder in places.items():
        monkeypatch.setenv(name, str(tmp_path / {"HOME": "home", "XDG_CACHE_HOME": "cache", "HF_HOME": "hub"}[name]))
        file = folder / "accelerate" / "default_config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(THEIRS)
        assert str(file) in run(capsys, None, tmp_path / f"{name}.yaml")


def test_the_command_refuses_what_is_not_there_or_not_of_the_peer(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such file"):
        import_file(tmp_path / "none.yaml", tmp_path / "config.yaml")
    ours = tmp_path / "ours.yaml"
    ours.write_text("num_processes: 2\n")
    with pytest.raises(ValueError, match=r"is not in Accelerate's format.*accel config validate"):
        import_file(ours, tmp_path / "config.yaml")
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("distributed_type: NO\n")
    with pytest.raises(ValueError, match=r"is the file that was to be imported.*--config-file"):
        import_file(theirs, theirs)
