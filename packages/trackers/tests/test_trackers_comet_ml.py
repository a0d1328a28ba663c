"""CometML: what was logged stands in the archives that Comet writes offline, and Comet leaves the process as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from comet_server import comet_server
from read_comet_ml import archives, recorded
from services import Offline, needs, offline, record  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, TrackedRun
from accel_core.api.component import how_to_install
from accel_testing import TrackerSuite
from accel_trackers.comet_ml import CometML, experiment_key
from accel_trackers.jsonl import read

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
    with pytest.raises(
        TypeError, match=rf"init_kwargs=.*'comet_ml'.* has '{unknown}', which comet_ml.start or.*project_name"
    ):
        record(CometML(online=False, offline_directory=directory), tracked(options={unknown: 1}))


def test_names_that_comet_would_cut_off_stay_two(directory, caplog):
    names = "a" * 101, "a" * 100 + "b", "a" * 95
    values = dict(zip(names, (1.0, 2.0, 3.0), strict=True))
    work = lambda tracker: (tracker.log(values, 0), tracker.log({names[2]: 4.0}, 0, prefix="validation"))
    record(CometML(online=False, offline_directory=directory), tracked(), work)
    found = {name: value for name, step, value in only(directory).metrics if set(name) - set("curr_step")}
    assert sorted(value for name, value in found.items() if "aaa" in name) == [1.0, 2.0, 3.0, 4.0]
    assert caplog.text.count("Comet takes no name like") == 3


def test_options_of_a_record_go_where_they_are_known(directory):
    bins = Bins((1, 3), (0.0, 1.0, 2.0), 0.0, 0.0)
    options = {"prefix": "val", "epoch": 3, "metadata": {"layer": "first"}}

    def work(tracker):
        tracker.log({"loss": 1.0}, 5, **options)
        tracker.log_histograms({"weights": bins}, 5, **options)
        with pytest.raises(
            TypeError, match=r"'walltime', which log_metrics or log_histogram_3d does not have.*metadata"
        ):
            tracker.log_histograms({"weights": bins}, 5, walltime=1)

    record(CometML(online=False, offline_directory=directory), tracked(), work)
    archive = only(directory)
    assert ("val_loss", 5, 1.0) in archive.metrics
    assert ("histogram3d", "weights", 5) in {(kind, name, step) for kind, name, step, _ in archive.files}


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
    assert archive.kinds == {"metric_msg", "log_other"}
    assert archive.others == {"offline_experiment": True}
    assert archive.parameters == {}


def test_what_comet_records_by_itself_is_told(directory):
    """Outside of pytest, which it looks for in order to leave something out."""
    script = f"""
from pathlib import Path
from accel_core import Accelerator
from accel_trackers.comet_ml import CometML
accelerator = Accelerator(cpu=True, log_with=CometML(online=False, offline_directory=Path({str(directory)!r})))
accelerator.init_trackers("a project", {{"lr": 0.1}})
for step in range(3):
    accelerator.log({{"loss": 1.0}}, step=step)
accelerator.end_training()
"""
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", script], timeout=60, check=True)
    archive = only(directory)
    names = {name for name, _, _ in archive.metrics}
    assert (names, archive.parameters) == ({"loss", "process duration"}, {"lr": 0.1})
    assert (archive.others, [name for _, name, _, _ in archive.files]) == (
        {"offline_experiment": True},
        ["config.json"],
    )
    assert '"process duration"' in CometML.__doc__


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
    assert f"no earlier part of experiment {'k' * 32}: `comet upload` that before" in caplog.text


def test_an_experiment_that_comet_could_not_open_is_told(server):
    server.taken.add("k" * 32)
    with pytest.raises(RuntimeError, match="did not open the experiment, and logged the reason"):
        record(CometML(), tracked(options={"experiment_key": "k" * 32}))


LOSES_ITS_SERVER = """
import json, logging, os, sys, time, warnings
from pathlib import Path
import torch
from comet_server import comet_server
from accel_core import Accelerator, TrackingKwargs
from accel_trackers.comet_ml import CometML

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("accel_trackers.comet_ml").addHandler(handler)


def until(what):
    deadline = time.monotonic() + 30
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)


def train(log, between=lambda: None):
    torch.manual_seed(0)
    weight, losses = torch.randn(3, requires_grad=True), []
    for step in range(20):
        loss = (weight * torch.randn(3)).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight.data -= 0.1 * gradient
        losses.append(loss.item())
        log({"loss": loss}, step=step)
        if step == 4:
            between()
    return losses


with comet_server() as server:
    os.environ |= {"COMET_URL_OVERRIDE": server.url, "COMET_API_KEY": "k" * 25}
    accelerator = Accelerator(
        cpu=True, project_dir="out", log_with=["jsonl", CometML(offline_directory=Path("archives"))],
        kwargs_handlers=[TrackingKwargs(finish_timeout=40)],
    )
    accelerator.init_trackers("a project")

    def lose_it():
        until(lambda: len([each for each in server.metrics if each[0] == "loss"]) == 5)
        arrived = [step for name, step, _ in server.metrics if name == "loss"]
        server.stop()
        accelerator.log({"loss": 0.0}, step=1000)
        until(lambda: said)
        told.append((arrived, len(said)))

    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train(accelerator.log, lose_it)
        before = time.monotonic()
        accelerator.end_training()
        took = time.monotonic() - before
    warned = [str(one.message) for one in caught if one.category is RuntimeWarning]
alone = train(lambda values, step: None)
print(json.dumps({"told": told, "said": said, "warned": warned, "took": took, "losses": losses, "alone": alone}))
"""


@pytest.mark.timeout(150)
def test_a_server_that_goes_away_costs_the_training_nothing_and_is_told_once(tmp_path):
    """In a program of its own, for Comet remembers where its server was."""
    done = subprocess.run(
        [sys.executable, "-c", LOSES_ITS_SERVER], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["told"] == [[[0, 1, 2, 3, 4], 1]]
    [told] = found["said"]
    assert "Comet has lost its server while experiment" in told
    assert found["losses"] == found["alone"]
    assert (found["warned"], found["took"] < 40) == ([], True)
    steps = [0, 1, 2, 3, 4, 1000, *range(5, 20)]
    values = dict(zip(steps, [*found["losses"][:5], 0.0, *found["losses"][5:]], strict=True))
    [run] = (tmp_path / "out" / "a project").iterdir()
    assert [(line["step"], line["values"]["loss"]) for line in read(run)] == list(values.items())
    kept = [(step, value) for name, step, value in only(tmp_path / "archives").metrics if name == "loss"]
    assert [step for step, _ in kept] == steps
    assert [value for _, value in kept] == pytest.approx(list(values.values()))


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
    assert CometML.unusable() == f"comet_ml is not installed. {how_to_install('accel-trackers[comet]')}"
