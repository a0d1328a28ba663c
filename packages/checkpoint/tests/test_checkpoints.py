"""`save_state` and `load_state` as a script sees them: folders, automatic names, limits, nodes, and what is registered."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from sharded_strategies import Rows
from torch import nn

from accel_core import (
    Accelerator,
    CheckpointError,
    CollectiveMismatchError,
    LocalSGD,
    ProjectConfiguration,
    World,
    load_checkpoint_in_model,
)
from accel_core.api.component import capture_random_state, restore_random_state
from accel_testing import run_ranks


@pytest.fixture(autouse=True)
def own_streams():
    before = capture_random_state(None)
    yield
    restore_random_state(before, None)


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def started(project=None, total_limit=None, *, value=0, **options):
    """A run with one model, whose weights say which step it has made."""
    config = project and ProjectConfiguration(
        project, automatic_checkpoint_naming=True, total_limit=total_limit, **options
    )
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Linear(1, 1, bias=False)
    accelerator.prepare(model)
    nn.init.constant_(model.weight, value)
    return accelerator, model


def saved_by(accelerator, model, values):
    for value in values:
        nn.init.constant_(model.weight, value)
        yield Path(accelerator.save_state())


def names(project):
    return sorted(os.listdir(Path(project) / "checkpoints"))


class TestAFolderOfOnesOwn:
    def test_it_is_returned_and_holds_the_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        accelerator, model = started(value=1)
        assert accelerator.save_state("some/where") == str(tmp_path / "some" / "where")
        nn.init.constant_(model.weight, 2)
        accelerator.load_state(Path("some") / "where")
        assert model.weight.item() == 1

    def test_saving_again_replaces_what_was_there_and_leaves_other_files(self, tmp_path):
        accelerator, model = started(value=1)
        accelerator.save_state(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "data-mine").mkdir()
        nn.init.constant_(model.weight, 2)
        accelerator.save_state(tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        kinds = sorted(name[:5] for name in os.listdir(tmp_path))
        assert kinds == ["data-", "data-", "manif", "notes"], "its own and one of ours"
        nn.init.constant_(model.weight, 3)
        accelerator.load_state(tmp_path)
        assert model.weight.item() == 2

    def test_one_has_to_be_given(self):
        accelerator, _ = started()
        with pytest.raises(
            ValueError, match=r"save_state\(\) was called without a folder\. Type save_state\('my_check"
        ):
            accelerator.save_state()
        with pytest.raises(ValueError, match=r"load_state\(\) was called without a folder"):
            accelerator.load_state()

    def test_options_that_do_nothing_are_refused(self, tmp_path):
        accelerator, _ = started()
        with pytest.raises(ValueError, match="a pickled checkpoint is never loaded"):
            accelerator.save_state(tmp_path / "a", safe_serialization=False)
        with pytest.raises(TypeError, match="exclude_frozen_parameters"):
            accelerator.save_state(tmp_path / "a", exclude_frozen_parameters=True)
        with pytest.raises(ValueError, match=r"asynchronous='later'\): expected False, True, 'eager'"):
            accelerator.save_state(tmp_path / "a", asynchronous="later")
        assert not (tmp_path / "a").exists()
        accelerator.save_state(tmp_path / "a")
        accelerator.load_state(tmp_path / "a", map_location="cpu")
        accelerator.load_state(tmp_path / "a", {"map_location": "cpu"})
        with pytest.raises(TypeError, match="strict"):
            accelerator.load_state(tmp_path / "a", strict=False)

    def test_weights_alone_can_be_read_from_it(self, tmp_path):
        accelerator, _ = started(value=7)
        accelerator.save_state(tmp_path / "a")
        model = nn.Linear(1, 1, bias=False)
        load_checkpoint_in_model(model, tmp_path / "a")
        assert model.weight.item() == 7


class TestAutomaticNames:
    def test_they_count_and_the_newest_is_that_of_the_highest_number(self, tmp_path):
        accelerator, model = started(tmp_path)
        folders = list(saved_by(accelerator, model, range(12)))
        assert folders == [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(12)]
        os.utime(folders[3])
        other, model = started(tmp_path, value=-1)
        other.load_state()
        assert model.weight.item() == 11, "and not 9, which would be last by the alphabet, or 3, which was touched last"
        assert other.save_state().endswith("checkpoint_12")

    def test_counting_begins_where_the_configuration_says(self, tmp_path):
        accelerator, _ = started(tmp_path, iteration=5)
        assert accelerator.save_state().endswith("checkpoint_5")
        assert accelerator.project_configuration.iteration == 6

    def test_a_second_run_in_the_same_project_has_to_load_first(self, tmp_path):
        list(saved_by(*started(tmp_path), [1, 2]))
        accelerator, model = started(tmp_path, value=3)
        with pytest.raises(
            CheckpointError, match=r"call load_state\(\) first to go on .* ProjectConfiguration\(iteration=2"
        ):
            accelerator.save_state()
        accelerator.load_state()
        assert model.weight.item() == 2
        assert accelerator.save_state().endswith("checkpoint_2")

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_of_two_runs_that_go_on_from_one_checkpoint_neither_replaces_or_removes_those_of_the_other(
        self, tmp_path, ahead
    ):
        list(saved_by(*started(tmp_path, 1), [1]))
        (first, weights), (second, _) = started(tmp_path, 1), started(tmp_path, 1)
        first.load_state()
        second.load_state()
        list(saved_by(first, weights, range(2, 2 + ahead)))
        with pytest.raises(CheckpointError, match=rf"checkpoint_{ahead} exists already, .* a project_dir of its own"):
            second.save_state()
        second.load_state()
        assert second.save_state().endswith(f"checkpoint_{ahead + 1}")

    @pytest.mark.parametrize("spelled", ["{project}", "{project}/../{name}", "{link}"])
    def test_from_an_older_checkpoint_saving_goes_on_above_the_highest(self, spelled, tmp_path):
        project = tmp_path / "project"
        list(saved_by(*started(project), [1, 2, 3]))
        (tmp_path / "link").symlink_to(project)
        accelerator, model = started(project)
        folder = spelled.format(project=project, name=project.name, link=tmp_path / "link")
        accelerator.load_state(f"{folder}/checkpoints/checkpoint_0/")
        assert model.weight.item() == 1
        assert accelerator.save_state().endswith("checkpoint_3")

    def test_one_of_another_name_beside_them_does_not_need_others(self, tmp_path):
        accelerator, _ = started(value=1)
        accelerator.save_state(tmp_path / "checkpoints" / "best")
        accelerator, model = started(tmp_path)
        accelerator.load_state(tmp_path / "checkpoints" / "best")
        assert model.weight.item() == 1
        assert accelerator.save_state().endswith("checkpoint_0")

    def test_one_of_another_project_does_not_open_this_one(self, tmp_path):
        list(saved_by(*started(tmp_path / "first"), [1]))
        list(saved_by(*started(tmp_path / "second"), [2, 3]))
        accelerator, model = started(tmp_path / "second")
        accelerator.load_state(tmp_path / "first" / "checkpoints" / "checkpoint_0")
        assert model.weight.item() == 1
        with pytest.raises(CheckpointError, match="checkpoint_0 exists already"):
            accelerator.save_state()

    def test_a_limit_removes_by_number_what_is_ours_and_nothing_else(self, tmp_path):
        accelerator, model = started(tmp_path, 2, iteration=8)
        root = tmp_path / "checkpoints"
        (root / "best").mkdir(parents=True)
        (root / "checkpoint_final").mkdir()
        (root / "checkpoint_3").mkdir()
        (root / "checkpoint_3" / "mine.txt").touch()
        (root / "notes.txt").touch()
        mine = ["best", "checkpoint_3", "checkpoint_final", "notes.txt"]
        for folder, expected in zip(
            saved_by(accelerator, model, range(4)), ([8], [8, 9], [9, 10], [10, 11]), strict=True
        ):
            assert folder.is_dir()
            assert names(tmp_path) == sorted(mine + [f"checkpoint_{number}" for number in expected])

    def test_a_limit_of_one_always_leaves_one(self, tmp_path):
        accelerator, model = started(tmp_path, 1)
        for number, _ in enumerate(saved_by(accelerator, model, range(3))):
            assert names(tmp_path) == [f"checkpoint_{number}"]
        other, model = started(tmp_path)
        other.load_state()
        assert model.weight.item() == 2

    def test_asynchronous_saves_count_and_are_limited_too(self, tmp_path):
        accelerator, _ = started(tmp_path, 2)
        folders = [accelerator.save_state(asynchronous=True) for _ in range(4)]
        accelerator.wait_for_checkpoint()
        assert [Path(folder).name for folder in folders] == [f"checkpoint_{number}" for number in range(4)]
        assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]

    def test_a_folder_beside_them_is_one_too_many(self, tmp_path):
        accelerator, _ = started(tmp_path)
        with pytest.raises(ValueError, match="was given a folder, and automatic_checkpoint_naming=True names them"):
            accelerator.save_state(tmp_path / "a")
        assert not os.listdir(tmp_path)

    def test_where_there_is_none_yet_that_is_said(self, tmp_path):
        accelerator, _ = started(tmp_path)
        with pytest.raises(CheckpointError, match="it has none. Pass a folder to load_state"):
            accelerator.load_state()

    def test_an_unfinished_save_is_passed_over_and_its_number_not_used_again(self, tmp_path):
        list(saved_by(*started(tmp_path), [1, 2]))
        (tmp_path / "checkpoints" / "checkpoint_2" / "data-0123456789abcdef").mkdir(parents=True)
        accelerator, model = started(tmp_path)
        accelerator.load_state()
        assert model.weight.item() == 2
        assert accelerator.save_state().endswith("checkpoint_3")


class TestRegisteredObjects:
    def test_they_come_back_in_the_order_of_registration(self, tmp_path):
        accelerator, _ = started()
        accelerator.register_for_checkpointing(Counter(1), Counter(2))
        accelerator.register_for_checkpointing(Counter(3))
        accelerator.save_state(tmp_path / "a")
        other, _ = started()
        counters = [Counter(), Counter(), Counter()]
        other.register_for_checkpointing(*counters)
        other.load_state(tmp_path / "a")
        assert [each.value for each in counters] == [1, 2, 3]

    def test_fewer_or_more_of_them_do_not_fit(self, tmp_path):
        accelerator, _ = started()
        accelerator.register_for_checkpointing(Counter())
        accelerator.save_state(tmp_path / "a")
        other, _ = started()
        with pytest.raises(CheckpointError, match="there are 0 registered objects here, and 1 in the checkpoint"):
            other.load_state(tmp_path / "a")

    def test_what_has_no_state_or_is_known_already_is_refused(self):
        accelerator, _ = started()
        with pytest.raises(ValueError, match=r"which these have not: 1: a int, 2: a dict\. Give them these"):
            accelerator.register_for_checkpointing(Counter(), 3, {})
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        with pytest.raises(ValueError, match="a Counter that is registered already, and would be saved twice"):
            accelerator.register_for_checkpointing(counter)
        accelerator.register_for_checkpointing(Counter())

    def test_a_state_that_cannot_be_encoded_is_named_and_what_was_saved_before_stays(self, tmp_path):
        accelerator, model = started(value=1)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        accelerator.save_state(tmp_path / "a")
        counter.value = {"lock": [object()]}
        with pytest.raises(CheckpointError, match=r"object\.0.*state\['value'\]\['lock'\]\[0\]"):
            accelerator.save_state(tmp_path / "a")
        nn.init.constant_(model.weight, 2)
        accelerator.load_state(tmp_path / "a")
        assert (model.weight.item(), counter.value) == (1, 0)


def on_two_nodes(root, strategy=None):
    """Each rank is a node with a file system of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    world = World.current(cpu=True)
    project = f"{root}/node-{world.rank}"
    config = ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=1, save_on_each_node=True)
    accelerator = Accelerator(cpu=True, project_config=config, strategy=strategy)
    layers = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layers, optimizer)
    return accelerator, model, layers, optimizer, project


