"""Folders that are damaged, hostile or of another run are refused by name on every rank, and change nothing."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from peer_jobs import DATA, Counter, Net, groups, made
from safetensors.torch import load_file, save_file

from accel_compat.checkpoints import load_peer_state
from accel_core import Accelerator, CheckpointError
from accel_testing import run_ranks


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def saved(folder: Path, name: str, change) -> None:
    """A file of `torch.save`, changed."""
    value = torch.load(folder / name, weights_only=False)
    torch.save(change(value), folder / name)


def cut(path: Path, keep: float = 0.6) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def without(*names: str):
    return lambda state: {key: value for key, value in state.items() if key not in names}


def wider(folder: Path) -> None:
    save_file(Net(width=8).state_dict(), folder / "model.safetensors")


def renamed(folder: Path, name: str, other: str) -> None:
    (folder / name).rename(folder / other)


def more_groups(state: dict) -> dict:
    first, *others = state["param_groups"]
    return {
        **state,
        "param_groups": [{**first, "params": first["params"][:1]}, {**first, "params": first["params"][1:]}, *others],
    }


def of_another_shape(state: dict) -> dict:
    state["state"][0]["exp_avg"] = torch.zeros(9, 9)
    return state


def of_no_parameter(state: dict) -> dict:
    state["state"][77] = state["state"][0]
    return state


def of_sgd(state: dict) -> dict:
    optimizer = torch.optim.SGD(groups(Net()), lr=0.1)
    return optimizer.state_dict()


def add_index(folder: Path, names: list[str]) -> None:
    (folder / "model.safetensors").unlink()
    text = '{"weight_map": {' + ", ".join(f'"{number}": "{name}"' for number, name in enumerate(names)) + "}}"
    (folder / "model.safetensors.index.json").write_text(text)


def ndarray_of_objects(folder: Path) -> None:
    import numpy as np

    saved(folder, "custom_checkpoint_0.pkl", lambda state: {"array": np.array([{}, []], dtype=object)})


ALONE = "adamw_1"
DAMAGE = {
    "weights cut": (lambda f: cut(f / "model.safetensors"), "model.safetensors was to be read, but it is damaged"),
    "weights empty": (lambda f: cut(f / "model.safetensors", 0), "model.safetensors was to be read, but it is damaged"),
    "weights missing": (lambda f: (f / "model.safetensors").unlink(), "there are 1 models here, and 0 in the checkpoint"),
    "weights of another width": (wider, "'frozen.weight' is float32 [4, 4] here, and float32 [8, 4] in the checkpoint"),
    "weights of another dtype": (
        lambda f: save_file({k: v.double() for k, v in load_file(f / "model.safetensors").items()}, f / "model.safetensors"),
        "is float32 [4, 4] here, and float64",
    ),
    "a second model alone": (
        lambda f: renamed(f, "model.safetensors", "model_1.safetensors"),
        "of files like model.safetensors that of number 0 is missing; there are model_1.safetensors",
    ),
    "two models": (
        lambda f: shutil.copy(f / "model.safetensors", f / "model_1.safetensors"),
        "there are 1 models here, and 2 in the checkpoint",
    ),
    "index without files": (lambda f: add_index(f, ["a.safetensors"]), "but 'a.safetensors', which it names, is not beside it"),
    "index to elsewhere": (lambda f: add_index(f, ["../a.safetensors"]), "but '../a.safetensors', which it names, is not beside"),
    "index damaged": (
        lambda f: (add_index(f, []), (f / "model.safetensors.index.json").write_text("{}")),
        "model.safetensors.index.json was to be read, but it is damaged",
    ),
    "optimizer cut": (lambda f: cut(f / "optimizer.bin"), "optimizer.bin was to be read, but it is damaged"),
    "optimizer missing": (lambda f: (f / "optimizer.bin").unlink(), "there are 1 optimizers here, and 0 in the checkpoint"),
    "two optimizers": (
        lambda f: shutil.copy(f / "optimizer.bin", f / "optimizer_1.bin"),
        "there are 1 optimizers here, and 2 in the checkpoint",
    ),
    "optimizer without groups": (
        lambda f: saved(f, "optimizer.bin", without("param_groups")),
        "optimizer.bin was to be read, but 'param_groups' is missing in it",
    ),
    "optimizer with a state of its own": (
        lambda f: saved(f, "optimizer.bin", lambda state: {**state, "more": 1}),
        "it has ['more'] besides 'state' and 'param_groups'",
    ),
    "state of no parameter": (
        lambda f: saved(f, "optimizer.bin", of_no_parameter),
        "it has state of the parameters [77], which are in none of its groups",
    ),
    "other groups": (
        lambda f: saved(f, "optimizer.bin", more_groups),
        "the optimizer has 2 groups of parameters, and the checkpoint 3",
    ),
    "moments of another shape": (
        lambda f: saved(f, "optimizer.bin", of_another_shape),
        "the state '0.first.weight/exp_avg' has the shape [9, 9], and the parameter has [4, 4]",
    ),
    "another class": (
        lambda f: saved(f, "optimizer.bin", of_sgd),
        "the optimizer is a torch.optim:AdamW, and the checkpoint holds the state of a torch.optim:SGD",
    ),
    "scheduler missing": (lambda f: (f / "scheduler.bin").unlink(), None),  # as the run of an engine leaves it: with the warning
    "scheduler is a list": (lambda f: saved(f, "scheduler.bin", lambda state: [1]), "scheduler.bin was to be read, but it holds a list"),
    "another schedule": (
        lambda f: shutil.copy(DATA / "sgd_2" / "scheduler.bin", f),
        "scheduler.0 is a OneCycleLR with ['base_lrs', 'cycle_momentum', 'last_epoch', 'total_steps', 'use_beta1'], and the checkpoint has",
    ),
    "a pipe": (
        lambda f: ((f / "scheduler.bin").unlink(), os.mkfifo(f / "scheduler.bin"), (f / "optimizer.bin").unlink()),
        "there are 1 optimizers here, and 0 in the checkpoint",  # what would wait for a writer is no file of a save
    ),
    "a folder for a file": (
        lambda f: ((f / "optimizer.bin").unlink(), (f / "optimizer.bin").mkdir()),
        "there are 1 optimizers here, and 0 in the checkpoint",
    ),
    "objects missing": (
        lambda f: (f / "custom_checkpoint_0.pkl").unlink(),
        "there are 1 registered objects here, and 0 in the checkpoint",
    ),
    "array of objects": (ndarray_of_objects, "custom_checkpoint_0.pkl was to be read, but it names"),
    "streams cut": (lambda f: cut(f / "random_states_0.pkl"), "random_states_0.pkl was to be read, but it is damaged"),
    "streams of another version": (
        lambda f: saved(f, "random_states_0.pkl", without("random_state")),
        "random_states_0.pkl was to be read, but 'random_state' is missing in it",
    ),
    "stream of another kind": (
        lambda f: saved(f, "random_states_0.pkl", lambda state: {**state, "torch_manual_seed": torch.zeros(3)}),
        "random_states_0.pkl was to be read, but its random states are of another version, or damaged",
    ),
    "streams of rank 1 alone": (
        lambda f: renamed(f, "random_states_0.pkl", "random_states_1.pkl"),
        "of files like random_states_0.pkl that of number 0 is missing",
    ),
    "files of two saves": (
        lambda f: (shutil.copy(f / "random_states_0.pkl", f / "random_states_1.pkl"), saved(f, "random_states_1.pkl", lambda s: {**s, "step": 9})),
        "the files random_states_*.pkl are of the steps [3, 9]",
    ),
    "scale of another kind": (lambda f: torch.save({"a": 1}, f / "scaler.pt"), "scaler.pt was to be read, but it is no state of"),
    "shards of ranks": (
        lambda f: (f / "pytorch_model_fsdp_rank0.bin").touch(),
        "it has the shards of one rank, without their places",
    ),
}  # fmt: skip


def state_of(run) -> list:
    """Everything that a load could have changed."""
    _, model, optimizer, scheduler, loader, counter = run
    tensors = [each.clone() for each in model.state_dict().values()] + [torch.get_rng_state()]
    return [tensors, str(optimizer.state_dict()), str(scheduler.state_dict()), str(loader.state_dict()), counter.value]


def same(here: list, there: list) -> bool:
    return all(map(torch.equal, here[0], there[0])) and here[1:] == there[1:]


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(DATA / ALONE, tmp_path / "theirs")


def refused(folder: Path, name: str = ALONE) -> str:
    """The refusal, behind which all is as it was."""
    run = made(name)
    before = state_of(run)
    with pytest.raises(CheckpointError) as caught:
        load_peer_state(run[0], folder)
    assert same(state_of(run), before)
    return str(caught.value)


@pytest.mark.parametrize("damage", [name for name, (_, found) in DAMAGE.items() if found])
def test_what_is_wrong_is_named_and_nothing_is_changed(damage, folder):
    change, found = DAMAGE[damage]
    change(folder)
    assert found in refused(folder)


FILES = (
    "optimizer.bin",
    "scheduler.bin",
    "custom_checkpoint_0.pkl",
    "random_states_0.pkl",
    "pytorch_model.bin",
    "scaler.pt",
    "dl_state_dict.bin",
)


@pytest.mark.parametrize("name", FILES)
def test_code_in_a_pickle_is_named_and_never_runs(name, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil(tmp_path / "ran")}, folder / name)
    said = refused(folder)
    assert f"{name} was to be read, but it names {os.mkdir.__module__}.mkdir, which would have to be run" in said
    assert "Nothing of it was run." in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_bare_pickle_is_no_file_of_torch_and_never_runs(name, protocol, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=protocol))
    assert f"{name} was to be read, but " in refused(folder)
    assert not (tmp_path / "ran").exists()


def touch(path: str) -> None:
    Path(path).touch()


class Sampler:
    """Would call a function of its own when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.epoch = mark, 4

    def __reduce__(self):
        return touch, (str(self.mark),), {"epoch": 4}


