"""MLflow: what was logged is in its database and artifacts, and its own client reads it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from read_mlflow import read_run
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Accelerator, Table, TrackedRun
from accel_core.api.component import how_to_install
from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.mlflow import MLflow

pytestmark = [
    needs("mlflow"),
    pytest.mark.filterwarnings(
        "ignore:The ``noload`` loader strategy:DeprecationWarning"
    ),  # MLflow's use of SQLAlchemy
]


class TestMLflow(TrackerSuite):
    tracker = MLflow
    lacks = {"test_histograms_come_back": "MLflow has none"}
    leaves_behind = {"warnings.filters": "packages that MLflow imports add to them"}

    def options(self, folder):
        return {"tracking_uri": uri_of(folder), "artifact_location": (folder.parent / "artifacts").as_uri()}

    def read(self, written: Written) -> Recorded:
        return read_run(uri_of(written.folder), written.state["run_id"])


def uri_of(folder):
    """One database for all runs, for it takes seconds to make one."""
    return f"sqlite:///{folder.parent / 'mlflow.db'}"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The folder of a project, with MLflow's tables in its database."""
    folder = tmp_path_factory.mktemp("logs") / "project"
    tracker = MLflow()
    tracker.start(TrackedRun("first", "first", directory=folder / "first"))
    tracker.finish(failed=False)
    return folder


@pytest.fixture
def begin(database):
    """Begins to record a run, and ends it with the test."""
    trackers = []

    def begin(tracker=None, **run):
        tracker = tracker or MLflow()
        run = {"project": "project", "run_id": f"run-{len(trackers)}", **run}
        tracker.start(TrackedRun(directory=database / run["run_id"], **run))
        trackers.append(tracker)
        return tracker

    yield begin
    for tracker in trackers:
        tracker.finish(failed=False)


@pytest.fixture
def client(database):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{database / 'mlflow.db'}")


def id_of(tracker):
    return tracker.state()["run_id"]


def history(client, tracker, name):
    tracker.flush()
    return [(metric.step, metric.value) for metric in client.get_metric_history(id_of(tracker), name)]


