"""Checkpoints of other libraries: how they become neutral ones, and what a load makes of what is not in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_jobs import Counter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_checkpoint import ForeignCheckpoint, ForeignOptimizer, flat_range, pieces_of
from accel_checkpoint.importing import command, opened
from accel_checkpoint.importing.foreign import write_foreign
from accel_checkpoint.inspection.command import main
from accel_core import Accelerator, CheckpointError
from accel_core.api.component import capture_random_state, how_to_install
from accel_core.api.layouts import Alias, Elementwise, Replicated

WEIGHT = torch.arange(12.0).view(3, 4)
KIND = "torch.optim:SGD"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.again = self.weight
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return x @ self.weight


def shard(start: int, stop: int) -> Elementwise:
    return Elementwise(
        (3, 4), torch.float32, tuple(pieces_of(flat_range((3, 4), start, stop), WEIGHT.flatten()[start:stop]))
    )


def foreign(**changes) -> ForeignCheckpoint:
    """A weight that two files have a part of each, a buffer, a tie, and an SGD with momentum."""
    group = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9).param_groups[0]
    options = {key: value for key, value in group.items() if key != "params"}

    def part(start: int, stop: int, **others) -> dict:
        weight = shard(start, stop)
        return {"model.0": {"weight": weight, **others}, "optimizer.0": {"0.weight/momentum_buffer": weight}}

    parts = [lambda: part(0, 6, mean=Replicated(torch.ones(2)), again=Alias("weight")), lambda: part(6, 12)]
    found = {
        "origin": "Toy 1.2",
        "facts": {"form": "of two"},
        "parts": parts,
        "optimizers": [ForeignOptimizer(KIND, [{**options, "names": ["0.weight"]}])],
        "backwards": 7,
    }
    return ForeignCheckpoint(**{**found, **changes})


@pytest.fixture
def written(tmp_path) -> Path:
    write_foreign(foreign(), tmp_path / "new", lambda line: None)
    return tmp_path / "new"


def prepared(*others):
    accelerator = Accelerator(cpu=True)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, model, *accelerator.prepare(model, optimizer, *others)[1:]


def test_what_is_there_is_restored_and_the_rest_is_left_with_one_warning(written):
    data = DataLoader(TensorDataset(torch.arange(8)))
    accelerator, model, optimizer, _, schedule = prepared(
        data, torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), lambda step: 1.0)
    )
    counter = Counter()
    counter.value = 3
    accelerator.register_for_checkpointing(counter)
    streams, epoch = torch.get_rng_state(), schedule.state_dict()
    left = "imported from Toy 1.2, and leaves as they are what is not in it: loader.0, scheduler.0, object.0, the random streams"
    with pytest.warns(UserWarning, match=left) as caught:
        accelerator.load_state(written)
    assert len(caught) == 1
    assert torch.equal(model.weight, WEIGHT)
    assert model.mean.tolist() == [1.0, 1.0]
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], WEIGHT)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(torch.get_rng_state(), streams)
    assert (counter.value, schedule.state_dict()) == (3, epoch)


def test_a_run_goes_on_from_it_and_saves_whole_checkpoints(written, tmp_path):
    accelerator, model, optimizer = prepared()
    with pytest.warns(UserWarning, match="not in it: the random streams"):
        accelerator.load_state(written)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "next")
    accelerator.load_state(tmp_path / "next")  # without a warning


def test_a_scheduler_that_is_there_is_restored(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    theirs = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    theirs.step()
    write_foreign(foreign(schedulers=[theirs.state_dict()]), tmp_path / "new", lambda line: None)
    ours = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), lambda step: 1.0)
    accelerator, _, _, ours = prepared(ours)
    with pytest.warns(UserWarning, match="not in it: the random streams"):
        accelerator.load_state(tmp_path / "new")
    assert ours.state_dict()["last_epoch"] == 1
    alone, *_ = prepared()
    with pytest.raises(CheckpointError, match="there are 0 schedulers here, and 1 in the checkpoint"):
        alone.load_state(tmp_path / "new")


def test_what_does_not_fit_is_refused_as_ever(written):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="there are 0 optimizers here, and 1 in the checkpoint"):
        accelerator.load_state(written)


def test_a_record_may_lack_what_another_library_does_not_save_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(ForeignCheckpoint, "absent", ["accumulation", "model"])
    write_foreign(foreign(), tmp_path / "new", lambda line: None)
    accelerator, *_ = prepared()
    with pytest.raises(CheckpointError, match="lies: .*Missing: "):
        accelerator.load_state(tmp_path / "new")


def test_a_failed_import_leaves_no_checkpoint(tmp_path):
    def fails():
        raise CheckpointError("no more")

    with pytest.raises(CheckpointError, match="no more"):
        write_foreign(foreign(parts=[*foreign().parts, fails]), tmp_path / "new", lambda line: None)
    assert not [*(tmp_path / "new").iterdir()]


class Offer:
    """An importer that is installed."""

    distribution, name = "accel-toy", "toy"

    def load(self):
        return lambda folder, optimizer: foreign(origin=f"Toy {optimizer}") if folder.name == "theirs" else None


@pytest.fixture
def installed(monkeypatch):
    """Nothing but a toy importer."""
    for module in (command, opened):
        monkeypatch.setattr(module, "list_offers", lambda group: [Offer()])
    monkeypatch.setattr(opened, "find", lambda group, name, offers: offers[0])


@pytest.mark.usefixtures("installed")
def test_the_command_says_what_is_there_and_writes_it(tmp_path, capsys):
    theirs, new = tmp_path / "theirs", tmp_path / "new"
    theirs.mkdir()
    assert main(["import", str(theirs), str(new), "--optimizer", "torch.optim.SGD"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"checkpoint  {theirs}",
        "written by  Toy torch.optim.SGD",
        "form        of two",
        "not in it   loader, object, precision, strategy, plugin, random, scheduler: load_state() leaves them as they are",
        "",
        f"written: {new}",
    ]
    assert said.err == "file 1 of 2\nfile 2 of 2\n"
    assert main([str(new), "--record"]) == 0
    assert '"origin": "Toy torch.optim.SGD"' in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_dry_run_writes_nothing_and_a_target_is_needed_otherwise(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    assert main(["import", str(theirs), str(tmp_path / "new"), "--dry-run"]) == 0
    assert "written by  Toy None" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        main(["import", str(theirs)])
    assert "TARGET is missing; or --dry-run" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_a_target_that_is_taken_is_refused(tmp_path, capsys):
    theirs, new = tmp_path / "theirs", tmp_path / "new"
    theirs.mkdir()
    new.touch()
    assert main(["import", str(theirs), str(new)]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_what_no_importer_knows_is_refused_with_those_to_install(tmp_path, capsys):
    assert main(["import", str(tmp_path), str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "no importer knows it. Installed: toy." in said
    assert how_to_install("accel-deepspeed") in said
    assert main(["import", str(tmp_path / "absent"), str(tmp_path / "new")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_folder_that_is_called_import_can_be_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_foreign(foreign(), Path("import"), lambda line: None)
    assert main(["./import"]) == 0
    assert str(Path("import")) in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_a_folder_that_an_importer_knows_is_loaded_from_where_it_is(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    accelerator, model, optimizer = prepared()
    with pytest.warns(UserWarning, match="not in it: the random streams"):
        accelerator.load_state(theirs)
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], WEIGHT)
    assert not [*theirs.iterdir()]
    with pytest.raises(CheckpointError, match="there are 0 optimizers here, and 1 in the checkpoint"):
        alone(Tied()).load_state(theirs)
    with pytest.raises(CheckpointError, match="A checkpoint was to be read from"):
        accelerator.load_state(tmp_path)  # which no importer knows


def alone(model: nn.Module) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return accelerator


def test_places_of_parameters_tied_names_and_streams_of_ranks_are_matched_with_the_run(tmp_path):
    group = foreign().optimizers[0].groups[0]
    parts = [
        lambda: {
            "model.0": {"again": Elementwise.whole(WEIGHT), "mean": Replicated(torch.ones(2))},
            "optimizer.0": {"loose.0.0/momentum_buffer": Elementwise.whole(WEIGHT)},
        }
    ]
    found = foreign(
        parts=parts,
        optimizers=[ForeignOptimizer("", [{**group, "names": ["loose.0.0"]}])],
        random=[capture_random_state(None)],
        objects=[{"value": 5}],
    )
    expected = torch.rand(())
    write_foreign(found, tmp_path / "new", lambda line: None)
    accelerator, model, optimizer = prepared()
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(tmp_path / "new")  # without a warning
    assert torch.equal(torch.rand(()), expected)
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], WEIGHT)
    assert counter.value == 5
