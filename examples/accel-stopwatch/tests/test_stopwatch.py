"""The stopwatch reports once per rank, to a file or to the log, and never ends a run."""

from __future__ import annotations

import json
import logging

import pytest

from accel_core import Accelerator
from accel_stopwatch import Stopwatch
from accel_testing import run_ranks


def run(path):
    accelerator = Accelerator(cpu=True, plugins=[Stopwatch(path)])
    accelerator.end_training()
    accelerator.end_training()


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_writes_one_line(world, tmp_path):
    path = tmp_path / "times.jsonl"
    run_ranks(run, world, path)
    lines = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["rank"])
    assert [(line["rank"], line["world_size"], line["shard"], line["shards"]) for line in lines] == [
        (rank, world, rank, world) for rank in range(world)
    ]
    assert all(0 < line["seconds"] < 60 for line in lines)


def test_without_a_file_it_goes_to_the_log(caplog):
    with caplog.at_level(logging.INFO, "accel_stopwatch"):
        run(None)
    (record,) = caplog.records
    assert json.loads(record.getMessage())["rank"] == 0


def test_a_file_that_cannot_be_written_is_warned_of_and_ends_nothing(tmp_path):
    accelerator = Accelerator(cpu=True, plugins=[Stopwatch(tmp_path / "missing" / "times.jsonl")])
    with pytest.warns(RuntimeWarning, match="Stopwatch"):
        accelerator.end_training()
