"""Aim: what was logged is in its repository, and Aim itself reads it back."""

from __future__ import annotations

import pytest
from read_aim import make_repository, read_run
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

from accel_core import Bins, TrackedRun
from accel_testing import Recorded, TrackerSuite, Written
from accel_trackers.aim import Aim

pytestmark = [
    needs("aim"),
    pytest.mark.filterwarnings("ignore:.*declarative_base:DeprecationWarning"),  # when Aim is imported
]


class TestAim(TrackerSuite):
    tracker = Aim
    leaves_behind = {"warnings.filters": "modules that Aim imports, such as urllib3, add to them"}

    def options(self, folder):
        if not (folder / ".aim").exists():
            make_repository(folder)
        return {"repo": str(folder)}

    def read(self, written: Written) -> Recorded:
        return read_run(written.folder, written.state["run_hash"])


@pytest.fixture
def started(tmp_path):
    """A tracker that has begun, and is closed after the test."""
    make_repository(tmp_path)
    tracker = Aim(repo=str(tmp_path), experiment="pretraining", name="the third", tags=["long", "bf16"])
    tracker.start(TrackedRun("project", "run-1", {"lr": 0.1}))
    yield tracker
    if tracker.tracker is not None and not getattr(tracker, "ended", False):
        tracker.finish(failed=False)


def test_options_become_properties_of_the_run(started):
    run = started.tracker
    assert (run.experiment, run.name, sorted(run.tags)) == ("pretraining", "the third", ["bf16", "long"])


def test_context_and_epoch_go_to_aim(started):
    import aim

    started.log({"loss": 1.0}, 0, context={"subset": "train"}, epoch=3)
    started.log({"loss": 2.0}, 0, context={"subset": "validation"})
    started.log({"loss": 3.0}, 0, context={"subset": "validation"})
    found = {tuple(sorted(one.context.to_dict().items())): one for one in started.tracker.metrics()}
    assert set(found) == {
        (("subset", "train"),),
        (("subset", "validation"),),
        (("series", 2), ("subset", "validation")),
    }
    _, (values, epochs, _) = found[(("subset", "train"),)].data.items_list()
    assert (values, epochs) == ([1.0], [3.0])
    started.log({"shape": aim.Distribution(hist=[1, 2], bin_range=(0.0, 1.0))}, 0)
    assert started.tracker.get_distribution_sequence("shape", aim.sdk.run.Context({})) is not None


def test_a_histogram_has_the_context_of_its_record(started):
    bins = Bins((1, 2), (0.0, 1.0, 2.0), 0.0, 0.0)
    for subset in ("train", "validation"):
        started.log_histograms({"weights": bins}, 0, context={"subset": subset}, epoch=3)
    found = started.tracker.collect_sequence_info(("distributions",))["distributions"]
    assert [each["context"] for each in found if each["name"] == "weights"] == [
        {"subset": "train"},
        {"subset": "validation"},
    ]


def test_what_has_no_name_ruins_nothing(started, tmp_path, caplog):
    started.log({"": 7.0, "_": 8.0}, 0)
    started.log({"loss": 1.0}, 1)
    run_hash = started.state()["run_hash"]
    started.finish(failed=False)
    started.ended = True
    assert read_run(tmp_path, run_hash).numbers == {"__00000000": [(0, 7.0)], "_": [(0, 8.0)], "loss": [(1, 1.0)]}
    assert caplog.text.count("Aim takes no name like '': it is recorded as '__00000000'.") == 1


def test_a_name_may_have_values_of_several_kinds(started, tmp_path):
    started.log({"state": 1.0}, 0)
    started.log({"state": "warm"}, 1)
    run_hash = started.state()["run_hash"]
    started.finish(failed=False)
    started.ended = True
    found = read_run(tmp_path, run_hash)
    assert (found.numbers["state"], found.texts["state"]) == ([(0, 1.0)], [(1, "warm")])


def test_objects_of_aim_are_recorded_as_they_are():
    import aim

    assert Aim().records(aim.Text("so"))
    assert not Aim().records(object())


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        (
            Bins((1, 1), (0.0, 1.0, 3.0), 1.0, 1.0),
            r"'weights' has 2 bins of widths from 1; Aim takes at most 512, all of",
        ),
        (Bins((1,) * 513, tuple(map(float, range(514))), 1.0, 1.0), r"'weights' has 513 bins.*Log the values instead"),
    ],
)
def test_a_histogram_that_aim_cannot_hold_is_refused(started, bins, message):
    with pytest.raises(ValueError, match=message):
        started.log_histograms({"weights": bins}, 0)


def test_without_a_repository_it_makes_one_for_the_project(tmp_path):
    tracker = Aim()
    assert tracker.requires_logging_directory
    assert not Aim(repo="elsewhere").requires_logging_directory
    tracker.start(TrackedRun("project", "run-1", directory=tmp_path / "runs" / "project" / "run-1"))
    tracker.log({"loss": 0.5}, 0)
    found = (
        read_run(tmp_path / "runs" / "project", tracker.state()["run_hash"])
        if tracker.finish(failed=False) is None
        else None
    )
    assert found.numbers == {"loss": [(0, 0.5)]}
