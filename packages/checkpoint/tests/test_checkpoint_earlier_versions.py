"""What earlier versions have saved is loaded by this one: on as many ranks as then, and on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from earlier_versions import Run, written

from accel_testing import run_ranks

SAVED = sorted((Path(__file__).parent / "earlier_versions").iterdir())


def resumed(folder):
    run = Run(folder)
    run.accelerator.load_state()
    facts, notes = run.facts(), run.notes.content
    run.train(2)  # it goes on
    run.accelerator.end_training()
    return facts, same_as_written(notes)


def same_as_written(notes):
    expected = written()
    tensors = {name: notes.pop(name).tolist() == expected.pop(name).tolist() for name in ("array", "tensor")}
    return tensors | {name: (type(value), notes[name]) == (type(value), value) for name, value in expected.items()}


@pytest.fixture(params=SAVED, ids=[folder.name for folder in SAVED])
def saved(request, tmp_path):
    """A copy: what goes on from it may write beside it."""
    return shutil.copytree(request.param, tmp_path / "run")


def test_all_of_it_comes_back_on_as_many_ranks(saved):
    facts = json.loads((saved / "facts.json").read_text(encoding="utf-8"))
    for (found, notes), expected in zip(run_ranks(resumed, 2, saved), facts, strict=True):
        assert found == expected
        assert all(notes.values()), notes


def test_all_but_the_streams_of_the_other_rank_comes_back_on_one(saved):
    first, second = json.loads((saved / "facts.json").read_text(encoding="utf-8"))
    found, notes = resumed(saved)
    assert all(notes.values()), notes
    assert sorted(found.pop("read")) == sorted(first.pop("read") + second.pop("read"))
    gradients = {
        name for name in first if name.startswith("gradient")
    }  # of a window that is open: the mean over the ranks
    for name in gradients:
        mean = (torch.tensor(first.pop(name)) + torch.tensor(second.pop(name))) / 2
        torch.testing.assert_close(torch.tensor(found.pop(name)), mean)
    assert found == first