def save_on_each_node(root):
    accelerator, model, layers, optimizer, project = on_two_nodes(root)
    counter = Counter(accelerator.process_index)
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(accelerator.process_index)
    for mode in (False, "eager", "lazy"):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        folder = accelerator.save_state(asynchronous=mode)
        assert folder.startswith(project)
        accelerator.wait_for_checkpoint()
        assert names(project) == [Path(folder).name]
    files = sorted(path.name for path in Path(folder).glob("data-*/*"))
    weight = layers.weight.detach().clone()
    nn.init.zeros_(layers.weight)
    counter.value = -1
    drawn = torch.rand(3)
    accelerator.load_state()
    assert torch.equal(layers.weight, weight)
    assert counter.value == accelerator.process_index
    assert torch.equal(torch.rand(3), drawn), (
        "each rank has its own random streams, though one rank wrote those of both"
    )
    accelerator.end_training()
    return files, weight


def refuse_on_each_node(root):
    accelerator, *_, project = on_two_nodes(root, Rows())
    with pytest.raises(CheckpointError) as caught:
        accelerator.save_state()
    return str(caught.value), [path.name for path in Path(project).rglob("*.json")]


def missing_on_one_node(root):
    """Rank 1 is a machine that came in for another one: its disk is empty."""
    accelerator, *_ = on_two_nodes(root)
    assert not accelerator.load_state(missing_ok=True), "the first start"
    accelerator.save_state()
    if accelerator.process_index == 1:
        shutil.rmtree(f"{root}/node-1/checkpoints")
    with pytest.raises(
        CheckpointError, match=r"The newest checkpoint in .* was to be read, but it has none\. .*\(on rank 1\)"
    ):
        accelerator.load_state(missing_ok=True)
    with pytest.raises(CollectiveMismatchError, match="load_state"):
        accelerator.load_state(missing_ok=accelerator.process_index == 0)