def test_code_in_a_sampler_is_not_run_either(folder, tmp_path):
    torch.save(Sampler(tmp_path / "ran"), folder / "sampler.bin")
    run = made(ALONE)
    load_peer_state(run[0], folder)  # without a warning: the position of the loader is known
    assert run[4].state_dict()["epoch"] == 4
    torch.save(Evil(tmp_path / "ran"), folder / "sampler.bin")
    assert "sampler.bin was to be read, but it names" in refused(folder)
    assert not (tmp_path / "ran").exists()


SHARDED = "fsdp_sharded_2"
INDEX = "pytorch_model_fsdp_0/.metadata"


def with_code(folder: Path, mark: Path) -> None:
    """An index that names a function, in place of its first member."""
    (folder / INDEX).write_bytes(pickle.dumps({"state_dict_metadata": Evil(mark)}))


def with_code_in_values(folder: Path, mark: Path) -> None:
    """A value that is no tensor, of the same length in its file."""
    path = folder / "optimizer_0" / "__0_0.distcp"
    content = path.read_bytes()
    file = io.BytesIO()
    torch.save(Evil(mark), file)
    begins = [at for at in range(len(content)) if content.startswith(b"PK\x03\x04", at)]
    assert begins[0] == 0
    path.write_bytes(file.getvalue()[: len(content)] + content[len(file.getvalue()) :])


