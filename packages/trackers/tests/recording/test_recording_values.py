"""What is logged: taken as it is at that moment without waiting for a device, and made plain, flat and countable later."""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
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
from accel_trackers.recording.record import LeftOut, Record, _copied, count, weight
from accel_trackers.recording.tables import as_table
from accel_trackers.recording.values import HostCopy, describe, plain_value


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
    """What trackers of the newer spelling are given, of every kind."""
    view = Record(values).joined()
    return {**view.values, **view.histograms, **view.others}


# Records


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (2.5, 2.5),
        (True, 1),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.int64(-7), -7),
        (np.bool_(True), 1),
        (np.str_("text"), "text"),
        (np.array(4), 4),
        (np.array([[1.5]]), 1.5),
        (np.longdouble(0.5), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor([[1.5]], dtype=torch.bfloat16), 1.5),
        (torch.tensor(True), 1),
        (torch.nn.Parameter(torch.tensor(0.25)), 0.25),
        (torch.tensor(3.0, requires_grad=True) * 2, 6.0),
        (Fraction(1, 4), 0.25),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
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


@pytest.mark.parametrize("value", ["\udcff", Text("\udcff"), np.str_("\udcff")], ids=lambda each: type(each).__name__)
def test_texts_that_no_file_can_hold_are_spelled_out(value: Any) -> None:
    for found in (taken(value=value)["value"], as_table(["a"], [[value]]).rows[0][0]):
        assert found == "\\udcff"
        assert type(found) is str


def test_other_objects_are_passed_on() -> None:
    figure = Figure()
    found = taken(figure=figure, several=[1, figure], nothing=None)
    assert found == {"figure": figure, "several": [1, figure], "nothing": None}


def test_a_tensor_of_several_elements_is_a_copy_without_its_graph() -> None:
    found = taken(large=torch.ones(3, requires_grad=True) * 2)["large"]
    assert found.tolist() == [2, 2, 2]
    assert not found.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        "x" * 20_000,
        torch.ones(20_000),
        np.ones((200, 100)),
        [1] * 20_000,
        Histogram(torch.ones(20_000)),
        {"deep": {"text": "x" * 20_000}},
        np.str_("x" * 20_000),
    ],
    ids=["text", "tensor", "array", "list", "histogram", "nested", "text of numpy"],
)
def test_ten_thousand_elements_count_as_one_record_more(value: Any) -> None:
    assert weight(Record({"value": value, "loss": torch.tensor(1.0)})) == 1 + 2


def test_what_becomes_of_values_after_they_were_taken_does_not_show() -> None:
    loss, array, inner, rows, pair = torch.tensor([1.0]), np.array(2.0), {"a": 1}, [1, 2], torch.ones(2)
    values = {"loss": loss, "array": array, "inner": inner, "rows": rows, "pair": pair, "zeros": np.zeros(2)}
    record = Record(values)
    loss.zero_()
    pair.zero_()
    array[...] = 0
    rows.append(3)
    values["zeros"][:] = 7
    inner["a"] = values["more"] = 5
    found = record.nested().values
    assert found.pop("zeros").tolist() == [0, 0]
    assert found == {"loss": 1.0, "array": 2.0, "inner": {"a": 1}, "rows": [1, 2], "pair": [1, 1]}


def test_the_nested_form_is_another_each_time() -> None:
    record = Record({"inner": {"a": [1]}})
    found = record.nested().values
    found["inner"]["a"].clear()
    found["inner"]["b"] = 2
    assert record.nested().values == {"inner": {"a": [1]}}


def test_nested_mappings_of_any_kind_become_dicts_with_texts_as_keys() -> None:
    found = Record({"metrics": OrderedDict([(0, torch.tensor(1.0)), (Colour.RED, {"deep": np.float64(2)})])})
    assert found.nested().values == {"metrics": {"0": 1.0, "red": {"deep": 2.0}}}
    assert type(found.nested().values["metrics"]) is dict


@pytest.mark.parametrize("values", [{"a": {1: 0.0, "1": 0.0}}, {"a": {"1": 1}, "a/1": torch.tensor(2)}])
def test_two_values_of_one_name_are_refused_where_they_are_logged(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="have the name 'a/1', joined by '/'. Rename one of them"):
        Record(values)


