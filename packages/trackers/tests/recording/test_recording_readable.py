"""Configurations of any kind become data of JSON that people can read."""

from __future__ import annotations

import argparse
import json
import math
import os
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_trackers.recording.values import readable_config


class Colour(Enum):
    RED = "red"
    MIXED = (1, 2)


class Level(IntEnum):
    HIGH = 3


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    extra: dict[str, Any] = field(default_factory=dict)


class Point(NamedTuple):
    x: int
    y: int


class Plain:
    """An object with attributes, some of them of its class."""

    depth = 3
    kind = int

    def __init__(self) -> None:
        self.width = 4
        self._secret = 5

    @property
    def broken(self) -> int:
        raise RuntimeError("do not ask")

    def method(self) -> None: ...

    @staticmethod
    def function() -> None: ...


def inside(value: Any) -> Any:
    """What a value becomes inside of a configuration, which JSON has to know."""
    data = readable_config({"value": value})
    assert json.loads(json.dumps(data)).keys() == {"value"}
    return data["value"]


# As a whole


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"lr": 0.1, "names": ["a", None]}, {"lr": 0.1, "names": ["a", None]}),
        (OrderedDict(a=1), {"a": 1}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (UserDict(a=1), {"a": 1}),
        (argparse.Namespace(lr=0.1, _hidden=1), {"lr": 0.1, "_hidden": 1}),
        (types.SimpleNamespace(inner=types.SimpleNamespace(a=1)), {"inner": {"a": 1}}),
        (Optimizer(extra={"a": Optimizer}), {"lr": 0.1, "betas": [0.9, 0.99], "extra": {"a": str(Optimizer)}}),
        (Point(1, 2), {"x": 1, "y": 2}),
        (Plain(), {"width": 4}),
        ([1, 2], {"config": [1, 2]}),
        ("text", {"config": "text"}),
        (Path("a.yaml"), {"config": "a.yaml"}),
        (Colour.RED, {"config": "red"}),
        (3, {"config": 3}),
        (len, {"config": str(len)}),
        (torch.tensor([1, 2]), {"config": [1, 2]}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_configuration_may_be_of_any_kind(config: object, expected: dict[str, Any]) -> None:
    assert readable_config(config) == expected


def test_models_of_pydantic_are_read_as_they_say() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", lr=(float, 0.1), key=(str, pydantic.Field("secret", exclude=True)))
    assert readable_config(model()) == {"lr": 0.1}
    assert readable_config({"inner": [model()]}) == {"inner": [{"lr": 0.1}]}
    odd = model()
    odd.lr = "none"  # which it warns of when it is read
    assert readable_config(odd) == {"lr": "none"}


# Inside


def function() -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, 2), [1, 2]),
        (deque([1]), "deque([1])"),
        (torch.Size([2, 3]), [2, 3]),
        ({"b", "a", "c"}, ["a", "b", "c"]),
        (frozenset({3, 1}), [1, 3]),
        ({1, "a", None}, [1, None, "a"]),
        (range(3), "range(0, 3)"),
        (Colour.RED, "red"),
        (Colour.MIXED, [1, 2]),
        (Level.HIGH, 3),
        (Path("runs") / "a", str(Path("runs") / "a")),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (torch.channels_last, "torch.channels_last"),
        (Optimizer, str(Optimizer)),
        (np.float32, str(np.float32)),
        (function, str(function)),
        (math.sqrt, str(math.sqrt)),
        (date(2024, 2, 29), "2024-02-29"),
        (timedelta(minutes=1), "0:01:00"),
        (Decimal("0.5"), "0.5"),
        (Fraction(1, 4), 0.25),
        (1 + 2j, "(1+2j)"),
        (Point(1, 2), {"x": 1, "y": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (np.float32(0.5), 0.5),
        (np.str_("a"), "a"),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(["a", Colour.RED], dtype=object), ["a", "red"]),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.tensor([1j]), ["1j"]),
        (torch.nn.Parameter(torch.ones(2)), [1.0, 1.0]),
        (torch.zeros(64), [0.0] * 64),
        (torch.zeros(1001), "tensor([0., 0., 0.,  ..., 0., 0., 0.])"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_json_has_not_becomes_what_people_can_read(value: object, expected: object) -> None:
    found = inside(value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan"), torch.tensor(math.inf)])
def test_what_is_not_finite_stays_a_float(value: Any) -> None:
    assert repr(inside(value)) == repr(float(value))


class Seed(int):
    """A number of a class of its own."""


@pytest.mark.parametrize("number", [10**400, 2**63, -(2**63) - 1, 2**64 - 1, 2**127 + 1])
def test_integers_that_do_not_fit_into_64_bits_are_texts(number: int) -> None:
    for value in (number, Seed(number), Enum("Seeds", {"FIRST": number}).FIRST):
        assert inside(value) == str(number)
    assert inside([{"entropy": (number,)}]) == [{"entropy": [str(number)]}]


def test_integers_of_numpy_and_torch_that_do_not_fit_into_64_bits_are_texts() -> None:
    number = 2**64 - 1
    expected = [str(number)]
    assert inside(np.uint64(number)) == str(number)
    assert inside(np.array([number], dtype=np.uint64)) == expected
    assert inside(torch.tensor([number], dtype=torch.uint64)) == expected
    assert inside(np.random.SeedSequence(2**100).entropy) == str(2**100)


def test_the_largest_integers_that_fit_stay_numbers() -> None:
    for number in (2**63 - 1, -(2**63), Seed(7), np.int64(-(2**63))):
        assert inside(number) == number
        assert type(inside(number)) is int
    assert inside(True) is True


def test_a_long_text_of_the_user_is_kept_and_that_of_an_object_is_cut() -> None:
    assert inside("x" * 10_000) == "x" * 10_000
    found = inside(torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(100))))
    assert found.startswith("Sequential(\n  (0): Linear(")
    assert len(found) == 2000


