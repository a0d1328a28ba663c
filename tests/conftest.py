"""Shows the sizes that tests/test_shape.py counts at the end of the run, whether or not anything failed."""

from __future__ import annotations

import pytest

SIZES = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def show_sizes(pytestconfig):
    """Called with a table, which is then printed after the tests."""

    def show(table: str) -> None:
        pytestconfig.stash[SIZES] = table

    return show


def pytest_terminal_summary(terminalreporter, config):
    if table := config.stash.get(SIZES, None):
        terminalreporter.section("sizes, in lines")
        terminalreporter.write_line(table)