def test_the_same_dict_twice_is_no_circle() -> None:
    inner = {"b": 1}
    assert taken(first=inner, second=inner) == {"first/b": 1, "second/b": 1}


def test_nested_values_get_joined_names_by_kind() -> None:
    figure = Figure()
    values = {
        "loss": 1.5,
        "eval": {"text": "a", "top": {"1": True}, "figure": figure},
        "h": Histogram([1, 2], 1),
        "none": None,
    }
    found = Record({**values, "empty": {}}).joined()
    assert found.values == {"loss": 1.5, "eval/text": "a", "eval/top/1": 1}
    assert type(found.values["eval/top/1"]) is int
    assert found.histograms["h"].counts == (2,)
    assert found.others == {"eval/figure": figure, "none": None}
    nested = Record(values).nested().values
    assert nested == {"loss": 1.5, "eval": {"text": "a", "top": {"1": True}, "figure": figure}, "none": None}
    assert nested["eval"]["top"]["1"] is True


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
            r"test_recording_values.Broken of shape \(\), which cannot be read: RuntimeError: out of reach",
        ),
        (Fraction(10**400), r"fractions.Fraction, which cannot be read: OverflowError: .*"),
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
        "half": torch.nn.Parameter(torch.tensor(1.5).half()),
    }
    device.copies.clear()
    record = Record(values)
    for loss in losses:
        loss.fill_(-1)
    kinds = [(5, torch.float32), (1, torch.int64), (1, torch.float16)]
    assert device.copies == [(*kind, "cpu", ("non_blocking", True)) for kind in kinds]
    assert [event.asked for event in device.events] == [0, 0, 0]
    device.unplug()
    device.done.set()
    found = record.nested().values
    expected = {"first": 0.5, "losses": {str(number): float(number) for number in range(5)}, "steps": 7, "half": 1.5}
    assert found == expected
    assert [*found] == [*values]


def test_reading_waits_until_the_device_is_there(device: Device) -> None:
    record = Record({"loss": torch.tensor(2.0)})
    device.unplug()
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(record.joined().values))
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    assert device.events[0].asked > 1
    device.done.set()
    worker.join(10)
    assert found == [{"loss": 2.0}]


def test_tensors_and_histograms_on_a_device_are_sent_and_not_waited_for(device: Device) -> None:
    values, weights = torch.tensor([1.0, 2.0]), torch.ones(3)
    device.copies.clear()
    record = Record({"pair": values, "weights": Histogram(weights, 1)})
    assert device.copies == [(size, torch.float32, "cpu", ("non_blocking", True)) for size in (2, 3)]
    assert [event.asked for event in device.events] == [0, 0]
    device.unplug()
    device.done.set()
    assert record.nested().values == {"pair": [1.0, 2.0]}
    assert record.joined().histograms["weights"].counts == (3,)


