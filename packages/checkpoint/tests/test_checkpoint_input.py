"""Bad input: what cannot be saved or loaded is refused on every rank, within seconds, and nothing is changed."""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial

import pytest
import torch
from checkpoint_jobs import SOON, Counter, Training, automatic, error_of, forked_together, names_in
from torch import nn
from torch.utils.data import DataLoader
from xxhash import xxh3_128_hexdigest

from accel_core import Accelerator, ProjectConfiguration
from accel_testing import run_ranks

STEPS = 2
SECONDS = 15.0
"""Of a machine that does other things too."""


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


def prepare_folders(root):
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
    "absent": "FileNotFoundError: .*there is no such folder. Pass one that save_state",
    "empty": "CheckpointError: .*empty, but it has no manifest.json, and so holds no checkpoint",
    "file": "CheckpointError: .*file, but it is a file",
    "files": "CheckpointError: .*files, but it has no manifest.json",
    "other": "CheckpointError: .*other, but it holds a manifest of another kind",
    # The second, if the importer of that library is installed.
    "theirs": "CheckpointError: .*theirs(, but it has no manifest.json|/optimizer.bin was to be read, but it is damaged)",
    "newer": "CheckpointError: .*was written by a newer accel-core: its format has version 2, and this one reads up to 1",
    "liar": "CheckpointError: .*is damaged: .*index.json is missing",
    "worldless": "CheckpointError: .*cannot be compared with what is prepared, so nothing was loaded: KeyError",
    "unknown": "CheckpointError: .*lies: .*more is unknown",
}


def load_folders(root):
    training = Training()
    accelerator = training.accelerator
    on_main(accelerator, lambda: prepare_folders(root))
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
    on_main(accelerator, lambda: prepare_folders(root))
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


def resealed(folder, change):
    """Changes an index, and lets all hashes hold."""
    (data,) = [path for path in folder.iterdir() if path.is_dir()]
    content = json.loads((data / "index.json").read_text())
    change(content)
    text = json.dumps(content).encode()
    (data / "index.json").write_bytes(text)
    sealed(folder, index={"nbytes": len(text), "hash": xxh3_128_hexdigest(text)})


def weight(content):
    return content["tensors"]["model.0/0.weight"]


LIES = {
    "unknown kind": (lambda content: weight(content).update(kind="guessed"), "is of the unknown kind 'guessed'"),
    "no shape": (lambda content: weight(content).pop("shape"), "KeyError: 'shape'"),
    "a shape of text": (lambda content: weight(content).update(shape="84"), "has the shape '84'"),
    "another shape": (lambda content: weight(content)["parts"][0].update(sizes=[4, 4]), "and float32 .* in its file"),
    "no place": (lambda content: weight(content)["parts"][0].update(offsets=[-1, 0]), r"is at \[-1, 0\], of the sizes"),
    "two of one": (
        lambda content: content["tensors"]["optimizer.0/0.0.weight/step"]["parts"].append({}),
        "has 2 parts, and one is enough",
    ),
    "another file": (lambda content: weight(content)["parts"][0].update(file="../x"), "KeyError: '../x'"),
    "not of the file": (lambda content: weight(content)["parts"][0].update(key="x"), "KeyError: 'x'"),
    "no file": (lambda content: content["files"].clear(), "it names other files, or other sizes, than the manifest"),
    "an alias of nothing": (lambda content: content["aliases"].update(a="b"), "the alias 'a' stands for no tensor"),
    "an object of nobody": (lambda content: content["objects"]["object.0"].clear(), "'object.0' is of no rank"),
    "an object of a text": (lambda content: content["objects"]["object.0"][0].update(ranks="0"), "is of the ranks '0'"),
    "no skeleton": (lambda content: content["objects"]["object.0"][0].pop("skeleton"), "'object.0' has no skeleton"),
    "no streams": (lambda content: content["objects"].pop("random"), r"lies: its hashes hold, .*Missing: \['random'\]"),
    "a gap": (lambda content: weight(content)["parts"].clear(), "model.0/0.weight"),
}


