"""What is said of trackers, once each, beside what the other tests of tracking meet."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
from trackers_for_tests import Listing, Older, begun, opened_at_the_end, said

from accel_core import Accelerator, TrackingKwargs


def whole(accelerator: Accelerator, values: dict[str, Any]) -> None:
    accelerator.log(values)
    accelerator.end_training()


class Failing(Listing):
    def log(self, values: Any, step: int, **options: Any) -> None:
        raise ConnectionError("gone")

    def finish(self, failed: bool) -> None:
        raise OSError("and no disk")


def test_a_tracker_that_cannot_be_closed_either() -> None:
    accelerator = begun(Failing())
    text = said(lambda: whole(accelerator, {"loss": 1}))
    assert "could not be closed either, and may have lost records: OSError: and no disk." in text


def test_waiting_at_the_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_trackers.recording.shutdown._QUIET", 0.05)
    with opened_at_the_end() as event:

        class Slow(Listing):
            def log(self, values: Any, step: int, **options: Any) -> None:
                event.wait(30)

        accelerator = begun(Slow(), rules=TrackingKwargs(finish_timeout=0.3))
        with caplog.at_level(logging.WARNING, "accel_core"):
            text = said(lambda: whole(accelerator, {"loss": 1}))
    assert "Waiting for the tracker 'listing' to record the rest, for 0.3 s at most." in caplog.text
    assert "at the end 2 records were not done within 0.3 s, and may be lost" in text


def test_a_process_that_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        text = said(lambda: accelerator.log({"loss": 1}))
    assert "log() was called in a process that was forked from the one that records, and is not recorded." in text
    accelerator.end_training()
    assert tracker.logged() == []


def test_older_trackers_get_images_as_arrays_and_tables_as_lists() -> None:
    pytest.importorskip("numpy")

    class Pictures(Older):
        def log_images(self, values: Any, step: int) -> None:
            self.seen.append({name: [image.shape for image in several] for name, several in values.items()})

        def log_table(self, name: str, columns: Any, data: Any, dataframe: Any, step: int) -> None:
            self.seen.append((name, columns, data, dataframe, step))

    tracker = Pictures()
    accelerator = begun(tracker)
    accelerator.log_images({"x": torch.zeros(3, 4, 5)})
    accelerator.log_table("t", ["a"], [[1]])
    accelerator.end_training()
    assert tracker.seen[:2] == [{"x": [(4, 5, 3)]}, ("t", ["a"], [[1]], None, 0)]


def test_what_is_recorded_is_flushed_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_trackers.recording.recorder._FLUSH_AFTER", 0.05)

    class Flushed(Listing):
        def flush(self) -> None:
            self._note("flush")

    tracker = Flushed()
    accelerator = begun(tracker)
    accelerator.log({"loss": 1})
    deadline = time.monotonic() + 10
    while ("flush",) not in tracker.calls and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tracker.calls[-1] == ("flush",)
    accelerator.end_training()
