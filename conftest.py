"""How all tests are run: longest files first, each from the same random numbers, no walks over what lives as long as the run, no limit of time per example."""

from __future__ import annotations

import gc

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

LONGEST = (
    "test_resume_state.py",
    "test_watch.py",
    "test_checkpoint_sharded_strategies.py",
    "test_checkpoint_asynchronous.py",
    "test_checkpoint_faults.py",
    "test_checkpoint_input.py",
    "test_launch_failures.py",
    "test_recording.py",
    "test_start_anywhere.py",
    "test_checkpoint_optimizers.py",
    "test_testing_checkpoint_suite.py",
    "test_recording_ends.py",
    "test_world.py",
    "test_recording_attacks.py",
    "test_quickstart.py",
    "test_testing_strategy_suite.py",
    "test_resume.py",
    "test_checkpoint_weights.py",
    "test_precision_suites.py",
    "test_fsdp_training.py",
    "test_data_iterable.py",
    "test_third_party.py",
    "test_fsdp_suites.py",
    "test_failure_notices.py",
    "test_checkpoint_whole_state.py",
    "test_watch_attacks.py",
    "test_exits.py",
    "test_launch_test_command.py",
    "test_launch_machines.py",
    "test_data_behaviours.py",
)
"""Files that take twelve seconds or more. A process takes a whole file: one of these begun last would leave the other process idle."""


def pytest_collection_modifyitems(config, items):
    """Side by side, the longest files come first, in every process alike."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup():
    """Weights that a test leaves to chance are the same in every run: a failure comes again."""
    torch.manual_seed(0)


def pytest_collection_finish():
    """Keeps what was imported and collected out of every later collection of garbage, of which some tests make many."""
    gc.collect()
    gc.freeze()
