"""R6 and bad input: what cannot be saved or loaded is refused on every rank, within seconds, and nothing is changed."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import SOON, Counter, Training, automatic, error_of, forked, names_in
from torch import nn
from torch.utils.data import DataLoader
from xxhash import xxh3_128_hexdigest

from accel_core import Accelerator, ProjectConfiguration
from accel_core.testing import run_ranks

STEPS = 2
SECONDS = 10.0


def same_on_all(results):
    """What every rank returned, which is one and the same."""
    first, *others = results
    assert all(other == first for other in others)
    return first


def timed(action):
    """What an action raises; it must not take long."""
    start = time.monotonic()
    said = error_of(action)
    assert time.monotonic() - start < SECONDS
    return said


def on_main(accelerator, action):
    """Does something on one rank, and lets the others wait for it."""
    if accelerator.is_main_process:
        action()
    accelerator.wait_for_everyone()


# Folders


def sealed(folder, **members):
    """Rewrites a manifest so that its seal holds, whatever it says."""
    path = folder / "manifest.json"
    content = {**json.loads(path.read_text()), **members}
    content.pop("seal")
    body = json.dumps({**content, "seal": ""}, indent=2)[: -len('"\n}')].encode()
    path.write_bytes(body + f'{xxh3_128_hexdigest(body)}"\n}}\n'.encode())


def prepare_folders(root, save):
    """Nothing of this is a checkpoint."""
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (root / "files").mkdir()
    (root / "files" / "notes.txt").write_text("mine")
    (root / "other").mkdir()
    (root / "other" / "manifest.json").write_text('{"name": "my web page"}')
    (root / "theirs").mkdir()
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        (root / "theirs" / name).write_text("theirs")


LOADS = {
    "absent": "FileNotFoundError: .*there is no such folder. Pass a folder that save_state|The newest complete one",
    "empty": "CheckpointError: .*empty, but it has no manifest.json, and so holds no checkpoint",
    "file": "CheckpointError: .*file, but it is a file",
    "files": "CheckpointError: .*files, but it has no manifest.json",
    "other": "CheckpointError: .*other, but it holds a manifest of another kind",
    "theirs": "CheckpointError: .*theirs, but it has no manifest.json",
    "newer": "CheckpointError: .*was written by a newer accel-core: its format has version 2, and this one reads up to 1",
    "liar": "CheckpointError: .*is damaged: .*index.json is missing",
    "worldless": "CheckpointError: .*lies",
    "unknown": "CheckpointError: .*lies: .*more is unknown",
}


def load_folders(root):
    training = Training()
    accelerator = training.accelerator
    on_main(accelerator, lambda: prepare_folders(root, training))
    for name in ("newer", "liar", "worldless", "unknown"):
        accelerator.save_state(root / name)
    on_main(accelerator, lambda: sealed(root / "newer", version=2))
    on_main(accelerator, lambda: sealed(root / "liar", id="f" * 16))
    on_main(accelerator, lambda: sealed(root / "worldless", record={}))
    on_main(accelerator, lambda: sealed(root / "unknown", more=1))
    before = training.fingerprint()
    said = {name: timed(lambda name=name: accelerator.load_state(root / name)) for name in LOADS}
    assert training.fingerprint() == before
    return said


def test_what_is_no_checkpoint_is_refused_on_every_rank_and_changes_nothing(tmp_path):
    said = same_on_all(run_ranks(load_folders, 2, tmp_path))
    for name, expected in LOADS.items():
        assert re.search(expected, said[name] or "LOADED", re.DOTALL), (name, said[name])
        assert str(tmp_path / name) in said[name]


SAVES = {
    "file": "CheckpointError: .*file, but it is a file. Save into another folder",
    "other": "CheckpointError: .*other, but it holds a manifest of another kind.*Save into another folder",
    "theirs": "CheckpointError: .*a checkpoint of another library: model.safetensors, optimizer.bin. Save into another",
    "newer": "CheckpointError: .*newer, but it was written by a newer accel-core",
    "file/below": "NotADirectoryError: .*cannot be saved here: Not a directory.*Make room, make it writable, or",
    "/proc/checkpoint": "OSError|FileNotFoundError|PermissionError: .*cannot be saved here: .*/proc/checkpoint",
}


def save_into_folders(root, mode):
    training = Training()
    accelerator = training.accelerator
    on_main(accelerator, lambda: prepare_folders(root, training))
    accelerator.save_state(root / "newer")
    on_main(accelerator, lambda: sealed(root / "newer", version=2))
    before = sorted(str(path) for path in root.rglob("*"))
    said = {name: timed(lambda name=name: accelerator.save_state(root / name, asynchronous=mode)) for name in SAVES}
    accelerator.wait_for_checkpoint()
    assert sorted(str(path) for path in root.rglob("*")) == before
    accelerator.save_state(root / "files")
    accelerator.load_state(root / "files")
    return said, (root / "files" / "notes.txt").read_text()


@pytest.mark.parametrize("mode", [False, "eager"])
def test_a_place_that_is_taken_or_closed_is_refused_on_every_rank_and_stays_as_it_was(tmp_path, mode):
    said, notes = same_on_all(run_ranks(save_into_folders, 2, tmp_path, mode))
    for name, expected in SAVES.items():
        assert re.search(expected, said[name] or "SAVED", re.DOTALL), (name, said[name])
        assert str(tmp_path / name) in said[name]
    assert notes == "mine"


# Another run


class Other(nn.Module):
    """Of another shape, with one parameter more and one less."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(5, 8))
        self.extra = nn.Linear(2, 2)


