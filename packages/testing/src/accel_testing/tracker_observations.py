"""The values that the tracker suite records, and the facts that it observes.

See `accel_testing.tracker_suite`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from accel_core import Bins, Table
from accel_trackers import plain_value, readable_config

if TYPE_CHECKING:
    from accel_core import TrackedRun, Tracker
    from accel_testing.shared_launch import Raised


@dataclass(frozen=True)
class Recorded:
    """One run in the service's own reader: for each name its records, pairs of step and value.

    Args:
        numbers: as int or float.
        texts: as they were logged.
        config: names of nested dicts joined by "/" → the value, or it as a text, in the spelling of
            Python or of JSON.
        images: each as a tensor (height, width, channels) of uint8, or as (height, width) where the
            pixels cannot be had.
        tables: with cells as they were logged, or as texts of them.
        histograms: their counts and edges are compared.
        ended: how the run ended; None if the service does not say.
        runs: how many runs the service shows where this one was recorded.
    """

    numbers: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    texts: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Sequence[tuple[int, torch.Tensor | tuple[int, int]]]] = field(default_factory=dict)
    tables: Mapping[str, Sequence[tuple[int, Table]]] = field(default_factory=dict)
    histograms: Mapping[str, Sequence[tuple[int, Bins]]] = field(default_factory=dict)
    ended: Literal["finished", "failed"] | None = None
    runs: int = 1


class Written(NamedTuple):
    """A run that is to be read back.

    Args:
        run: what `start` was given; `run.directory` is its folder if the tracker requires one.
        state: what `state()` said.
        folder: the one that `options` was given.
        is_open: whether the tracker still records.
    """

    run: TrackedRun
    state: Mapping[str, Any]
    folder: Path
    is_open: bool


class Declarations:
    """The declarations and methods that a subclass of the suite may provide."""

    tracker: ClassVar[str | Callable[[], Tracker]]
    lacks: ClassVar[Mapping[str, str]] = {}
    precision: ClassVar[Literal["float64", "float32"]] = "float64"
    leaves_behind: ClassVar[Mapping[str, str]] = {}

    def read(self, written: Written) -> Recorded:
        """Reads a run back with the service's reader, without what the service added itself."""
        raise NotImplementedError

    def options(self, folder: Path) -> Mapping[str, Any]:  # noqa: ARG002
        """`init_kwargs` of a run. They may name this folder, empty, and serve a resumed run too."""
        return {}


@dataclass
class Facts:
    """The facts of four runs: one, the same resumed, another beside that, and one of odd names."""

    raised: dict[str, Raised] = field(default_factory=dict)  # by the part of `CALLS`, or the moment
    read: dict[str, Recorded | Raised] = field(default_factory=dict)  # "flushed", "ended", "resumed", "beside" or "odd"
    state: Any = None  # what `state()` said of the first run
    service: Any = None  # what `tracker.tracker` was
    changed: dict[str, list[str]] = field(default_factory=dict)  # by the moment: what of the process was changed in it
    said: list[str] = field(default_factory=list)  # logged in the run of odd names, and refusals of its records
    printed: str = ""
    strays: list[str] = field(default_factory=list)  # files that lie outside the folders of the runs


def _image(height: int, width: int, channels: int) -> torch.Tensor:
    return (torch.arange(height * width * channels) * 37 % 256).to(torch.uint8).reshape(height, width, channels)


CONFIG = {
    "learning rate": 0.001,
    "layers": 12,
    "tied": True,
    "dataset": "größe 精度 🙂",
    "checkpoint": None,
    "optimizer": {"kind": "AdamW", "betas": [0.9, 0.999], "groups": {"decay": 0.1, "names": ["a", None, "ü"]}},
    "tags": [],
    "prompt": "Tell what you see.\n" * 200,
}
MANY = 1000
RESUMED_AT, LAST = 1022, 1040
GOES_ON = "continued"
UNKNOWN = "no_such_option"

