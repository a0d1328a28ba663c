"""CometML: what was logged stands in the archives that Comet writes offline, and Comet leaves the process as it was."""

from __future__ import annotations

import json
import os
import sys

import pytest
from comet_server import comet_server
from read_comet_ml import archives, recorded
from services import Offline, needs, offline, record  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, TrackedRun
from accel_core.testing import TrackerSuite
from accel_trackers.comet_ml import CometML, experiment_key

pytestmark = needs("comet_ml")


class TestCometML(TrackerSuite):
    tracker = "comet_ml"
    lacks = {
        "test_histograms_come_back": "Comet has bins of its own",
        "test_what_was_flushed_can_be_read": "offline, Comet writes its archive when the experiment ends",
    }

    leaves_behind = {
        "warnings.filters": "ruamel.yaml and urllib3, which comet_ml imports, show some of their warnings once or never"
    }

    def options(self, folder):
        return {"online": False, "offline_directory": str(folder)}

    def read(self, written):
        return recorded(written.folder, written.state["experiment_key"])


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "archives" / "of comet"


def tracked(**given):
    return TrackedRun(**{"project": "a project", "run_id": "run-1_a", "config": {"lr": 0.1}, **given})


def only(directory):
    [archive] = archives(directory)
    return archive


def test_the_experiment_is_known_by_its_project_key_options_and_configuration(directory):
    config = {"lr": 0.1, "model": {"width": 8, "names": ["a", None]}, "prompt": "x" * 3000, "none": None}
    tracker = CometML("a team", False, "a name", ["x"], directory)
    record(tracker, tracked(config=config))
    archive = only(directory)
    said = {name: archive.meta[name] for name in ("project_name", "workspace", "tags", "resume_strategy")}
    assert said == {"project_name": "a project", "workspace": "a team", "tags": ["x"], "resume_strategy": "create"}
    assert archive.others["Name"] == "a name"
    assert archive.key == experiment_key("run-1_a") == tracker.state()["experiment_key"]
    shown = {"lr": 0.1, "model|width": 8, "model|names": ["a", None], "prompt": "x" * 1000, "none": None}
    assert archive.parameters == shown
    [content] = [content for _, name, _, content in archive.files if name == "config.json"]
    assert json.loads(content) == config


@pytest.mark.parametrize(
    "run_id, begins, length",
    [("run-1_a", "run1a", 32), ("é", "", 32), ("a" * 40, "a" * 40, 40), ("b-" * 60, "b" * 50, 50)],
)
def test_keys_are_as_comet_wants_them(run_id, begins, length):
    from comet_ml.utils import is_valid_experiment_key

    key = experiment_key(run_id)
    assert is_valid_experiment_key(key)
    assert (len(key), key.startswith(begins)) == (length, True)
    assert key == experiment_key(run_id)


def test_keys_of_runs_that_are_spelled_alike_differ():
    assert experiment_key("a-b") != experiment_key("ab")


def test_options_of_the_call_go_on_top(directory):
    options = {"name": "of the call", "online": False, "offline_directory": str(directory), "experiment_key": "k" * 33}
    tracker = CometML(online=True, experiment_name="of the tracker")
    record(tracker, tracked(options=options), lambda tracker: tracker.log({"loss": 1.0}, 3, prefix="val"))
    archive = only(directory)
    assert (archive.key, archive.others["Name"], archive.metrics) == ("k" * 33, "of the call", [("val_loss", 3, 1.0)])


@pytest.mark.parametrize("unknown", ["projct", "experiment_config"])
def test_unknown_options_are_refused_by_name(directory, unknown):
    with pytest.raises(TypeError, match=rf"init_kwargs\['comet_ml'\] has {unknown}, which.*project_name"):
        record(CometML(online=False, offline_directory=directory), tracked(options={unknown: 1}))


def test_of_a_histogram_the_middles_are_counted(directory):
    import comet_ml

    bins = Bins((1, 0, 3, 2), (-2.0, -1.0, 1.0, 2.0, 4.0), 0.0, 0.0)
    tracker = CometML(online=False, offline_directory=directory)
    record(tracker, tracked(), lambda tracker: tracker.log_histograms({"weights": bins}, 5))
    [(step, content)] = [
        (step, json.loads(content)) for _, name, step, content in only(directory).files if name == "weights"
    ]
    edges = comet_ml.Histogram().values
    found = [(edges[index - 1], edges[index + 1], count) for index, count in content["index_values"]]
    assert step == 5
    assert [count for _, _, count in found] == [1, 3, 2]
    assert all(low < middle < high for (low, high, _), middle in zip(found, (-1.5, 1.5, 3.0), strict=True))


def test_a_resumed_run_goes_on_under_its_key(directory):
    states = []

    def work(tracker):
        tracker.log({"loss": 1.0}, 0)
        states.append(tracker.state())

    record(CometML(online=False, offline_directory=directory), tracked(), work)
    resumed = tracked(run_id="another", resumed=states[0], step=1)
    record(CometML(online=False, offline_directory=directory), resumed, lambda tracker: tracker.log({"loss": 0.5}, 1))
    before, after = archives(directory)
    assert before.key == after.key
    assert (before.meta["resume_strategy"], after.meta["resume_strategy"]) == ("create", "get_or_create")
    assert before.metrics + after.metrics == [("loss", 0, 1.0), ("loss", 1, 0.5)]