class TestAStartThatMayBeTheFirst:
    @pytest.mark.parametrize("automatic", [False, True])
    def test_a_run_resumes_if_there_is_something_and_begins_if_there_is_nothing(self, tmp_path, automatic):
        folder = None if automatic else tmp_path / "a"
        for expected in (0, 1, 2):
            accelerator, model = started(tmp_path if automatic else None)
            assert accelerator.load_state(folder, missing_ok=True) is (expected > 0)
            assert model.weight.item() == expected
            nn.init.constant_(model.weight, expected + 1)
            accelerator.save_state(folder)
        assert accelerator.load_state(folder) is True

    def test_a_save_that_was_killed_is_nothing(self, tmp_path):
        (tmp_path / "checkpoints" / "checkpoint_0" / f"data-{'0' * 16}").mkdir(parents=True)
        accelerator, _ = started(tmp_path)
        assert not accelerator.load_state(missing_ok=True)
        assert not accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0", missing_ok=True)
        (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
        assert not accelerator.load_state(tmp_path / "checkpoints", missing_ok=True), (
            "files of the user's are no checkpoint"
        )
        assert accelerator.save_state().endswith("checkpoint_0")

    @pytest.mark.parametrize("automatic", [False, True])
    def test_what_is_damaged_or_of_another_library_is_something(self, tmp_path, automatic):
        accelerator, _ = started(tmp_path)
        folder = Path(accelerator.save_state())
        (index,) = folder.glob("data-*/index.json")
        index.unlink()
        other, _ = started(tmp_path)
        with pytest.raises(CheckpointError, match="index.json is missing"):
            other.load_state(None if automatic else folder, missing_ok=True)
        shutil.rmtree(folder)
        folder.mkdir()
        for name in (".metadata", "__0_0.distcp"):
            (folder / name).touch()
        with pytest.raises(CheckpointError, match="manifest"):
            other.load_state(None if automatic else folder, missing_ok=True)

    def test_a_folder_still_has_to_be_given(self):
        accelerator, _ = started()
        with pytest.raises(ValueError, match=r"load_state\(\) was called without a folder"):
            accelerator.load_state(missing_ok=True)

    def test_what_one_node_lacks_is_an_error_and_so_is_another_call_there(self, tmp_path):
        run_ranks(missing_on_one_node, 2, str(tmp_path))


class TestNodes:
    def test_each_holds_a_full_set_in_its_own_folder(self, tmp_path):
        (first, weight), (second, _) = run_ranks(save_on_each_node, 2, str(tmp_path))
        assert first == ["index.json", "rank-00000.safetensors"]
        assert second == ["index.json", "rank-00001.safetensors"]
        for node in (0, 1):
            layers = nn.Linear(2, 2)
            load_checkpoint_in_model(layers, tmp_path / f"node-{node}" / "checkpoints" / "checkpoint_2")
            assert torch.equal(layers.weight, weight)

    def test_a_strategy_whose_state_is_spread_over_nodes_is_refused(self, tmp_path):
        reports = run_ranks(refuse_on_each_node, 2, str(tmp_path))
        for message, files in reports:
            assert "save_on_each_node" in message, message
            assert files == []


def run_on_two_ranks(root):
    accelerator, model = started(root, 2, value=1)
    counter = Counter(accelerator.process_index)
    accelerator.register_for_checkpointing(counter)
    folders = []
    for step in range(3):
        nn.init.constant_(model.weight, step)
        folders.append(accelerator.save_state(asynchronous=(False, "eager", "lazy")[step]))
        accelerator.wait_for_checkpoint()
    nn.init.constant_(model.weight, 9)
    accelerator.load_state()
    with pytest.raises(ValueError, match="was given a folder"):
        accelerator.save_state("elsewhere")
    accelerator.end_training()
    return folders, model.weight.item(), accelerator.project_configuration.iteration, counter.value


def test_automatic_names_are_the_same_on_all_ranks(tmp_path):
    first, second = run_ranks(run_on_two_ranks, 2, str(tmp_path))
    assert first[:3] == second[:3]
    assert first[1:] == (2.0, 3, 0)
    assert second[3] == 1
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]


