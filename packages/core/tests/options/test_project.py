"""The folders of a project: checked where they are given, and filled in by the Accelerator's argument alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_core.options.handlers import ProjectConfiguration, resolve_project


def test_the_logs_go_into_the_project_unless_a_folder_of_their_own_is_given() -> None:
    assert ProjectConfiguration("runs").logging_dir == "runs"
    assert ProjectConfiguration("runs", logging_dir="logs").logging_dir == "logs"
    assert ProjectConfiguration(logging_dir="logs").project_dir is None


def test_another_project_takes_along_the_logs_that_were_not_given() -> None:
    project, own = ProjectConfiguration("first"), ProjectConfiguration("first", logging_dir="first")
    for each in (project, own):
        each.set_directories("second")
    assert (project.project_dir, project.logging_dir) == ("second", "second")
    assert (own.project_dir, own.logging_dir) == ("second", "first")


def test_a_folder_of_the_logs_that_was_assigned_later_stays() -> None:
    project = ProjectConfiguration("first")
    project.logging_dir = "logs"
    project.set_directories("second")
    assert project.logging_dir == "logs"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"automatic_checkpoint_naming": "no"}, TypeError, "automatic_checkpoint_naming='no'.*a str: give True or"),
        ({"save_on_each_node": 1}, TypeError, "save_on_each_node=1.*a int: give True or False"),
        ({"iteration": -1}, ValueError, "iteration=-1.: expected an integer of at least 0"),
        ({"iteration": 3.0}, ValueError, "iteration=3.0.: expected an integer of at least 0"),
        ({"iteration": True}, ValueError, "iteration=True.: expected an integer of at least 0"),
        (
            {"total_limit": 0, "automatic_checkpoint_naming": True},
            ValueError,
            "total_limit=0.: expected an integer of at least 1",
        ),
        (
            {"total_limit": True, "automatic_checkpoint_naming": True},
            ValueError,
            "total_limit=True.: expected an integer of at least 1",
        ),
        (
            {"total_limit": 2},
            ValueError,
            "total_limit=2. limits checkpoints with automatic names.*never deleted. Add automatic_checkpoint_naming=True",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_birth(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """For `total_limit`."""
    with pytest.raises(error, match=message):
        ProjectConfiguration(**options)


def test_nothing_given_is_a_configuration_without_folders() -> None:
    assert resolve_project(None, None) == ProjectConfiguration()


def test_the_argument_fills_in_what_the_configuration_leaves_open() -> None:
    given = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    project = resolve_project(Path("runs"), given)
    assert (project.project_dir, project.logging_dir, project.total_limit) == (Path("runs"), Path("runs"), 2)
    assert resolve_project("runs", ProjectConfiguration(logging_dir="logs")).logging_dir == "logs"
    assert resolve_project("runs", None).project_dir == "runs"


def test_the_configuration_that_was_given_stays_as_it_is() -> None:
    """Law 7: two Accelerators with one configuration do not count for each other."""
    given = ProjectConfiguration("runs")
    first, second = resolve_project(None, given), resolve_project(None, given)
    first.iteration = 5
    assert (given.iteration, second.iteration) == (0, 0)


def test_the_same_folder_may_be_given_twice() -> None:
    assert resolve_project("runs/", ProjectConfiguration(Path("runs"))).project_dir == Path("runs")


def test_two_folders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' and ProjectConfiguration\(project_dir='b'\) were both given.*Leave one"):
        resolve_project("a", ProjectConfiguration("b"))


def test_automatic_names_need_a_folder() -> None:
    with pytest.raises(
        ValueError, match=r"automatic_checkpoint_naming=True\) was given, but no folder.*Add project_dir"
    ):
        resolve_project(None, ProjectConfiguration(automatic_checkpoint_naming=True))
