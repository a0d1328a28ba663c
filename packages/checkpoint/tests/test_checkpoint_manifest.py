"""The manifest: what makes a folder a checkpoint, how each way of being none is said, and how any damage is found."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re

import pytest
from xxhash import xxh3_128_hexdigest

from accel_checkpoint.files.manifest import LARGEST, FileRecord, Manifest, is_complete, read_manifest, write_manifest
from accel_core import CheckpointError

ID = "0123456789abcdef"
RECORD = {"step": 7, "options": {"mixed_precision": ["bf16", "code"]}, "loss": 0.25, "name": "Größe", "none": None}
HASH = "0123456789abcdef" * 2


def manifest(id=ID, created="2030-01-31T12:00:00+00:00", files=("rank-00000.safetensors", "rank-00001.safetensors")):
    return Manifest(id, created, FileRecord(10, HASH), {name: 20 + i for i, name in enumerate(files)}, RECORD)


def checkpoint(folder, **kwargs):
    """A folder with a manifest and files of the sizes that it says."""
    said = manifest(**kwargs)
    data = folder / said.data
    data.mkdir(parents=True)
    for name, nbytes in {"index.json": 10, **said.files}.items():
        (data / name).write_bytes(bytes(nbytes))
    write_manifest(folder, said)
    return said


def rewrite(folder, **changes):
    """Seals other members, as a writer that lies would do; a change to `...` takes the member out."""
    members = {**json.loads((folder / "manifest.json").read_text()), **changes}
    members = {name: value for name, value in members.items() if value is not ... and name != "seal"}
    body = json.dumps({**members, "seal": ""}, indent=2)[: -len('"\n}')]
    (folder / "manifest.json").write_text(f'{body}{xxh3_128_hexdigest(body.encode())}"\n}}\n')


# What is written


def test_a_manifest_that_no_reader_would_take_is_not_written(tmp_path):
    before = checkpoint(tmp_path)
    large = dataclasses.replace(manifest(id="f" * 16), record={"configuration": "x" * LARGEST})
    with pytest.raises(
        CheckpointError, match=rf"has \d+ bytes, and no reader takes more than {LARGEST}\. Make the record"
    ):
        write_manifest(tmp_path, large)
    assert read_manifest(tmp_path) == before


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    assert checkpoint(tmp_path) == read_manifest(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f"data-{ID}", "manifest.json"]


def test_a_reader_can_be_written_from_the_description(tmp_path):
    checkpoint(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    assert content.isascii()
    assert content[-36:].decode() == xxh3_128_hexdigest(content[:-36]) + '"\n}\n'
    members = json.loads(content)
    assert list(members) == ["format", "version", "hash", "id", "created", "index", "files", "record", "seal"]
    assert members == {
        "format": "accel-checkpoint",
        "version": 1,
        "hash": "xxh3_128",
        "id": ID,
        "created": "2030-01-31T12:00:00+00:00",
        "index": {"nbytes": 10, "hash": HASH},
        "files": {"rank-00000.safetensors": 20, "rank-00001.safetensors": 21},
        "record": RECORD,
        "seal": content[-36:-4].decode(),
    }


def test_a_manifest_replaces_the_one_before_it_and_gets_the_permissions_of_any_new_file(tmp_path):
    checkpoint(tmp_path)
    checkpoint(tmp_path, id="f" * 16)
    assert read_manifest(tmp_path).id == "f" * 16
    (tmp_path / "other").write_text("")
    assert (tmp_path / "manifest.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("value, reason", [({1, 2}, "set is not JSON"), (float("nan"), "not JSON")])
def test_a_record_that_is_not_json_is_refused_before_anything_is_written(tmp_path, value, reason):
    said = Manifest(ID, "2030-01-31T12:00:00Z", FileRecord(1, HASH), {}, {"a": value})
    with pytest.raises(CheckpointError, match=rf"record of the run is not JSON: .*{reason}") as caught:
        write_manifest(tmp_path, said)
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_manifest_before_and_nothing_else(tmp_path, monkeypatch, failing):
    said = checkpoint(tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(
        OSError, match=r"cannot be published: No space left on device\. What was .* Make room"
    ) as caught:
        write_manifest(tmp_path, manifest(id="f" * 16))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert read_manifest(tmp_path) == said
    assert sorted(os.listdir(tmp_path)) == [f"data-{ID}", "manifest.json"]


def test_a_manifest_that_a_power_cut_may_undo_is_said(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    fsync, calls = os.fsync, []

    def second_fails(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(OSError, match=r"is complete, but a power cut may undo it: Input/output error\. Save again"):
        write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    assert checkpoint(tmp_path) == read_manifest(tmp_path)


# What is damaged


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_one_flipped_bit_anywhere_is_found(tmp_path, mask):
    """Every byte of the manifest in turn."""
    folder = tmp_path / "checkpoint"
    checkpoint(folder)
    path = folder / "manifest.json"
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= mask
        path.write_bytes(flipped)
        assert not is_complete(folder), position
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            read_manifest(folder)


@pytest.mark.parametrize("cut", [0, 1, 35, 36, 37, 200])
def test_a_manifest_that_lost_its_end_or_gained_one_is_found(tmp_path, cut):
    checkpoint(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    for damaged in (content[:-cut] if cut else b"", content + b" " * (cut + 1)):
        (tmp_path / "manifest.json").write_bytes(damaged)
        with pytest.raises(CheckpointError):
            read_manifest(tmp_path)


def test_a_broken_seal_shows_the_expected_hash_and_the_found_one(tmp_path):
    checkpoint(tmp_path)
    path = tmp_path / "manifest.json"
    expected = path.read_text()[-36:-4]
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    found = xxh3_128_hexdigest(path.read_bytes()[:-36])
    with pytest.raises(
        CheckpointError, match=f"is damaged: the seal .* expects the hash '{expected}', but '{found}' is"
    ):
        read_manifest(tmp_path)


def test_a_manifest_of_ours_that_is_no_longer_json_is_damaged(tmp_path):
    checkpoint(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=r"is damaged: its manifest\.json is no longer JSON \(Unterminated string"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"version": 0}, "version is 0"),
        ({"version": True}, "version is True"),
        ({"version": "1"}, "version is '1'"),
        ({"hash": "crc32"}, "hash is 'crc32'"),
        ({"id": "../../../../etc"}, r"id is '\.\./\.\./\.\./\.\./etc'"),
        ({"id": ...}, "id is missing"),
        ({"created": 5}, "created is 5"),
        ({"index": {"nbytes": 10}}, r"index is \{'nbytes': 10\}"),
        ({"index": {"nbytes": -1, "hash": HASH}}, "index is"),
        ({"index": {"nbytes": 10, "hash": "f"}}, "index is"),
        ({"files": ["a"]}, r"files is \['a'\]"),
        ({"files": {"a": True}}, "files is"),
        ({"files": {"../a": 1}}, r"files is \{'\.\./a': 1\}"),
        ({"files": {"a\n": 1}}, "files is"),
        ({"record": []}, r"record is \[\]"),
        ({"extra": 1}, "extra is unknown"),
        ({"id": 5, "created": 6}, "created is 6, id is 5"),
    ],
)
def test_a_sealed_manifest_that_lies_is_refused_with_the_lie(tmp_path, changes, found):
    checkpoint(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(
        CheckpointError, match=rf"but it lies: its seal holds, but no accel-core writes what it says: {found}"
    ):
        read_manifest(tmp_path)
    assert not is_complete(tmp_path)


def test_files_that_are_missing_or_of_another_size_are_named(tmp_path):
    said = checkpoint(tmp_path, files=[f"rank-0000{i}.safetensors" for i in range(9)])
    data = tmp_path / said.data
    (data / "index.json").write_bytes(bytes(11))
    (data / "rank-00000.safetensors").unlink()
    (data / "rank-00001.safetensors").write_bytes(b"")
    (data / "rank-00002.safetensors").unlink()
    (data / "rank-00002.safetensors").mkdir()
    expected = (
        f"is damaged: of the files that its manifest names, in {said.data}, index.json has 11 bytes instead of 10, "
        f"rank-00000.safetensors is missing, rank-00001.safetensors has 0 bytes instead of 21, rank-00002.safetensors is no file."
    )
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        read_manifest(tmp_path)
    for i in range(3, 9):
        (data / f"rank-0000{i}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00003\.safetensors is missing and 5 more"):
        read_manifest(tmp_path)
    assert is_complete(tmp_path), "only the manifest counts for that"


# What is no checkpoint


def test_a_folder_that_does_not_exist_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no such folder\. .*none"):
        read_manifest(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "no" / "parent")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "file" / "inside")


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"file, but it is a file\. Pass one that save_state"):
        read_manifest(tmp_path / "file")
    with pytest.raises(CheckpointError, match="but it is a link that leads nowhere"):
        read_manifest(tmp_path / "link")
    assert not is_complete(tmp_path / "file")


@pytest.mark.parametrize(
    "inside, reason",
    [
        (None, r"has no manifest\.json, and so holds no checkpoint\. Pass one that save_state"),
        ("notes.txt", r"holds no checkpoint\. Pass"),
        (f"data-{ID}", "holds no checkpoint: a save into it was not finished"),
        ("manifest.json.removed", "holds no checkpoint: its removal was begun"),
    ],
)
def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path, inside, reason):
    folder = tmp_path / "alone" / "checkpoint"
    folder.mkdir(parents=True)
    if inside is not None:
        (folder / inside).mkdir()
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content, found",
    [
        ("", "is not JSON"),
        ("hello", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "its \"format\" is None, not 'accel-checkpoint'"),
        ('{"name": "my web page"}', 'its "format" is None'),
        ('{"format": "other", "version": 99}', "its \"format\" is 'other'"),
    ],
)
def test_a_manifest_of_another_kind_is_said_to_be_one(tmp_path, content, found):
    (tmp_path / "manifest.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=f"holds a manifest of another kind: .*{found}"):
        read_manifest(tmp_path)


def test_a_folder_named_like_the_manifest_is_of_another_kind(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"of another kind: manifest\.json is a folder"):
        read_manifest(tmp_path)


def test_a_newer_version_asks_for_an_upgrade_even_if_its_seal_is_another(tmp_path):
    checkpoint(tmp_path)
    rewrite(tmp_path, version=2)
    text = (tmp_path / "manifest.json").read_text()
    for content in (text, text + "\n"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(
            CheckpointError,
            match="by a newer accel-core: its format has version 2, .* reads up to 1. .* up-to-date clone",
        ):
            read_manifest(tmp_path)


# What to type next


def test_a_manifest_that_may_not_be_read_is_an_error_of_the_file_system(tmp_path, monkeypatch):
    checkpoint(tmp_path / "closed")

    def denied(path, flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError, match=r"cannot be read: Permission denied.*closed.manifest\.json"):
        read_manifest(tmp_path / "closed")
    assert not is_complete(tmp_path / "closed")
