"""Configuration files: where they lie, what is refused in them, and what writing keeps."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from accel_launch.errors import SettingsError
from accel_launch.importing.places import peer_paths
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import CommandLine
from accel_launch.settings.files import chosen_path, load, own_path, read, write
from accel_launch.settings.resolution import resolve


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own; returns the environment."""
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return dict(os.environ)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.yaml"


def test_the_own_file_lies_in_the_users_folder_for_configuration(home, tmp_path):
    assert own_path() == tmp_path / "config" / "accel" / "config.yaml"
    assert load(None, home) is None
    write(own_path(), {"num_processes": 2}, {})
    assert load(None, home).data == {"num_processes": 2}


def test_another_file_is_chosen_by_the_option_or_else_by_the_variable(home, tmp_path):
    (tmp_path / "a.yaml").write_text("cpu: true")
    (tmp_path / "b.yaml").write_text("cpu: false")
    home["ACCELERATE_CONFIG_FILE"] = "~/a.yaml"
    assert load(None, home).data == {"cpu": True}
    assert load(str(tmp_path / "b.yaml"), home).data == {"cpu": False}
    with pytest.raises(
        SettingsError, match=r"c\.yaml was asked for, and there is no such file. Type `accel config --config-file"
    ):
        load(str(tmp_path / "c.yaml"), home)
    home["ACCELERATE_CONFIG_FILE"] = "nowhere.yaml"
    with pytest.raises(SettingsError, match=r"nowhere\.yaml was asked for \(ACCELERATE_CONFIG_FILE\)"):
        load(None, home)
    assert chosen_path(None, home).name == "nowhere.yaml"


def test_the_places_where_accelerate_may_keep_its_file(home, tmp_path):
    home["HF_HOME"] = str(tmp_path / "hf")
    places = peer_paths(home)
    assert places[0] == tmp_path / "hf" / "accelerate" / "default_config.yaml"
    assert tmp_path / ".cache" / "huggingface" / "accelerate" / "default_config.yaml" in places


def test_yaml_and_json_are_read_and_no_is_a_text(path):
    path.write_text("mixed_precision: no\nfsdp:\n  cpu_offload: yes\n  wrap: [A, 1.5]\nx: 1e-3\n")
    file = read(path)
    assert file.data == {"mixed_precision": "no", "fsdp": {"cpu_offload": "yes", "wrap": ["A", 1.5]}, "x": 0.001}
    assert {type(file.data["x"]), type(file.data["fsdp"])} == {float, dict}
    assert file.place("fsdp", "wrap") == f"{path}, line 4"
    path.write_text('\ufeff{\n\t"num_processes": 2\n}', encoding="utf-8")
    assert read(path).data == {"num_processes": 2}
    for empty in ("", "# nothing\n", "---\n"):
        path.write_text(empty)
        assert read(path).data == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' stands there twice"),
        ("fsdp:\n  a: 1\n  a: 2\n", "line 3: the key 'a' stands there twice"),
        ('{"a": 1, "a": 2}', "the key 'a' stands there twice"),
        ('{"a": 1,\n "b" 2}', "line 2: this is no JSON"),
        ("a: 1\n  b: 2\n", "line 2: this is no YAML"),
        ("a: [1, 2\n", "this is no YAML"),
        ("- 1\n", "holds a list, and a mapping of options was expected"),
        ("only words", "holds a str, and a mapping"),
        ("a: 1\n7: 2\n", "line 2: the key 7 is no text"),
        ("a: 1\nb: 2020-01-01\n", "line 2: b is a date"),
        ("a: !!python/object:os.x {}\n", "line 1: a is a .*python/object"),
        ("a: !mine 3\n", "line 1: a is a "),
        ('{"a":' * 3000, "cannot be read: maximum recursion"),
        (BOMB, r"more than 100000 values.*aliases \(`\*name`\) count.*Write each option once"),
    ],
)
def test_what_is_no_mapping_of_options_is_refused_with_its_line(path, text, message):
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read(path)


def test_a_file_that_cannot_be_read_says_why(path):
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(SettingsError, match=r"config\.yaml cannot be read: .*codec"):
        read(path)


