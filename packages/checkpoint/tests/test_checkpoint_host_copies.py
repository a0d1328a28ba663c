"""What is elsewhere comes together, and while one part is used the next one is on its way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_checkpoint import host_copies
from accel_checkpoint.files.part_file import PartReader, write_part
from accel_checkpoint.host_copies import Staging, contents
from accel_core import Accelerator, CheckpointError

STAGED = 4096


class Late:
    """Copies of an accelerator, at the latest moment: when somebody waits for them."""

    def __init__(self, pairs, log):
        self.pairs, self.log = pairs, log

    def synchronize(self):
        self.log.append("arrived")
        for place, tensor in self.pairs:
            place.copy_(tensor)
        self.pairs = []


class Far:
    """Tensors that count as an accelerator's, and what happens with them, in order."""

    def __init__(self):
        self.addresses, self.log = set(), []

    def sent(self, tensor):
        self.addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def has(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.addresses

    def copy(self, pairs):
        pairs = list(pairs)
        self.log.append("enqueued")
        return [Late(pairs, self.log)] if pairs else []


@pytest.fixture
def far(monkeypatch):
    found = Far()
    monkeypatch.setattr(host_copies, "STAGED", STAGED)
    monkeypatch.setattr(host_copies, "on_accelerator", found.has)
    monkeypatch.setattr(host_copies, "copy", found.copy)
    return found


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_bytes_are_those_of_the_tensors_wherever_these_are(far):
    large = torch.randn(40, 100)
    tensors = [
        torch.randn(3),
        far.sent(large),
        torch.empty(0, 4),
        far.sent(torch.randn(7, 5)).t(),
        torch.randn(6, 4).t(),
        far.sent(torch.randn(2, 3, 500))[:, 1:, ::2],
        far.sent(torch.randn(4, dtype=torch.complex64)).conj(),
        far.sent(torch.tensor(2.5, dtype=torch.bfloat16)),
    ]
    found = [b"".join(map(bytes, parts)) for parts in contents(tensors)]
    assert found == [raw(tensor.resolve_conj()) for tensor in tensors]


def test_small_tensors_are_waited_for_together_and_the_next_come_meanwhile(far):
    tensors = [far.sent(torch.randn(STAGED // 16)) for _ in range(10)]  # four of them fit
    for index, parts in enumerate(contents(tensors)):
        for _ in parts:
            far.log.append(index)
    assert far.log == [
        "enqueued",
        *("enqueued", "arrived", 0, 1, 2, 3),
        *("enqueued", "arrived", 4, 5, 6, 7),
        *("enqueued", "arrived", 8, 9),
    ]


def test_nothing_is_on_its_way_into_memory_that_is_given_back(far):
    parts = host_copies._numbered_parts([far.sent(torch.randn(2 * STAGED))])
    next(parts)
    assert far.log.count("arrived") == 1
    parts.close()
    assert far.log.count("arrived") == far.log.count("enqueued") > 1


def test_a_file_of_what_is_elsewhere_is_that_of_what_is_here(far, tmp_path):
    tensors = {"a": far.sent(torch.randn(33, 100)), "b": torch.randn(3), "c": far.sent(torch.randn(9, 2)).t()}
    described = write_part(tmp_path / "x.safetensors", tensors)
    far.addresses.clear()
    assert write_part(tmp_path / "y.safetensors", tensors).tensors == described.tensors
    with PartReader(tmp_path / "x.safetensors", described) as reader:
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(("most", "locked"), [(1 << 20, [True, False]), (8, [False])])
def test_memory_for_what_is_elsewhere_is_page_locked_up_to_a_size(far, monkeypatch, most, locked):
    asked = []
    made = host_copies._host_memory
    monkeypatch.setattr(
        host_copies, "_host_memory", lambda nbytes, pinned: (asked.append(pinned), made(nbytes, False))[1]
    )
    staging = Staging(most)
    tensors = {"far": far.sent(torch.randn(8)), "here": torch.randn(3)}
    places = staging.room(tensors)
    assert sorted(asked, reverse=True) == locked
    assert {key: place.shape for key, place in places.items()} == {key: each.shape for key, each in tensors.items()}
    again = staging.room(tensors)
    assert [again[key].data_ptr() for key in places] == [place.data_ptr() for place in places.values()]


def test_staging_memory_is_made_of_pieces(monkeypatch):
    monkeypatch.setattr(host_copies, "SLAB", 256)
    staging = Staging(0)
    tensors = {str(size): torch.randn(size) for size in (16, 48, 16, 100, 3)}
    places = staging.room(tensors)
    for key, tensor in tensors.items():
        places[key].copy_(tensor)
    assert all(torch.equal(places[key], tensor) for key, tensor in tensors.items())
    sizes = [place.untyped_storage().nbytes() for place in places.values()]
    assert sizes == [256, 256, 448, 64]


@pytest.mark.parametrize("mode", [False, "eager", "lazy"])
def test_a_graph_that_is_captured_has_no_save_in_it(mode, monkeypatch, tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(CheckpointError, match="while a graph is captured"):
        accelerator.save_state(tmp_path / "a", asynchronous=mode)
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    accelerator.save_state(tmp_path / "a", asynchronous=mode)
    accelerator.wait_for_checkpoint()
    assert (tmp_path / "a" / "manifest.json").exists()
