"""What says how the run is recorded: rules of tracking, and the interface of a tracker."""

from __future__ import annotations

import pytest
from trackers_for_tests import Listing

from accel_core import Accelerator, Tracker, TrackingKwargs


def test_the_rules_of_tracking_are_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TRACKING__STRICT", "yes")
    accelerator = Accelerator(cpu=True, log_with=Listing())
    assert accelerator._trackers._rules == TrackingKwargs(strict=True)
    assert "tracking.strict" in str(accelerator.explain())
    accelerator.end_training()
    with pytest.raises(
        ValueError, match=r"ACCELERATE_TRACKING__STRICT was given, an option of 'tracking', beside kwargs_handlers"
    ):
        Accelerator(cpu=True, log_with=Listing(), kwargs_handlers=[TrackingKwargs()])
    with pytest.warns(
        UserWarning, match="ACCELERATE_TRACKING__STRICT was given, an option of 'tracking', which is not active"
    ):
        Accelerator(cpu=True).end_training()


def test_rules_without_trackers_have_no_effect_and_say_so() -> None:
    with pytest.warns(UserWarning, match="kwargs_handlers has a TrackingKwargs, which nothing that is active takes"):
        Accelerator(cpu=True, kwargs_handlers=[TrackingKwargs(strict=True)]).end_training()


def test_the_interface_says_what_it_lacks() -> None:
    bare = Tracker()
    assert (Tracker.unusable(), bare.state(), bare.records(object())) == (None, {}, False)
    for call in (
        lambda: bare.tracker,
        lambda: bare.log({}, 0),
        lambda: bare.log_images({}, 0),
        lambda: bare.log_histograms({}, 0),
    ):
        with pytest.raises(NotImplementedError):
            call()
