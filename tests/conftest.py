"""Shows the sizes that tests/test_shape.py counts, at the end of the run."""

from __future__ import annotations

import pytest

SIZES = pytest.StashKey[str]()


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
