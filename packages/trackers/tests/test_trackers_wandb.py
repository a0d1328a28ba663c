"""WandB: what was logged stands in the files that wandb writes offline, and wandb leaves the process as it was."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading

import numpy as np
import pytest
import torch
from read_wandb import read_runs, recorded
from services import Offline, needs, offline, record  # noqa: F401 - a fixture of every test in this module

from accel_core import Table, TrackedRun
from accel_core.api.component import how_to_install
from accel_testing import TrackerSuite
from accel_trackers.wandb import WandB

pytestmark = needs("wandb")

CONFIG = {"lr": 1e-3, "layers": [1, 2, {"name": None}], "model": {"width": 8, "bias": True}, "note": "ä"}


@pytest.fixture(autouse=True)
def service_stopped():
    """wandb keeps a process and two threads until the program ends."""
    yield
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


class TestWandB(TrackerSuite):
    tracker = "wandb"
    leaves_behind = {
        "warnings.filters": "urllib3, which wandb imports, shows its warnings of one kind no more",
        "child process": "wandb-core, which wandb keeps until the program ends",
        "thread 'wandb-": "they wait for that process",
    }

    def options(self, folder):
        return {"mode": "offline", "dir": folder}

    def read(self, written):
        if not written.is_open:
            read_runs(written.folder)  # waits for the end of the file
        return recorded(written.folder, written.state["id"])


@pytest.mark.parametrize("project", ["p" * 300, "team/project: a"])
def test_a_project_whose_name_wandb_does_not_take_has_another_which_is_told(project, directory, caplog):
    tracker = WandB(mode="offline", dir=directory)
    record(tracker, tracked(project=project), lambda each: each.log({"loss": 1.0}, 0))
    [run] = read_runs(directory)
    assert (len(run.history), len(run.project) <= 128) == (1, True)
    assert f"wandb takes no name like {project!r}: it is recorded as {run.project!r}." in caplog.text


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "runs"


def tracked(**given):
    return TrackedRun(**{"project": "a project", "run_id": "run-1_a", "config": CONFIG, **given})


def only(directory):
    [run] = read_runs(directory)
    return run


def test_charts_have_the_step_as_their_axis(directory):
    record(
        WandB(mode="offline", dir=directory, step_metric="iteration"),
        tracked(),
        lambda tracker: tracker.log({"a": 1}, 9),
    )
    run = only(directory)
    assert run.axes == {"*": "iteration"}
    assert run.logged("iteration") == [(9, {"a": 1})]


def test_a_value_under_the_name_of_the_step_is_refused_unless_it_is_the_step(directory):
    tracker = WandB(mode="offline", dir=directory)

    def work(tracker):
        tracker.log({"trainer/global_step": 4}, 4)
        tracker.log({"trainer/global_step": 5}, 4)

    with pytest.raises(ValueError, match=r"'trainer/global_step' was logged at step 4, and it is 5.*step_metric"):
        record(tracker, tracked(), work)
    tracker.finish(True)


@pytest.mark.parametrize("name", ["", "_step", "_runtime"])
def test_names_that_wandb_keeps_for_itself_are_refused(directory, name):
    tracker = WandB(mode="offline", dir=directory)
    with pytest.raises(ValueError, match=rf"Values named \['{name}'\] were logged"):
        record(tracker, tracked(), lambda tracker: tracker.log({name: 1, "loss": 2}, 0))
    tracker.finish(True)


def test_the_run_is_known_by_its_project_id_config_and_options(directory):
    tracker = WandB("team", "offline", "a name", "a group", "train", ["x", "y"], "some notes", directory)
    record(tracker, tracked())
    run = only(directory)
    assert (run.project, run.run_id, run.config) == ("a project", "run-1_a", CONFIG)
    said = run.record
    assert (said.entity, said.display_name, said.run_group, said.job_type) == ("team", "a name", "a group", "train")
    assert (list(said.tags), said.notes) == (["x", "y"], "some notes")


def test_options_of_the_call_go_on_top(directory):
    options = {"name": "of the call", "id": "other", "mode": "offline", "dir": directory, "config": {"a": 1}}
    record(WandB(mode="disabled", name="of the tracker"), tracked(options=options))
    run = only(directory)
    assert (run.run_id, run.record.display_name, run.config) == ("other", "of the call", {"a": 1})


def test_unknown_options_are_refused_by_name(directory):
    with pytest.raises(TypeError, match="projct"):
        record(WandB(mode="offline", dir=directory), tracked(options={"projct": "x"}))
    with pytest.raises(ValueError, match="consol"):
        record(WandB(mode="offline", dir=directory), tracked(options={"settings": {"consol": "off"}}))


def test_dark_images_stay_dark(directory):
    picture = torch.tensor([[[0], [1]], [[1], [0]]], dtype=torch.uint8)
    record(WandB(mode="offline", dir=directory), tracked(), lambda tracker: tracker.log_images({"mask": [picture]}, 3))
    read_runs(directory)
    [(step, found)] = recorded(directory, "run-1_a").images["mask"]
    assert (step, found.tolist()) == (3, picture.tolist())


def test_tables_longer_than_wandb_keeps_are_refused(directory):
    tracker = WandB(mode="offline", dir=directory)
    table = Table(("a",), tuple((row,) for row in range(10001)))
    with pytest.raises(ValueError, match=r"'answers' has 10001 rows.*10000.*set wandb.Table.MAX_ROWS"):
        record(tracker, tracked(), lambda tracker: tracker.log_table("answers", table, 0))
    tracker.finish(True)


NAMES = ["../../t", "..", "a/../b", "/x", "a:b", "C:\\x", "a\\..\\b", "n" * 300, "n" * 299 + "m", ""]


def test_tables_whose_names_no_artifact_can_have_are_recorded_under_others(directory, caplog):
    def work(tracker):
        for row, name in enumerate([*NAMES, "fine/a:b", "x y"]):
            tracker.log_table(name, Table(("a",), ((row,),)), 0)

    record(WandB(mode="offline", dir=directory), tracked(), work)
    read_runs(directory)
    found = recorded(directory, "run-1_a").tables
    assert sorted(table.rows[0][0] for [(_, table)] in found.values()) == list(range(len(NAMES) + 2))
    assert set(found) > {"fine/a:b", "x y"}
    told = [message for message in caplog.messages if "takes no name like" in message]
    assert told == [
        f"wandb takes no name like {name!r}: it is recorded as {other!r}."
        for name, other in zip(NAMES, found, strict=False)
    ]
    assert all(path.resolve().is_relative_to(directory.resolve()) for path in directory.rglob("*.table.json"))


def test_images_of_any_name_are_recorded(directory):
    names = ["../../t", "/x", "a:b", "n" * 300, "n" * 299 + "m", "in/" + "ü" * 200]
    pictures = [torch.full((2, 2, 1), index, dtype=torch.uint8) for index in range(len(names))]

    def work(tracker):
        for name, picture in zip(names, pictures, strict=True):
            tracker.log_images({name: [picture]}, 2**60)

    record(WandB(mode="offline", dir=directory), tracked(), work)
    read_runs(directory)
    found = recorded(directory, "run-1_a").images
    assert list(found)[:3] == names[:3]
    assert all(torch.equal(found[name][0][1], picture) for name, picture in zip(found, pictures, strict=True))


def test_types_of_wandb_are_recorded_as_they_are(directory):
    import wandb

    page = wandb.Html("<p>hello</p>", inject=False)
    tracker = WandB(mode="offline", dir=directory)
    assert tracker.records(page)
    assert tracker.records([page])
    assert not tracker.records([])
    assert not tracker.records([page, 1])
    assert not tracker.records(torch.ones(2))
    record(tracker, tracked(), lambda tracker: tracker.log({"page": page}, 2))
    run = only(directory)
    [(step, stored)] = run.values("page")
    assert (step, (run.folder / "files" / stored["path"]).read_text()) == (2, "<p>hello</p>")


def test_a_resumed_run_goes_on_under_its_id_and_says_what_is_missing_here(directory, caplog):
    first = WandB(mode="offline", dir=directory)
    states = []

    def work(tracker):
        tracker.log({"loss": 1.0}, 0)
        states.append(json.loads(json.dumps(tracker.state())))

    record(first, tracked(), work)
    with caplog.at_level(logging.WARNING):
        record(
            WandB(mode="offline", dir=directory),
            tracked(run_id="another", resumed=states[0], step=1, config={**CONFIG, "lr": 0.5}),
            lambda tracker: tracker.log({"loss": 0.5}, 1),
        )
    before, after = read_runs(directory)
    assert before.run_id == after.run_id == "run-1_a"
    assert (before.record.resume, after.record.resume) == (False, True)  # of which `wandb sync` makes one run
    assert before.values("loss") + after.values("loss") == [(0, 1.0), (1, 0.5)]
    assert after.config["lr"] == 0.5
    [message] = [entry.getMessage() for entry in caplog.records if entry.name == "accel_trackers.wandb"]
    assert str(after.folder) in message
    assert "`wandb sync` uploads both as one run" in message


def test_without_a_key_it_says_what_to_type_and_asks_nobody(directory, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(RuntimeError, match=r"no API key.*`wandb login`.*mode='offline'.*WANDB_MODE=offline"):
        record(WandB(dir=directory), tracked())
    assert read_runs(directory) == []


def test_the_mode_may_come_from_the_environment(directory, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(directory))
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-environment")
    directory.mkdir()
    record(WandB(), tracked(), lambda tracker: tracker.log({"a": 1}, 0))
    run = only(directory)
    assert (run.run_id, run.values("a")) == ("of-the-environment", [(0, 1)])


def test_disabled_records_nothing(directory):
    record(WandB(mode="disabled", dir=directory), tracked(), lambda tracker: tracker.log({"a": 1}, 0))
    assert read_runs(directory) == []


def test_it_prints_nothing_and_captures_nothing(directory, capfd):
    streams = []

    def work(tracker):
        streams.append((sys.stdout, sys.stderr))
        print("of the program")
        tracker.log({"a": 1}, 0)

    before = (sys.stdout, sys.stderr)
    record(WandB(mode="offline", dir=directory), tracked(), work)
    assert streams == [before]
    assert capfd.readouterr() == ("of the program\n", "")
    assert not list(directory.rglob("output.log"))
    assert not list(directory.rglob("requirements.txt"))


def test_settings_of_the_user_and_variables_come_before_ours(directory, monkeypatch):
    import wandb

    def settings(given=None):
        tracker = WandB(mode="offline", dir=directory)
        record(tracker, tracked(options={} if given is None else {"settings": given}))
        return tracker.tracker.settings

    quiet = settings()
    assert (quiet.console, quiet.silent, quiet.disable_git, quiet.x_disable_stats) == ("off", True, True, True)
    loud = settings({"console": "wrap", "disable_git": False})
    assert (loud.console, loud.disable_git, loud.silent) == ("wrap", False, True)
    assert settings(wandb.Settings(x_disable_stats=False)).x_disable_stats is False
    wandb.teardown()
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "false")
    variables = settings()
    assert (variables.console, variables.x_disable_stats) == ("wrap", False)


def test_the_process_stays_as_it_was(directory):
    before = (sys.exit, sys.excepthook, dict(os.environ))
    states = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())

    def work(tracker):
        assert (sys.exit, sys.excepthook, dict(os.environ)) == before
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("Otel")]
        tracker.log({"a": 1}, 0)
        tracker.log_images({"b": [torch.zeros(2, 2, 3, dtype=torch.uint8)]}, 0)
        tracker.log_table("c", Table(("a",), ((1,),)), 0)
        tracker.flush()

    record(WandB(mode="offline", dir=directory), tracked(), work)
    assert (sys.exit, sys.excepthook, dict(os.environ)) == before
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == states


def test_it_is_usable_exactly_where_wandb_is_installed(monkeypatch):
    assert WandB.unusable() is None
    monkeypatch.setattr("accel_trackers.service.find_spec", lambda name: None)
    assert WandB.unusable() == f"wandb is not installed. {how_to_install('accel-trackers[wandb]')}"
