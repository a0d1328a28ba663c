"""A run goes on from a folder of the peer as the peer's own run did: same losses, learning rates, counts."""

from __future__ import annotations

import random
import shutil
import warnings
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
from peer_jobs import DATA, Counter, Net, Tied, data, facts, goes_on, groups, made, steps
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accel_compat.checkpoints import is_peer_folder, load_peer_state, newest_folder
from accel_core import Accelerator, CheckpointError
from accel_testing import run_ranks

ALONE = ("adamw_1", "sharded_safetensors_1", "scaler_1")
PAIRS = ("sgd_2", "adamw_2", "fsdp_sharded_2", "fsdp_full_2")
(COMMAND,) = entry_points(group="accel.commands", name="checkpoint")
main = COMMAND.load()
LEFT = "leaves as they are what is not in it: loader.0."


def check(name: str, results: list) -> None:
    expected = facts(name)
    for losses, rates, count, _ in results:
        np.testing.assert_allclose(losses, expected["losses"], rtol=1e-6)
        assert rates == pytest.approx(expected["lr"], rel=1e-12)
        assert count == expected.get("counter", 3)
    assert LEFT in results[0][3][0]


@pytest.mark.parametrize("name", ALONE)
def test_one_process_goes_on_with_the_losses_of_the_peer(name):
    check(name, [goes_on(name)])


@pytest.mark.parametrize("name", PAIRS)
def test_two_processes_go_on_with_the_losses_of_the_peer(name):
    check(name, run_ranks(goes_on, 2, name))


@pytest.mark.parametrize("name", ["sgd_2", "fsdp_sharded_2"])
def test_a_folder_is_loaded_under_another_strategy(name):
    check(name, run_ranks(goes_on, 2, name, strategy="fsdp"))


@pytest.mark.parametrize("name", ["adamw_1", "fsdp_sharded_2"])
def test_what_was_imported_goes_on_with_the_same_losses(name, tmp_path, capsys):
    assert main(["import", str(DATA / name), str(tmp_path / "new")]) == 0
    assert "optimizers            torch.optim.AdamW, 2 groups\n" in capsys.readouterr().out
    check(name, run_ranks(goes_on, facts(name)["processes"], name, folder=str(tmp_path / "new"), own=True))


def test_what_an_engine_saved_is_read_by_the_importer_of_its_package():
    pytest.importorskip("accel_deepspeed")
    losses, rates, count, said = goes_on("deepspeed_2")
    expected = facts("deepspeed_2")
    np.testing.assert_allclose(losses, [each[:1] for each in expected["losses"]], rtol=1e-6)
    assert (rates, count) == (pytest.approx(expected["lr"], rel=1e-12), expected["counter"])
    assert "imported from Accelerate (DeepSpeed 0.19" in said[0]


def state_of(folder, name="sgd_2", own=False):
    accelerator, model, optimizer, *_ = made(name)
    with pytest.warns(UserWarning, match=LEFT):
        accelerator.load_state(folder) if own else load_peer_state(accelerator, folder)
    return model.state_dict(), [optimizer.state[each].get("momentum_buffer") for each in model.parameters()]