def load_lies(folder):
    training = Training()
    training.step()
    training.accelerator.save_state(folder)
    before, (data,) = training.fingerprint(), [path for path in folder.iterdir() if path.is_dir()]
    manifest, index = (folder / "manifest.json").read_bytes(), (data / "index.json").read_bytes()
    said = {}
    for name, (change, _) in LIES.items():
        resealed(folder, change)
        said[name] = timed(lambda: training.accelerator.load_state(folder))
        (folder / "manifest.json").write_bytes(manifest)
        (data / "index.json").write_bytes(index)
    training.accelerator.load_state(folder)
    assert training.fingerprint() == before
    return said


def test_an_index_that_lies_under_hashes_that_hold_is_refused(tmp_path):
    (said,) = run_ranks(load_lies, 1, tmp_path)
    for name, (_, expected) in LIES.items():
        assert re.search(f"^CheckpointError: .*{expected}", said[name] or "LOADED", re.DOTALL), (name, said[name])


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
    "more optimizers": (
        partial(prepared, *ALL, "second optimizer", registered=1),
        "there are 2 optimizers here, and 1",
    ),
    "no scheduler": (
        partial(prepared, "model", "optimizer", registered=1),
        "there are 0 schedulers here, and 1 in the",
    ),
    "more schedulers": (
        partial(prepared, *ALL, "second scheduler", registered=1),
        "there are 2 schedulers here, and 1",
    ),
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


# Calls that not all ranks make


def call_on_rank_0(name, folder):
    """The others go on with the loop, or end."""
    training = Training()
    accelerator = training.accelerator
    training.step()
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        CALLS[name](accelerator, training.model, folder)
    else:
        training.step()
    accelerator.end_training()


CALLS = {
    "save_state()": lambda accelerator, model, folder: accelerator.save_state(folder),
    "load_state()": lambda accelerator, model, folder: accelerator.load_state(folder),
    "save_model()": lambda accelerator, model, folder: accelerator.save_model(model, folder),
    "get_state_dict()": lambda accelerator, model, folder: accelerator.get_state_dict(model),
}


def wait_on_rank_0(folder):
    training = Training()
    training.step()
    training.accelerator.save_state(folder, asynchronous=True)
    if training.accelerator.is_main_process:
        training.accelerator.wait_for_checkpoint()
    else:
        training.step()
    training.accelerator.end_training()


def save_on_rank_1_and_end(folder):
    training = Training()
    if not training.accelerator.is_main_process:
        training.accelerator.save_state(folder)


def save_at_different_steps(folder):
    training = Training()
    for step in range(3):
        training.step()
        if step == 1 + training.accelerator.process_index:
            training.accelerator.save_state(folder)


def save_and_load(folder):
    training = Training()
    training.accelerator.save_state(folder)
    accelerator = training.accelerator
    accelerator.save_state(folder) if accelerator.is_main_process else accelerator.load_state(folder)


def fatal_calls(folder):
    """How ranks end that do not call the same, by what they call."""
    jobs = {name: (call_on_rank_0, name, folder / name.strip("()")) for name in CALLS}
    jobs["wait_for_checkpoint()"] = wait_on_rank_0, folder / "wait"
    jobs["on rank 1"] = save_on_rank_1_and_end, folder / "one"
    jobs["steps"] = save_at_different_steps, folder / "steps"
    jobs["both"] = save_and_load, folder / "both"
    return dict(zip(jobs, forked_together(list(jobs.values()), 2), strict=True))


def test_a_call_on_some_ranks_only_ends_all_and_names_the_ranks_and_their_lines(tmp_path):
    (ends,) = run_ranks(fatal_calls, 1, tmp_path, timeout=110)
    for name, ranks in ends.items():
        assert all(ended.seconds < SOON for ended in ranks), (name, ranks)
        assert any(ended.code not in (0, -9) for ended in ranks), (name, ranks)
        output = "\n".join(ended.output for ended in ranks)
        assert "rank 0" in output, (name, output)
        assert "rank 1" in output, (name, output)
        assert "test_checkpoint_input.py, line " in output or name == "both", (name, output)
        assert (name if name.endswith("()") else "save_state()") in output, (name, output)


