"""Trackers by name and by class, and loggers."""

from __future__ import annotations

import logging

import pytest

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers, register_tracker_class


class Remembering(GeneralTracker):
    name = "remembering"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir, **options):
        super().__init__()
        self.given = (run_name, str(logging_dir), options)
        self.records = []

    @property
    def tracker(self):
        return self.records

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step, **kwargs):
        self.records.append((step, values))


def test_a_registered_class_is_made_with_the_run(tmp_path, monkeypatch):
    monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, "remembering", raising=False)
    register_tracker_class(Remembering)
    with pytest.raises(ValueError, match="requires a `logging_dir`"):
        Accelerator(log_with="remembering")
    accelerator = Accelerator(log_with="remembering", project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 1}, {"remembering": {"tag": "a"}})
    accelerator.log({"loss": 0.5}, step=3)
    tracker = accelerator.get_tracker("remembering")
    assert isinstance(tracker, Remembering)
    assert tracker.given == ("project", str(tmp_path), {"tag": "a"})
    assert tracker.config == {"lr": 1}
    assert accelerator.get_tracker("remembering", unwrap=True) == [(3, {"loss": 0.5})]
    accelerator.end_training()
    del LOGGER_TYPE_TO_CLASS["remembering"]


def test_what_is_no_tracker_class_is_refused():
    with pytest.raises(ValueError, match="expected a subclass of `GeneralTracker`"):
        register_tracker_class(dict)
    with pytest.raises(ValueError, match="Unsupported logging capability"):
        filter_trackers("no such service")


def test_a_logger_needs_to_know_the_process(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)  # which get_logger sets, too
    logger = get_logger("accel_compat_test", log_level="INFO")
    PartialState._reset_state()
    with pytest.raises(RuntimeError, match="not known before"):
        logger.info("early")
    PartialState()
    with caplog.at_level(logging.INFO):
        logger.info("said")
        logger.warning_once("once")
        logger.warning_once("once")
    assert [record.message for record in caplog.records] == ["[RANK 0] said", "[RANK 0] once"]
