"""Options from the environment: read where no argument was given, and refused when they make no sense."""

from __future__ import annotations

import pytest

from accel_core.options.resolution import Option, as_bool, as_steps, as_text, resolve


def test_an_argument_wins_even_if_it_equals_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert resolve(1, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", as_steps, 1) == Option(1, "argument")


def test_the_variable_serves_where_nothing_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", " bf16 ")
    assert resolve(None, "ACCELERATE_MIXED_PRECISION", as_text, "no") == Option("bf16", "ACCELERATE_MIXED_PRECISION")


def test_an_empty_variable_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "")
    assert resolve(None, "ACCELERATE_MIXED_PRECISION", as_text, "no") == Option("no", "default")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("off", False), ("n", False)])
def test_truth_values_in_their_usual_spellings(text: str, value: bool) -> None:
    assert as_bool(text, "X") is value


def test_what_is_no_truth_value_is_refused_with_the_variable() -> None:
    with pytest.raises(ValueError, match=r"ACCELERATE_USE_CPU='maybe' is not a truth value: expected one of 1, true"):
        as_bool("maybe", "ACCELERATE_USE_CPU")


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "four"])
def test_what_is_no_number_of_steps_is_refused_with_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=r"ACCELERATE_STEPS='.*' is not a number of steps: expected an integer"):
        as_steps(text, "ACCELERATE_STEPS")