def test_many_unknown_keys_are_refused_without_looking_for_what_each_may_have_meant(path):
    path.write_text(json.dumps({f"key{number}": number for number in range(30_000)}))
    began = time.perf_counter()
    with pytest.raises(SettingsError, match="There are more mistakes in .*: mend these first") as raised:
        resolve(Catalog(), CommandLine(), read(path), {})
    assert len(raised.value.problems) == 51
    assert time.perf_counter() - began < 10


def test_a_pipe_is_read_as_shells_give_it(home):
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as stream:
        stream.write("num_processes: 2\n")
        stream.flush()
        threading.Timer(0.2, stream.close).start()
        assert load(f"/dev/fd/{reading}", home).data == {"num_processes": 2}


def test_what_does_not_end_is_refused(path):
    path.symlink_to("/dev/zero")
    with pytest.raises(SettingsError, match="cannot be read: it has more than 1048576 characters"):
        read(path)
    path.unlink()
    with open(path, "wb") as stream:
        stream.truncate(1 << 34)
    with pytest.raises(SettingsError, match="it has more than 1048576 characters"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        read(path)


def test_what_is_written_has_help_beside_it_and_is_read_again(path):
    data = {
        "num_processes": 2,
        "mixed_precision": "no",
        "tee": "3",
        "rdzv_conf": {"a": "1"},
        "fsdp": {"wrap": ["A", "B"], "shard": None},
    }
    write(path, data, {"num_processes": "how many", "fsdp": "the strategy", "fsdp.wrap": "units " * 40})
    assert read(path).data == data
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# how many", "num_processes: 2"]
    assert "  wrap: [A, B]" in lines
    assert max(map(len, lines)) <= 100
    assert [each.name for each in path.parent.iterdir()] == ["config.yaml"]


OWN = """\
# My machine at home.

num_processes: 2  # all of them
# not the default
tee: "3"

# --- strategy ---

fsdp:  # sharded
  # fits only so
  cpu_offload: true  # slow
  wrap:
    - A
    - B
cpu: true
# the end
"""


def test_writing_again_keeps_what_the_user_wrote_beside_it(path):
    path.write_text(OWN)
    write(path, read(path).data, {"fsdp": "other help"})
    assert path.read_text() == OWN
    data = {"num_processes": 4, "fsdp": {"cpu_offload": False, "wrap": ["A", "B"], "shard": 2}, "debug": True}
    write(path, data, {"debug": "compares", "fsdp.shard": "how many"})
    assert path.read_text() == (
        "# My machine at home.\n\nnum_processes: 4  # all of them\n# not the default\nfsdp:  # sharded\n  # fits only so\n"
        "  cpu_offload: false # slow\n  wrap:\n    - A\n    - B\n  # how many\n  shard: 2\n# compares\ndebug: true\n"
    )
    assert read(path).data == data


def test_an_empty_file_says_that_defaults_hold_until_something_is_given(path):
    write(path, {}, {})
    assert path.read_text() == "# Nothing is given: defaults hold.\n"
    write(path, {"cpu": True}, {})
    assert path.read_text() == "cpu: true\n"


def test_writing_anew_keeps_nothing_and_json_has_no_remarks(path, tmp_path):
    path.write_text("a: [")
    write(path, {"cpu": True}, {}, anew=True)
    assert path.read_text() == "cpu: true\n"
    write(tmp_path / "c.json", {"cpu": True}, {"cpu": "help"})
    assert json.loads((tmp_path / "c.json").read_text()) == {"cpu": True}
    assert read(tmp_path / "c.json").data == {"cpu": True}


def test_a_file_is_replaced_as_a_whole_behind_a_link_and_keeps_its_mode(path, tmp_path):
    real = tmp_path / "elsewhere" / "real.yaml"
    real.parent.mkdir()
    real.write_text("cpu: true\n")
    real.chmod(0o600)
    path.symlink_to(real)
    write(path, {"cpu": False}, {})
    assert path.is_symlink()
    assert real.read_text() == "cpu: false\n"
    assert real.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    path.write_text("cpu: true\n")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        SettingsError, match=r"config.yaml cannot be written: disk full. Give another with --config-file"
    ):
        write(path, {"cpu": False}, {})
    assert path.read_text() == "cpu: true\n"
    assert [each.name for each in path.parent.iterdir()] == ["config.yaml"]