def test_without_a_server_it_records_in_the_folder_of_the_project(begin, client, database, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = begin(config={"lr": 0.5})
    assert tracker.requires_logging_directory
    tracker.log({"note": "here"}, 3)
    [experiment] = [each for each in client.search_experiments() if each.name == "project"]
    assert experiment.experiment_id == tracker.tracker.info.experiment_id
    files = database / "mlartifacts" / id_of(tracker) / "artifacts"
    assert {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()} == {
        "config.json",
        "texts/note/00000003.txt",
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["option", "variable"])
def test_with_a_server_it_needs_no_folder(how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert not MLflow(tracking_uri="http://localhost:5000" if how == "option" else None).requires_logging_directory


def test_the_address_in_the_environment_is_used(client, database, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "first")
    tracker = MLflow()
    tracker.start(TrackedRun("project", "elsewhere", directory=tmp_path / "elsewhere"))
    tracker.finish(failed=False)
    experiment = client.get_run(id_of(tracker)).info.experiment_id
    assert client.get_experiment(experiment).name == "first"
    assert not list(tmp_path.iterdir())


def test_options_describe_the_run(begin, client):
    tracker = begin(MLflow(run_name="mine", tags={"team": "a"}, description="What **for**."))
    below = begin(options={"experiment_name": "other", "tags": {"team": "b"}, "parent_run_id": id_of(tracker)})
    run, inner = client.get_run(id_of(tracker)), client.get_run(id_of(below))
    assert (run.info.run_name, inner.info.run_name) == ("mine", "run-1")
    assert (run.data.tags["team"], inner.data.tags["team"]) == ("a", "b")
    assert run.data.tags["mlflow.note.content"] == "What **for**."
    assert inner.data.tags["mlflow.parentRunId"] == id_of(tracker)
    assert client.get_experiment(inner.info.experiment_id).name == "other"


def test_an_unknown_option_is_named(begin):
    with pytest.raises(
        TypeError,
        match=r"'no_such', which MLflow does not have here: expected artifact_location, .*experiment_name, .*run_id",
    ):
        begin(options={"no_such": 1})


def test_a_nested_run_is_asked_for_by_its_parent(begin):
    with pytest.raises(TypeError, match="'nested_run', which MLflow does not have here: .*parent_run_id"):
        begin(options={"nested_run": True})


@pytest.mark.parametrize("name", ["nested", "nested_run"])
def test_that_a_run_is_not_nested_may_be_said(begin, name):
    assert "mlflow.parentRunId" not in begin(options={name: False}).tracker.data.tags


def test_an_experiment_may_be_chosen_by_its_id(begin, client, tmp_path):
    experiment = client.create_experiment("by its id", artifact_location=tmp_path.as_uri())
    run = client.get_run(id_of(begin(options={"experiment_id": experiment})))
    assert run.info.experiment_id == experiment
    wrong = {"experiment_id": "x", "run_id": run.info.run_id}
    with pytest.raises(ValueError, match=f"belongs to the experiment '{experiment}', and stays there"):
        begin(options=wrong)
    client.set_terminated(run.info.run_id)
    with pytest.raises(ValueError, match=f"belongs to the experiment '{experiment}'"):
        begin(options=wrong)
    assert client.get_run(run.info.run_id).info.status == "FINISHED"  # what is refused is left as it was


@pytest.mark.parametrize("asked", ["option", "variable", "no"])
def test_the_machine_is_measured_on_request(begin, client, asked, monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    if asked == "variable":
        monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    tracker = begin(options={"log_system_metrics": True} if asked == "option" else {})
    deadline = time.monotonic() + (20 if asked != "no" else 0.5)
    while not (found := system_metrics(client, tracker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert bool(found) is (asked != "no")


def system_metrics(client, tracker):
    return [name for name in client.get_run(id_of(tracker)).data.metrics if name.startswith("system/")]


def test_an_unknown_option_of_a_record_is_named(begin):
    with pytest.raises(
        TypeError,
        match=r"'walltime', which a record does not have here: expected timestamp.",
    ):
        begin().log({"x": 1.0}, 0, walltime=1.0)


def test_the_time_of_a_record_can_be_given(begin, client):
    tracker = begin()
    tracker.log({"x": 1.0}, 0, timestamp=1234)
    tracker.flush()
    assert client.get_metric_history(id_of(tracker), "x")[0].timestamp == 1234


def test_a_value_that_comes_again_is_recorded_again(begin, client):
    tracker = begin()
    for _ in range(5):
        tracker.log({"x": math.nan, "y": 2.0}, 7)
    assert history(client, tracker, "y") == [(7, 2.0)] * 5
    assert len(history(client, tracker, "x")) == 5


def test_numbers_are_gathered_for_some_time(begin, client):
    tracker = begin(MLflow(flush_secs=600))
    for step in range(3):
        tracker.log({"x": float(step)}, step)
    assert [metric.step for metric in client.get_metric_history(id_of(tracker), "x")] == [0]
    assert history(client, tracker, "x") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_more_numbers_than_a_request_takes(begin, client):
    tracker = begin(MLflow(flush_secs=600))
    tracker.log({f"x/{number}": float(number) for number in range(1200)}, 1)
    assert len(client.get_run(id_of(tracker)).data.metrics) == 1200


def test_more_parameters_than_a_request_takes(begin, client):
    config = {"many": {f"p{number}": number for number in range(230)}, "long": "ä" * 7000}
    found = client.get_run(id_of(begin(config=config))).data.params
    assert {f"many/p{number}": str(number) for number in range(230)} == {
        name: value for name, value in found.items() if name != "long"
    }
    assert found["long"] == "ä" * 5999 + "…"


NAMES = [
    "loss@1", "loss#1", "a//b", "a/b", "/a", "..", "../x", ".", "", "x" * 300, "x" * 301, "größe 精度", "a:b", "with\nline", "~", "./a",
]  # fmt: skip


def test_names_that_mlflow_does_not_take_come_back_from_tags(begin, client):
    tracker = begin(config={name: number for number, name in enumerate(NAMES)})
    tracker.log({name: float(number) for number, name in enumerate(NAMES)}, 0)
    tracker.log({name: name for name in NAMES}, 0)
    tracker.log_images({name: [torch.full((2, 2, 1), 9, dtype=torch.uint8)] for name in NAMES[:3]}, 0)
    tracker.flush()
    found = read_run(client.tracking_uri, id_of(tracker))
    assert found.numbers == {name: [(0, float(number))] for number, name in enumerate(NAMES)}
    assert found.texts == {name: [(0, name)] for name in NAMES}
    assert found.images.keys() == set(NAMES[:3])


def test_what_comes_again_for_a_step_is_a_file_of_its_own(begin, client):
    tracker = begin()
    for text in ("one", "two", "three"):
        tracker.log({"note": text}, 12)
        tracker.log_table("answers", Table(("said",), ((text,),)), 12)
    paths = [
        file.path for name in ("texts/note", "tables/answers") for file in client.list_artifacts(id_of(tracker), name)
    ]
    assert [path.partition("/")[2] for path in paths] == [
        "note/00000012-2.txt", "note/00000012-3.txt", "note/00000012.txt",
        "answers/00000012-2.json", "answers/00000012-3.json", "answers/00000012.json",
    ]  # fmt: skip


def test_texts_and_tables_of_a_resumed_run_stay_beside_those_of_the_same_step(begin, client):
    first = begin()
    first.log({"note": "one"}, 3)
    first.log_table("answers", Table(("a",), (("one",),)), 3)
    resumed = begin(resumed=first.state(), step=3)
    for said in ("two", "three"):
        resumed.log({"note": said}, 3)
        resumed.log_table("answers", Table(("a",), ((said,),)), 3)
    found = read_run(client.tracking_uri, id_of(first))
    assert sorted(found.texts["note"]) == [(3, "one"), (3, "three"), (3, "two")]
    assert sorted(table.rows for _, table in found.tables["answers"]) == [(("one",),), (("three",),), (("two",),)]


def test_cells_of_a_table_keep_their_types(begin, client):
    tracker = begin()
    rows = ((1, None, "x", True), (None, 2.5, "1", False))
    tracker.log_table("t", Table(("a", "b", "c", "d"), rows), 0)
    tracker.flush()
    [found] = read_run(client.tracking_uri, id_of(tracker)).tables["t"]
    assert repr(found) == repr((0, Table(("a", "b", "c", "d"), rows)))


def test_a_resumed_run_is_running_and_takes_new_parameters_alone(begin, client, caplog):
    first = begin(config={"lr": 0.5, "layers": 2})
    first.finish(failed=True)
    assert client.get_run(id_of(first)).info.status == "FAILED"
    with caplog.at_level(logging.WARNING, "accel_trackers.mlflow"):
        second = begin(resumed=first.state(), config={"lr": 0.25, "layers": 2, "heads": 4}, step=3)
    run = client.get_run(id_of(second))
    assert (id_of(second), run.info.status) == (id_of(first), "RUNNING")
    assert run.data.params == {"lr": "0.5", "layers": "2", "heads": "4"}
    [told] = caplog.messages
    assert told == "MLflow does not change parameters: the new values of lr are in config.json."
    second.flush()
    assert read_run(client.tracking_uri, id_of(first)).config == {"lr": 0.25, "layers": 2, "heads": 4}


def test_artifacts_that_cannot_be_written_cost_nothing_else(client, tmp_path, caplog):
    """As with `mlflow server --no-serve-artifacts` on another machine, or a bucket for which there are no credentials."""
    (tmp_path / "file").touch()
    tracker = MLflow(client.tracking_uri, artifact_location=(tmp_path / "file" / "below").as_uri())
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("without artifacts", config={"lr": 0.5})

    def work():
        for step in range(2):
            accelerator.log({"note": "here", "loss": 1 / (step + 1)}, step=step)
            accelerator.log_images({"x": torch.zeros(3, 2, 2)})
            accelerator.log_table("t", ["a"], [[step]])
        accelerator.end_training()

    with pytest.warns(RuntimeWarning) as warned:
        work()
    run = client.get_run(id_of(tracker))
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.5"})
    assert history(client, tracker, "loss") == [(0, 1.0), (1, 0.5)]
    place = f"MLflow could not write to {run.info.artifact_uri}: NotADirectoryError: "
    for kind, warning in zip(("values", "images", "tables"), warned, strict=True):
        text = str(warning.message)
        assert text.startswith(
            f"The tracker 'mlflow' leaves out {kind} that it cannot hold, and says of the first only: {place}"
        )
        assert "Give this process access to that place; or start the server with --serve-artifacts" in text
    [told] = caplog.messages
    assert told.startswith(f"MLflow has the configuration as parameters alone, and not in config.json: {place}")


def test_the_start_of_a_run_does_not_wait_for_its_place_of_artifacts(begin, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.log_text", lambda *_: pytest.fail("was called"))
        tracker = begin(config={"lr": 0.5})
    tracker.flush()
    assert read_run(client.tracking_uri, id_of(tracker)).config == {"lr": 0.5}


def test_a_run_whose_start_fails_does_not_go_on_for_ever(client, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("the server is gone")

    tracker = MLflow(client.tracking_uri)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("first", config={"lr": 0.5})
    monkeypatch.setattr("mlflow.MlflowClient.log_batch", fail)
    with pytest.warns(RuntimeWarning, match=r"switched off: start\(\) raised ConnectionError: the server is gone"):
        accelerator.end_training()
    assert client.get_run(id_of(tracker)).info.status == "FAILED"


def test_a_run_of_the_users_goes_on(begin, client):
    run = client.create_run(client.get_experiment_by_name("first").experiment_id)
    tracker = begin(options={"run_id": run.info.run_id})
    tracker.log({"x": 1.0}, 0)
    assert (id_of(tracker), history(client, tracker, "x")) == (run.info.run_id, [(0, 1.0)])


def test_a_run_of_the_users_gets_the_name_and_the_tags_that_are_asked_for(begin, client):
    run = client.create_run(client.get_experiment_by_name("first").experiment_id, tags={"kept": "so"})
    options = {"run_name": "new", "tags": {"team": "a"}, "description": "What for.", "experiment_name": "first"}
    begin(options={"run_id": run.info.run_id, "parent_run_id": "above", **options})
    found = client.get_run(run.info.run_id)
    assert found.info.run_name == "new"
    wanted = {"kept": "so", "team": "a", "mlflow.note.content": "What for.", "mlflow.parentRunId": "above"}
    assert wanted.items() <= found.data.tags.items()


def test_a_run_of_the_users_keeps_its_name_where_none_is_asked_for(begin, client):
    run = client.create_run(client.get_experiment_by_name("first").experiment_id, run_name="theirs")
    begin(options={"run_id": run.info.run_id})
    assert client.get_run(run.info.run_id).info.run_name == "theirs"


def test_a_run_of_the_users_is_not_in_another_experiment(begin, client):
    run = client.create_run(client.get_experiment_by_name("first").experiment_id)
    with pytest.raises(ValueError, match="belongs to the experiment 'first', and stays there"):
        begin(options={"run_id": run.info.run_id, "experiment_name": "other"})
    assert client.get_experiment_by_name("no other") is None


def test_a_run_that_is_not_there_is_named(begin):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="f00"):
        begin(resumed={"run_id": "f00"})


def test_an_experiment_made_by_another_process_in_that_moment_is_used(begin, client, monkeypatch):
    from mlflow import MlflowClient

    look, asked = MlflowClient.get_experiment_by_name, []

    def too_early(self, name):
        asked.append(name)
        return None if len(asked) == 1 else look(self, name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", too_early)
    assert begin(project="first").tracker.info.experiment_id == look(client, "first").experiment_id


def test_an_experiment_that_cannot_be_made_is_no_success(begin):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="exceeds the maximum length of 500"):
        begin(options={"experiment_name": "x" * 600})


def test_two_processes_do_not_begin_a_database_at_once(begin, database):
    import fcntl

    began = threading.Event()
    thread = threading.Thread(target=lambda: (begin(), began.set()))
    with (database / ".mlflow.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread.start()
        assert not began.wait(1)
    thread.join(60)
    assert began.is_set()


def test_a_server_is_used_without_words(begin, monkeypatch):
    """At the end of a run on a server, MLflow prints where it is."""
    from mlflow.tracking._tracking_service import client as module

    seen = []
    monkeypatch.setattr(
        module.TrackingServiceClient,
        "_log_url",
        lambda self, run_id: seen.append(os.environ.get("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")),
    )
    begin().finish(failed=False)
    assert seen == ["true"]
    assert "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT" not in os.environ


def test_the_active_run_of_the_program_is_left_alone(begin):
    import mlflow

    tracker = begin()
    tracker.log({"x": 1.0}, 0)
    assert mlflow.active_run() is None
    assert not mlflow.is_tracking_uri_set()


@pytest.mark.parametrize("wanted", [None, "true", "false"])
def test_reports_on_the_use_of_mlflow_are_off_unless_wanted(begin, monkeypatch, wanted):
    from mlflow import telemetry

    reports = SimpleNamespace(config=None, info={"session_id": "1"}, add_record=lambda record: None)
    monkeypatch.setattr("mlflow.telemetry.client._MLFLOW_TELEMETRY_CLIENT", reports)
    if wanted is not None:
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", wanted)
    begin()
    assert (telemetry.get_telemetry_client() is None) is (wanted is None)
    assert os.environ.get("MLFLOW_DISABLE_TELEMETRY") == wanted


def test_without_its_package_it_says_what_to_type(monkeypatch):
    monkeypatch.setattr("accel_trackers.service.find_spec", lambda name: None)
    assert how_to_install("accel-trackers[mlflow]") in MLflow.unusable()
