"""Folders that somebody made to harm the reader: each is refused soon, in little memory, before anything is restored."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import Training, error_of
from test_checkpoint_input import resealed, sealed
from torch import nn

from accel_checkpoint.codec import decode
from accel_checkpoint.inspection.command import list_checkpoints
from accel_core import CheckpointError, load_checkpoint_in_model
from accel_testing import run_ranks

GIB = 1 << 30
SECONDS = 20


def data_of(folder):
    (data,) = [path for path in folder.iterdir() if path.is_dir()]
    return data


def in_place_of(path, make):
    path.unlink()
    make(path)


def sparse(path, nbytes):
    path.touch()
    os.truncate(path, nbytes)


def in_place_of_the_index(make):
    return lambda folder: in_place_of(data_of(folder) / "index.json", make)


def described(folder, change):
    """Changes what the index says of the one file of tensors, which gets the size that it says then."""

    def changed(content):
        ((name, file),) = content["files"].items()
        change(content, name, file)
        os.truncate(data_of(folder) / name, file["nbytes"])
        sealed(folder, files={name: file["nbytes"]})

    resealed(folder, changed)


def a_large_header(content, name, file):
    by = 20 * GIB
    file["header_bytes"] += by
    file["nbytes"] += by
    for tensor in file["tensors"].values():
        tensor["offset"] += by


def a_large_object(content, name, file):
    nbytes = 40 * GIB
    hashes = ["0" * 32] * (nbytes >> 22)
    shape = {"dtype": "uint8", "shape": [nbytes]}
    file["tensors"]["large"] = {**shape, "offset": file["nbytes"], "nbytes": nbytes, "hashes": hashes}
    file["nbytes"] += nbytes
    (entry,) = content["objects"]["object.0"]
    entry["skeleton"] = {"value": {"$": "tensor", "name": "large", **shape, "requires_grad": False}}
    entry["tensors"] = {"large": {"file": name, "key": "large"}}


def a_shape_that_overflows(content, name, file):
    file["tensors"]["odd"] = {
        "dtype": "uint8", "shape": [1 << 62, 0, 1 << 62], "offset": file["nbytes"], "nbytes": 0, "hashes": []
    }  # fmt: skip


def colliding(content):
    prime = (1 << 61) - 1  # all of its multiples have the hash 0
    items = [[{"$": "int", "value": hex(number * prime)}, 0] for number in range(20_000)]
    content["objects"]["object.0"][0]["skeleton"] = {"value": {"$": "dict", "items": items}}


def says(unit, **members):
    """Changes the members of an object of ours; those that are None go."""

    def change(content):
        skeleton = content["objects"][unit][0]["skeleton"]
        skeleton.update(members)

    return lambda folder: resealed(folder, change)


def object_is(unit, skeleton):
    return lambda folder: resealed(folder, lambda content: content["objects"][unit][0].update(skeleton=skeleton))


def renamed(old, new):
    return lambda folder: resealed(
        folder, lambda content: content["objects"].update({new: content["objects"].pop(old)})
    )


def records(**members):
    def change(folder):
        record = json.loads((folder / "manifest.json").read_text())["record"]
        sealed(folder, record={**record, **members})

    return change


def group_says(**members):
    def change(content):
        content["objects"]["optimizer.0"][0]["skeleton"]["groups"][0].update(members)

    return lambda folder: resealed(folder, change)


MANIFEST = "manifest.json"
CANNOT = "cannot be compared with what is prepared, so nothing was loaded: "
LIES = "The checkpoint lies: its hashes hold, but no save_state.* leaves such a value as its "
HOSTILE = {
    "manifest: a pipe": (lambda folder: in_place_of(folder / MANIFEST, os.mkfifo), "is no regular file of at most"),
    "manifest: a device": (
        lambda folder: in_place_of(folder / MANIFEST, lambda path: path.symlink_to("/dev/zero")),
        "is no regular file of at most",
    ),
    "manifest: 8 GiB": (
        lambda folder: in_place_of(folder / MANIFEST, lambda path: sparse(path, 8 * GIB)),
        "is no regular file of at most",
    ),
    "index: a pipe": (in_place_of_the_index(os.mkfifo), "index.json is no file"),
    "index: 2 GiB": (
        lambda folder: (
            in_place_of_the_index(lambda path: sparse(path, 2 * GIB))(folder),
            sealed(folder, index={"nbytes": 2 * GIB, "hash": "0" * 32}),
        ),
        "the file has the hash [0-9a-f]{32}, and the manifest says 0{32}",
    ),
    "header: 20 GiB": (lambda folder: described(folder, a_large_header), "is no index .* has a header of 2147.* bytes"),
    "object: 40 GiB": (lambda folder: described(folder, a_large_object), "the bytes of 'large' from 0 to .* damaged"),
    "a shape that overflows": (lambda folder: described(folder, a_shape_that_overflows), "'odd' has the shape"),
    "colliding keys": (lambda folder: resealed(folder, colliding), "a dict of which more than 100 keys have one hash"),
    "random: a list": (object_is("random", [1, 2]), f"{LIES}random: TypeError"),
    "random: no torch": (says("random", torch=5), f"{LIES}random: TypeError"),
    "random: another python": (says("random", python={"version": 3, "state": 5, "gauss": None}), f"{LIES}random"),
    "optimizer: a text": (object_is("optimizer.0", "x"), CANNOT),
    "optimizer: groups": (says("optimizer.0", groups=7), CANNOT),
    "optimizer: a group": (says("optimizer.0", groups=[["lr"]]), CANNOT),
    "optimizer: names": (group_says(names="0.0.weight"), "optimizer.0"),
    "optimizer: a rate of text": (group_says(lr="fast"), "has a number as 'lr', and the checkpoint 'fast'"),
    "optimizer: values": (object_is("optimizer.0.values", [1]), CANNOT),
    "optimizer: no values": (renamed("optimizer.0.values", "optimizer.0.valued"), "Missing: .*optimizer.0.values"),
    "scheduler: another number": (renamed("scheduler.0", "scheduler.7"), r"Missing: \['scheduler.0'\]"),
    "record: hooks": (records(left_to_hooks=["model.x"]), CANNOT),
    "record: nothing": (records(world=None), CANNOT),
}  # fmt: skip


def load_what_is_hostile(root):
    """What is raised, by name; nothing may change, wait, or take much memory."""
    training, model = Training(), nn.Linear(4, 8)
    training.step()
    before = training.fingerprint()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, used + GIB))
    said = {}
    for name, (change, _) in HOSTILE.items():
        folder = root / name
        training.accelerator.save_state(folder)
        change(folder)
        signal.alarm(SECONDS)  # ends the process, should it wait
        said[name] = error_of(lambda folder=folder: training.accelerator.load_state(folder))
        if name.startswith(("manifest", "index", "header")):
            weights = error_of(lambda folder=folder: load_checkpoint_in_model(model, folder))
            assert weights is not None, name
        signal.alarm(0)
        assert training.fingerprint() == before, name
    return said


def test_what_would_wait_take_all_memory_or_be_restored_in_part_is_refused_before_anything_changes(tmp_path):
    (said,) = run_ranks(load_what_is_hostile, 1, tmp_path, timeout=240)
    for name, (_, expected) in HOSTILE.items():
        assert re.search(f"^CheckpointError: .*{expected}", said[name] or "LOADED", re.DOTALL), (name, said[name])
        assert "Part of the run was restored" not in said[name], (name, said[name])


def load_what_an_earlier_version_has_saved(folder):
    training = Training()
    training.step()
    training.accelerator.save_state(folder)
    before = training.fingerprint()
    record = json.loads((folder / "manifest.json").read_text())["record"]
    del record["tracking"]  # which says where a run is recorded, since runs are
    sealed(folder, record=record)
    training.step()
    training.accelerator.load_state(folder)
    return training.fingerprint() == before


def test_a_record_that_says_nothing_of_trackers_is_of_an_earlier_version(tmp_path):
    assert run_ranks(load_what_an_earlier_version_has_saved, 1, tmp_path) == [True]


def test_a_pipe_among_checkpoints_does_not_stop_who_lists_them(tmp_path):
    (tmp_path / "checkpoint_1").mkdir()
    os.mkfifo(tmp_path / "checkpoint_1" / MANIFEST)
    assert [row["state"] for row in list_checkpoints(tmp_path)] == ["foreign"]


@pytest.mark.parametrize("tag", ["set", "frozenset"])
def test_a_set_of_items_with_one_hash_is_refused(tag):
    prime = (1 << 61) - 1
    items = [{"$": "int", "value": hex(number * prime)} for number in range(101)]
    with pytest.raises(CheckpointError, match="more than 100 of its items have one hash"):
        decode({"$": tag, "items": items}, {}, "it")
    assert len(decode({"$": tag, "items": items[:100]}, {}, "it")) == 100


def test_numbers_in_the_state_of_numpy_that_lead_out_of_it_are_refused():
    numpy = pytest.importorskip("numpy")
    from accel_core.api.checkpoint import check_random_state
    from accel_core.api.component import capture_random_state

    states = capture_random_state(None)
    name, keys, _, *rest = numpy.random.get_state()
    check_random_state(states, torch.device("cpu"))
    with pytest.raises(ValueError, match="state position of numpy is 1000000, and not 0 to 624"):
        check_random_state({**states, "numpy": (name, keys, 10**6, *rest)}, None)