def test_nothing_is_warned_of_on_the_way(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator, _ = started(tmp_path, 1)
        accelerator.save_state()
        accelerator.save_state(asynchronous="lazy")
        accelerator.load_state()
        accelerator.end_training()


def _saves_under_local_sgd(folder):
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        _local_step(accelerator, model, optimizer, local)
        with pytest.raises(CheckpointError, match="inside LocalSGD, 1 steps after the last average"):
            accelerator.save_state(folder)
        _local_step(accelerator, model, optimizer, local)
        with pytest.warns(UserWarning, match="The optimizer state of rank 0 is saved, for all ranks"):
            accelerator.save_state(folder)
    with pytest.warns(UserWarning, match="save_state\\(\\) was called after LocalSGD"):
        accelerator.save_state(folder)
    expected = [parameter.clone() for parameter in model.parameters()]
    momenta = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model.parameters()]
    accelerator.load_state(folder)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), expected, strict=True))
    return momenta, [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]


def _local_step(accelerator, model, optimizer, local):
    accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
    optimizer.step()
    optimizer.zero_grad()
    local.step()


def test_ranks_that_train_apart_are_saved_only_where_they_have_met(tmp_path):
    (first, restored), (second, also) = run_ranks(_saves_under_local_sgd, 2, str(tmp_path / "checkpoint"))
    assert all(torch.equal(*each) for each in zip(first, restored, strict=True))
    assert all(torch.equal(*each) for each in zip(first, also, strict=True)), (
        "the optimizer is that of rank 0, all of it"
    )
    assert not torch.equal(first[0], second[0])


