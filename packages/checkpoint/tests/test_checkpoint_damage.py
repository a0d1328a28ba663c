"""What was changed on the disk is not loaded, and what could run is not run."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil

import pytest
import torch
from checkpoint_jobs import Training, error_of, names_in
from torch import nn

from accel_core import load_checkpoint_in_model
from accel_testing import run_ranks

STEPS = 2


class Notes:
    """Different on each rank, and large enough to have a tensor."""

    def __init__(self, rank):
        self.table = torch.full((5,), float(rank))

    def state_dict(self):
        return {"table": self.table}

    def load_state_dict(self, state):
        self.table = state["table"]


def training_with_notes():
    training = Training()
    training.notes = Notes(training.accelerator.process_index)
    return training


def save(folder):
    training = training_with_notes()
    training.step(STEPS)
    training.accelerator.save_state(folder)
    return training.fingerprint()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks, and what each rank was."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    return folder, run_ranks(save, 2, folder)


def files_of(folder):
    """All files of a checkpoint, relative to its folder."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def refused(training, folder, damage, repair):
    """What `load_state` raises, on every rank, while something is wrong."""
    accelerator = training.accelerator
    if accelerator.is_main_process:
        damage()
    accelerator.wait_for_everyone()
    said = error_of(lambda: accelerator.load_state(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        repair()
    accelerator.wait_for_everyone()
    return said


def offsets_in(path, count):
    """The first and last bytes of a file, and some between. A manifest is known by the name of its seal, newer by a digit."""
    content = path.read_bytes()
    size = len(content)
    offsets = {0, 7, 8, size - 30, size - 46, *random.Random(0).sample(range(size - 46), count)}
    return sorted(offsets - {content.find(b'"version": 1') + len(b'"version": ')})


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x08
    path.write_bytes(content)


def load_with_flipped_bytes(folder, count):
    """By file and offset, what was raised; and what the run is when all is well again."""
    training = training_with_notes()
    said = {}
    places = {name: offsets_in(folder / name, count) for name in files_of(folder)}
    training.accelerator.wait_for_everyone()  # until every rank has read the files, nobody writes
    for name, offsets in places.items():
        path = folder / name
        for offset in offsets:
            change = lambda path=path, offset=offset: flip(path, offset)
            said[name.name, offset] = refused(training, folder, change, change)
    training.accelerator.load_state(folder)
    return said, training.fingerprint()


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_flipped_byte_in_any_file_is_found_and_the_file_and_its_hash_are_named(saved, tmp_path, ranks):
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    assert [name.name for name in files_of(folder)] == [
        "index.json", "rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"
    ]  # fmt: skip
    found = run_ranks(load_with_flipped_bytes, ranks, folder, 40 if ranks == 1 else 10)
    for said, fingerprint in found:
        assert fingerprint[:3] == saved[1][0][:3]
        for (name, offset), error in said.items():
            assert error is not None, f"{name} was loaded with its byte {offset} changed"
            assert error.startswith("CheckpointError: "), error
            assert name in error, (offset, error)
            assert re.search(r"\b[0-9a-f]{32}\b", error), (offset, error)
    if ranks == 2:
        assert found == [(found[0][0], saved[1][0]), (found[0][0], saved[1][1])]


def broken_in_files(folder, other):
    """How a file, and what happens to it: a text, what damages it, and what the error says."""
    manifest, (data,) = folder / "manifest.json", [path for path in folder.iterdir() if path.is_dir()]
    parts = sorted(path for path in data.iterdir() if path.suffix == ".safetensors")
    others = next(path for path in other.iterdir() if path.is_dir())
    yield (
        "manifest deleted",
        manifest.unlink,
        "has no manifest.json, and so holds no checkpoint: a save into it was not",
    )
    yield "index deleted", (data / "index.json").unlink, "is damaged: .*index.json is missing"
    for part in parts:
        yield f"{part.name} deleted", part.unlink, f"is damaged: .*{part.name} is missing"
        yield f"{part.name} cut", lambda part=part: os.truncate(part, 100), f"{part.name} has 100 bytes instead of"
        yield f"{part.name} emptied", lambda part=part: os.truncate(part, 0), f"{part.name} has 0 bytes instead of"
        yield f"{part.name} grown", lambda part=part: os.truncate(part, 10**6), f"{part.name} has 1000000 bytes instead"
        yield f"{part.name} a folder", lambda part=part: (part.unlink(), part.mkdir()), f"{part.name} is no file"
    yield (
        "data deleted",
        lambda: shutil.rmtree(data),
        "index.json is missing, rank-00000.safetensors is missing, rank-0",
    )
    yield "index cut", lambda: os.truncate(data / "index.json", 100), "index.json has 100 bytes instead of"
    yield "manifest cut", lambda: os.truncate(manifest, 100), "is damaged: its manifest.json is no longer JSON"
    yield "manifest emptied", lambda: os.truncate(manifest, 0), "manifest.json is not JSON"
    yield "manifest of another", lambda: shutil.copy(other / "manifest.json", manifest), "is damaged: .* is missing"
    swap = lambda: (shutil.rmtree(data), shutil.copytree(others, data))
    yield (
        "data of another",
        swap,
        "index.json(: the file has the hash .*, and the manifest says [0-9a-f]{32}| has .* bytes instead)",
    )
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        one = lambda name=name: shutil.copy(others / name, data / name)
        yield (
            f"{name} of another",
            one,
            rf"{name}: (the header|the bytes of .*) have? .*the checkpoint says [0-9a-f]{{32}}|has .* instead",
        )
    swapped = lambda: (
        shutil.copy(parts[0], data / "x"), shutil.copy(parts[1], parts[0]), os.replace(data / "x", parts[1])
    )  # fmt: skip
    yield "parts swapped", swapped, r"rank-0000[01]\.safetensors has \d+ bytes instead of"


def load_what_is_broken(root, original, other):
    """What was raised, by what was done, beside what was expected."""
    training = training_with_notes()
    folder = root / "checkpoint"
    said = []
    for number in range(sum(1 for _ in broken_in_files(original, other))):
        if training.accelerator.is_main_process:
            shutil.copytree(original, folder)
        training.accelerator.wait_for_everyone()
        what, damage, expected = list(broken_in_files(folder, other))[number]
        training.accelerator.wait_for_everyone()
        error = refused(training, folder, damage, lambda: shutil.rmtree(folder))
        said.append((what, expected, error))
    training.accelerator.load_state(original)
    return said, training.counter.value


def step_and_save(folder, steps):
    training = training_with_notes()
    training.step(steps)
    training.accelerator.save_state(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_that_are_gone_cut_or_of_another_checkpoint_are_refused_by_name(saved, tmp_path, ranks):
    run_ranks(step_and_save, 2, tmp_path / "other", STEPS + 1)
    for said, steps in run_ranks(load_what_is_broken, ranks, tmp_path / "work", saved[0], tmp_path / "other"):
        assert steps == STEPS
        for what, expected, error in said:
            assert error is not None, what
            assert error.startswith("CheckpointError: "), (what, error)
            assert re.search(expected, error), (what, error)


# Pickles


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


NAMES = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt",
    "random_states_0.pkl", "custom_checkpoint_0.pkl", "sampler.bin", "dl_state_dict.bin", "rank-00000.safetensors",
    "rank-00001.safetensors", "rank-00000.done.json", "index.json", "model.safetensors.index.json", "data.pkl", "archive.pt",
)  # fmt: skip
"""Where a loader of ours, or of another library, could look."""


def bombs_in(folder, marker, names):
    """Puts hostile files there; those that torch would write, and plain pickles, in turn."""
    for number, name in enumerate(names):
        path = folder / name
        if path.exists():
            path.unlink()
        if number % 2:
            torch.save(Bomb(marker), path)
        else:
            path.write_bytes(pickle.dumps(Bomb(marker)))


def test_the_bomb_goes_off_where_a_pickle_is_loaded(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert names_in(tmp_path) == ["marker"]


def load_beside_bombs(folder, marker):
    """Files that no manifest names are not looked at; those that it names are not what it says."""
    training = training_with_notes()
    data = next(path for path in folder.iterdir() if path.is_dir())
    bombs_in(folder, marker, [name for name in NAMES if name not in names_in(folder)])
    bombs_in(data, marker, [name for name in NAMES if name not in names_in(data)])
    training.accelerator.load_state(folder)
    training.accelerator.save_state(folder)
    training.accelerator.load_state(folder)
    return training.fingerprint()


def load_bombs(folder, marker):
    """What is raised where one of our own files is one; and by whom it is asked for."""
    training = training_with_notes()
    data = next(path for path in folder.iterdir() if path.is_dir())
    said = {}
    for path in (*data.iterdir(), folder / "manifest.json"):
        content = path.read_bytes()
        for long in (False, True):
            bombs_in(path.parent, marker, [path.name])
            if long:  # of the right size: pickles may have anything behind them
                path.write_bytes(path.read_bytes().ljust(len(content), b" ")[: max(len(content), 100)])
            said[path.name, "load", long] = error_of(lambda: training.accelerator.load_state(folder))
            said[path.name, "weights", long] = error_of(lambda: load_checkpoint_in_model(nn.Linear(4, 8), folder))
        path.write_bytes(content)
    bombs_in(folder, marker, ["manifest.json"])
    said["manifest.json", "save", False] = error_of(lambda: training.accelerator.save_state(folder))
    return said


def test_hostile_pickles_beside_a_checkpoint_are_not_touched(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    ((steps, *_),) = run_ranks(load_beside_bombs, 1, tmp_path / "copy", tmp_path / "marker")
    assert steps == STEPS
    assert "marker" not in names_in(tmp_path)
    assert "random_states_0.pkl" in names_in(tmp_path / "copy"), "files of the user's, of which we know nothing, stay"


def test_hostile_pickles_in_the_place_of_our_files_are_refused_and_never_run(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    (said,) = run_ranks(load_bombs, 1, tmp_path / "copy", tmp_path / "marker")
    assert "marker" not in names_in(tmp_path)
    assert len(said) == 17
    for (name, action, long), error in said.items():
        assert error is not None, (name, action, long)
        assert error.startswith(("CheckpointError: ", "ValueError: ", "FileNotFoundError: ")), (
            name,
            action,
            long,
            error,
        )
        assert name in error or action == "weights", (name, action, error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "weights.pt"])
def test_a_hostile_file_of_weights_is_refused_by_name_and_never_run(tmp_path, name):
    bombs_in(tmp_path, tmp_path / "marker", [name])
    for number, place in enumerate((tmp_path, tmp_path / name)):
        error = error_of(lambda place=place: load_checkpoint_in_model(nn.Linear(4, 8), place))
        assert error is not None, number
        assert str(tmp_path) in error
        assert names_in(tmp_path) == [name]
