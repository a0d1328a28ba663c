"""The order of the files when they run side by side; and the sizes that tests/test_shape.py counts, at the end of the run."""

from __future__ import annotations

import pytest

SIZES = pytest.StashKey[str]()
LONGEST = (
    "test_fsdp_any_to_any.py",
    "test_benchmarks.py",
    "test_resume_state.py",
    "test_resume.py",
    "test_third_party.py",
    "test_core_checkpoint_faults.py",
    "test_core_checkpoint_strategies.py",
    "test_core_checkpoint_optimizers.py",
    "test_launch_test_command.py",
    "test_core_exits.py",
    "test_same_losses.py",
    "test_quickstart.py",
    "test_quickstart_resume.py",
    "test_core_start_anywhere.py",
    "test_launch_notebook.py",
    "test_evaluation.py",
    "test_docs.py",
    "test_launch_machines.py",
    "test_launch_questionnaire.py",
    "test_trackers_suites.py",
    "test_trackers_mlflow.py",
    "test_trackers_comet_ml.py",
)
"""Files that take minutes. A process takes a whole file: one of these begun last would leave the other process idle."""


def pytest_collection_modifyitems(config, items):
    """Side by side, the longest files come first, in every process alike."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def show_sizes(pytestconfig):
    """Called with a table, which is then printed after the tests, whether or not anything failed."""

    def show(table: str) -> None:
        pytestconfig.stash[SIZES] = table
        if hasattr(pytestconfig, "workeroutput"):  # what a process of xdist gives the one that reports
            pytestconfig.workeroutput["sizes"] = table

    return show


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if table := getattr(node, "workeroutput", {}).get("sizes"):
        node.config.stash[SIZES] = table


def pytest_terminal_summary(terminalreporter, config):
    if table := config.stash.get(SIZES, None):
        terminalreporter.section("sizes, in lines")
        terminalreporter.write_line(table)
