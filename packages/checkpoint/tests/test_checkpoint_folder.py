"""A save is a transaction: what is refused beforehand, what is swept, and what a kill at any moment leaves."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest

from accel_checkpoint.files import folder as folders
from accel_checkpoint.files import lock
from accel_checkpoint.files.folder import Draft, is_leftover, remove_checkpoint
from accel_checkpoint.files.manifest import FileRecord, Manifest, is_complete, read_manifest
from accel_core import CheckpointError
from accel_testing import run_ranks

OLD, NEW = "0" * 16, "f" * 16
MINE = ("notes.txt", "model.safetensors", "data-mine", "manifest.json.mine.tmp", "manifest.json.bak")


def put(path, content):
    """Writes a file with the functions of `os`, so that it can be killed as any other step of a save."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(descriptor, content)
    os.fsync(descriptor)
    os.close(descriptor)


def fill(draft):
    """Two files that say which save wrote them, and the manifest for them."""
    content = draft.id.encode()
    for name in ("index.json", "rank-00000.safetensors"):
        put(draft.data / name, content)
    index = FileRecord(len(content), "0" * 32)
    return Manifest(draft.id, "2030-01-01T00:00:00Z", index, {"rank-00000.safetensors": len(content)}, {})


def save(folder, id=None):
    draft = Draft.begin(folder, id)
    draft.publish(fill(draft))
    draft.sweep()


def saved(folder):
    """The id of the checkpoint in a folder, all of whose files are of that save."""
    found = read_manifest(folder)
    contents = {path.read_text() for path in (folder / found.data).iterdir() if path.name != lock.NAME}
    assert contents == {found.id}
    return found.id


def names_in(folder):
    return sorted(os.listdir(folder))


def add_files_of_the_user(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in MINE:
        (folder / name).write_text(name)
    (folder / "mine").mkdir()
    (folder / "mine" / "deep").write_text("deep")


def assert_files_of_the_user_are_there(folder):
    assert [(folder / name).read_text() for name in MINE] == list(MINE)
    assert (folder / "mine" / "deep").read_text() == "deep"


# Killing a process at each of its operations on the file system

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "ftruncate")


def mortal(operation, left):
    """An operation that does not happen if it is the last one that is left; of a write, half of it happens."""

    def call(*args, **kwargs):
        if next(left) == 0:
            if operation.__name__ == "write":
                operation(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*args, **kwargs)

    return call


def is_killed_at(number, action):
    """Runs `action` in a process that is killed at its operation with this number; whether there was one."""
    child = os.fork()
    if child == 0:
        try:
            left = itertools.count(number, -1)
            for name in OPERATIONS:
                setattr(os, name, mortal(getattr(os, name), left))
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert exit_code in (0, -signal.SIGKILL)
    return exit_code != 0


def kill_everywhere(root, prepare, action, check):
    """Kills `action` at each operation in turn, each time after `prepare` in a new folder; what `check` returned each time."""
    found = []
    for number in itertools.count():
        folder = root / str(number)
        prepare(folder)
        killed = is_killed_at(number, lambda folder=folder: action(folder))
        found.append(check(folder))
        if not killed:
            break
    return found


# Saving


def test_a_folder_and_its_parents_are_made_and_hold_the_checkpoint(tmp_path):
    folder = tmp_path / "a" / "b"
    draft = Draft.begin(folder)
    assert (draft.folder, draft.data) == (folder, folder / f"data-{draft.id}")
    assert names_in(folder) == [draft.data.name]
    assert not is_complete(folder)
    draft.publish(fill(draft))
    assert saved(folder) == draft.id
    assert names_in(folder) == [draft.data.name, "manifest.json"]


