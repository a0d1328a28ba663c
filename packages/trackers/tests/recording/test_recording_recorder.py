"""What a tracker is told of a record, and what becomes of what it cannot take: no other value, record or tracker is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trackers_for_tests import Listing, Older, Wrong, begun, opened_at_the_end, said

from accel_core import Accelerator, Histogram, Tracker, TrackingKwargs
from accel_trackers.recording import record

# --- histograms -----------------------------------------------------------------------------------------------------------


def test_a_histogram_that_cannot_be_counted_costs_no_tracker_and_no_other_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = record.count

    def out_of_memory(values: torch.Tensor, bins: int) -> Any:
        if values.numel() == 4:
            raise MemoryError("no memory left")
        return counted(values, bins)

    monkeypatch.setattr(record, "count", out_of_memory)
    trackers = [Listing("a"), Listing("b"), Older()]
    accelerator = begun(*trackers)
    odd = Histogram(torch.ones(4))

    def work() -> None:
        accelerator.log({"odd": odd, "deep": {"odd": odd}, "even": Histogram([1.0, 2.0]), "loss": 1.0})
        accelerator.log({"loss": 2.0})
        accelerator.end_training()

    text = said(work)
    for tracker in trackers[:2]:
        assert tracker.logged() == [({"loss": 1.0}, 0), ({"loss": 2.0}, 1)]
        assert [[*call[1]] for call in tracker.calls if call[0] == "histograms"] == [["even"]]
        for name in ("odd", "deep/odd"):
            start = f"The tracker {tracker.name!r} leaves out the value {name!r}: a Histogram, which cannot be counted"
            assert start in text
    assert "which cannot be counted: MemoryError: no memory left" in text
    assert "switched off" not in text
    assert trackers[2].seen[:2] == [("log", {"loss": 1.0}, 0), ("log", {"loss": 2.0}, 1)]


def test_the_user_may_log_what_a_histogram_lacks_by_the_same_name() -> None:
    tracker = Listing()
    accelerator = begun(tracker)
    accelerator.log({"weights": Histogram([1.0, float("nan")]), "weights/nonfinite": 7})
    accelerator.end_training()
    assert tracker.logged() == [({"weights/nonfinite": 7}, 0)]


class Optional(Listing):
    """Has one option per method, and knows those of the other."""

    def log(self, values: Any, step: int, **options: Any) -> None:
        self._check(options)
        self._note("log", values, options.get("group"))

    def log_histograms(self, values: Any, step: int, **options: Any) -> None:
        self._check(options)
        self._note("histograms", [*values], options.get("bars"))

    def _check(self, options: dict[str, Any]) -> None:
        if unknown := options.keys() - {"group", "bars"}:
            raise TypeError(f"log_kwargs['listing'] has {', '.join(unknown)}")


def test_options_of_a_record_reach_histograms_too() -> None:
    tracker = Optional()
    accelerator = begun(tracker)
    options = {"listing": {"group": "g", "bars": 3}}
    accelerator.log({"weights": Histogram([1.0]), "loss": 1}, log_kwargs=options)
    accelerator.log({"weights": Histogram([1.0])}, log_kwargs=options)
    accelerator.log({"loss": 2}, log_kwargs=options)
    accelerator.end_training()
    both = [("log", {"loss": 1}, "g"), ("histograms", ["weights"], 3)]
    assert tracker.calls[1:-1] == [*both, both[1], ("log", {"loss": 2}, "g")]


def test_an_option_that_is_misspelt_costs_the_record() -> None:
    tracker = Optional()
    accelerator = begun(tracker)

    def work() -> None:
        accelerator.log({"weights": Histogram([1.0])}, log_kwargs={"listing": {"brs": 3}})
        accelerator.log({"loss": 1})
        accelerator.end_training()

    told = "The tracker 'listing' leaves out histograms with log_kwargs={'listing': {'brs': 3}}: log_kwargs['listing'] has brs"
    assert told in said(work)
    assert tracker.calls[1:] == [("log", {"loss": 1}, None), ("finish", False)]


# --- what a tracker has ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["log", "log_images", "log_table", "log_histograms"])
def test_what_a_client_has_not_implemented_switches_its_tracker_off_with_the_text(method: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this server has no such endpoint")

    tracker = type("Failing", (Listing,), {method: fail})()
    accelerator = begun(tracker)

    def work() -> None:
        accelerator.log({"loss": 1, "weights": Histogram([1.0])})
        accelerator.log_images({"x": torch.zeros(3, 2, 2)})
        accelerator.log_table("t", ["a"], [[1]])
        accelerator.end_training()

    text = said(work)
    assert "is switched off: log" in text
    assert "raised NotImplementedError: this server has no such endpoint." in text
    assert "it has none" not in text


def test_a_tracker_without_any_method_says_of_each_kind_that_it_has_none() -> None:
    class Bare(Tracker):
        name = "bare"

        def start(self, run: Any) -> None:
            pass

    accelerator = begun(Bare())

    def work() -> None:
        for _ in range(2):
            accelerator.log({"loss": 1, "weights": Histogram([1.0])})
            accelerator.log_images({"x": torch.zeros(3, 2, 2)})
            accelerator.log_table("t", ["a"], [[1]])
        accelerator.end_training()

    lines = sorted(said(work).splitlines())
    kinds = ("histograms", "images", "tables", "values")
    assert [line.partition(". ")[0] for line in lines] == [
        f"The tracker 'bare' leaves out {kind}: it has none" for kind in kinds
    ]


def test_where_a_tracker_is_given_a_folder_may_be_an_attribute_or_a_property() -> None:
    class Fixed(Listing):
        requires_logging_directory = True

    class Asked(Listing):
        def __init__(self, folder: bool) -> None:
            super().__init__("asked")
            self.folder = folder

        @property
        def requires_logging_directory(self) -> bool:
            return self.folder

    class Own(Listing):
        def __init__(self) -> None:
            super().__init__("own")
            self.requires_logging_directory = True

    assert Tracker.requires_logging_directory is False
    assert [each.requires_logging_directory for each in (Fixed(), Asked(True), Asked(False), Own())] == [
        True,
        True,
        False,
        True,
    ]


# --- older classes --------------------------------------------------------------------------------------------------------


def test_older_trackers_get_lists_in_place_of_tensors_and_histograms_are_said_to_be_missing() -> None:
    tracker = Older()
    accelerator = begun(tracker, config={"lr": 1})
    model = torch.nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.fill_(3)
    values = {"pair": torch.ones(2), "deep": {"weight": model.weight, "rows": [1, "a"]}, "flag": True, "a/b": 1}

    def work() -> None:
        accelerator.log({**values, "weights": Histogram([1.0])})
        with torch.no_grad():
            model.weight.fill_(99)
        assert accelerator.get_tracker("older") is tracker
        accelerator.end_training()

    text = said(work)
    assert text.startswith("The tracker 'older' leaves out histograms: it has none.")
    expected = {"pair": [1, 1], "deep": {"weight": [[3], [3]], "rows": [1, "a"]}, "flag": True, "a/b": 1}
    assert tracker.seen == [("config", {"lr": 1}), ("log", expected, 0), ("finish",)]
    assert tracker.seen[1][1]["flag"] is True


def test_what_one_older_tracker_does_to_its_values_no_other_sees() -> None:
    class Spoiling(Older):
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            values["inner"]["rows"].clear()
            values.clear()

    spoiling, late = Spoiling(), Older()
    late.name = "late"
    accelerator = begun(spoiling, late)
    accelerator.log({"inner": {"rows": [1, 2]}})
    accelerator.get_tracker("older")  # by then it has done its work
    accelerator.end_training()
    assert late.seen[0] == ("log", {"inner": {"rows": [1, 2]}}, 0)


def test_an_older_tracker_whose_configuration_cannot_be_stored_is_closed() -> None:
    class Full(Older):
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise OSError("disk full")

    tracker = Full()
    accelerator = begun(tracker, config={"lr": 1})

    def work() -> None:
        accelerator.log({"loss": 1})
        accelerator.end_training()

    assert "start() raised OSError: disk full" in said(work)
    assert tracker.seen == [("finish",)]


def test_a_tensor_on_several_ranks_costs_an_older_tracker_no_other_value() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parts = DTensor.from_local(torch.arange(4.0), DeviceMesh("cpu", [0]), [Shard(0)])
    finally:
        dist.destroy_process_group()
    tracker = Older()
    accelerator = begun(tracker)

    def work() -> None:
        accelerator.log({"parts": parts, "loss": 1})
        accelerator.end_training()

    assert "DTensor of shape (4,) with the placements (Shard(dim=0),) lies on several ranks" in said(work)
    assert tracker.seen[0] == ("log", {"loss": 1}, 0)


def test_objects_are_taken_by_older_trackers_and_by_those_that_say_so() -> None:
    class Choosy(Listing):
        def records(self, value: object) -> bool:
            return isinstance(value, threading.Event) or value is None

    event, older, choosy = threading.Event(), Older(), Choosy("choosy")
    accelerator = begun(older, Listing(), choosy)

    def work() -> None:
        accelerator.log({"event": event, "none": None, "small": torch.zeros(2)})
        accelerator.end_training()

    text = said(work)
    assert older.seen[0] == ("log", {"event": event, "none": None, "small": [0, 0]}, 0)
    assert choosy.logged() == [({"event": event, "none": None}, 0)]
    assert text.count("The tracker 'listing' leaves out the value") == 3
    assert (
        "The tracker 'choosy' leaves out the value 'small': torch.Tensor of shape (2,). Log numbers, texts, Histogram(...), or"
        in text
    )


# --- weight ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The tracker 'wrong' is switched off")
@pytest.mark.parametrize(
    "log",
    [
        lambda a: a.log({"note": "x" * 100_000}),
        lambda a: a.log({"deep": {"note": "x" * 100_000}}),
        lambda a: a.log_table("t", ["a"], [["x" * 100_000]]),
    ],
    ids=["text", "nested", "table"],
)
def test_long_texts_count_as_many_records_while_they_wait(log: Callable[[Accelerator], None]) -> None:
    with opened_at_the_end() as gate:
        rules = TrackingKwargs(most_pending=100, finish_timeout=0.1)
        accelerator = begun(Wrong("log", lambda: gate.wait(20)), rules=rules)
        accelerator.log({"loss": 0})
        for _ in range(9):
            log(accelerator)
        assert "switched off" not in str(accelerator.explain())
        for _ in range(3):
            log(accelerator)
        assert "switched off: it is 100 records behind" in str(accelerator.explain())
        accelerator.end_training()


@pytest.mark.filterwarnings("ignore:The tracker '(wrong|older)' is switched off")
def test_small_tensors_count_while_they_wait_for_one_that_takes_them() -> None:
    with opened_at_the_end() as gate:

        class Slow(Older):
            def log(self, values: dict[str, Any], step: int | None = None) -> None:
                gate.wait(20)

        accelerator = begun(Slow(), rules=TrackingKwargs(most_pending=20, finish_timeout=0.1))
        accelerator.log({"loss": 0})
        for _ in range(11):
            accelerator.log({"tensor": torch.ones(10_000)})
        assert "switched off: it is 20 records behind" in str(accelerator.explain())
        accelerator.end_training()