OF_SHARDED = {
    "no index": (lambda f, _: (f / INDEX).unlink(), "it has no .metadata: its save was not finished"),
    "index cut": (lambda f, _: cut(f / INDEX), ".metadata was to be read, but it is damaged, or of another version"),
    "index empty": (lambda f, _: cut(f / INDEX, 0), ".metadata was to be read, but it is damaged, or of another version"),
    "code in the index": (with_code, ".metadata was to be read, but it is damaged, or of another version"),
    "code in a value": (with_code_in_values, "__0_0.distcp was to be read, but it"),
    "file missing": (lambda f, _: (f / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink(), "__1_0.distcp, which its index names, is missing"),
    "file cut": (lambda f, _: cut(f / "pytorch_model_fsdp_0" / "__1_0.distcp"), "__1_0.distcp was to be read, but it"),
    "optimizer missing": (lambda f, _: shutil.rmtree(f / "optimizer_0"), "there are 1 optimizers here, and 0 in the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("damage", OF_SHARDED)
def test_sharded_folders_are_refused_alike(damage, tmp_path):
    folder = shutil.copytree(DATA / SHARDED, tmp_path / "theirs")
    change, found = OF_SHARDED[damage]
    change(folder, tmp_path / "ran")
    assert found in refused(folder, SHARDED)
    assert not (tmp_path / "ran").exists()


def refused_in_pairs(folder: Path) -> tuple[str, bool]:
    """The refusal on this rank, and whether all is as it was."""
    run = made("sgd_2")
    before = state_of(run)
    try:
        load_peer_state(run[0], folder)
    except CheckpointError as error:
        return str(error), same(state_of(run), before)
    return "", False


def test_every_rank_refuses(tmp_path):
    folder = shutil.copytree(DATA / "sgd_2", tmp_path / "theirs")
    saved(folder, "optimizer.bin", lambda state: {**state, "more": 1})
    assert [("besides 'state'" in said, kept) for said, kept in run_ranks(refused_in_pairs, 2, folder)] == [
        (True, True)
    ] * 2


def test_what_this_process_cannot_take_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        load_peer_state(Accelerator(cpu=True), tmp_path / "none")
    with pytest.raises(TypeError, match="strict"):
        load_peer_state(made(ALONE)[0], DATA / ALONE, strict=False)
    with pytest.warns(UserWarning, match="leaves as they are"):
        load_peer_state(made(ALONE)[0], DATA / ALONE, map_location="cpu")
    assert Counter().value == 0
