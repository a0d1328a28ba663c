"""The user's own hooks around `save_state` and `load_state`: what they are given, and what is left to them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_strategies import Rows
from torch import nn

from accel_core import Accelerator, CheckpointError, CollectiveMismatchError
from accel_core.api.component import capture_random_state, restore_random_state
from accel_testing import run_ranks


@pytest.fixture(autouse=True)
def own_streams():
    before = capture_random_state(None)
    yield
    restore_random_state(before, None)


class Net(nn.Module):
    """Tied weights and a buffer."""

    def __init__(self, width=2):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


class Pretrained(Net):
    """Saves and loads itself, as models of the hub do."""

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "own.bin")

    def from_pretrained(self, folder):
        self.load_state_dict(torch.load(Path(folder) / "own.bin", weights_only=True))


def prepared(*models, **options):
    accelerator = Accelerator(cpu=True, **options)
    for model in models:
        accelerator.prepare(model)
    return accelerator


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model):
    return model.first.weight[0, 0].item()


def test_a_save_hook_is_given_the_users_models_their_weights_and_the_folder(tmp_path):
    models = [Net(), Net(3)]
    accelerator = prepared(*models)
    seen = []

    def hook(models, weights, output_dir):
        assert not (Path(output_dir) / "manifest.json").exists(), "nothing is published yet"
        Path(output_dir, "mine.txt").write_text("written by a hook")
        seen.append((list(models), [dict(each) for each in weights], output_dir))

    accelerator.register_save_state_pre_hook(hook)
    folder = accelerator.save_state(tmp_path / "a")
    ((given, weights, output_dir),) = seen
    assert all(one is other for one, other in zip(given, models, strict=True))
    assert output_dir == folder == str(tmp_path / "a")
    for model, found in zip(models, weights, strict=True):
        expected = accelerator.get_state_dict(model)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(tensor.requires_grad for tensor in found.values())
    assert Path(folder, "mine.txt").read_text() == "written by a hook"
    accelerator.load_state(folder)


def test_models_that_hooks_take_are_theirs_to_save_and_to_load(tmp_path):
    """As scripts of diffusers and peft do it: one is saved by itself, the other stays."""

    def saves(models, weights, output_dir):
        for index, model in reversed(list(enumerate(models))):
            if isinstance(model, Pretrained):
                model.save_pretrained(os.path.join(output_dir, "pretrained"))
                weights.pop(index)

    def loads(models, input_dir):
        for _ in range(len(models)):
            model = models.pop()
            if isinstance(model, Pretrained):
                model.from_pretrained(os.path.join(input_dir, "pretrained"))
            else:
                models.insert(0, model)

    def run(*values):
        models = [fill(Pretrained(), values[0]), fill(Net(), values[1])]
        accelerator = prepared(*models)
        accelerator.register_save_state_pre_hook(saves)
        return accelerator, models

    accelerator, _ = run(1, 2)
    for mode in (False, "eager", "lazy"):
        folder = accelerator.save_state(tmp_path / "a", asynchronous=mode)
        accelerator.wait_for_checkpoint()
        (part,) = Path(folder).glob("data-*/rank-00000.safetensors")
        assert not [name for name in load_file(part) if name.startswith("model.0/")], "it is not written twice"

    other, models = run(3, 4)
    with pytest.raises(
        CheckpointError, match=r"model\.0 was left to a hook of register_save_state_pre_hook\(\), and no ho"
    ):
        other.load_state(folder)
    assert [value_of(each) for each in models] == [3, 4]
    other.register_load_state_pre_hook(loads)
    other.load_state(folder)
    assert [value_of(each) for each in models] == [1, 2]


def test_all_weights_may_be_popped_one_after_another(tmp_path):
    models = [fill(Net(), 1), fill(Net(), 2)]
    accelerator = prepared(*models)

    def saves(models, weights, output_dir):
        for number, model in enumerate(models):
            save_file(
                dict(weights[0]) | {"second.weight": model.second.weight.detach().clone()}, f"{output_dir}/{number}"
            )
            weights.pop(0)
        assert weights == []

    def loads(models, input_dir):
        for number in reversed(range(len(models))):
            models.pop().load_state_dict(load_file(f"{input_dir}/{number}"))

    accelerator.register_save_state_pre_hook(saves)
    accelerator.register_load_state_pre_hook(loads)
    accelerator.save_state(tmp_path / "a")
    for model in models:
        fill(model, 9)
    accelerator.load_state(tmp_path / "a")
    assert [value_of(each) for each in models] == [1, 2]


def test_hooks_run_in_the_order_of_registration_until_their_handles_are_removed(tmp_path):
    accelerator = prepared(Net())
    calls = []
    saving = [accelerator.register_save_state_pre_hook(lambda *_, n=n: calls.append(f"save {n}")) for n in range(3)]
    loading = [accelerator.register_load_state_pre_hook(lambda *_, n=n: calls.append(f"load {n}")) for n in range(2)]
    accelerator.save_state(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")
    assert calls == ["save 0", "save 1", "save 2", "load 0", "load 1"]
    saving[1].remove()
    loading[0].remove()
    loading[0].remove()
    calls.clear()
    accelerator.save_state(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")
    assert calls == ["save 0", "save 2", "load 1"]
    with saving[0]:
        pass
    calls.clear()
    accelerator.save_state(tmp_path / "a")
    assert calls == ["save 2"]


def test_a_model_that_is_left_to_a_load_hook_alone_keeps_what_the_hook_gave_it(tmp_path):
    model = fill(Net(), 1)
    accelerator = prepared(model)
    accelerator.save_state(tmp_path / "a")
    accelerator.register_load_state_pre_hook(lambda models, _: fill(models.pop(), 5))
    accelerator.load_state(tmp_path / "a")
    assert value_of(model) == 5


def test_what_puts_in_strangers_is_refused(tmp_path):
    model = fill(Net(), 1)
    accelerator = prepared(model)
    accelerator.save_state(tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.append({}))
    with pytest.raises(
        CheckpointError, match=r"put a dict into `weights`. It may take entries out \(weights\.pop\(\)\)"
    ):
        accelerator.save_state(tmp_path / "a")
    handle.remove()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before, "what was saved before is untouched"
    accelerator.register_load_state_pre_hook(lambda models, _: models.append(nn.Linear(1, 1)))
    with pytest.raises(CheckpointError, match="put a Linear into `models`, which was not prepared"):
        accelerator.load_state(tmp_path / "a")


def test_a_hook_that_raises_ends_the_save_and_leaves_what_was_there(tmp_path):
    model = fill(Net(), 1)
    accelerator = prepared(model)
    accelerator.save_state(tmp_path / "a")
    fill(model, 2)

    def fails(models, weights, output_dir):
        raise KeyError("mine")

    handle = accelerator.register_save_state_pre_hook(fails)
    for mode in (False, "lazy"):
        with pytest.raises(KeyError, match="mine"):
            accelerator.save_state(tmp_path / "a", asynchronous=mode)
    handle.remove()
    accelerator.load_state(tmp_path / "a")
    assert value_of(model) == 1
    assert len(list((tmp_path / "a").glob("data-*"))) == 1


def popping_on_the_main_process(folder, strategy):
    """A hook that saves on the main process alone, and takes entries out there alone."""
    model = fill(Pretrained(4), 1)
    accelerator = Accelerator(cpu=True, strategy=strategy and strategy())
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def saves(models, weights, output_dir):
        if accelerator.is_main_process:
            for each in models:
                each.save_pretrained(output_dir)
                weights.pop()

    def loads(models, input_dir):
        while models:
            models.pop().from_pretrained(input_dir)

    accelerator.register_save_state_pre_hook(saves)
    handle = accelerator.register_load_state_pre_hook(loads)
    accelerator.save_state(folder)
    fill(model, 2)
    accelerator.load_state(folder)
    assert value_of(model) == 1

    handle.remove()
    accelerator.register_load_state_pre_hook(lambda models, _: accelerator.is_main_process and models.pop())
    with pytest.raises(CheckpointError, match=re.escape("by rank: [[0], []]). Take them out on every rank")):
        accelerator.load_state(folder)
    accelerator.end_training()


def raising_on_one_rank(folder):
    model = fill(Net(), 1)
    accelerator = prepared(model)
    accelerator.save_state(folder)

    def fails(*_):
        if accelerator.process_index == 1:
            raise ValueError("a disk of my own is full")

    handle = accelerator.register_save_state_pre_hook(fails)
    with pytest.raises(ValueError, match=r"a disk of my own is full \(on rank 1\)"):
        accelerator.save_state(folder)
    handle.remove()
    handle = accelerator.register_load_state_pre_hook(fails)
    with pytest.raises(ValueError, match=r"a disk of my own is full \(on rank 1\)"):
        accelerator.load_state(folder)
    handle.remove()
    accelerator.load_state(folder)
    accelerator.end_training()


@pytest.mark.parametrize("strategy", [None, Rows])
def test_taking_out_on_the_main_process_is_enough_when_saving(strategy, tmp_path):
    run_ranks(popping_on_the_main_process, 2, str(tmp_path / "a"), strategy)


def test_a_hook_that_raises_on_one_rank_raises_on_all(tmp_path):
    run_ranks(raising_on_one_rank, 2, str(tmp_path / "a"))


def reading_lazily(folder):
    """Under a strategy that shards, a tensor is gathered when it is read, and no other is."""
    torch.manual_seed(0)
    model = Net(4)
    accelerator = Accelerator(cpu=True, strategy=Rows())
    trained, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(trained(torch.randn(3, 4)).pow(2).sum())
    optimizer.step()
    gathered = []

    def hook(models, weights, output_dir):
        before = [parameter.data_ptr() for parameter in models[0].parameters()]
        (found,) = weights
        assert list(found) == list(models[0].state_dict())
        assert len(found) == len(models[0].state_dict())
        assert "first.weight" in found
        gathered.append(found["first.weight"])
        gathered.append(found["second.weight"])
        gathered.append(found["norm.running_mean"])
        with pytest.raises(KeyError, match="third"):
            found["third"]
        assert [parameter.data_ptr() for parameter in models[0].parameters()] == before

    handle = accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(folder)
    handle.remove()
    expected = model.state_dict()
    nothing, one, everything = (gathers(accelerator, folder, names) for names in ((), ("first.bias",), tuple(expected)))
    assert nothing < one < everything
    for name, tensor in zip(("first.weight", "second.weight", "norm.running_mean"), gathered, strict=True):
        assert torch.equal(tensor, expected[name]), name
    accelerator.end_training()


def gathers(accelerator, folder, names):
    """How many collectives a save makes in which a hook reads these names."""
    reads = accelerator.register_save_state_pre_hook(lambda _, weights, __: [weights[0][name] for name in names])
    with reads, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accelerator.save_state(folder)
    return sum(each.name.startswith("gloo:") for each in profile.events())


def reading_on_one_rank(folder):
    """What a hook reads is gathered, so a hook that reads on one rank alone is told."""
    model = fill(Net(4), 1)
    accelerator = Accelerator(cpu=True, strategy=Rows())
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    alone = accelerator.register_save_state_pre_hook(lambda _, w, __: accelerator.is_main_process and dict(w[0]))
    message = r"rank 0 waits to read 'first\.weight'\n  rank 1 waits for the hooks to have saved\n.* let hooks read the same names in"
    with alone, pytest.raises(CollectiveMismatchError, match=message):
        accelerator.save_state(folder)
    names = ("first.weight", "first.bias") if accelerator.is_main_process else ("first.bias", "first.weight")
    crossed = accelerator.register_save_state_pre_hook(lambda _, weights, __: [weights[0][name] for name in names])
    message = r"rank 0 waits to read 'first\.weight'\n  rank 1 waits to read 'first\.bias'"
    with crossed, pytest.raises(CollectiveMismatchError, match=message):
        accelerator.save_state(folder)
    accelerator.save_state(folder)
    accelerator.end_training()


def test_only_what_is_read_is_gathered(tmp_path):
    run_ranks(reading_lazily, 2, str(tmp_path / "a"))


def test_reading_what_is_spread_on_one_rank_alone_raises_on_all(tmp_path):
    run_ranks(reading_on_one_rank, 2, str(tmp_path / "a"))
