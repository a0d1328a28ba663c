"""Checkpoints with automatic names: numeric order, nothing of another run replaced, nothing deleted but ours."""

from __future__ import annotations

import errno
import os
import re

import pytest
from test_checkpoint_folder import MINE, add_files_of_the_user, kill_everywhere, names_in, phases, save, saved

from accel_checkpoint.files.manifest import is_complete
from accel_checkpoint.files.retention import enforce, name, newest, next_path, numbers
from accel_core import CheckpointError
from accel_testing import run_ranks

RUBBISH = "data-00000000000000ab"


def path_of(root, number):
    return root / name(number)


def save_all(root, *which):
    for number in which:
        save(path_of(root, number), f"{number:016x}")


def leave_unfinished(root, number, *files):
    (path_of(root, number) / RUBBISH).mkdir(parents=True)
    for file in files:
        (path_of(root, number) / file).write_text("mine")


def damage(root, number):
    manifest = path_of(root, number) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("2030", "2031"))


def complete(root):
    return [number for number in numbers(root) if is_complete(path_of(root, number))]


# Which there are


def test_names_are_ordered_by_number_and_others_are_not_ours(tmp_path):
    save_all(tmp_path, 10, 9, 0)
    for other in ("checkpoint_007", "checkpoint_x", "checkpoint_", "checkpoint_-1", "checkpoint_1.old", "last"):
        save(tmp_path / other)
    (tmp_path / "checkpoint_11").write_text("a file")
    leave_unfinished(tmp_path, 12)
    assert numbers(tmp_path) == [0, 9, 10, 12]
    assert complete(tmp_path) == [0, 9, 10]
    assert newest(tmp_path) == tmp_path / "checkpoint_10"


def test_a_root_that_does_not_exist_has_none(tmp_path):
    assert numbers(tmp_path / "none") == complete(tmp_path / "none") == []


def test_where_there_is_no_checkpoint_the_newest_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"but it has none\. Pass a folder to load_state"):
        newest(tmp_path)
    leave_unfinished(tmp_path, 3)
    leave_unfinished(tmp_path, 12)
    with pytest.raises(
        CheckpointError, match=r"but none of checkpoint_12, checkpoint_3 has a manifest: no save of ours"
    ):
        newest(tmp_path)


def test_a_damaged_newest_is_not_passed_over_in_silence(tmp_path):
    save_all(tmp_path, 1, 2, 3)
    leave_unfinished(tmp_path, 4)
    damage(tmp_path, 3)
    good = re.escape(f'Type load_state("{tmp_path / "checkpoint_2"}"), or remove that one')
    with pytest.raises(CheckpointError, match=rf"but checkpoint_3 is damaged: the seal .*\. {good}"):
        newest(tmp_path)
    damage(tmp_path, 2)
    (tmp_path / "checkpoint_1" / f"data-{1:016x}" / "index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint_3 is damaged: .*No other is complete: start without load_state"
    ):
        newest(tmp_path)


def test_a_newest_that_lost_a_file_is_not_passed_over_in_silence(tmp_path):
    save_all(tmp_path, 1, 2)
    (tmp_path / "checkpoint_2" / f"data-{2:016x}" / "index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint_2 is damaged: .* index\.json is missing\. Type .*checkpoint_1"
    ):
        newest(tmp_path)
    assert complete(tmp_path) == [1, 2], "only the manifests count for that"


# Where the next goes


def test_the_next_checkpoint_has_the_number_of_the_iteration(tmp_path):
    leave_unfinished(tmp_path, 5)
    save_all(tmp_path, 4)
    assert next_path(tmp_path / "new", 0) == tmp_path / "new" / "checkpoint_0"
    assert next_path(tmp_path, 5) == tmp_path / "checkpoint_5"
    assert next_path(tmp_path, 6) == tmp_path / "checkpoint_6"
    assert next_path(tmp_path, 4, {4}) == tmp_path / "checkpoint_4"


def test_a_checkpoint_of_another_run_is_not_replaced(tmp_path):
    save_all(tmp_path, 4, 10)
    damage(tmp_path, 10)
    for taken in (4, 10):
        with pytest.raises(
            CheckpointError,
            match=rf"as .*checkpoint_{taken}, but checkpoint_{taken} exists already, .* call load_state\(\) first to go on from the newest, or start "
            rf"at ProjectConfiguration\(iteration=11\).* give each a project_dir of its own",
        ):
            next_path(tmp_path, taken, {3})