# Calls with wrong arguments, or at the wrong moment


class Stateful:
    """Gives back what it was given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Half:
    def state_dict(self):
        return {}


def refusals(root):
    """What is raised, by the call; after all of it the run is as before, and goes on."""
    training = Training()
    accelerator = training.accelerator
    training.step(STEPS)
    before = training.fingerprint()
    calls = {
        "pickled": lambda: accelerator.save_state(root / "a", safe_serialization=False),
        "unknown option of a save": lambda: accelerator.save_state(root / "a", max_shard_size="1GB"),
        "unknown option of a load": lambda: accelerator.load_state(root / "a", strict=False),
        "unknown option in a dict": lambda: accelerator.load_state(root / "a", load_kwargs={"strict": False}),
        "unknown mode": lambda: accelerator.save_state(root / "a", asynchronous="later"),
        "no folder to save": accelerator.save_state,
        "no folder to load": accelerator.load_state,
        "twice": lambda: accelerator.register_for_checkpointing(training.counter),
        "without state": lambda: accelerator.register_for_checkpointing(Counter(), Half(), 3),
        "no model": lambda: accelerator.save_model("model", root / "a"),
    }
    said = {name: timed(call) for name, call in calls.items()}
    assert training.fingerprint() == before
    assert not (root / "a").exists()
    accelerator.save_state(root / "b")
    accelerator.load_state(root / "b", map_location="cpu")
    assert training.fingerprint() == before
    return said


REFUSALS = {
    "pickled": r"ValueError: safe_serialization=False: a pickled checkpoint is never loaded",
    "unknown option of a save": r"Error: save_state\(\) .*max_shard_size",
    "unknown option of a load": r"Error: load_state\(\) .*strict",
    "unknown option in a dict": r"Error: load_state\(\) .*strict",
    "unknown mode": r"ValueError: save_state\(asynchronous='later'\): expected False, True, 'eager'",
    "no folder to save": r"ValueError: save_state\(\) was called without a folder. Type save_state\('my_checkpoint'\), or let",
    "no folder to load": r"ValueError: load_state\(\) was called without a folder, and checkpoints have no automatic names",
    "twice": r"ValueError: register_for_checkpointing\(\) was given a Counter that is registered already",
    "without state": r"ValueError: register_for_checkpointing\(\) takes .*: 1: a Half, 2: a int\. Give them these",
    "no model": r"save_model\(\) .*torch.nn.Module",
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_arguments_are_refused_before_anything_is_done(tmp_path, ranks):
    said = same_on_all(run_ranks(refusals, ranks, tmp_path))
    for name, expected in REFUSALS.items():
        assert re.search(expected, said[name] or "ACCEPTED"), (name, said[name])


def save_what_cannot_be_encoded(root, mode):
    """An object of the user's that has what JSON and safetensors cannot hold, on one rank only."""
    training = Training()
    accelerator = training.accelerator
    training.step(STEPS)
    accelerator.save_state(root)
    mine = Stateful(
        {"best": {"callbacks": [1, object()]}} if accelerator.process_index == accelerator.num_processes - 1 else {}
    )
    accelerator.register_for_checkpointing(mine)
    training.step()
    said = timed(lambda: accelerator.save_state(root, asynchronous=mode))
    waited = error_of(accelerator.wait_for_checkpoint)
    mine.state = {"best": 3}
    accelerator.save_state(root)
    mine.state = None
    accelerator.load_state(root)
    accelerator.wait_for_everyone()
    return said, waited, mine.state, len(names_in(root))


@pytest.mark.parametrize(("ranks", "mode"), [(1, False), (1, "lazy"), (2, False), (2, "eager")])
def test_what_cannot_be_encoded_is_named_with_its_path_and_leaves_the_previous(tmp_path, ranks, mode):
    said, waited, state, files = same_on_all(run_ranks(save_what_cannot_be_encoded, ranks, tmp_path, mode))
    assert said.startswith("CheckpointError: ")
    assert "object.1" in said
    assert re.search(r"best.*callbacks.*1", said)
    assert "object" in said
    assert (waited, state, files) == (None, {"best": 3}, 2)