def test_a_smaller_world_has_the_weights_and_moments_of_all_and_the_streams_of_its_ranks():
    weights, moments = state_of(DATA / "sgd_2")
    saved = torch.load(DATA / "sgd_2" / "pytorch_model.bin", weights_only=True)
    assert list(saved) == list(weights)
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
    theirs = torch.load(DATA / "sgd_2" / "optimizer.bin", weights_only=True)["state"]
    assert moments[:2] == [None, None]  # of the frozen layer
    assert all(torch.equal(moment, theirs[number]["momentum_buffer"]) for number, moment in enumerate(moments[2:]))


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.module.{}", "module._orig_mod.{}"])
def test_names_of_wrapped_and_compiled_models_are_those_of_the_model(wrapped, tmp_path):
    folder = shutil.copytree(DATA / "sgd_2", tmp_path / "theirs")
    saved = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save({wrapped.format(name): value for name, value in saved.items()}, folder / "pytorch_model.bin")
    weights, _ = state_of(folder)
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_model_whose_own_names_begin_like_a_wrapper_s_keeps_them(tmp_path):
    torch.save({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    shutil.copy(DATA / "sgd_2" / "random_states_0.pkl", tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Wrapper())
    load_peer_state(accelerator, tmp_path)
    assert torch.equal(model.module.weight, torch.ones(2, 2))


def streams_in(name: str) -> tuple[list[float], ...]:
    accelerator, *_ = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_peer_state(accelerator, DATA / name)
    return [torch.rand(()).item(), random.random(), np.random.rand()], accelerator.process_index


def test_in_a_larger_world_ranks_that_were_not_there_have_streams_of_their_own():
    alone = streams_in("adamw_1")[0]
    pair = run_ranks(streams_in, 2, "adamw_1")
    assert pair[0][0] == alone
    assert not set(pair[1][0]) & set(alone)


def several(folder):
    """As `several` in data/write_folders.txt."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(99)
    net, tied = Net(), Tied()
    one, two = torch.optim.AdamW(groups(net), lr=0.5), torch.optim.Adam(tied.parameters(), lr=0.5)
    loader = DataLoader(data(), batch_size=4)
    net, tied, one, two, loader = accelerator.prepare(net, tied, one, two, loader)
    accelerator.load_state(folder)
    losses = []
    for x, y in loader:
        loss = ((net(x) + tied(x) - y) ** 2).mean()
        for each in (one, two):
            each.zero_grad()
        accelerator.backward(loss)
        for each in (one, two):
            each.step()
        losses.append([loss.item()])
    assert tied.head.weight is tied.embed.weight
    return losses


@pytest.mark.parametrize("imported", [False, True])
def test_tied_weights_several_models_and_the_position_of_a_loader_are_restored(imported, tmp_path):
    folder = DATA / "several_1"
    if imported:
        assert main(["import", str(folder), str(tmp_path / "new")]) == 0
        folder = tmp_path / "new"
    np.testing.assert_allclose(several(folder), facts("several_1")["losses"], rtol=1e-6)


def test_a_loss_scale_is_restored_where_there_is_one():
    accelerator, *_ = made("scaler_1", mixed_precision="fp16")
    with pytest.warns(UserWarning, match=LEFT):
        load_peer_state(accelerator, DATA / "scaler_1")
    assert accelerator.scaler.state_dict()["scale"] == 1024.0


def test_a_run_that_scales_no_loss_leaves_the_scale_out():
    accelerator, *_ = made("scaler_1", mixed_precision="bf16")
    with pytest.warns(UserWarning, match=LEFT):
        load_peer_state(accelerator, DATA / "scaler_1")


def test_a_save_inside_a_window_begins_a_new_one_and_says_so():
    accelerator, *_ = made("adamw_1", gradient_accumulation_steps=2)
    with (
        pytest.warns(UserWarning, match=LEFT),
        pytest.warns(UserWarning, match="saved after 1 of 2 micro-batches of a window of accumulation"),
    ):
        load_peer_state(accelerator, DATA / "adamw_1")


def test_models_that_a_hook_loads_need_no_file(tmp_path):
    folder = shutil.copytree(DATA / "adamw_1", tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    accelerator, model, *_ = made("adamw_1")
    before = model.last.weight.detach().clone()
    accelerator.register_load_state_pre_hook(lambda models, where: models.clear())
    with pytest.warns(UserWarning, match=LEFT):
        load_peer_state(accelerator, folder)
    assert torch.equal(model.last.weight, before)


def test_a_model_that_a_hook_leaves_takes_the_file_of_its_place(tmp_path):
    folder = shutil.copytree(DATA / "several_1", tmp_path / "theirs")
    for name in ("optimizer.bin", "optimizer_1.bin", "model.safetensors"):
        (folder / name).unlink()
    (folder / "model_1.safetensors").rename(folder / "model.safetensors")  # as the peer's hooks leave it
    accelerator = Accelerator(cpu=True)
    net, tied = accelerator.prepare(Net(), Tied())
    before = net.last.weight.detach().clone()
    accelerator.register_load_state_pre_hook(lambda models, where: models.pop(0))
    load_peer_state(accelerator, folder)
    assert torch.equal(net.last.weight, before)
    assert torch.equal(tied.head.weight, load_file(folder / "model.safetensors")["embed.weight"])
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Tied(), Net())
    accelerator.register_load_state_pre_hook(lambda models, where: models.pop(0))
    with pytest.raises(CheckpointError, match=r"model\.0: the checkpoint has no 'frozen\.weight'"):
        load_peer_state(accelerator, folder)


def test_a_run_saves_and_loads_checkpoints_of_ours_afterwards(tmp_path):
    accelerator, *_, counter = made("adamw_1")
    with pytest.warns(UserWarning, match=LEFT):
        load_peer_state(accelerator, DATA / "adamw_1")
    accelerator.save_state(tmp_path / "ours")
    assert isinstance(counter, Counter)
    counter.value = 0
    accelerator.load_state(tmp_path / "ours")  # without a warning
    assert counter.value == 3
    assert not is_peer_folder(tmp_path / "ours")


def through_the_module(project: str) -> tuple[list, int]:
    """A script for the peer, which finds the newest folder of the peer by itself."""
    from accelerate import Accelerator as Theirs
    from accelerate.utils import ProjectConfiguration

    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True)
    accelerator = Theirs(cpu=True, project_config=configuration)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.03], total_steps=24)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state()
    batches = [data()[4 + 2 * number : 6 + 2 * number] for number in range(1, 4)]
    losses = steps(accelerator, model, optimizer, scheduler, batches, counter, engine=False)
    accelerator.save_state()
    accelerator.load_state()
    return losses, counter.value


def test_a_script_for_the_peer_goes_on_through_the_module_accelerate(tmp_path):
    shutil.copytree(DATA / "adamw_1", tmp_path / "checkpoints" / "checkpoint_4")
    ((losses, count),) = run_ranks(through_the_module, 1, str(tmp_path))
    np.testing.assert_allclose(losses, facts("adamw_1")["losses"], rtol=1e-6)
    assert count == 6
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]


def test_folders_of_the_peer_are_known_from_others(tmp_path):
    assert all(is_peer_folder(each) for each in DATA.iterdir() if each.is_dir())
    assert not is_peer_folder(tmp_path)
    assert not is_peer_folder(tmp_path / "none")
    (tmp_path / "model.safetensors").touch()  # weights alone are no checkpoint
    assert not is_peer_folder(tmp_path)
    for number in (2, 10):
        shutil.copytree(DATA / "adamw_1", tmp_path / f"checkpoint_{number}")
    assert newest_folder(tmp_path) == tmp_path / "checkpoint_10"
    assert newest_folder(tmp_path / "checkpoint_2") is None