def test_keys_become_texts() -> None:
    found = readable_config(
        {1: "a", 1.5: "c", None: "d", Colour.RED: "e", (1, 2): "f", torch.float16: "h", Path("b"): 1}
    )
    assert found == {
        "1": "a", "1.5": "c", "None": "d", "red": "e", "[1, 2]": "f", "torch.float16": "h", "b": 1,
    }  # fmt: skip


class FromFile:
    """What a file of YAML becomes in many a script."""

    def __init__(self, content: dict[Any, Any]) -> None:
        self.__dict__.update(content)


def test_attributes_may_have_any_name() -> None:
    assert readable_config(FromFile({True: 1, 3: 2, "lr": 0.1, "_own": 4})) == {"True": 1, "3": 2, "lr": 0.1}


def test_the_same_object_twice_is_no_circle() -> None:
    inner = [1]
    assert readable_config({"a": inner, "b": [inner, inner]}) == {"a": [1], "b": [[1], [1]]}


# Of any structure

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
ODD = st.sampled_from([
    Colour.MIXED, Path("a"), torch.bfloat16, torch.ones(3), np.ones((2, 2)), b"\xff", int, function, object(), 1j, math.nan, Decimal("sNaN"),
])  # fmt: skip
KEYS = (
    st.text()
    | st.integers()
    | st.none()
    | st.tuples(st.integers())
    | st.sampled_from([Colour.RED, Path("b"), 1.5, int])
)
Data = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
Anything = st.recursive(
    SCALARS | ODD | st.builds(lambda: 10**400) | st.sets(st.integers() | st.text(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.builds(lambda value: Optimizer(extra={"value": value}), inner)
        | st.builds(lambda value: argparse.Namespace(value=value), inner)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.text(), Data, max_size=4))
def test_data_of_json_is_not_changed(config: dict[str, Any]) -> None:
    assert json.dumps(readable_config(config)) == json.dumps(config)


@given(Anything)
def test_whatever_is_configured_is_data_of_json_in_the_end(config: object) -> None:
    for each in (config, {"inside": config}):
        text = json.dumps(readable_config(each))
        assert json.dumps(readable_config(json.loads(text))) == text


def test_texts_that_no_file_can_hold_are_spelled_out() -> None:
    config = readable_config({"path": Path(os.fsdecode(b"data/\xff")), "\udcfe": "\udcfd", "fine": "ü"})
    assert config == {"path": "data/\\udcff", "\\udcfe": "\\udcfd", "fine": "ü"}
    json.dumps(config, ensure_ascii=False).encode()


def test_what_contains_itself_is_an_error_at_the_call() -> None:
    config: dict[str, Any] = {"a": 1}
    config["self"] = config
    with pytest.raises(RecursionError):
        readable_config(config)