def test_nothing_is_collected_unasked(directory):
    record(CometML(online=False, offline_directory=directory), tracked(config={}), lambda each: each.log({"a": 1}, 0))
    archive = only(directory)
    assert archive.kinds == {"metric_msg", "parameter_msg", "log_other"}
    assert archive.others == {"offline_experiment": True}
    assert archive.parameters == {}


def test_what_is_asked_for_is_collected(directory, monkeypatch):
    monkeypatch.setenv("COMET_AUTO_LOG_CODE", "1")
    record(CometML(online=False, offline_directory=directory), tracked())
    assert "source_code" in {kind for kind, _, _, _ in only(directory).files}


def test_the_experiment_is_global_only_where_frameworks_are_logged(directory):
    import comet_ml

    seen = []

    def work(tracker):
        seen.append(comet_ml.get_global_experiment() is tracker.tracker)

    record(CometML(online=False, offline_directory=directory), tracked(), work)
    assert comet_ml.get_global_experiment() is None
    options = {"auto_metric_logging": True}
    record(CometML(online=False, offline_directory=directory), tracked(run_id="b", options=options), work)
    assert seen == [False, True]
    comet_ml.config.set_global_experiment(None)


def test_an_experiment_of_the_program_goes_on_beside_it(directory, tmp_path):
    import comet_ml

    quiet = comet_ml.ExperimentConfig(
        log_code=False, log_env_details=False, auto_output_logging=False, offline_directory=str(tmp_path)
    )
    own = comet_ml.start(project_name="own", online=False, experiment_config=quiet)
    record(CometML(online=False, offline_directory=directory), tracked(), lambda each: each.log({"a": 1}, 0))
    assert not own.ended
    assert comet_ml.get_global_experiment() is own
    own.end()
    assert only(directory).metrics == [("a", 0, 1)]
    comet_ml.config.set_global_experiment(None)


@pytest.fixture(scope="module")
def serving():
    """One for the module: Comet's client remembers where its server was."""
    with comet_server() as server:
        yield server


@pytest.fixture
def server(serving, monkeypatch):
    monkeypatch.setenv("COMET_URL_OVERRIDE", serving.url)
    monkeypatch.setenv("COMET_API_KEY", "k" * 25)
    serving.forget()
    return serving


def test_online_comets_client_sends_what_was_logged(server):
    def work(tracker):
        tracker.log({"loss": 0.5, "note": "a text"}, 3)
        tracker.log({"loss": 0.25}, 3)

    record(CometML(), tracked(config={"lr": 0.1}), work)
    assert [metric for metric in server.metrics if metric[0] == "loss"] == [("loss", 3, 0.5), ("loss", 3, 0.25)]
    assert server.parameters == {"lr": 0.1}
    [text] = [body for query, body in server.files if query.get("type") == ["text-sample"] and query["step"] == ["3"]]
    assert b"a text" in text
    assert b'{"name":"note"}' in text


def test_online_a_resumed_run_goes_on_where_the_server_knows_it(server, caplog):
    import comet_ml

    server.known.add("k" * 32)
    tracker = CometML()
    with caplog.at_level("WARNING", logger="accel_trackers"):
        record(tracker, tracked(resumed={"experiment_key": "k" * 32}), lambda tracker: tracker.log({"loss": 0.5}, 3))
    assert isinstance(tracker.tracker, comet_ml.ExistingExperiment)
    assert (tracker.tracker.get_key(), caplog.messages) == ("k" * 32, [])
    assert ("loss", 3, 0.5) in server.metrics


def test_online_a_resumed_run_that_the_server_does_not_know_begins_anew_and_says_so(server, caplog):
    tracker = CometML()
    with caplog.at_level("WARNING", logger="accel_trackers"):
        record(tracker, tracked(resumed={"experiment_key": "k" * 32}))
    assert f"no earlier part of experiment {'k' * 32}" in caplog.text
    assert "`comet upload` it before the run is resumed" in caplog.text


def test_an_experiment_that_comet_could_not_open_is_told(server):
    server.taken.add("k" * 32)
    with pytest.raises(RuntimeError, match="did not open the experiment, and logged the reason above"):
        record(CometML(), tracked(options={"experiment_key": "k" * 32}))


def test_without_a_key_it_says_what_to_type(directory):
    with pytest.raises(RuntimeError, match=r"no API key.*`comet login`.*online=False.*COMET_START_ONLINE=0"):
        record(CometML(), tracked())


def test_recording_offline_may_come_from_the_environment(directory, monkeypatch):
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(directory))
    directory.mkdir(parents=True)
    record(CometML(), tracked(), lambda tracker: tracker.log({"a": 1}, 0))
    assert only(directory).metrics == [("a", 0, 1)]


def test_the_process_stays_as_it_was(directory, capfd):
    before = (sys.excepthook, sys.stdout, sys.stderr, dict(os.environ))

    def work(tracker):
        assert (sys.excepthook, sys.stdout, sys.stderr, dict(os.environ)) == before
        print("of the program")

    record(CometML(online=False, offline_directory=directory), tracked(), work)
    assert (sys.excepthook, sys.stdout, sys.stderr, dict(os.environ)) == before
    assert capfd.readouterr() == ("of the program\n", "")


def test_it_is_usable_exactly_where_comet_is_installed(monkeypatch):
    assert CometML.unusable() is None
    monkeypatch.setattr("accel_trackers.service.find_spec", lambda name: None)
    assert CometML.unusable() == "comet_ml is not installed. Type: pip install 'accel-trackers[comet]'"