class OnMeta(nn.Module):
    """Has a buffer without data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("ghost", torch.empty(3, device="meta"))


def save_what_has_no_data(root, mode):
    accelerator = Accelerator(cpu=True)
    model = OnMeta()
    accelerator.prepare(model, device_placement=[False])
    said = [timed(lambda: save_behind(accelerator, root, mode)) for _ in range(2)]
    model.ghost = torch.zeros(3)
    accelerator.save_state(root)
    accelerator.load_state(root)
    return said, len(names_in(root))


def save_behind(accelerator, folder, mode):
    accelerator.save_state(folder, asynchronous=mode)
    accelerator.wait_for_checkpoint()


@pytest.mark.parametrize("mode", [False, "eager", "lazy"])
def test_a_tensor_without_data_is_refused_and_the_next_save_is_not_disturbed(tmp_path, mode):
    (((first, second), files),) = run_ranks(save_what_has_no_data, 1, tmp_path, mode)
    assert first == second
    assert re.search(r"^CheckpointError: .*ghost' .* is on the meta device", first), first
    assert files == 2


def save_at_wrong_moments(root):
    """In the middle of a micro-batch, between backward and step, and where ranks stand at different places."""
    training = Training(gradient_accumulation_steps=3)
    accelerator, said = training.accelerator, []

    def save():
        said.append(timed(lambda: accelerator.save_state(root)))

    with accelerator.accumulate(training.model):
        save()
        accelerator.backward(training.model(torch.ones(1, 4)).sum())
    save()
    for micro_batch in range(2):
        with accelerator.accumulate(training.model):
            accelerator.backward(training.model(torch.ones(1, 4)).sum())
            if micro_batch == 1:
                save()
            training.optimizer.step()
    save()
    for _ in range(1 + accelerator.process_index):  # not yet synchronised, so nothing else notices
        with accelerator.accumulate(training.model):
            accelerator.backward(training.model(torch.ones(1, 4)).sum())
            training.optimizer.step()
    save()
    return said


def test_a_save_at_a_moment_from_which_no_run_could_go_on_is_refused(tmp_path):
    said = same_on_all(run_ranks(save_at_wrong_moments, 2, tmp_path))
    assert said[1] is said[3] is None
    assert said[0].startswith(
        "CheckpointError: save_state() was called inside accumulate() before accelerator.backward"
    )
    assert said[2].startswith("CheckpointError: save_state() was called between the backward that closes a window")
    assert "at different places of the loop: of their windows of accumulation the ranks have done [1, 2]" in said[4]


def save_into_own_folder(root):
    """Every rank has a disk of its own."""
    training = Training()
    accelerator = training.accelerator
    mine = root / str(accelerator.process_index)
    mine.mkdir(parents=True)
    os.chdir(mine)
    named = timed(lambda: accelerator.save_state("checkpoint"))
    said = timed(
        lambda: accelerator.save_state("/proc/self/cwd/checkpoint")
    )  # one name, and another place for each process
    return named, said, names_in(mine / "checkpoint") if (mine / "checkpoint").exists() else []


def load_from_own_folder(root):
    """Every rank finds another checkpoint, or none, under the same name."""
    training = Training()
    accelerator = training.accelerator
    for name in ("0", "1", "x/0"):
        accelerator.save_state(root / name)
    rank = accelerator.process_index
    return timed(lambda: accelerator.load_state(root / str(rank))), timed(
        lambda: accelerator.load_state(root / "x" / str(rank))
    )


def test_a_folder_that_the_ranks_do_not_share_is_refused_on_all(tmp_path):
    (named, said, left), (other_named, other_said, nothing) = run_ranks(save_into_own_folder, 2, tmp_path / "save")
    assert (named, said) == (other_named, other_said)
    assert re.search(r"another folder on each rank: .*save/0/checkpoint, .*save/1/checkpoint\. .* broadcast", named)
    assert re.search(r"rank 1 does not see it: the ranks do not share this folder\. .*save_on_each_node=True", said)
    assert left == nothing == []
    another, absent = same_on_all(run_ranks(load_from_own_folder, 2, tmp_path / "load"))
    assert re.search(r"load_state\(\) found another checkpoint on each rank \([0-9a-f]{16}, [0-9a-f]{16}\)", another)
    assert absent.startswith("FileNotFoundError: ")
    assert "(on rank 1)" in absent


def change_by_hand(root):
    """A weight that is changed while it is copied, without a step: the copying of another tensor is what takes long."""
    training = Training(width=8_000_000)
    accelerator = training.accelerator
    accelerator.save_state(root, asynchronous="lazy")
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(1.0)
    said = error_of(accelerator.wait_for_checkpoint)
    return said, names_in(root)


def test_weights_that_are_changed_by_hand_while_they_are_copied_make_the_save_fail(tmp_path):
    ((said, names),) = run_ranks(change_by_hand, 1, tmp_path)
    assert re.search(
        r"^CheckpointError: \d+ tensors were changed while save_state\(asynchronous='lazy'\) copied them, .*: .*model\.0/",
        said,
    )
    assert names == []


def naming(root):
    """Automatic names beside folders, and a folder without a checkpoint."""
    training = Training(project=automatic(root))
    accelerator = training.accelerator
    said = [timed(lambda: accelerator.save_state(root / "mine")), timed(accelerator.load_state)]
    accelerator.save_state()
    stranger = Training(project=automatic(root))
    said.append(timed(stranger.accelerator.save_state))
    return said


def test_automatic_names_and_a_folder_exclude_each_other_and_no_run_replaces_another(tmp_path):
    both, nothing, taken = same_on_all(run_ranks(naming, 2, tmp_path))
    assert re.search(
        r"ValueError: save_state\('.*mine'\) was given a folder, and automatic_checkpoint_naming=True", both
    )
    assert re.search(
        r"CheckpointError: The newest checkpoint in .*checkpoints was to be read, but it has none", nothing
    )
    assert re.search(
        r"CheckpointError: .*checkpoint_0 exists already, and this run has neither saved nor loaded", taken
    )
    with pytest.raises(ValueError, match="total_limit"):
        ProjectConfiguration(project_dir=str(tmp_path), total_limit=2)


def wrong_hooks(root):
    training = Training()
    accelerator = training.accelerator
    accelerator.save_state(root)
    said = []
    for register, call in (
        (accelerator.register_save_state_pre_hook, lambda: accelerator.save_state(root)),
        (accelerator.register_load_state_pre_hook, lambda: accelerator.load_state(root)),
    ):
        for hook in (
            lambda things, *more: things.append(nn.Linear(1, 1)),
            lambda *more: 1 / (1 - accelerator.process_index),
            lambda: None,
            lambda things, *more: more[0].append({}) if len(more) == 2 else things.clear() or things.append(3),
        ):
            with register(hook):
                said.append(timed(call))
    accelerator.save_state(root)
    accelerator.load_state(root)
    return said


def test_a_hook_that_fails_or_puts_something_in_is_named_on_every_rank(tmp_path):
    said = same_on_all(run_ranks(wrong_hooks, 2, tmp_path))
    assert said[1] == said[5]
    assert re.fullmatch(
        r"ZeroDivisionError: division by zero \(on rank 1\), at .*test_checkpoint_input.py, line \d+, in <lambda>: "
        r"lambda \*more: 1 / \(1 - accelerator.process_index\),",
        said[1],
    )
    assert "TypeError: " in said[2]
    assert "TypeError: " in said[6]
    assert "A hook of register_save_state_pre_hook() put a dict into `weights`" in said[3]
    assert "A hook of register_load_state_pre_hook() put a Linear into `models`" in said[4]
    assert "A hook of register_load_state_pre_hook() put a int into `models`" in said[7]
