"""Operations over nested tensors, in one process and in two."""

from __future__ import annotations

import pickle
from collections import namedtuple

import pytest
import torch

from accel_testing import run_ranks
from accelerate.state import PartialState
from accelerate.utils import operations

Pair = namedtuple("Pair", "left right")


def test_structures_keep_their_types():
    data = {"pair": Pair(torch.ones(2, 3), [torch.zeros(2)]), "text": "kept"}
    assert operations.get_shape(data) == {"pair": Pair([2, 3], [[2]]), "text": "kept"}
    assert operations.slice_tensors(data, slice(1))["pair"].left.shape == (1, 3)
    assert operations.listify(data)["pair"].right == [[0.0, 0.0]]
    both = operations.concatenate([{"pair": data["pair"]}] * 2)
    assert isinstance(both["pair"], Pair)
    assert both["pair"].left.shape == (4, 3)
    empty = operations.initialize_tensors(operations.get_data_structure(data))
    assert empty["pair"].left.shape == (2, 3)
    with pytest.raises(TypeError, match="was given a str"):
        operations.recursively_apply(lambda leaf: leaf, data, error_on_other_type=True)


def test_keys_may_stay_where_they_are():
    moved = operations.send_to_device({"a": torch.ones(1), "b": [torch.ones(1)]}, "meta", skip_keys="a")
    assert moved["a"].device.type == "cpu"
    assert moved["b"][0].is_meta
    assert operations.find_device(["text", moved["a"]]) == torch.device("cpu")


def test_the_batch_size_is_that_of_the_first_tensor():
    assert operations.find_batch_size({"a": [torch.ones(3, 1)]}) == 3
    assert operations.ignorant_find_batch_size("text") is None
    with pytest.raises(ValueError, match="empty list"):
        operations.find_batch_size({"a": []})


def test_outputs_are_given_in_full_precision():
    forward = operations.convert_outputs_to_fp32(
        lambda: (torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int8))
    )
    assert [each.dtype for each in forward()] == [torch.float32, torch.int8]
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(forward.__wrapped__)


def test_objects_stay_as_they_are_in_one_process():
    assert operations.gather_object("whole") == "whole"


def combined() -> dict[str, object]:
    rank = PartialState().process_index
    try:
        operations.gather(torch.ones(1, 2 + rank))
    except operations.DistributedOperationException:
        refused = True
    return {
        "mean": operations.reduce(torch.tensor([float(rank)])).item(),
        "copied": operations.copy_tensor_to_devices(torch.ones(2) if rank else None).tolist(),
        "objects": operations.gather_object([rank]),
        "refused": refused,
    }


def test_processes_combine_what_they_have():
    assert run_ranks(combined, 2) == [{"mean": 0.5, "copied": [1.0, 1.0], "objects": [0, 1], "refused": True}] * 2
