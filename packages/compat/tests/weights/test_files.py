"""Files of one process: what is written and read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerate import Accelerator, dispatch_model
from accelerate.utils import load, load_state_dict, save


def test_values_and_arrays_come_back(tmp_path):
    save({"a": torch.ones(2), "state": np.arange(3)}, tmp_path / "x.bin")
    found = load(tmp_path / "x.bin")
    assert found["a"].tolist() == [1.0, 1.0]
    assert found["state"].tolist() == [0, 1, 2]


def test_a_file_that_executes_something_is_refused(tmp_path):
    torch.save({"a": ValueError}, tmp_path / "x.bin")
    with pytest.raises(Exception, match="weights_only|Unsupported"):
        load(tmp_path / "x.bin")
    with pytest.raises(ValueError, match="executes what the file says"):
        load(tmp_path / "x.bin", weights_only=False)


def test_weights_that_share_their_memory_are_written_once(tmp_path):
    weight = torch.arange(4.0)
    save({"a": weight, "b": weight}, tmp_path / "x.safetensors", safe_serialization=True)
    assert load_state_dict(tmp_path / "x.safetensors", {"": "cpu"})["a"].tolist() == [0, 1, 2, 3]
    assert list(load_state_dict(tmp_path / "x.safetensors")) == ["a"]


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_of_which_a_part_is_on_disk_is_saved_whole(tmp_path, safe):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path / "offload", force_hooks=True)
    Accelerator(cpu=True).save_model(model, tmp_path / "saved", safe_serialization=safe)
    found = load_state_dict(tmp_path / "saved" / ("model.safetensors" if safe else "pytorch_model.bin"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert model[2].weight.device.type == "meta"
