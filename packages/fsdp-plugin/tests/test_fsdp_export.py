"""Models of libraries that write themselves: the line that scripts end with works on a sharded model, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_testing import run_ranks


class Saves(nn.Module):
    """A model of a library, with the arguments that such a method has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.head = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.head(self.body(x))

    def save_pretrained(self, folder, is_main_process=True, state_dict=None, save_function=torch.save):
        state_dict = self.state_dict() if state_dict is None else state_dict
        for value in state_dict.values():
            value.untyped_storage().data_ptr()  # as libraries look for shared memory
        if is_main_process:
            folder.mkdir(exist_ok=True)
        if state_dict:
            save_function(state_dict, folder / "weights.bin")
        return sorted(state_dict)


class Fails(Saves):
    def save_pretrained(self, folder, **_):
        raise OSError(f"no space for {folder.name}")


def exported(folder):
    accelerator = Accelerator(strategy="fsdp", cpu=True)
    model, failing = accelerator.prepare(Saves(), Fails())
    line = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    facts = {"names": accelerator.unwrap_model(model).save_pretrained(folder / "plain", **line)}
    model.save_pretrained(folder / "given", state_dict=accelerator.get_state_dict(model), **line)
    assert type(model.state_dict()["head.weight"]).__name__ == "DTensor"
    part = accelerator.prepare(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    facts["part"] = (type(accelerator.unwrap_model(part)[:2]), list(part[:2]) == list(part)[:2])
    for name, call in {
        "refused": lambda: accelerator.save({"nested": [model.state_dict()]}, folder / "parts.bin"),
        "failed": lambda: failing.save_pretrained(folder / "plain"),
    }.items():
        with pytest.raises((ValueError, OSError)) as caught:
            call()
        facts[name] = str(caught.value)
    accelerator.end_training()
    return facts


def test_save_pretrained_of_a_sharded_model_writes_all_weights_and_parts_are_not_saved(tmp_path):
    first, second = run_ranks(exported, 2, tmp_path)
    assert (first["names"], second["names"]) == (sorted(Saves().state_dict()), None)
    for name in ("plain", "given"):
        found = torch.load(tmp_path / name / "weights.bin", weights_only=True)
        for key, value in Saves().state_dict().items():
            assert torch.equal(found[key], value)
    for facts in (first, second):
        assert facts["part"] == (nn.Sequential, True)
        assert "Gather them on every rank first: accelerator.get_state_dict(model)" in facts["refused"]
        assert "no space for plain" in facts["failed"]
    assert not (tmp_path / "parts.bin").exists()