class _Count:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def _registers_on_the_main_process(folder):
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    if accelerator.is_main_process:
        accelerator.register_for_checkpointing(_Count())
    with pytest.raises(
        CheckpointError, match=r"prepared and registered the same:\n  object\.0 on ranks \[0\]\nCall prepare"
    ):
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the main process takes away what it has made
    return sorted(path.name for path in Path(folder).iterdir())


def test_what_is_registered_on_some_ranks_only_is_refused(tmp_path):
    assert run_ranks(_registers_on_the_main_process, 2, str(tmp_path)) == [[], []]


def _hooks_on_the_main_process(folder):
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    called = []
    if accelerator.is_main_process:
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: called.append(len(models)))
    accelerator.save_state(folder)
    return called


def test_a_hook_may_be_registered_on_the_main_process_only(tmp_path):
    assert run_ranks(_hooks_on_the_main_process, 2, str(tmp_path / "a")) == [[1], []]


def _some_skip_the_backward(folder):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        if accelerator.is_main_process:
            accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.save_state(folder)
    before = [None if each.grad is None else each.grad.tolist() for each in model.parameters()]
    accelerator.load_state(folder)
    return before, [None if each.grad is None else each.grad.tolist() for each in model.parameters()]


def test_a_rank_that_left_a_backward_out_has_a_gradient_of_zero(tmp_path):
    first, second = run_ranks(_some_skip_the_backward, 2, str(tmp_path / "a"))
    assert first[0] == first[1]
    assert second == ([None, None], [[[0.0]], [0.0]])
