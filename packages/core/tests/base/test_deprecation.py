"""Older spellings work, with one warning at the user's line, and none outlives its version."""

from __future__ import annotations

import ast
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

import accel_core
from accel_core import DDP, Accelerator, AutocastKwargs, GradientAccumulationPlugin, Single
from accel_core.base.deprecation import Deprecation
from accel_core.facade.older_arguments import OLDER_ARGUMENTS, chosen_strategy, renamed
from accel_core.plugins.offers import Version

SOURCES = sorted(Path(accel_core.__file__).parent.rglob("*.py"))


def removals() -> dict[str, str]:
    """Where each older spelling is declared → the version that removes it."""
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Deprecation":
                last = node.keywords[-1].value if node.keywords else node.args[-1]
                found[f"{path.name}:{node.lineno}"] = ast.literal_eval(last)
    return found


def test_no_older_spelling_outlives_its_version() -> None:
    declared = removals()
    assert len(declared) >= len(OLDER_ARGUMENTS)
    now = Version.parse(accel_core.__version__)
    due = {place for place, version in declared.items() if Version.parse(version) <= now}
    assert not due, f"version {accel_core.__version__} is to be without them: {due}"


def test_the_warning_names_both_spellings_and_the_version_at_the_line_of_the_user() -> None:
    message = r"^old\(\) is an older spelling, which version 9.0 no longer takes. Write new\(\)\.$"
    with pytest.warns(FutureWarning, match=message) as record:
        Deprecation("old()", "new()", "9.0").warn()
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert (record[0].filename, record[0].lineno) == (__file__, line)


def test_a_loop_warns_once_and_each_line_for_itself() -> None:
    spelling = Deprecation("old()", "new()", "9.0")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        for _ in range(3):
            spelling.warn()
        spelling.warn()
    assert len(record) == 2


def test_a_warning_out_of_the_library_points_at_the_line_that_called_it() -> None:
    def user() -> Any:
        return renamed({"kwarg_handler": [AutocastKwargs()]}, {"kwargs_handlers": None})

    with pytest.warns(FutureWarning, match="kwarg_handler is an older spelling.*Write kwargs_handlers") as record:
        assert user() == {"kwargs_handlers": [AutocastKwargs()]}
    assert record[0].filename == __file__
    assert record[0].lineno == user.__code__.co_firstlineno + 1


def test_an_argument_that_has_only_its_own_spelling_is_as_it_was_given() -> None:
    older: dict[str, object] = {"fsdp_plugin": 1}
    assert renamed(older, {}) == {}
    assert older == {"fsdp_plugin": 1}


def test_both_spellings_at_once_are_refused() -> None:
    with (
        pytest.warns(FutureWarning, match="step_with_optimizer is an older spelling"),
        pytest.raises(ValueError, match="step_with_optimizer and step_scheduler_with_optimizer were both given"),
    ):
        Accelerator(cpu=True, step_with_optimizer=True, step_scheduler_with_optimizer=False)


def test_a_plugin_argument_is_taken_out_and_stands_for_the_strategy() -> None:
    single = Single()
    older: dict[str, object] = {"single_plugin": single, "other_plugin": None, "unknown": 1}
    assert chosen_strategy(None, older) == (single, {"default": single})
    assert older == {"unknown": 1}


@pytest.mark.parametrize("argument", ["ddp_plugin", "ddp_plugins"])
def test_of_a_dict_of_configured_objects_the_first_is_active(argument: str) -> None:
    train, evaluate = DDP(bucket_cap_mb=50), DDP()
    active, configured = chosen_strategy(None, {argument: {"train": train, "evaluate": evaluate}})
    assert active is train
    assert configured == {"train": train, "evaluate": evaluate}


def test_a_strategy_that_is_given_by_its_name_has_no_configured_objects() -> None:
    assert chosen_strategy("ddp", {}) == ("ddp", {})


@pytest.mark.parametrize(
    ("older", "error", "message"),
    [
        ({"my_plugin": 3}, TypeError, "my_plugin=3 is a int, expected a strategy object, such as DDP"),
        ({"my_plugins": {"a": 3}}, TypeError, r"my_plugins\['a'\]=3 is a int, expected a strategy object"),
        ({"my_plugins": {}}, ValueError, r"my_plugins=\{\} holds no strategy. Put at least one object into it"),
        (
            {"single_plugin": Single(), "single_plugins": {"a": Single()}},
            ValueError,
            "single_plugins=.* and single_plugin=.* were both given, and one run has one strategy. Leave one",
        ),
        (
            {"fsdp_plugin": DDP()},
            ValueError,
            r"fsdp_plugin=<.*> was given, but a DDP goes by other names: ddp\. Write strategy=DDP\(\.\.\.\)",
        ),
        (
            {"ddp_plugins": {"a": DDP(), "b": Single()}},
            ValueError,
            r"ddp_plugins\['b'\]=<.*> was given, but a Single goes by other names: single",
        ),
    ],
)
def test_plugin_arguments_that_choose_nothing_or_too_much_are_refused(
    older: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        chosen_strategy(None, older)


def test_a_variable_beside_a_complete_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 8: it would be ignored."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(
        ValueError,
        match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='4' and gradient_accumulation_plugin=.*leave the other out",
    ):
        Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


def test_a_plugin_that_says_nothing_of_steps_has_windows_of_one() -> None:
    plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 1
