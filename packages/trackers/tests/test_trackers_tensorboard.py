"""TensorBoard: what was logged is in the event files, and TensorBoard's own readers show it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from read_tensorboard import read_events
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, TrackedRun
from accel_core.api.component import how_to_install
from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.tensorboard import TensorBoard

pytestmark = needs("tensorboard")


class TestTensorBoard(TrackerSuite):
    tracker = TensorBoard
    precision = "float32"
    leaves_behind = {"warnings.filters": "boto3, which TensorBoard imports where it is installed, adds to them"}

    def read(self, written: Written) -> Recorded:
        return read_events(written.run.directory)


@pytest.fixture
def begin(tmp_path):
    """Begins to record a run, and ends it with the test."""
    trackers = []

    def begin(options=None, tracker=None, **run):
        tracker = tracker or TensorBoard()
        tracker.start(TrackedRun("project", "run", directory=tmp_path / "run", options=options or {}, **run))
        trackers.append(tracker)
        return tracker

    yield begin
    for tracker in trackers:
        tracker.finish(failed=False)


def read(tracker):
    tracker.flush()
    return read_events(tracker.tracker.log_dir)


def test_numbers_are_found_by_the_reader_of_old(begin):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = begin()
    for step, loss in [(0, 0.5), (1, 0.25), (1, 0.75), (0, 2.0)]:
        tracker.log({"train/loss": loss}, step)
    tracker.flush()
    events = EventAccumulator(tracker.tracker.log_dir).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (0, 0.5),
        (1, 0.25),
        (1, 0.75),
        (0, 2.0),
    ]


def test_double_precision_keeps_all_digits(begin):
    numbers = {"third": 1 / 3, "samples": 2.0**53 - 1, "huge": 1e300}
    tracker = begin(tracker=TensorBoard(double_precision=True))
    tracker.log(numbers, 0)
    assert read(tracker).numbers == {name: [(0, value)] for name, value in numbers.items()}


def test_several_kinds_of_values_under_one_name_stay_apart(begin):
    image, bins = torch.zeros(2, 3, 3, dtype=torch.uint8), Bins((1,), (0.0, 1.0), 0.5, 0.25)
    tracker = begin()
    tracker.log({"x": 1.0}, 0)
    tracker.log({"x": "said"}, 0)
    tracker.log_images({"x": [image]}, 0)
    tracker.log_histograms({"x": bins}, 0)
    found = read(tracker)
    assert (found.numbers, found.texts) == ({"x": [(0, 1.0)]}, {"x": [(0, "said")]})
    assert [(name, step) for name, [(step, _)] in (*found.images.items(), *found.histograms.items())] == [
        ("x/images", 0),
        ("x/histogram", 0),
    ]
    resumed = begin(resumed=tracker.state(), step=1)
    resumed.log_images({"x": [image]}, 1)
    assert [step for step, _ in read(resumed).images["x/images"]] == [0, 1]


def test_what_came_after_the_checkpoint_is_replaced(begin):
    first = begin()
    for step in range(6):
        first.log({"loss": float(step), "even": 1.0} if step % 2 == 0 else {"loss": float(step)}, step)
    first.log({"not again": 1.0}, 5)
    first.finish(failed=True)
    second = begin(resumed=first.state(), step=3)
    second.log({"loss": -3.0}, 3)
    found = read(second).numbers
    assert found["loss"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, -3.0)]
    assert (found["even"], found["not again"]) == ([(0, 1.0), (2, 1.0)], [])


def test_a_run_resumed_within_the_second_is_read_after_the_first_part(begin, tmp_path):
    first = begin()
    first.log({"loss": 1.0}, 0)
    [older] = (tmp_path / "run").glob("events*")
    begin(resumed=first.state(), step=1)
    [newer] = set((tmp_path / "run").glob("events*")) - {older}
    assert newer.name.split(".")[3] > older.name.split(".")[3]


def test_clocks_that_differ_do_not_hold_up_a_resumed_run(begin, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"events.out.tfevents.{int(time.time()) + 3600}.elsewhere.1.0").touch()
    began = time.monotonic()
    begin(resumed={"kinds": {}}, step=1)
    assert time.monotonic() - began < 10


def test_the_configuration_is_a_file_and_a_row_of_the_table_of_hyperparameters(begin, tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = {"lr": 0.5, "tied": True, "seed": None, "optimizer": {"betas": [0.9, 0.99], "groups": {}}, "name": "größe"}
    begin(config=config)
    assert json.loads((tmp_path / "run" / "hparams.json").read_text(encoding="utf-8")) == config
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    row = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert {
        name: getattr(value, value.WhichOneof("kind")) for name, value in row.session_start_info.hparams.items()
    } == {
        "lr": 0.5,
        "tied": "True",
        "seed": "None",
        "optimizer/betas": "[0.9, 0.99]",
        "optimizer/groups": "{}",
        "name": "größe",
    }


def test_values_can_be_read_after_flush_secs(begin, tmp_path):
    tracker = begin(tracker=TensorBoard(flush_secs=0.1))
    tracker.log({"loss": 1.0}, 0)
    deadline = time.monotonic() + 10
    while "loss" not in read_events(tmp_path / "run").numbers and time.monotonic() < deadline:
        time.sleep(0.1)
    assert read_events(tmp_path / "run").numbers == {"loss": [(0, 1.0)]}


def test_options_of_the_writer_go_on_top(begin, tmp_path):
    begin(options={"filename_suffix": ".mine", "flush_secs": 3, "max_queue": 5})
    assert [path.suffix for path in (tmp_path / "run").glob("events*")] == [".mine"]


@pytest.mark.parametrize("name", ["no_such", "log_dir"])
def test_an_unknown_option_of_the_writer_and_another_folder_are_refused(begin, name):
    with pytest.raises(TypeError, match=name):
        begin(options={name: "runs"})


def test_the_time_of_a_record_can_be_given(begin):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = begin()
    tracker.log({"loss": 1.0}, 0, walltime=1234.5)
    tracker.flush()
    assert EventAccumulator(tracker.tracker.log_dir).Reload().Scalars("loss")[0].wall_time == 1234.5


@pytest.mark.parametrize("method", ["log", "log_images", "log_histograms"])
def test_an_unknown_option_of_a_record_is_named(begin, method):
    with pytest.raises(
        TypeError,
        match=r"'dataformats', which a record does not have here: expected walltime.",
    ):
        getattr(begin(), method)({}, 0, dataformats="HWC")


def test_without_its_package_it_says_what_to_type(monkeypatch):
    monkeypatch.setattr("accel_trackers.service.find_spec", lambda name: None)
    assert how_to_install("accel-trackers[tensorboard]") in TensorBoard.unusable()
