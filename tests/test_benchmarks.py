"""The benchmarks run: every row, one tiny round of it, without the peers. Nothing here depends on how long anything takes.

What three of the rows count is tested in every run where it is made: one collective for `gather_for_metrics` in test_metrics.py, messages
without pickles in test_data_batch_scatter.py and test_data_wire.py, and going on deep in a huge set in test_resume.py.
"""

from __future__ import annotations

import io
import json
import pickle
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
ROWS = [
    ("P1", 3),
    ("P2", 2),
    ("P3", 2),
    ("P4", 2),
    ("P5", 2),
    ("P6", 2),
    ("P6d", 7),
    ("P7", 3),
    ("P8", 10),
    ("P9", 8),
    ("P10", 8),
    ("P11", 2),
    ("P12", 2),
    ("P13", 2),
    ("P13c", 2),
    ("M1", 2),
    ("M1t", 2),
    ("H1", 13),
    ("B1", 7),
    ("B2", 5),
]
TINY = ["--rounds", "1", "--repeats", "1", "--batches", "8", "--size", "2", "--libraries", "accel"]

pytestmark = pytest.mark.timeout(240)
in_full = pytest.mark.full(group="benchmarks")


class Results:
    """What the rows came to, each measured once: by the test that wants it, or meanwhile by a thread.

    Args:
        folder: where the rows leave their results.
    """

    def __init__(self, folder):
        self.folder = folder
        self.pool = ThreadPoolExecutor(1)
        self.beside = {row: self.pool.submit(self.measured, row) for row in ("P8", "P10", "P9")}
        self.found = {}

    def of(self, row):
        """What the run printed, and what it wrote."""
        if row not in self.found:
            beside = self.beside.get(row)
            self.found[row] = self.measured(row) if beside is None or beside.cancel() else beside.result()
        return self.found[row]

    def measured(self, row):
        out = self.folder / f"{row}.json"
        command = [sys.executable, str(RUN), "--rows", row, *TINY, "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout, json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("results"))
    yield results
    results.pool.shutdown(cancel_futures=True)


@in_full
@pytest.mark.parametrize(("row", "lines"), ROWS)
def test_a_row_of_the_benchmarks_runs(row, lines, results):
    printed, written = results.of(row)
    assert printed.count(f"| {row} ") == lines
    assert {"date", "cpu", "cores", "torch"} <= written["machine"].keys()
    assert len(written["rounds"][row]) >= 1
    assert all({"accel"} <= measured.keys() for measured in written["rounds"][row])


@in_full
def test_gathering_for_metrics_is_one_collective(results):
    """Two tensors travel in exactly one collective."""
    rounds = results.of("P7")[1]["rounds"]["P7"]
    assert {measured["accel"]["collectives"] for measured in rounds} == {1.0}
    assert {measured["plain"]["collectives"] for measured in rounds} == {2.0}


@in_full
def test_dispatched_batches_travel_together_and_without_pickles(results):
    """P6d: a message is one collective and holds several batches; scattering by hand takes one for each tensor."""
    rounds = results.of("P6d")[1]["rounds"]["P6d"]
    for measured in rounds:
        assert measured["accel"]["collectives_per_message"] == 1
        assert measured["accel"]["collectives"] < 1
        assert measured["accel"]["pickles"] == 0
        assert measured["scatter"]["collectives"] == 4


@in_full
def test_resuming_deep_in_a_huge_set_reads_one_batch_and_takes_no_memory(results):
    """At batch 10^6 of 10^9 samples, no other sample is read, also under a sampler of the user's own."""
    rounds = results.of("P10")[1]["rounds"]["P10"]
    assert {measured["accel"]["other"] for measured in rounds} == {0.0}
    assert all(measured["accel"]["memory"] <= 2**20 for measured in rounds)


def test_accel_compat_is_not_measured_as_accelerate(tmp_path):
    """Both are called `accelerate`; the environment of the tests has ours."""
    command = [
        sys.executable,
        str(RUN),
        "--rows",
        "P1",
        "--libraries",
        "accel,accelerate",
        "--out",
        str(tmp_path / "out.json"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "is accel-compat, not the peer" in ended.stderr
    assert not (tmp_path / "out.json").exists()


def test_pickling_is_counted_under_any_name():
    """Functions, and objects of subclasses; what is called outside is not."""
    counting = runpy.run_path(str(RUN.with_name("counting.py")))
    before = sys.getprofile()
    with counting["Calls"]({_roundtrip.__code__}) as calls:
        _roundtrip([1])
        ForkingPickler(io.BytesIO()).dump([1])
    _roundtrip([1])
    assert (calls.pickles, calls.functions) == (3, 1)
    assert sys.getprofile() is before


def _roundtrip(obj):
    return pickle.loads(pickle.dumps(obj))