@pytest.mark.parametrize("lacks", ["pinned memory", "events"])
def test_without_pinned_memory_or_events_a_copy_is_waited_for(device: Device, lacks: str) -> None:
    to, modes = torch.Tensor.to, []

    def spied(tensor: torch.Tensor, where: str, non_blocking: bool = False) -> torch.Tensor:
        modes.append(non_blocking)
        if non_blocking and lacks == "pinned memory":
            raise NotImplementedError(lacks)
        return to(tensor, where)

    def no_event(_: object) -> Any:
        raise RuntimeError(lacks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", spied)
        patch.setattr(torch, "Event", no_event)
        copied = HostCopy(torch.tensor([1.0]))
    assert modes == [True, False]
    assert copied.wait().tolist() == [1.0]


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
    found = taken(
        whole=whole, part=part, several=several, parts=parts
    )  # without a process group: none takes a collective
    assert found["whole"] == 2.0
    assert found["several"].tolist() == [1, 1, 1]
    for name, shape in (("part", "()"), ("parts", "(3,)")):
        assert f"of shape {shape} with the placements (Partial(sum),) lies on several ranks" in found[name].reason
        assert "Log value.full_tensor(), taken on every rank, or value.to_local()" in found[name].reason
    assert counted(whole, 1).counts == (1,)
    with pytest.raises(ValueError, match=r"DTensor of shape \(\).*Log value.full"):
        _copied(Histogram(part))


# Words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(3, 4), "torch.Tensor of shape (3, 4)"),
        (np.zeros((3, 4)), "numpy.ndarray of shape (3, 4)"),
        ([1, 2, 3], "list"),
        (Fraction(1, 2), "fractions.Fraction"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_value_is_described_in_a_few_words(value: object, expected: str) -> None:
    assert describe(value) == expected


def test_plain_leaves_alone_what_it_does_not_know() -> None:
    for value in (None, [1], Figure(), np.zeros(2), 1j):
        assert plain_value(value) is value


# Histograms


def counted(values: Any, bins: int = 4) -> Bins:
    return count(_copied(Histogram(values, bins)).wait(), bins)


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
    monkeypatch.setattr("accel_trackers.recording.record._PART", 7)
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
        found.append(Record({"h": histogram}))
    values[0] = 30.0
    assert [each.joined().histograms["h"].total for each in found] == [12.0, 22.0]


def test_a_histogram_does_not_keep_the_graph_of_its_values() -> None:
    assert not _copied(Histogram(torch.ones(2, requires_grad=True) * 2)).wait().requires_grad


def test_a_record_lets_go_of_values_that_are_counted_and_keeps_their_counts() -> None:
    record = Record({"h": Histogram([1, 2], 2)})
    (copy,) = (weakref.ref(each.values) for each in record._values.values())
    assert record.joined().histograms == record.joined().histograms == {"h": Bins((1, 1), (1.0, 1.5, 2.0), 3.0, 5.0)}
    assert copy() is None


@pytest.mark.parametrize("bins", [0, -1, 513, 2.0, True, "8"])
def test_bins_that_are_no_number_of_bins_are_refused(bins: Any) -> None:
    with pytest.raises(ValueError, match=r"Histogram\(bins=.*\): expected an integer from 1 to 512"):
        Histogram([1], bins)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        *((each, "Error: ") for each in ("text", 3.0, {"a": 1}, ["a"], [1, None], [1j], [10**400], [[1, 2], [3]])),
        *((each, "Error: ") for each in ([1.0, torch.ones(2)], [torch.ones(2), 1.0])),
        (np.array(["a"]), "TypeError: Cannot cast array data"),
        (np.array([1j]), "TypeError: Cannot cast array data"),
        (torch.tensor([1j]), "TypeError: the dtype is torch.complex64: take value.abs()"),
        ([torch.tensor([1j])], "TypeError: the dtype is torch.complex64: take value.abs()"),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_what_cannot_be_counted_is_left_out_with_the_reason(values: Any, found: str) -> None:
    left_out = taken(value=Histogram(values))["value"]
    assert left_out.reason.startswith("accel_core.tracking.values.Histogram, which cannot be read: ")
    assert found in left_out.reason


@pytest.mark.parametrize("values", [torch.empty(3, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_a_histogram_of_a_tensor_without_readable_values_is_left_out(values: torch.Tensor) -> None:
    assert "Histogram, which cannot be " in taken(value=Histogram(values))["value"].reason


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
    ]
    columns = list("abcdefghij")
    assert as_table(columns, [row]) == Table(
        tuple(columns),
        ((None, True, 1, 2.5, "text", 3.0, 0.5, "red", "[1, 2]", "tensor([0., 0.])"),),
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
        *(
            (given, r"log_table\(\) takes columns=\['a', 'b'\] and data=.*, or dataframe=... alone")
            for given in (
                {},
                {"columns": ["a"]},
                {"data": [[1]]},
                {"columns": ["a"], "data": [[1]], "dataframe": PolarsLike(["a"])},
            )
        ),
        ({"columns": ["a", "b", "a"], "data": []}, "was given two columns of one name: a, b, a. Rename one"),
        ({"columns": ["1", 1], "data": []}, "was given two columns of one name: 1, 1. Rename one"),
        (
            {"columns": ["a", "b"], "data": [[1, 2], [3]]},
            r"row 1 of data is \[3\], expected a cell for each of \('a', 'b'\)",
        ),
        ({"columns": ["a"], "data": ["x"]}, "row 0 of data is 'x', expected a cell for each"),
        ({"columns": ["a"], "data": [{"a": 1}]}, "row 0 of data is {'a': 1}, expected a cell for each"),
    ],
)
def test_what_is_no_table_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        as_table(**given)