def a_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def an_optimizer(model, kind=torch.optim.AdamW, **options):
    return kind(model.parameters(), lr=0.1, **options)


def a_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def prepared(*names, model=a_model, kind=torch.optim.AdamW, registered=0, twice=False, **options):
    """A run that has what is named."""
    accelerator = Accelerator(cpu=True, **options)
    model = model()
    groups = [{"params": [each]} for each in model.parameters()] if twice else model.parameters()
    optimizer = kind(groups, lr=0.1)
    things = {"model": model, "optimizer": optimizer, "scheduler": a_scheduler(optimizer)}
    things |= {"second model": a_model(), "second scheduler": a_scheduler(optimizer), "second optimizer": optimizer}
    things["second optimizer"] = an_optimizer(model)
    accelerator.prepare(*(things[name] for name in names))
    accelerator.register_for_checkpointing(*(Counter() for _ in range(registered)))
    return accelerator


ALL = ("model", "optimizer", "scheduler")
MISFITS = {
    "another model": (
        partial(prepared, *ALL, model=Other, registered=1),
        r"model.0: the checkpoint has no 'extra.weight', 'extra.bias'",
        r"model.0: the model has no '2.weight', '2.bias'",
        r"model.0: '0.weight' is float32 \[8, 5\] here, and float32 \[8, 4\] in the checkpoint",
    ),
    "more models": (partial(prepared, *ALL, "second model", registered=1), "there are 2 models here, and 1 in the"),
    "no optimizer": (
        partial(prepared, "model", registered=1),
        "there are 0 optimizers here, and 1 in the checkpoint",
        "there are 0 schedulers here, and 1 in the checkpoint",
    ),
    "more optimizers": (partial(prepared, *ALL, "second optimizer", registered=1), "there are 2 optimizers here, and 1"),
    "no scheduler": (partial(prepared, "model", "optimizer", registered=1), "there are 0 schedulers here, and 1 in the"),
    "more schedulers": (partial(prepared, *ALL, "second scheduler", registered=1), "there are 2 schedulers here, and 1"),
    "nothing registered": (partial(prepared, *ALL), "there are 0 registered objects here, and 1 in the checkpoint"),
    "more registered": (partial(prepared, *ALL, registered=3), "there are 3 registered objects here, and 1 in the"),
    "another optimizer": (partial(prepared, *ALL, kind=torch.optim.SGD, registered=1), "optimizer.0: .*SGD.*AdamW"),
    "more groups": (partial(prepared, *ALL, twice=True, registered=1), "optimizer.0: .*4.*1"),
}


def load_into_others(folder):
    saving = prepared(*ALL, registered=1)
    saving.save_state(folder)
    said = {}
    for name, (make, *_) in MISFITS.items():
        accelerator = make()
        said[name] = timed(lambda accelerator=accelerator: accelerator.load_state(folder))
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_checkpoint_of_another_run_is_refused_with_all_that_does_not_fit(tmp_path, ranks):
    said = same_on_all(run_ranks(load_into_others, ranks, tmp_path / "checkpoint"))
    for name, (_, *lines) in MISFITS.items():
        error = said[name] or "LOADED"
        assert error.startswith("CheckpointError: "), (name, error)
        assert "does not fit what is prepared here, so nothing was loaded:" in error
        for line in lines:
            assert re.search(line, error), (name, line, error)


def load_with_another_number_of_loaders(folder):
    one, two = Accelerator(cpu=True), Accelerator(cpu=True)
    one.prepare(a_model())
    two.prepare(a_model(), DataLoader(torch.arange(8.0)))
    one.save_state(folder / "without")
    said = [error_of(lambda: two.load_state(folder / "without"))]
    if (failure := error_of(lambda: two.save_state(folder / "with"))) is None:
        said.append(error_of(lambda: one.load_state(folder / "with")))
    else:
        assert "so where it stands cannot be saved. Install a loader component" in failure
        assert names_in(folder / "with") == []
    return said


def test_another_number_of_loaders_is_refused(tmp_path):
    (said,) = run_ranks(load_with_another_number_of_loaders, 1, tmp_path)
    assert "there are 1 loaders here, and 0 in the checkpoint" in said[0]
    assert all("there are 0 loaders here, and 1 in the checkpoint" in error for error in said[1:])
