"""Models whose weights come for each call, on a device that computes late: no weight is read early, or overwritten early."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import accel_toydevice  # noqa: F401  (gives torch the device)
from accel_big_model import AlignDevicesHook, cpu_offload, disk_offload, dispatch_model

LAYERS, WIDTH = 8, 64


class Net(nn.Module):
    """Blocks, with a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net().eval()


def half(place):
    """Every other block elsewhere, and the tied weights too."""
    blocks = {f"blocks.{number}": place if number % 2 else 0 for number in range(LAYERS)}
    return {"embedding": place, **blocks, "head": place}


WAYS = {
    "half in main memory": lambda model, folder: dispatch_model(model, half("cpu"), main_device=0),
    "half on disk": lambda model, folder: dispatch_model(model, half("disk"), main_device=0, offload_dir=folder),
    "all in main memory": lambda model, folder: cpu_offload(model, "toy:0"),
    "all on disk": lambda model, folder: disk_offload(model, folder, "toy:0"),
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("aside", [False, True])
def test_the_bits_are_those_of_a_model_that_is_all_there(tmp_path, way, aside):
    expected, batches = net().to("toy"), [torch.randint(32, (4,)) for _ in range(6)]
    expected = [expected(ids.to("toy")).cpu() for ids in batches]
    model = WAYS[way](net(), tmp_path)
    found = []
    torch.accelerator.synchronize()  # what stays on the device is there for any stream
    with torch.Stream("toy:0") if aside else contextlib.nullcontext():
        for ids in batches:  # the first pass learns the order, the others fetch ahead
            torch.toy._sleep(0.02)  # the device is behind: weights come and go before it has begun
            found.append(model(ids.to("toy")))
        torch.accelerator.synchronize()
    assert [torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [True] * len(batches)


@torch.no_grad()
def test_a_model_that_is_called_in_another_stream_than_its_weights_were_asked_for(tmp_path):
    """What is ahead was asked for by a module that computed in one stream, and is used in another."""
    ids = torch.arange(4)
    expected = net()(ids)
    model = cpu_offload(net(), "toy:0")
    streams = [torch.Stream("toy:0") for _ in range(2)]
    model(ids.to("toy"))
    torch.accelerator.synchronize()
    found = []
    for number in range(6):
        with streams[number % 2]:
            torch.toy._sleep(0.02)
            found.append(model(ids.to("toy")))
    torch.accelerator.synchronize()
    assert all(torch.equal(each.cpu(), found[0].cpu()) for each in found)
    torch.testing.assert_close(found[0].cpu(), expected)


@torch.no_grad()
def test_all_that_is_fetched_ahead_comes_in_one_stream(monkeypatch):
    """Each stream has memory of its own: what one has used would lie idle in the others."""
    model, streams = cpu_offload(net(), "toy:0"), set()
    fetch = AlignDevicesHook.fetch

    def fetched(hook):
        if threading.current_thread() is not threading.main_thread():
            streams.add(torch.accelerator.current_stream("toy:0").stream_id)
        return fetch(hook)

    monkeypatch.setattr(AlignDevicesHook, "fetch", fetched)
    for _ in range(4):
        model(torch.arange(4).to("toy"))
    assert len(streams) == 1
    assert torch.accelerator.current_stream("toy:0").stream_id not in streams


class Beside(nn.Module):
    """A weight and a buffer of its own beside modules."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x) * self.scale + self.own)


@torch.no_grad()
@pytest.mark.parametrize(
    "places",
    [
        {"": 0, "first": "cpu"},
        {"": 0, "second": "disk"},
        {"": 0, "second.weight": "cpu"},
        {"own": 0, "scale": 0, "first": 0, "second": "disk"},
        {"": "cpu", "own": 0, "first": 0},
    ],
)
def test_what_a_module_with_exceptions_has_of_its_own_is_where_it_computes(tmp_path, places):
    torch.manual_seed(0)
    model, x = Beside(), torch.ones(2, WIDTH)
    expected = model.to("toy")(x.to("toy")).cpu()
    model = dispatch_model(model.to("cpu"), places, main_device=0, offload_dir=tmp_path)
    assert torch.equal(model(x).cpu(), expected)
