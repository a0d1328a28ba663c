"""Options are read from constructors, and values are made from text and data, by one set of rules."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_core.options.conversion import choices, expected, fields_of, from_data, to_data

if TYPE_CHECKING:
    from somewhere import Unknown


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Component:
    def __init__(
        self,
        size: int,
        mode: Literal["pad", "stop"] = "pad",
        names: Sequence[str] = (),
        function: Callable[[], None] | None = None,
        either: str | Unknown | None = None,
        unknown: Unknown | None = None,
        untyped=1,
        *rest: int,
        keyword: bool = False,
        **more: Any,
    ) -> None: ...


def test_options_are_the_parameters_of_the_constructor_in_order() -> None:
    fields = fields_of(Component)
    assert list(fields) == ["size", "mode", "names", "function", "either", "unknown", "untyped", "keyword"]
    assert fields["size"].default is inspect.Parameter.empty
    assert fields["mode"].default == "pad"


def test_what_text_cannot_express_is_for_python_only_and_says_its_type() -> None:
    fields = fields_of(Component)
    assert {name for name, field in fields.items() if field.python_only} == {"function", "unknown", "untyped"}
    assert "Callable[[], None]" in fields["function"].python_only
    assert fields["untyped"].python_only == "it has no type"


class Machine(enum.Enum):
    ROUND = object()


def odd(
    machine: Machine | None = None,
    remark: [int] = None,
    colour: Colour = Colour.RED,
) -> None: ...


def test_a_parameter_that_has_an_odd_annotation_is_for_python_only() -> None:
    reasons = {name: field.python_only for name, field in fields_of(odd).items()}
    assert reasons == {
        "machine": "its type is Machine | None",
        "remark": "its type is [int]",
        "colour": "",
    }


def test_a_partial_has_the_options_of_what_it_calls() -> None:
    fields = fields_of(functools.partial(odd, colour=Colour.BLUE))
    assert (fields["colour"].type, fields["colour"].default) == (Colour, Colour.BLUE)


def test_a_union_with_an_object_is_expressed_by_its_other_members() -> None:
    either = fields_of(Component)["either"]
    assert from_data(either.type, "name") == "name"
    assert expected(either.type) == "a text or 'none'"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (bool, "Yes", True),
        (bool, "off", False),
        (int, " 12 ", 12),
        (int, "-3", -3),
        (float, "1e-3", 1e-3),
        (float, "2", 2.0),
        (str, "no", "no"),
        (Path, "a/b", Path("a/b")),
        (str | os.PathLike[str], "a/b", "a/b"),
        (Path | None, "~/a", Path.home() / "a"),
        (str | os.PathLike[str], "~/a", f"{Path.home()}/a"),
        (list[Path], "~,b", [Path.home(), Path("b")]),
        (str, "~/a", "~/a"),
        (torch.dtype, "bfloat16", torch.bfloat16),
        (torch.dtype, "torch.float32", torch.float32),
        (timedelta, "90", timedelta(seconds=90)),
        (timedelta, "1.5h", timedelta(minutes=90)),
        (timedelta, "250ms", timedelta(milliseconds=250)),
        (Literal["pad", "stop"], "STOP", "stop"),
        (Literal[1, 2], "2", 2),
        (Colour, "Blue", Colour.BLUE),
        (int | None, "none", None),
        (int | None, "7", 7),
        (str | None, "Null", None),
        (bool | int, "true", True),
        (bool | int, "2", 2),
        (bool | int, "1", 1),
        (list[int], "1, 2,3", [1, 2, 3]),
        (list[int], "[1, 2]", [1, 2]),
        (list[str], "", []),
        (tuple[str, ...], "a,b", ("a", "b")),
        (str | Sequence[str], "a", "a"),
        (str | Sequence[str], "a,b", ["a", "b"]),
        (set[int], "1,1", {1}),
        (dict[str, int], "a=1,b=2", {"a": 1, "b": 2}),
        (Mapping[str, Any], '{"a": [1, null]}', {"a": [1, None]}),
        (dict[str, Any], "rank=2,name=x", {"rank": 2, "name": "x"}),
        (dict[str, Any], '{"a": "2", "b": 2}', {"a": "2", "b": 2}),
        (dict[str, str], "a=x=y,b=", {"a": "x=y", "b": ""}),
        (list, '["7", 7]', ["7", 7]),
        (tuple[int, str], "1,a", (1, "a")),
        (Literal["none"] | str | None, "none", "none"),
        (Literal[1, True], "true", True),
        (Annotated[int, "a remark"], "5", 5),
    ],
)
def test_a_text_becomes_a_value(kind: Any, text: str, value: Any) -> None:
    result = from_data(kind, text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (bool, "maybe", "true or false"),
        (bool, 1, "true or false"),
        (int, "1.5", "a whole number"),
        (int, True, "a whole number"),
        (int, 1.0, "a whole number"),
        (float, "much", "a number"),
        (torch.dtype, "float33", "a dtype of torch such as 'bfloat16'"),
        (torch.dtype, "nn", "a dtype of torch such as 'bfloat16'"),
        (timedelta, "soon", "a time such as 600 (seconds), '90s', '30m' or '2h'"),
        *(
            (timedelta, wrong, "a time such as 600 (seconds), '90s', '30m' or '2h'")
            for wrong in (math.inf, -5, f"{9:9<30}d")
        ),
        (float, 10**400, "a number"),
        (list, "[" * 100_000, "a list"),
        (tuple[float, float], "0.9", "a list of 2: a number, a number"),
        (dict[str, int], "a=1,a=2", "a mapping such as {key: value}"),
        (dict[str, int], '{"a": 1, "a": 2}', "a mapping such as {key: value}"),
        (timedelta, True, "a time such as 600 (seconds), '90s', '30m' or '2h'"),
        (Literal["pad", "stop"], "drop", "one of 'pad', 'stop'"),
        (Literal["a"] | None, "b", "one of 'a' or 'none'"),
        (Colour, "green", "one of 'red', 'blue'"),
        (int | None, "x", "a whole number or 'none'"),
        (bool | int, "x", "true or false or a whole number"),
        (str, 5, "a text"),
        (str, None, "a text"),
        (Path, 5, "a path"),
        (list[int], "1,x", "a list, each a whole number"),
        (list[int], 3, "a list, each a whole number"),
        (list, "[1", "a list"),
        (dict[str, int], "a", "a mapping such as {key: value}"),
        (dict[str, int], [1], "a mapping such as {key: value}"),
    ],
)
def test_what_is_no_value_of_the_type_is_refused_with_what_one_looks_like(kind: Any, wrong: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_data(kind, wrong)
    assert str(caught.value) == words == expected(kind)


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        (bool, True, True),
        (bool, "no", False),
        (int, 3, 3),
        (float, 3, 3.0),
        (timedelta, 1.5, timedelta(seconds=1.5)),
        (int | None, None, None),
        (list[int], [1, "2"], [1, 2]),
        (list[str], ["a"], ["a"]),
        (dict[str, Any], {"a": "1"}, {"a": "1"}),
        (Any, {"a": [1]}, {"a": [1]}),
    ],
)
def test_data_become_a_value(kind: Any, data: Any, value: Any) -> None:
    assert from_data(kind, data) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, False),
        (float | None, 0.5),
        (torch.dtype | None, torch.float16),
        (timedelta, timedelta(hours=2)),
        (Colour, Colour.RED),
        (Path, Path("a")),
        (Sequence[str], ["a", "b"]),
        (tuple[int, ...], (1, 2)),
        (dict[str, list[int]], {"a": [1]}),
        (int | None, None),
    ],
)
def test_a_value_survives_the_way_through_json(kind: Any, value: Any) -> None:
    assert from_data(kind, json.loads(json.dumps(to_data(value)))) == value


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(alphabet="abc", min_size=1)))
def test_any_simple_value_survives_as_text(value: float | str | bool) -> None:
    assert from_data(type(value), str(value)) == value


def test_an_object_has_no_data() -> None:
    with pytest.raises(TypeError, match=r"is a object, which no text or data can express: give it in Python"):
        to_data(object())


def test_choices_are_known_where_the_type_lists_them() -> None:
    assert choices(Literal["a", "b"] | None) == ("a", "b")
    assert choices(Colour) == (Colour.RED, Colour.BLUE)
    assert choices(bool) == (True, False)
    assert choices(bool | int) == ()
    assert choices(str) == ()


def test_each_place_of_a_fixed_list_is_read_by_its_own_type():
    assert from_data(tuple[str, Any], "1,2") == ("1", 2)
    assert from_data(tuple[Any, str], "1,2") == (1, "2")