def test_new_folders_are_on_the_disk_before_the_manifest_that_makes_it_a_checkpoint(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(folders, "sync_folder", synced.append)
    draft = Draft.begin(target := tmp_path / "runs" / "one")
    assert not synced, "the caller would wait for the disk"
    monkeypatch.setattr(folders, "write_manifest", lambda *_: synced.append("manifest"))
    draft.publish(fill(draft))
    assert synced == [draft.data, target, tmp_path / "runs", tmp_path, "manifest"]


def test_every_save_has_an_id_of_its_own(tmp_path):
    ids = {Draft.begin(tmp_path / name).id for name in ("one", "two")}
    assert len(ids) == 2
    assert Draft.begin(tmp_path / "three", NEW).id == NEW


def test_a_folder_can_be_saved_again_beside_the_user_s_files(tmp_path):
    add_files_of_the_user(tmp_path)
    save(tmp_path, OLD)
    draft = Draft.begin(tmp_path, NEW)
    manifest = fill(draft)
    assert saved(tmp_path) == OLD, "the previous checkpoint is there until the new one is published"
    draft.publish(manifest)
    assert f"data-{OLD}" in names_in(tmp_path), "until nobody may need it any more"
    draft.sweep()
    assert saved(tmp_path) == NEW
    assert names_in(tmp_path) == sorted([*MINE, "mine", f"data-{NEW}", "manifest.json"])
    assert_files_of_the_user_are_there(tmp_path)


def test_what_killed_saves_left_is_swept_by_the_next(tmp_path):
    add_files_of_the_user(tmp_path)
    save(tmp_path, OLD)
    (tmp_path / "data-00000000000000ab" / "deep").mkdir(parents=True)
    (tmp_path / "data-00000000000000ab" / "deep" / "file").write_text("x")
    (tmp_path / "data-00000000000000ab" / "link").symlink_to(tmp_path / "mine")
    for name in ("manifest.json.0123abcd.tmp", "manifest.json.removed"):
        (tmp_path / name).write_text("x")
    (tmp_path / "data-00000000000000cd").symlink_to(tmp_path / "mine")
    Draft.begin(tmp_path, NEW)
    link_of_the_user = "data-00000000000000cd"
    assert names_in(tmp_path) == sorted(
        [*MINE, "mine", f"data-{OLD}", f"data-{NEW}", link_of_the_user, "manifest.json"]
    )
    assert saved(tmp_path) == OLD
    assert_files_of_the_user_are_there(tmp_path)


def test_a_discarded_draft_leaves_the_checkpoint_that_was_there(tmp_path):
    save(tmp_path, OLD)
    draft = Draft.begin(tmp_path, NEW)
    fill(draft)
    draft.discard()
    draft.discard()
    assert saved(tmp_path) == OLD
    assert names_in(tmp_path) == [f"data-{OLD}", "manifest.json"]


def test_discarding_what_was_published_removes_nothing(tmp_path):
    draft = Draft.begin(tmp_path, NEW)
    draft.publish(fill(draft))
    draft.discard()
    assert saved(tmp_path) == NEW


def test_what_was_not_written_whole_is_not_published(tmp_path):
    save(tmp_path, OLD)
    draft = Draft.begin(tmp_path, NEW)
    manifest = fill(draft)
    (draft.data / "rank-00000.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"not what is found in data-f+: rank-00000\.safetensors is missing\. .* share"
    ):
        draft.publish(manifest)
    assert saved(tmp_path) == OLD


def test_a_disk_that_fails_before_the_manifest_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    save(tmp_path, OLD)
    draft = Draft.begin(tmp_path, NEW)
    manifest = fill(draft)

    def fails(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(
        OSError, match="cannot be put on the disk: Input/output error. What was saved here is untouched"
    ):
        draft.publish(manifest)
    draft.discard()
    assert saved(tmp_path) == OLD
    assert names_in(tmp_path) == [f"data-{OLD}", "manifest.json"]


def test_data_that_cannot_be_removed_is_said_and_the_save_stands(tmp_path, monkeypatch):
    save(tmp_path, OLD)
    draft = Draft.begin(tmp_path, NEW)
    manifest = fill(draft)

    def busy(path, *, dir_fd=None):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(os, "rmdir", busy)
    draft.publish(manifest)
    with pytest.warns(RuntimeWarning, match=r"was saved, but the data before it, in .*, cannot be removed: .* busy"):
        draft.sweep()
    monkeypatch.undo()
    assert saved(tmp_path) == NEW
    save(tmp_path, "a" * 16)
    assert names_in(tmp_path) == ["data-" + "a" * 16, "manifest.json"]


# What is refused, before anything is written


def test_a_file_in_the_place_is_refused_and_stays(tmp_path):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"to be saved in .*taken, but it is a file\. Save into another folder"):
        Draft.begin(tmp_path / "taken")
    with pytest.raises(CheckpointError, match="is a link that leads nowhere. Save into another folder"):
        Draft.begin(tmp_path / "link")
    with pytest.raises(NotADirectoryError, match="cannot be saved here: Not a directory.*taken.inside"):
        Draft.begin(tmp_path / "taken" / "inside")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    "files, found",
    [
        (["model.safetensors", "optimizer.bin"], "model.safetensors, optimizer.bin"),
        (["pytorch_model.bin", "optimizer_1.bin"], "pytorch_model.bin, optimizer_1.bin"),
        (["model.safetensors", "scheduler.bin"], "model.safetensors, scheduler.bin"),
        (["pytorch_model_fsdp_0", "random_states_0.pkl"], "pytorch_model_fsdp_0, random_states_0.pkl"),
        (["optimizer.bin", "random_states_12.pkl"], "optimizer.bin, random_states_12.pkl"),
        ([".metadata", "__0_0.distcp", "__1_0.distcp"], ".metadata, __0_0.distcp"),
        (["latest", "global_step100"], "latest, global_step100"),
        (["latest_checkpointed_iteration.txt"], "latest_checkpointed_iteration.txt"),
    ],
)
def test_the_checkpoint_of_another_library_is_refused_and_stays(tmp_path, files, found):
    for name in files:
        (tmp_path / name).write_text("theirs")
    (tmp_path / f"data-{OLD}").mkdir()
    with pytest.raises(CheckpointError, match=f"a checkpoint of another library: {found}. Save into another folder"):
        Draft.begin(tmp_path)
    assert names_in(tmp_path) == sorted([*files, f"data-{OLD}"])


