"""Runs beside each other in one folder: who reads a checkpoint that is being replaced gets the new one."""

from __future__ import annotations

import pytest
from checkpoint_jobs import Training

from accel_core.checkpoint.files.manifest import identity, unreplaced
from accel_core.errors import CheckpointError
from accel_core.testing import run_ranks


def load_what_is_replaced(folder):
    """Another run saves when manifest and index have been read, and the files have not."""
    reading, saving = Training(), Training()
    saving.accelerator.save_state(folder)

    def save(models, input_dir):
        if saving.counter.value < 2:
            saving.step()
            saving.accelerator.save_state(input_dir)

    reading.accelerator.register_load_state_pre_hook(save)
    reading.accelerator.load_state(folder)
    return reading.fingerprint() == saving.fingerprint(), reading.counter.value


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_checkpoint_is_replaced_goes_on_with_the_new_one(tmp_path, ranks):
    assert run_ranks(load_what_is_replaced, ranks, tmp_path / "checkpoint") == [(True, 2)] * ranks


def test_reading_begins_anew_where_a_save_has_replaced_the_checkpoint_and_only_there(tmp_path):
    training = Training()
    training.accelerator.save_state(tmp_path)
    seen = []

    def read():
        seen.append(identity(tmp_path))
        if len(seen) < 3:
            training.accelerator.save_state(tmp_path)
            raise CheckpointError("gone")
        return "read"

    assert unreplaced(tmp_path, read) == "read"
    assert len(set(seen)) == 3

    def damaged():
        seen.append("once")
        raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        unreplaced(tmp_path, damaged)
    assert seen[3:] == ["once"]