# Which may go


def test_the_oldest_go_until_the_limit_remains(tmp_path):
    save_all(tmp_path, 8, 9, 10, 11)
    assert enforce(tmp_path, 2, path_of(tmp_path, 11)) == [tmp_path / "checkpoint_8", tmp_path / "checkpoint_9"]
    assert numbers(tmp_path) == [10, 11]
    assert enforce(tmp_path, 2, path_of(tmp_path, 11)) == []
    assert enforce(tmp_path, 1, path_of(tmp_path, 11)) == [tmp_path / "checkpoint_10"]


def test_the_one_just_saved_stays_even_if_its_number_is_the_lowest(tmp_path):
    save_all(tmp_path, 1, 5, 6)
    assert enforce(tmp_path, 1, path_of(tmp_path, 1)) == [tmp_path / "checkpoint_5", tmp_path / "checkpoint_6"]
    assert numbers(tmp_path) == [1]


def test_leftovers_of_killed_saves_go_and_nothing_else(tmp_path):
    """Unmanaged folders are never touched."""
    save_all(tmp_path, 3, 5, 9)
    damage(tmp_path, 3)
    leave_unfinished(tmp_path, 4)
    path_of(tmp_path, 6).mkdir()
    leave_unfinished(tmp_path, 7, "notes.txt")
    leave_unfinished(tmp_path, 10)
    save(tmp_path / "best")
    (tmp_path / "checkpoint_2").write_text("a file")
    assert enforce(tmp_path, 5, path_of(tmp_path, 9)) == [tmp_path / "checkpoint_4", tmp_path / "checkpoint_6"]
    assert names_in(tmp_path) == sorted(["best", "checkpoint_2", *map(name, (3, 5, 7, 9, 10))])
    assert names_in(path_of(tmp_path, 7)) == [RUBBISH, "notes.txt"]


def test_a_damaged_checkpoint_neither_goes_nor_counts(tmp_path):
    save_all(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 2)
    assert enforce(tmp_path, 2, path_of(tmp_path, 4)) == [tmp_path / "checkpoint_1"]
    assert numbers(tmp_path) == [2, 3, 4]


def test_a_checkpoint_that_cannot_go_is_said_and_the_others_go(tmp_path, monkeypatch):
    save_all(tmp_path, 1, 2, 3)
    unlink = os.unlink

    def busy(path, *, dir_fd=None):
        if "checkpoint_1" in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", busy)
    with pytest.warns(
        RuntimeWarning, match=r"was saved, but .*checkpoint_1, which the limit of 1 leaves out, cannot be rem"
    ):
        assert enforce(tmp_path, 1, path_of(tmp_path, 3)) == [tmp_path / "checkpoint_2"]
    monkeypatch.undo()
    assert complete(tmp_path) == [3]
    assert enforce(tmp_path, 1, path_of(tmp_path, 3)) == [tmp_path / "checkpoint_1"]


# A kill at any moment


def prepare_four(root):
    for number in range(1, 5):
        add_files_of_the_user(path_of(root, number))
    save_all(root, 1, 2, 3, 4)
    (root / "mine").write_text("mine")


def keep_two(root):
    enforce(root, 2, path_of(root, 4))


def check_enforced(root):
    found = complete(root)
    for number in found:
        assert saved(path_of(root, number)) == f"{number:016x}"
        assert {*MINE} <= {*names_in(path_of(root, number))}
    left = sum(not is_complete(path_of(root, number)) for number in numbers(root))
    assert left <= 1, "one is removed after another"
    keep_two(root)
    assert names_in(root) == ["checkpoint_3", "checkpoint_4", "mine"]
    return found


def kill_retention(root):
    return kill_everywhere(root, prepare_four, keep_two, check_enforced)


def test_a_kill_while_old_checkpoints_go_leaves_the_kept_ones_and_no_rubbish_for_long(tmp_path):
    (found,) = run_ranks(kill_retention, 1, tmp_path)
    assert phases(found) == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    assert len(found) > 20