# Steps rise through the whole run, but for those of "steps": a service that knows no way back loses these alone.
LOGGED: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "numbers": [
        (step, {"loss": 1 / (step + 3), "samples": 2**40 + step, "sign": -step, "small": 1e-30}) for step in range(4)
    ],
    "nonfinite": [(4, {"norm": math.nan, "finite": 1.5}), (5, {"norm": math.inf}), (6, {"norm": -math.inf})],
    "texts": [(7, {"note": "first line\nsecond line", "noted": 0.5}), (8, {"note": 'größe, 精度, 🙂, "so"'})],
    "names": [(9, {"with space": 1.0, "with_space": 2.0, "nest": 3.0, "nest/name/deeper": 4.0, "größe/精度": 5.0})],
    "many": [(step, {"many": step / 8}) for step in range(10, 10 + MANY)],
    GOES_ON: [(step, {GOES_ON: float(step)}) for step in range(RESUMED_AT - 2, RESUMED_AT + 2)],
    "late": [(LAST + 2, {"late": 0.5})],  # after a flush
    "steps": [(step, {"again": float(number)}) for number, step in enumerate([1030, 1030, 1025, LAST, 1028])],
}
LOGGED_RESUMED = [(step, {GOES_ON: -float(step)}) for step in range(RESUMED_AT, RESUMED_AT + 3)]
LOGGED_BESIDE = [(step, {"loss": step + 100.5}) for step in range(3)]
IMAGES = [
    (1010, {"drawn/colour": [_image(4, 6, 3), _image(5, 5, 3)], "grey": [_image(3, 7, 1)]}),
    (1011, {"drawn/colour": [_image(6, 4, 4)]}),
]
_ROWS = (("a", 0.5, True, None), ('ü, "so"\nand | so', -3, False, "x"))
TABLES = [
    (1012, {"answers/first": Table(("input", "score", "right", "note"), _ROWS)}),
    (1013, {"none": Table(("a",), ())}),
]
HISTOGRAMS = [
    (
        1014,
        {"weights/first": Bins((1, 0, 3), (-1.0, 0.0, 1.0, 2.0), 3.0, 5.0), "one": Bins((2,), (0.0, 0.5), 0.5, 0.2, 1)},
    ),
    (1015, {"weights/first": Bins((2, 1, 1), (-2.0, 0.0, 2.0, 4.0), 2.0, 6.0)}),
]

# A run of its own has what services stumble over, so that all else is recorded where they do. It is what the core hands over, which
# makes texts and floats of integers that have more than 64 bits.
ODD_CONFIG = readable_config(
    {"entropy": 2**127 + 1, "_target_": "package.Class", "": "unnamed", "model": {"_target_": "package.Model", "": 3.5}}
)
_LONG = "n" * 299
ODD_NAMES = ("", ".", "..", "a\tb", " x", "x", f"{_LONG}a", f"{_LONG}b")
ODD_LOGGED: list[tuple[int, dict[str, float]]] = [
    (step, {"before": step + 1.0, **{name: 10.0 * step + number for number, name in enumerate(ODD_NAMES, 10)}})
    for step in range(2)
]
LARGE: list[tuple[int, dict[str, float]]] = [
    (
        2,
        {
            "most": 2**63 - 1,
            "least": -(2**63),
            "beyond": plain_value(2**64 - 1),
            "further": plain_value(2**70),
            "beside": 2.0,
        },
    )
]
AFTER: list[tuple[int, dict[str, float]]] = [(3, {"after": 3.0, "before": 3.0})]

CALLS: dict[str, list[methodcaller]] = {
    part: [methodcaller("log", values, step) for step, values in records] for part, records in LOGGED.items()
} | {
    "images": [methodcaller("log_images", values, step) for step, values in IMAGES],
    "tables": [
        methodcaller("log_table", name, table, step) for step, tables in TABLES for name, table in tables.items()
    ],
    "histograms": [methodcaller("log_histograms", values, step) for step, values in HISTOGRAMS],
    "large": [methodcaller("log", values, step) for step, values in LARGE],
    "after": [methodcaller("log", values, step) for step, values in AFTER],
}
ODD_CALLS = {f"odd names at step {step}": methodcaller("log", values, step) for step, values in ODD_LOGGED}
ORDER = ("numbers", "nonfinite", "texts", "names", "many", "images", "tables", "histograms", GOES_ON, "steps")
"""The parts of `CALLS`: in each a tracker is called with these, and another part does not suffer if one raises."""


def expected(part: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """The records of one kind in a part: a step and values by name; one record per image."""
    if part == "images":
        return [(step, {name: image}) for step, values in IMAGES for name, images in values.items() for image in images]
    if part == "tables":
        return [(step, {name: table}) for step, tables in TABLES for name, table in tables.items()]
    if part == "histograms":
        return [(step, dict(values)) for step, values in HISTOGRAMS]
    texts, records = kind == "texts", {**LOGGED, "large": LARGE, "after": AFTER}[part]
    return [
        (step, {name: value for name, value in values.items() if isinstance(value, str) is texts})
        for step, values in records
    ]