def test_weights_alone_are_no_checkpoint_of_another_library(tmp_path):
    for name in (
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "latest",
        "checkpoint.ckpt",
    ):
        (tmp_path / name).write_text("mine")
    save(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_folder_that_is_ours_stays_ours_whatever_the_user_adds(tmp_path):
    save(tmp_path, OLD)
    for name in ("model.safetensors", "optimizer.bin"):
        (tmp_path / name).write_text("mine")
    save(tmp_path, NEW)
    assert saved(tmp_path) == NEW


@pytest.mark.parametrize(
    "content, found",
    [
        ("{}", "holds a manifest of another kind"),
        ("hello", "holds a manifest of another kind"),
        ('{"format": "accel-checkpoint", "version": 2}', "was written by a newer accel-core"),
    ],
)
def test_a_manifest_that_is_not_ours_or_newer_is_refused_and_stays(tmp_path, content, found):
    (tmp_path / "manifest.json").write_text(content)
    (tmp_path / f"data-{OLD}").mkdir()
    with pytest.raises(CheckpointError, match=rf"{found}.*\. Save into another folder"):
        Draft.begin(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == content
    assert names_in(tmp_path) == [f"data-{OLD}", "manifest.json"]


def test_a_damaged_checkpoint_is_replaced_but_its_data_stay_until_then(tmp_path):
    save(tmp_path, OLD)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("2030", "2031"))
    draft = Draft.begin(tmp_path, NEW)
    assert f"data-{OLD}" in names_in(tmp_path)
    draft.publish(fill(draft))
    draft.sweep()
    assert saved(tmp_path) == NEW
    assert names_in(tmp_path) == [f"data-{NEW}", "manifest.json"]


READ_ONLY = """
    import os, sys
    from pathlib import Path
    from accel_checkpoint.files.folder import Draft
    os.chdir(sys.argv[1])
    if os.geteuid() == 0:  # who may write everywhere
        os.setuid(65534)
    for folder in (Path("checkpoint"), Path("new", "checkpoint")):
        try:
            Draft.begin(folder)
        except PermissionError as error:
            print(error)
"""


def test_a_read_only_folder_is_said_with_its_path(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for folder in (tmp_path / "checkpoint", tmp_path):
        folder.chmod(0o555)
    command = [sys.executable, "-c", textwrap.dedent(READ_ONLY), str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        for folder in (tmp_path, tmp_path / "checkpoint"):
            folder.chmod(0o755)
    reason = (
        "cannot be saved here: Permission denied. What was saved here is untouched. Make room, make it writable, or"
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(reason in line for line in lines)
    assert "'checkpoint'" in lines[0]
    assert str(Path("new", "checkpoint")) in lines[1]
    assert names_in(tmp_path) == ["checkpoint"]
    assert names_in(tmp_path / "checkpoint") == []


# Removing


def test_a_checkpoint_is_removed_with_everything_in_its_folder(tmp_path):
    folder = tmp_path / "checkpoint"
    add_files_of_the_user(folder)
    (folder / "out").symlink_to(tmp_path)
    save(folder)
    (tmp_path / "beside").write_text("mine")
    remove_checkpoint(folder)
    assert names_in(tmp_path) == ["beside"]


def test_of_a_link_only_the_link_is_removed(tmp_path):
    save(tmp_path / "elsewhere", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    remove_checkpoint(tmp_path / "link")
    assert names_in(tmp_path) == ["elsewhere"]
    assert saved(tmp_path / "elsewhere") == OLD


def test_a_folder_that_is_swapped_for_a_link_while_it_is_removed_takes_nothing_with_it(tmp_path, monkeypatch):
    others, folder, unlink = tmp_path / "others", tmp_path / "checkpoint_1", os.unlink
    for place in (others, folder):
        (place / "below").mkdir(parents=True)
        for name in ("a", "b", "below/c", "below/d"):
            (place / name).write_text("mine")
    swaps = iter([(folder, others), (tmp_path / "aside" / "below", others / "below")])

    def swapping(path, **place):
        unlink(path, **place)
        for swapped, other in itertools.islice(swaps, 1):
            swapped.rename(tmp_path / ("aside" if swapped == folder else "deeper"))
            swapped.symlink_to(other)

    save(folder, OLD)
    monkeypatch.setattr(os, "unlink", swapping)
    with contextlib.suppress(OSError):
        remove_checkpoint(folder)
    assert next(swaps, None) is None
    assert sorted(str(path.relative_to(others)) for path in others.rglob("*")) == [
        "a",
        "b",
        "below",
        "below/c",
        "below/d",
    ]


def test_a_checkpoint_that_cannot_be_removed_is_said(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"cannot be removed: No such file .* Remove the folder by hand: .*none"
    ):
        remove_checkpoint(tmp_path / "none")


@pytest.mark.parametrize(
    "names, expected",
    [
        ([], True),
        (["manifest.json.0123abcd.tmp", "manifest.json.removed", "notes.txt"], True),
        (["manifest.json.0123abcd.tmp"], True),
        (["manifest.json.0123abcd.tmp", "notes.txt"], False),
        (["manifest.json"], False),
        (["manifest.json", "manifest.json.removed"], False),
    ],
)
def test_only_what_nobody_put_there_is_a_leftover(tmp_path, names, expected):
    (tmp_path / f"data-{OLD}").mkdir()
    for name in names:
        (tmp_path / name).write_text("x")
    assert is_leftover(tmp_path) is expected


# A kill at any moment


def prepare_second_save(folder):
    add_files_of_the_user(folder)
    save(folder, OLD)


def check_second_save(folder):
    found = saved(folder)
    save(folder, "a" * 16)
    assert saved(folder) == "a" * 16
    assert names_in(folder) == sorted([*MINE, "mine", "data-" + "a" * 16, "manifest.json"])
    assert_files_of_the_user_are_there(folder)
    return found


def kill_second_saves(root):
    return kill_everywhere(root, prepare_second_save, lambda folder: save(folder, NEW), check_second_save)


def check_first_save(folder):
    found = saved(folder / "new") if is_complete(folder / "new") else None
    save(folder / "new", "a" * 16)
    assert names_in(folder / "new") == ["data-" + "a" * 16, "manifest.json"]
    return found


def kill_first_saves(root):
    return kill_everywhere(root, lambda folder: None, lambda folder: save(folder / "new", NEW), check_first_save)


def check_removal(folder):
    if not folder.exists():
        return "gone"
    found = saved(folder) if is_complete(folder) else "leftover"
    assert found == OLD or is_leftover(folder)
    remove_checkpoint(folder)
    assert not folder.exists()
    return found


def kill_removals(root):
    return kill_everywhere(root, prepare_second_save, remove_checkpoint, check_removal)


def phases(found):
    return [value for value, _ in itertools.groupby(found)]


def test_a_kill_at_any_moment_leaves_the_previous_checkpoint_or_the_new_one(tmp_path):
    (found,) = run_ranks(kill_second_saves, 1, tmp_path)
    assert phases(found) == [OLD, NEW]
    assert len(found) > 15


def test_a_kill_in_the_first_save_leaves_no_checkpoint_or_the_whole(tmp_path):
    (found,) = run_ranks(kill_first_saves, 1, tmp_path)
    assert phases(found) == [None, NEW]
    assert len(found) > 15


def test_a_kill_while_removing_leaves_the_whole_checkpoint_or_a_leftover(tmp_path):
    (found,) = run_ranks(kill_removals, 1, tmp_path)
    assert phases(found) == [OLD, "leftover", "gone"]
    assert len(found) > 10
