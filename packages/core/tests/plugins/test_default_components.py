"""What the core looks up under a default name: who saves and loads, and what searches for the first nan; or nobody, which is said."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from sharded_strategies import Rows
from torch import nn
from trackers_for_tests import Listing

import accel_core
from accel_checkpoint import NeutralCheckpoints
from accel_core import Accelerator, NotInstalledError, PluginError, hookimpl
from accel_core.api.component import how_to_install
from accel_core.loop.run import Run
from accel_core.plugins import list_offers

DEFAULT_GROUPS = ("accel.checkpoints", "accel.diagnostics", "accel.recorders")


class Format:
    """Saves models with `torch.save`, in a thread that is waited for."""

    def __init__(self):
        self.told = []

    @hookimpl
    def save_checkpoint(self, run, folder, asynchronous):
        assert isinstance(run, Run)
        states = [run.relay.model_state(record.original, record.prepared) for record in run.models()]
        torch.save(
            [{name: entry.pieces[0].data for name, entry in state.items()} for state in states], folder / "all.pt"
        )
        self.told.append(("save", asynchronous))
        return str(folder)

    @hookimpl
    def load_checkpoint(self, run, folder, missing_ok):
        if missing_ok and not (folder / "all.pt").exists():
            return False
        for record, state in zip(run.models(), torch.load(folder / "all.pt", weights_only=True), strict=True):
            record.original.load_state_dict(state)
        self.told.append("load")
        return None

    @hookimpl
    def wait_for_checkpoint(self):
        self.told.append("wait")


def test_a_plugin_saves_and_loads_in_a_format_of_its_own(tmp_path):
    own = Format()
    accelerator = Accelerator(cpu=True, plugins=[own])
    model = accelerator.prepare(nn.Linear(2, 2))
    before = model.weight.detach().clone()
    assert accelerator.save_state(tmp_path, asynchronous="eager") == str(tmp_path)
    nn.init.zeros_(model.weight)
    assert accelerator.load_state(tmp_path) is True, "though the plugin returns nothing"
    assert accelerator.load_state(tmp_path / "missing", missing_ok=True) is False
    assert torch.equal(model.weight, before)
    accelerator.wait_for_checkpoint()
    accelerator.end_training()
    assert own.told == [("save", "eager"), "load", "wait", "wait"]
    assert [path.name for path in tmp_path.iterdir()] == ["all.pt"]
    assert accelerator.explain().owners["save_checkpoint"] == "plugin 'Format'"


class SavesAlone:
    @hookimpl
    def save_checkpoint(self, run, folder, asynchronous):
        return None


class SavesAndLoads(SavesAlone):
    @hookimpl
    def load_checkpoint(self, run, folder):
        pass


class Waits:
    @hookimpl
    def wait_for_checkpoint(self):
        pass


@pytest.mark.parametrize(
    "plugins", [[SavesAlone()], [Waits()], [SavesAndLoads(), Waits()]], ids=["saves", "waits", "two"]
)
def test_one_plugin_saves_loads_and_waits(plugins):
    with pytest.raises(PluginError, match="would be saved and loaded by different owners: save_checkpoint by"):
        Accelerator(cpu=True, plugins=plugins)


def test_a_format_that_cannot_be_waited_for_writes_nothing_behind(tmp_path):
    accelerator = Accelerator(cpu=True, plugins=[SavesAndLoads()])
    with pytest.raises(
        ValueError,
        match=r"asynchronous='eager'\) was asked for, and the plugin 'SavesAndLoads'.*no wait_for_checkpoint",
    ):
        accelerator.save_state(tmp_path, asynchronous="eager")
    accelerator.end_training()


def test_one_object_of_the_neutral_format_saves_whichever_run_it_is_given(tmp_path):
    """As in a plugin that saves as accel-checkpoint does, and then does something else."""
    own, weights = NeutralCheckpoints(), []
    for number in (1.0, 2.0):
        accelerator = Accelerator(cpu=True, plugins=[own])
        model = accelerator.prepare(nn.Linear(1, 1))
        nn.init.constant_(model.weight, number)
        accelerator.save_state(tmp_path / str(number))
        nn.init.zeros_(model.weight)
        accelerator.load_state(tmp_path / str(number))
        weights.append(model.weight.item())
        accelerator.end_training()
    assert weights == [1.0, 2.0]


def test_what_was_saved_dies_with_its_accelerator_without_a_collection(tmp_path):
    def train():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.save_state(tmp_path)
        accelerator.end_training()
        return weakref.ref(model)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


def test_nothing_is_imported_for_a_run_that_saves_nothing(monkeypatch):
    monkeypatch.setattr("accel_core.plugins.offers.Offer.load", lambda self: pytest.fail(f"{self} was imported"))
    accelerator = Accelerator(
        cpu=True, strategy=accel_core.Single(), mixed_precision=accel_core.Precision(), loader=object()
    )
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    accelerator.wait_for_checkpoint()
    accelerator.end_training()


@pytest.fixture
def without(monkeypatch):
    """Stands in for an environment with the core alone; `tests/matrix_job.py` runs in a real one."""

    def listed(group=None):
        return [offer for offer in list_offers(group) if offer.distribution == "accel-core"]

    monkeypatch.setattr("accel_core.build.list_offers", listed)
    monkeypatch.setattr("accel_core.plugins.offers.list_offers", listed)


CALLS = {
    "save_state()": lambda accelerator, model, folder: accelerator.save_state(folder),
    "load_state()": lambda accelerator, model, folder: accelerator.load_state(folder),
    "save_model()": lambda accelerator, model, folder: accelerator.save_model(model, folder),
    "save()": lambda accelerator, model, folder: accelerator.save({}, folder / "a"),
    "build_model(checkpoint=...)": lambda accelerator, model, folder: accelerator.build_model(lambda: model, folder),
    "export_weights()": lambda accelerator, model, folder: accel_core.export_weights(folder, folder),
    "load_checkpoint_in_model()": lambda accelerator, model, folder: accel_core.load_checkpoint_in_model(model, folder),
}


@pytest.mark.parametrize("call", CALLS)
def test_without_accel_checkpoint_a_call_says_what_to_type(without, call, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    expected = f"{call} needs accel-checkpoint, which is not installed. {how_to_install('accel-checkpoint')}"
    with pytest.raises(NotInstalledError, match=f"^{re.escape(expected)}$"):
        CALLS[call](accelerator, model, tmp_path)
    assert not list(tmp_path.iterdir())
    accelerator.end_training()


def test_names_of_accel_checkpoint_may_be_looked_at_without_it(without):
    assert callable(accel_core.export_weights)
    assert {"export_weights", "load_checkpoint_in_model"} <= set(dir(accel_core))
    found = {}
    exec("from accel_core import *", found)
    assert found["Accelerator"] is Accelerator


def test_weights_that_a_strategy_lays_out_are_gathered_by_it_too(without):
    accelerator = Accelerator(cpu=True, strategy=Rows())
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(NotInstalledError, match=r"^get_state_dict\(\) needs accel-checkpoint"):
        accelerator.get_state_dict(model)


def test_without_accel_diagnostics_detection_says_what_to_type(without):
    expected = (
        f"detect_nonfinite=True needs accel-diagnostics, which is not installed. {how_to_install('accel-diagnostics')}"
    )
    with pytest.raises(NotInstalledError, match=f"^{re.escape(expected)}$"):
        Accelerator(cpu=True, detect_nonfinite=True)


def test_without_accel_trackers_log_with_says_what_to_type_for_any_tracker(without):
    expected = f"log_with needs accel-trackers, which is not installed. {how_to_install('accel-trackers')}"
    with pytest.raises(NotInstalledError, match=f"^{re.escape(expected)}$"):
        Accelerator(cpu=True, log_with=Listing())
    for nothing in ([], "all"):
        with (
            pytest.warns(match=f"no tracker is installed.*{how_to_install('accel-trackers')}")
            if nothing
            else nullcontext()
        ):
            accelerator = Accelerator(cpu=True, log_with=nothing)
        accelerator.init_trackers("project")
        accelerator.log({"loss": 1.0})
        assert accelerator.trackers == accelerator.log_with == []


def test_of_two_that_serve_by_default_one_has_to_go(monkeypatch):
    (neutral,) = list_offers("accel.checkpoints")
    both = [neutral, replace(neutral, distribution="other-checkpoints", version="2.0")]
    monkeypatch.setattr("accel_core.plugins.offers.list_offers", lambda group=None: both)
    expected = (
        "save() needs a checkpoint format, and 2 distributions offer it under the name 'neutral': accel-checkpoint 0.1.0, "
        "other-checkpoints 2.0. Uninstall all but one."
    )
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PluginError, match=f"^{re.escape(expected)}$"):
        accelerator.save({}, "a")


def test_the_command_says_so_too(without, capsys):
    from accel_core.__main__ import main

    assert main(["checkpoint", "."]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m accel_core checkpoint needs accel-checkpoint, which is not installed."
    )


def test_what_serves_by_default_is_explained(tmp_path):
    explained = Accelerator(cpu=True).explain()
    states = {offer.group: offer.state for offer in explained.inactive if offer.group in DEFAULT_GROUPS}
    assert states == dict.fromkeys(DEFAULT_GROUPS, "ok: used where it is asked for")
    assert explained.owners["save_checkpoint"] == "accel-core's default, by what accel.checkpoints offers as 'neutral'"
