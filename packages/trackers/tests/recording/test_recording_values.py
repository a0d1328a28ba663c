"""What is logged: taken as it is at that moment without waiting for a device, and made plain, flat and countable later."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from accel_core import Bins, Histogram, Table
from accel_trackers.recording import device_copy, snapshot
from accel_trackers.recording.flat_values import Flat, flatten
from accel_trackers.recording.histograms import CopiedHistogram
from accel_trackers.recording.scalars import LeftOut, UnreadableError, describe, plain_value
from accel_trackers.recording.snapshot import Snapshot
from accel_trackers.recording.tables import as_table


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Figure:
    """An object that is no number."""


class Text(str):
    """A text of a class of its own."""

    __slots__ = ()


class Count(int):
    """A number of a class of its own."""


def taken(**values: Any) -> dict[str, Any]:
    return Snapshot.take(values).resolve()


# Snapshots


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (2.5, 2.5),
        (True, True),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.int64(-7), -7),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.array(4), 4),
        (np.array([[1.5]]), 1.5),
        (np.longdouble(0.5), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor([[1.5]], dtype=torch.bfloat16), 1.5),
        (torch.tensor(True), True),
        (torch.nn.Parameter(torch.tensor(0.25)), 0.25),
        (torch.tensor(3.0, requires_grad=True) * 2, 6.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Path("runs") / "first", str(Path("runs") / "first")),
        (date(2024, 2, 29), "2024-02-29"),
        (datetime(2024, 2, 29, 12, 30), "2024-02-29T12:30:00"),
        (timedelta(minutes=1.5), 90.0),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (Text("text"), "text"),
        (Count(7), 7),
    ],
)
def test_a_number_or_text_in_any_guise_becomes_a_plain_one(value: object, expected: object) -> None:
    found = taken(value=value)["value"]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [float, torch.tensor, np.float32, np.array])
def test_what_is_no_finite_number_stays_what_it_is(make: Any, value: float) -> None:
    assert repr(taken(value=make(value))["value"]) == repr(value)


@pytest.mark.parametrize(
    "value",
    [2**63, 2**70, -(2**63) - 1, Count(2**70), np.uint64(2**64 - 1), np.array(2**64 - 1, dtype=np.uint64), torch.tensor(2**63, dtype=torch.uint64)],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_an_integer_that_does_not_fit_into_64_bits_becomes_a_float(value: Any) -> None:
    for found in (taken(value=value)["value"], as_table(["a"], [[value]]).rows[0][0]):
        assert type(found) is float
        assert found == float(value.item() if isinstance(value, torch.Tensor) else int(value))


@pytest.mark.parametrize(
    "value", ["\udcff", Text("\udcff"), np.str_("\udcff"), Path("\udcff")], ids=lambda each: type(each).__name__
)
def test_texts_that_no_file_can_hold_are_spelled_out(value: Any) -> None:
    for found in (taken(value=value)["value"], as_table(["a"], [[value]]).rows[0][0]):
        assert found == "\\udcff"
        assert type(found) is str


def test_other_objects_are_kept() -> None:
    figure, several = Figure(), [1, 2]
    assert taken(figure=figure, several=several, nothing=None) == {
        "figure": figure,
        "several": several,
        "nothing": None,
    }


def test_a_large_tensor_is_kept_without_its_graph() -> None:
    found = taken(large=torch.ones(3, requires_grad=True) * 2)["large"]
    assert found.tolist() == [2, 2, 2]
    assert not found.requires_grad


def test_where_nobody_takes_objects_none_is_kept() -> None:
    values = {"figure": Figure(), "rows": [1], "tensor": torch.ones(2), "array": np.ones(3), "none": None, "loss": 1.0}
    shot = Snapshot.take(values, objects=False)
    descriptions = [describe(each) for each in values.values()]
    assert shot.resolve() == {
        **{name: LeftOut(each) for name, each in zip(values, descriptions, strict=True)},
        "loss": 1.0,
    }
    assert shot.elements == 0


def test_what_lists_hold_is_taken_as_it_is_then() -> None:
    model, row = torch.nn.Linear(1, 2), [1, np.float32(0.5), torch.tensor(2)]
    values = {
        "rows": (row, {"deep": [model.weight]}),
        "parameters": [*model.parameters()],
        "figures": [figure := Figure()],
    }
    shot = Snapshot.take(values)
    expected = [each.detach().clone() for each in model.parameters()]
    row.append(9)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(99)
    found = shot.resolve()
    assert found["rows"][0] == [1, 0.5, 2]
    assert [type(each) for each in found["rows"][0]] == [int, float, int]
    assert torch.equal(found["rows"][1]["deep"][0], expected[0])
    for each, before in zip(found["parameters"], expected, strict=True):
        assert type(each) is torch.Tensor
        assert torch.equal(each, before)
    assert found["figures"] == [figure]


def itself() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, torch.zeros(20_000)], "a list with a tensor of 20000 elements; Histogram(tensor) says"),
        ([{"deep": torch.ones(2, device="meta")}], "a list with a tensor of shape (2,) on the device meta: it has no values"),
        ([Histogram([1])], "a list with a Histogram, which belongs into a dict"),
        (itself(), "a list with a list that contains itself"),
        ([0] * 20_000, "a list of 20000; of up to 10000 values some trackers take one"),
        (np.zeros(20_000), "an array of 20000 elements; Histogram(array) says how they are distributed"),
        (torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})), "an Own of shape (2,): it is of a class of its own"),
        (torch.eye(3).to_sparse(), "a tensor of shape (3, 3) of torch.float32 with the layout torch.sparse_coo: take value.to_dense()"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_left_out_with_the_reason(value: Any, reason: str) -> None:
    found = taken(value=value)["value"]
    assert isinstance(found, LeftOut)
    assert found.reason.startswith(reason)


class Unreadable(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("no")


class Speechless:
    def __str__(self) -> str:
        raise OSError("no words")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (Unreadable(a=1), "an Unreadable of test_recording_values whose items cannot be read: KeyError: 'no'"),
        (
            {Speechless(): 1},
            "a dict with a Speechless of test_recording_values as a key, which no text can be made of: OSError: no words",
        ),
    ],
)
def test_dicts_that_cannot_be_read_are_refused_and_left_out_inside_of_others(values: Any, reason: str) -> None:
    with pytest.raises(UnreadableError) as raised:
        Snapshot.take(values)
    assert str(raised.value) == reason
    assert taken(inner=values, loss=1) == {"inner": LeftOut(reason), "loss": 1}


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        ("x" * 300, 300),
        (torch.ones(7), 7),
        (torch.tensor(1.0), 0),
        (2.5, 0),
        (np.ones((2, 3)), 6),
        ([1, "abc", torch.ones(4)], 3 + 3 + 4),
        (Histogram(torch.ones(5)), 5),
        ({"deep": {"text": "abcd"}}, 4),
        (np.str_("abc"), 3),
    ],
)
def test_a_snapshot_knows_how_much_it_holds(value: Any, elements: int) -> None:
    assert Snapshot.take({"value": value, "loss": torch.tensor(1.0)}).elements == elements


def test_what_becomes_of_values_after_they_were_taken_does_not_show() -> None:
    loss, array, inner = torch.tensor([1.0]), np.array(2.0), {"a": 1}
    values = {"loss": loss, "array": array, "inner": inner}
    shot = Snapshot.take(values)
    loss.zero_()
    array[...] = 0
    inner["a"] = values["more"] = 5
    assert shot.resolve() == {"loss": 1.0, "array": 2.0, "inner": {"a": 1}}


def test_every_resolving_gives_dicts_of_its_own() -> None:
    shot = Snapshot.take({"inner": {"a": 1}})
    shot.resolve()["inner"]["a"] = 2
    assert shot.resolve() == {"inner": {"a": 1}}


def test_nested_mappings_of_any_kind_become_dicts_with_texts_as_keys() -> None:
    found = taken(metrics=OrderedDict([(0, torch.tensor(1.0)), (Colour.RED, {"deep": np.float64(2)})]))
    assert found == {"metrics": {"0": 1.0, "red": {"deep": 2.0}}}
    assert type(found["metrics"]) is dict


def test_two_keys_that_read_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="Two values to be logged have the name '1': keys become texts. Rename one"):
        Snapshot.take({"outer": {1: 0.0, "1": 0.0}})


def test_two_names_that_become_one_when_they_are_joined_are_refused_where_they_are_logged() -> None:
    with pytest.raises(
        ValueError, match="have the name 'a/b', because the names of nested dicts are joined by '/'.*Rename"
    ):
        Snapshot.take({"a": {"b": 1}, "a/b": torch.tensor(2)})


def test_a_dict_in_itself_is_left_out() -> None:
    values: dict[str, Any] = {"a": 1}
    values["self"] = {"again": values}
    assert Snapshot.take(values).resolve() == {"a": 1, "self": {"again": LeftOut("a dict that contains itself")}}


def test_the_same_dict_twice_is_no_circle() -> None:
    inner = {"b": 1}
    assert taken(first=inner, second=inner) == {"first": inner, "second": inner}


def test_what_lies_too_deep_is_left_out_and_the_rest_is_not() -> None:
    values: dict[str, Any] = {"value": 0}
    for depth in range(1, 30):
        values = {"value": depth, "below": values}
    found, depths = Snapshot.take(values).resolve(), []
    while isinstance(found, dict):
        depths.append(found["value"])
        found = found["below"]
    assert depths == list(range(29, 29 - snapshot.DEEPEST, -1))
    assert found == LeftOut("a dict inside 20 others, which is the most")


class Broken(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch.Tensor.item:
            raise RuntimeError("out of reach")
        return super().__torch_function__(function, types, arguments, named or {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            torch.tensor(1.0).as_subclass(Broken),
            r"a Broken of shape \(\) that cannot be read: RuntimeError: out of reach",
        ),
        (Fraction(10**400), r"a Fraction of fractions that cannot be read: OverflowError: .*"),
    ],
    ids=["broken", "overflow"],
)
def test_a_value_that_cannot_be_read_is_left_out_with_the_reason_and_the_others_are_not(
    value: object, reason: str
) -> None:
    found = taken(value=value, loss=torch.tensor(1.0))
    assert found["loss"] == 1.0
    assert isinstance(found["value"], LeftOut)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found["value"].reason)


# A device, which this machine may not have: the CPU taken for one whose queue ends when the test says so.


class Device:
    """A device that is far behind, in place of the CPU.

    Args:
        patch: undone by `unplug`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copies: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.done = threading.Event()
        self.unplug = patch.undo
        to = torch.Tensor.to

        def spied(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            self.copies.append((len(tensor), tensor.dtype, *arguments, *named.items()))
            return to(tensor, *arguments, **named)

        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        patch.setattr(torch.Tensor, "item", lambda _: pytest.fail("it waits for the device"))
        patch.setattr(torch.Tensor, "to", spied)
        patch.setattr(torch, "Event", lambda _: Event(self))
        patch.setattr(torch.accelerator, "current_stream", lambda _: "the current stream")


class Event:
    """One in the queue of that device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.asked = 0
        device.events.append(self)

    def record(self, stream: object) -> None:
        assert stream == "the current stream"

    def query(self) -> bool:
        self.asked += 1
        return self.device.done.is_set()


@pytest.fixture
def device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        yield Device(patch)


def test_numbers_on_a_device_come_in_one_copy_per_dtype_that_nobody_waits_for(device: Device) -> None:
    losses = [torch.tensor(float(number)) for number in range(5)]
    values = {
        "first": 0.5,
        "losses": dict(enumerate(losses)),
        "steps": torch.tensor([7]),
        "half": torch.tensor(1.5).half(),
    }
    device.copies.clear()
    shot = Snapshot.take(values)
    for loss in losses:
        loss.fill_(-1)
    kinds = [(5, torch.float32), (1, torch.int64), (1, torch.float16)]
    assert device.copies == [(*kind, "cpu", ("non_blocking", True)) for kind in kinds]
    assert [event.asked for event in device.events] == [0]
    device.unplug()
    device.done.set()
    found = shot.resolve()
    assert found == {
        "first": 0.5,
        "losses": {str(number): float(number) for number in range(5)},
        "steps": 7,
        "half": 1.5,
    }
    assert [*found] == [*values]


def test_resolving_waits_until_the_device_is_there(device: Device) -> None:
    shot = Snapshot.take({"loss": torch.tensor(2.0)})
    device.unplug()
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(shot.resolve()))
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    assert device.events[0].asked > 1
    device.done.set()
    worker.join(10)
    assert found == [{"loss": 2.0}]


def test_small_tensors_on_a_device_are_on_the_host_when_the_mark_is_reached(device: Device) -> None:
    values = torch.tensor([1.0, 2.0])
    device.copies.clear()
    shot = Snapshot.take({"pair": values, "rows": [values, torch.tensor(3.0)]})
    assert device.copies == [
        (1, torch.float32, "cpu", ("non_blocking", True)),
        *[(2, torch.float32, "cpu", ("non_blocking", True))] * 2,
    ]
    assert [event.asked for event in device.events] == [0]
    device.unplug()
    device.done.set()
    found = shot.resolve()
    assert found["pair"].tolist() == found["rows"][0].tolist() == [1.0, 2.0]
    assert found["rows"][1] == 3.0
    assert device.events[0].asked > 0


def test_where_nobody_takes_tensors_none_leaves_its_device(device: Device) -> None:
    values = {"pair": torch.ones(2)}
    device.copies.clear()
    assert Snapshot.take(values, objects=False).resolve() == {"pair": LeftOut("a tensor of shape (2,)")}
    assert (device.copies, device.events) == ([], [])


def test_a_dtype_without_numbers_costs_no_other_value(device: Device) -> None:
    bits = torch.empty((), dtype=torch.bits8)
    shot = Snapshot.take({"bits": bits, "loss": torch.tensor(2.0)})
    device.unplug()
    device.done.set()
    found = shot.resolve()
    assert found["loss"] == 2.0
    assert "a tensor of shape () that cannot be read: NotImplementedError: " in found["bits"].reason


def test_numbers_that_do_not_leave_their_device_are_left_out_and_the_others_are_not(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "stack", lambda _: 1 / 0)
    shot = Snapshot.take({"loss": torch.tensor(2.0), "lr": 0.5})
    reason = "a tensor of shape () that cannot be read: ZeroDivisionError: division by zero"
    assert shot.resolve() == {"loss": LeftOut(reason), "lr": 0.5}


def test_without_pinned_memory_or_events_a_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    to, modes = torch.Tensor.to, []

    def unpinned(tensor: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
        modes.append(non_blocking)
        if non_blocking:
            raise NotImplementedError("pinned memory")
        return to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", unpinned)
    hosts, there = device_copy.send([torch.tensor([1.0])], torch.device("cpu"))
    assert (hosts[0].tolist(), there, modes) == ([1.0], None, [True, False])
    monkeypatch.undo()
    assert device_copy.mark(torch.device("cpu")) is None
    assert device_copy.mark(torch.device("meta")) is None
    assert device_copy.copied_to_host(torch.tensor(3), None) == 3


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_distributed_number_is_read_where_it_is_whole_and_left_out_where_it_takes_a_collective() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = DeviceMesh("cpu", [0])
    whole = DTensor.from_local(torch.tensor(2.0, requires_grad=True), mesh, [Replicate()])
    part = DTensor.from_local(torch.tensor(2.0), mesh, [Partial()])
    several = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    parts = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    found = taken(whole=whole, part=part, several=several, parts=parts)
    assert found["whole"] == 2.0
    assert found["several"].tolist() == [1, 1, 1]
    assert found["parts"].reason.startswith(
        "a DTensor of shape (3,) with the placements (Partial(sum),): its value lies"
    )
    reason = found["part"].reason
    assert "a DTensor of shape () with the placements (Partial(sum),): its value lies on several ranks" in reason
    assert "Take value.full_tensor() on every rank, or value.to_local()" in reason
    assert CopiedHistogram(Histogram(whole, bins=1)).resolve().counts == (1,)
    with pytest.raises(
        TypeError, match=r"Histogram\(values\) was given a DTensor of shape \(\).*Take value.full_tensor"
    ):
        CopiedHistogram(Histogram(part))


# Flat values


def test_nested_values_get_joined_names_by_kind() -> None:
    histogram, figure = CopiedHistogram(Histogram([1, 2])), Figure()
    flat = flatten(
        {
            "loss": 1.5,
            "eval": {"text": "a", "top": {"1": True}, "figure": figure},
            "h": histogram,
            "none": None,
            "empty": {},
        }
    )
    assert flat == Flat(
        {"loss": 1.5, "eval/text": "a", "eval/top/1": 1}, {"h": histogram}, {"eval/figure": figure, "none": None}
    )
    assert type(flat.numbers_and_texts["eval/top/1"]) is int


def test_flattening_refuses_two_values_of_one_name() -> None:
    with pytest.raises(ValueError, match="Two values to be logged have the name 'a/b'.*Rename one of them"):
        flatten({"a/b": 2, "a": {"b": 1}})


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (torch.zeros(3, 4), "a tensor of shape (3, 4)"),
        (torch.zeros(2).as_subclass(Subclass), "a Subclass of shape (2,)"),
        (np.zeros((3, 4)), "an array of shape (3, 4)"),
        ([1, 2, 3], "a list of 3"),
        ((), "a tuple of 0"),
        (1 + 2j, "a complex"),
        (object(), "an object"),
        (Fraction(1, 2), "a Fraction of fractions"),
        (LeftOut("a dict that contains itself"), "a dict that contains itself"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_value_is_described_in_a_few_words(value: object, expected: str) -> None:
    assert describe(value) == expected


def test_a_class_is_described_with_its_module() -> None:
    assert describe(Figure()) == f"a Figure of {__name__}"


def test_plain_leaves_alone_what_it_does_not_know() -> None:
    for value in (None, [1], Figure(), np.zeros(2), 1j):
        assert plain_value(value) is value


# Histograms


def counted(values: Any, bins: int = 4) -> Bins:
    return CopiedHistogram(Histogram(values, bins)).resolve()


def test_values_are_counted_between_the_least_and_the_greatest() -> None:
    found = counted([0, 1, 1, 2, 3.5, 4])
    assert found == Bins((1, 2, 1, 2), (0.0, 1.0, 2.0, 3.0, 4.0), 11.5, 34.25, 0)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[0, 1, 1], [2, 3, 4]]),
        torch.tensor([0, 1, 1, 2, 3, 4], dtype=torch.bfloat16),
        torch.tensor([0.0, 1, 1, 2, 3, 4], requires_grad=True),
        torch.tensor([0, 1, 1, 2, 3, 4], dtype=torch.uint8),
        [torch.tensor(0.0), torch.tensor([[1.0, 1.0]]), torch.tensor([2.0, 3.0, 4.0])],
        np.array([0, 1, 1, 2, 3, 4], dtype=">f4")[::-1],
        np.array([0, 1, 1, 2, 3, 4], dtype=np.longdouble),
        np.array([[0, 1, 1], [2, 3, 4]], dtype=np.uint16).T,
        (0, 1, 1, 2, 3, 4),
        range(5),
    ],
    ids=["int64", "bfloat16", "grad", "uint8", "tensors", "big endian", "long double", "uint16", "tuple", "range"],
)
def test_any_numbers_can_be_counted(values: Any) -> None:
    expected = (1, 1, 1, 2) if isinstance(values, range) else (1, 2, 1, 2)
    assert counted(values).counts == expected
    assert counted(values).edges == (0.0, 1.0, 2.0, 3.0, 4.0)


def test_true_and_false_are_counted_as_1_and_0() -> None:
    assert counted(torch.tensor([True, False, True]), 2) == Bins((1, 2), (0.0, 0.5, 1.0), 2.0, 2.0, 0)


@pytest.mark.parametrize(
    ("values", "nonfinite"), [([], 0), ([math.nan, math.inf, -math.inf], 3), (torch.empty(0, 3), 0)]
)
def test_without_any_finite_value_all_bins_are_empty(values: Any, nonfinite: int) -> None:
    assert counted(values, 2) == Bins((0, 0), (0.0, 0.5, 1.0), 0.0, 0.0, nonfinite)


def test_what_is_not_finite_is_counted_apart() -> None:
    found = counted([0.0, math.nan, 4.0, math.inf])
    assert (found.counts, found.nonfinite, found.total) == ((1, 0, 0, 1), 2, 4.0)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-30, 5e-324, 1e20, 1.7e308, -1.7976931348623157e308])
@pytest.mark.parametrize("bins", [1, 3, 64])
def test_bins_around_a_single_value_have_a_width(value: float, bins: int) -> None:
    found = counted([value] * 5, bins)
    assert sum(found.counts) == max(found.counts) == 5
    assert all(left < right and math.isfinite(left) for left, right in pairwise(found.edges))
    assert math.isfinite(found.edges[-1])


@pytest.mark.parametrize("pair", [(1.0, math.nextafter(1.0, 2.0)), (-1.7e308, 1.7e308), (0.0, 5e-324)])
def test_bins_are_apart_however_near_or_far_the_values_are(pair: tuple[float, float]) -> None:
    found = counted(list(pair), 64)
    assert sum(found.counts) == 2
    assert all(left < right for left, right in pairwise(found.edges))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30), st.integers(1, 9))
def test_every_finite_value_is_in_the_bin_whose_edges_are_around_it(values: list[float], bins: int) -> None:
    found = counted(values, bins)
    finite = [value for value in values if math.isfinite(value)]
    last = len(found.counts) - 1
    expected = [
        sum(left <= value and (value < right or (index == last and value == right)) for value in finite)
        for index, (left, right) in enumerate(pairwise(found.edges))
    ]
    assert list(found.counts) == expected
    assert sum(expected) == len(finite)
    assert found.nonfinite == len(values) - len(finite)


def test_many_values_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(1000.0)
    whole = counted(values, 10)
    monkeypatch.setattr("accel_trackers.recording.histograms._PART", 7)
    assert counted(values, 10) == whole
    assert whole.counts == (100,) * 10
    assert whole.total_of_squares == sum(number**2 for number in range(1000))


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_a_histogram_is_of_the_values_when_it_was_logged(make: Any) -> None:
    values = make([1.0, 2.0])
    histogram = Histogram(values, 2)
    found = []
    for first in (10.0, 20.0):
        values[0] = first
        found.append(Snapshot.take({"h": histogram}))
    values[0] = 30.0
    assert [each.resolve()["h"].resolve().total for each in found] == [12.0, 22.0]


def test_a_histogram_does_not_keep_the_graph_of_its_values() -> None:
    copy = CopiedHistogram(Histogram(torch.ones(2, requires_grad=True) * 2))
    assert not copy._values.requires_grad


def test_a_copy_lets_go_of_its_values_and_keeps_its_counts() -> None:
    copy = CopiedHistogram(Histogram([1, 2], 2))
    assert copy.resolve() is copy.resolve()
    assert not any(isinstance(each, torch.Tensor) for each in vars(copy).values())


def test_a_histogram_on_a_device_is_neither_waited_for_nor_copied_from_there(device: Device) -> None:
    histogram = Histogram(torch.ones(3), 1)
    assert isinstance(Snapshot.take({"h": histogram}).resolve()["h"], CopiedHistogram)
    assert not device.copies
    assert [event.asked for event in device.events] == [0]


@pytest.mark.parametrize("bins", [0, -1, 513, 2.0, True, "8"])
def test_bins_that_are_no_number_of_bins_are_refused(bins: Any) -> None:
    with pytest.raises(ValueError, match=r"Histogram\(bins=.*\): expected an integer from 1 to 512"):
        Histogram([1], bins)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ("text", "a str"),
        (3.0, "a float"),
        ({"a": 1}, "a dict of 1"),
        (["a"], "a list of 1: expected a tensor, an array, or a list of real numbers. Found: texts."),
        ([1, None], "a list of 2"),
        ([10**400], "a list of 1"),
        (np.array(["a"]), "an array of shape (1,): expected a tensor, an array, or a list of real numbers. Found: the dtype <U1."),
        (torch.tensor([1j]), "a tensor of shape (1,): expected a tensor, an array, or a list of real numbers. Found: a tensor of shape (1,) of torch.complex64: take value.abs()."),
        (torch.empty(1, device="meta"), "a tensor of shape (1,): expected a tensor, an array, or a list of real numbers. Found: a tensor of shape (1,) on the device meta: it has no values."),
        (torch.eye(2).to_sparse(), "a tensor of shape (2, 2): expected a tensor, an array, or a list of real numbers. Found: a tensor of shape (2, 2) of torch.float32 with the layout torch.sparse_coo: take value.to_dense()."),
        ([torch.eye(2).to_sparse()], "a list of 1: expected a tensor, an array, or a list of real numbers. Found: a tensor of shape (2, 2) of torch.float32 with the"),
        ([[1, 2], [3]], "a list of 2: expected a tensor"),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_what_cannot_be_counted_is_left_out_with_the_reason(values: Any, found: str) -> None:
    left_out = taken(value=Histogram(values))["value"]
    assert left_out.reason.startswith(
        f"a Histogram of accel_core.tracking.values that cannot be read: TypeError: Histogram(values) was given {found}"
    )


# Tables


def test_cells_become_plain() -> None:
    row = [
        None,
        True,
        1,
        2.5,
        "text",
        torch.tensor([3.0]),
        np.float32(0.5),
        Colour.RED,
        [1, 2],
        torch.zeros(2),
        10**400,
        10**5000,
    ]
    columns = list("abcdefghijkl")
    assert as_table(columns, [row]) == Table(
        tuple(columns),
        ((None, True, 1, 2.5, "text", 3.0, 0.5, "red", "[1, 2]", "tensor([0., 0.])", str(10**400), hex(10**5000)),),
    )


@pytest.mark.parametrize(
    "data",
    [
        [(1, 2), [3, 4]],
        ((1, 2), (3, 4)),
        torch.tensor([[1, 2], [3, 4]]),
        np.array([[1, 2], [3, 4]]),
        iter([[1, 2], [3, 4]]),
    ],
)
def test_rows_may_be_of_any_kind(data: Any) -> None:
    table = as_table(("a", 7), data)
    assert table == Table(("a", "7"), ((1, 2), (3, 4)))
    assert {type(cell) for row in table.rows for cell in row} == {int}


def test_a_table_may_have_no_rows() -> None:
    assert as_table(["a"], []) == Table(("a",), ())


@dataclasses.dataclass
class PolarsLike:
    columns: list[str]

    def rows(self) -> list[tuple[Any, ...]]:
        return [(1, "x"), (2, None)]


def test_dataframes_are_known_by_what_they_do() -> None:
    assert as_table(dataframe=PolarsLike(["a", "b"])) == Table(("a", "b"), ((1, "x"), (2, None)))


def test_a_dataframe_of_pandas_is_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"], "c": [0.5, 1.5]})
    assert as_table(dataframe=frame) == Table(("a", "b", "c"), ((1, "x", 0.5), (2, "y", 1.5)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"log_table\(\) was given no values. Give columns=\['a', 'b'\] and data=.*, or dataframe=... alone"),
        ({"columns": ["a"]}, "was given columns. Give"),
        ({"data": [[1]]}, "was given data. Give"),
        (
            {"columns": ["a"], "data": [[1]], "dataframe": PolarsLike(["a"])},
            "was given columns and data and dataframe. Give",
        ),
        ({"columns": ["a", "b", "a"], "data": []}, "was given two columns of the name 'a'. Rename one"),
        ({"columns": ["1", 1], "data": []}, "was given two columns of the name '1'. Rename one"),
        (
            {"columns": ["a", "b"], "data": [[1, 2], [3]]},
            r"2 columns \(a, b\), but row 1 of data has 1 cells. Give each row",
        ),
        ({"columns": "ab", "data": []}, "was given a str as columns: expected a list of names, such as"),
        ({"columns": ["a"], "data": 3}, "was given an int as data: expected a list of rows"),
        (
            {"columns": ["a"], "data": [{"a": 1}]},
            "was given a dict of 1 as row 0 of data: expected a list with one cell per column",
        ),
        (
            {"columns": ["a"], "data": [[1], [torch.empty((), device="meta")]]},
            r"was given in row 1 under 'a' a tensor of shape \(\) on the device meta: it has no values.$",
        ),
        (
            {"columns": ["a"], "data": [[Speechless()]]},
            r"was given a Speechless of .* in row 0 under 'a', which cannot be read: OSError: no words.$",
        ),
        (
            {"columns": ["a"], "data": torch.ones(2, 1).to_sparse()},
            r"was given as data a tensor of shape \(2, 1\) of torch.float32 with the layout torch.sparse_coo: take value.to_dense\(\).$",
        ),
        (
            {"dataframe": [[1]]},
            r"log_table\(dataframe=...\) was given a list of 1: expected a dataframe of pandas or polars. Give",
        ),
    ],
)
def test_what_is_no_table_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        as_table(**given)
