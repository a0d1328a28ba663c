"""What `nox -s peer` lets fail has a reason that people can read: a row of the page on differences, or the other's own failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

GROUPS = json.loads((Path(__file__).parent / "peer_failures.json").read_text(encoding="utf-8"))
PAGE = (Path(__file__).parents[4] / "docs/explanation/differences/through-compat.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["because"])
def test_every_failure_that_is_allowed_has_a_reason_on_the_page(group):
    if "row" in group:
        assert group["row"] in PAGE
    else:
        assert group["fails_there_too"]
    assert group["tests"] == sorted(set(group["tests"]))


def test_no_failure_is_listed_twice():
    listed = [test for group in GROUPS for test in group["tests"]]
    assert len(listed) == len(set(listed))
