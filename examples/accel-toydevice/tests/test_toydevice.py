"""The device keeps what a device promises, and accel-core, which has never heard of it, trains on it."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accel_toydevice  # noqa: F401  (gives torch the device, here and on every rank that imports this file)
from accel_core import Accelerator, Histogram, Tracker, WorldError, set_seed
from accel_testing import run_ranks


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained(accelerator):
    """The weights after a loop that does not say where it runs, and where they were while it ran."""
    x = torch.arange(48.0).view(16, 3).sin()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    places = set()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        places |= {str(tensor.device) for tensor in (inputs, loss, *model.parameters())}
    return {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}, places


def test_importing_it_makes_it_the_accelerator_of_torch():
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("toy")
    assert torch.accelerator.device_count() == 2
    assert Accelerator().device == torch.device("toy", 0)
    assert Accelerator(cpu=True).device == torch.device("cpu")


def test_a_loop_trains_on_it_as_on_the_cpu():
    here, places = trained(Accelerator())
    there, others = trained(Accelerator(cpu=True))
    assert (places, others) == ({"toy:0"}, {"cpu"})
    assert here.keys() == there.keys()
    for name, value in there.items():
        torch.testing.assert_close(here[name], value)


def test_preparing_keeps_parameters_their_ties_and_what_holds_them():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before)
    Accelerator().prepare(model)
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert model[1].weight is model[0].weight
    assert {parameter.device.type for parameter in optimizer.param_groups[0]["params"]} == {"toy"}


def test_a_weak_reference_to_a_parameter_refuses_the_move():
    model = torch.nn.Linear(3, 3)
    reference = weakref.ref(model.weight)
    with pytest.raises(RuntimeError, match="Couldn't swap Linear.weight"):
        Accelerator().prepare(model)
    assert reference() is model.weight
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_each_device_has_a_random_stream_that_seeds_and_states_restore():
    set_seed(7)
    first = [torch.rand(3, device=f"toy:{index}").tolist() for index in (0, 1)]
    state = torch.toy.get_rng_state(0)
    second = torch.rand(3, device="toy:0").tolist()
    torch.toy.set_rng_state(state, 0)
    assert torch.rand(3, device="toy:0").tolist() == second
    assert first[0] == first[1] != second
    set_seed(7)
    torch.rand(100)  # the host's stream is another one
    assert torch.rand(3, device="toy:0").tolist() == first[0]


def test_memory_is_counted_and_ends():
    before = torch.accelerator.memory_allocated(0)
    tensor = torch.empty(1000, device="toy:0")
    assert torch.accelerator.memory_allocated(0) == before + 4000
    with pytest.raises(torch.OutOfMemoryError, match="toy:1 is out of memory"):
        torch.empty(2**30, device="toy:1")
    del tensor
    assert torch.accelerator.memory_allocated(0) == before


def test_an_index_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match=r"toy:2 was asked for, but there are 2 toy devices"):
        torch.empty(1, device="toy:2")


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.nn.Conv2d(1, 2, 3, padding=1),
        lambda: torch.nn.ConvTranspose2d(1, 2, 3),
        lambda: torch.nn.Sequential(torch.nn.BatchNorm2d(1), torch.nn.Dropout(0.0)),
        lambda: torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Unflatten(1, (5, 5)), torch.nn.LayerNorm(5)),
    ],
    ids=["convolution", "transposed", "batch norm", "views"],
)
def test_modules_compute_what_they_compute_on_the_cpu(build):
    torch.manual_seed(0)
    here, given = build(), torch.randn(2, 1, 5, 5)
    there = build()
    there.load_state_dict(here.state_dict())
    there.to("toy")
    results = []
    for module, x in ((here, given.clone()), (there, given.to("toy"))):
        x.requires_grad_()
        output = module(x)
        output.square().sum().backward()
        state = [*module.state_dict().values(), *(parameter.grad for parameter in module.parameters())]
        results.append([tensor.detach().cpu() for tensor in (output, x.grad, *state)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def collectives():
    """What this rank sees of the collectives of the product."""
    accelerator = Accelerator()
    own = torch.tensor([accelerator.process_index + 1.0], device=accelerator.device)
    gathered = accelerator.gather(own)
    return {
        "devices": {str(accelerator.device), str(gathered.device)},
        "backend": dist.get_backend_config(),
        "gathered": gathered.tolist(),
        "reduced": accelerator.reduce(own, "mean").tolist(),
    }


def test_the_collectives_of_an_accelerator_work_on_the_device_of_each_rank():
    for rank, seen in enumerate(run_ranks(collectives, 2)):
        assert seen == {
            "devices": {f"toy:{rank}"},
            "backend": "cpu:gloo,toy:toyccl",
            "gathered": [1.0, 2.0],
            "reduced": [1.5],
        }


def calls_to_torch():
    """What each call to torch.distributed leaves on this rank, which begins with rank + 1 everywhere."""
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    seen = {}

    def note(name, call, shape=(2,), **options):
        tensor = torch.full(shape, rank + 1.0, device=device)
        results = call(tensor, **options)
        seen[name] = torch.cat([result.reshape(-1) for result in results or [tensor]]).tolist()

    def promised(tensor):
        work = dist.all_reduce(tensor, async_op=True)
        [result] = work.get_future().wait()
        assert result.data_ptr() == tensor.data_ptr()

    def received(call, count=2):
        """A call that writes into a list of tensors on rank 0, or on all."""
        outputs = [torch.zeros(1, device=device) for _ in range(count)]
        call(outputs)
        return outputs

    def exchanged(tensor):
        dist.all_to_all_single(output := torch.empty_like(tensor), tensor)
        return [output]

    def sent(tensor):
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    note("promised", promised)
    note("broadcast", dist.broadcast, src=1)
    note("reduce", lambda tensor: dist.reduce(tensor, 0) if rank == 0 else dist.reduce(tensor.clone(), 0))
    note("all_gather", lambda x: received(lambda out: dist.all_gather(out, x)), shape=(1,))
    note("gather", lambda x: received(lambda out: dist.gather(x, None if rank else out)), shape=(1,))
    note("scatter", lambda x: received(lambda out: dist.scatter(out[0], None if rank else [x, x * 3]), 1), shape=(1,))
    note("reduce_scatter", lambda x: received(lambda out: dist.reduce_scatter(out[0], [x, x * 3]), 1), shape=(1,))
    note("reduce_scatter_single", lambda x: received(lambda out: dist.reduce_scatter_single(out[0], x), 1))
    note("all_to_all_single", exchanged)
    note("send", sent)
    dist.barrier(device_ids=[rank])
    return seen


def test_every_collective_of_torch_that_it_offers_leaves_its_results_on_the_device():
    first, second = run_ranks(calls_to_torch, 2)
    assert first == {
        "promised": [3.0, 3.0],
        "broadcast": [2.0, 2.0],
        "reduce": [3.0, 3.0],
        "all_gather": [1.0, 2.0],
        "gather": [1.0, 2.0],
        "scatter": [1.0],
        "reduce_scatter": [3.0],
        "reduce_scatter_single": [3.0],
        "all_to_all_single": [1.0, 2.0],
        "send": [1.0, 1.0],
    }
    rest = {"reduce": [2.0, 2.0], "gather": [0.0, 0.0], "scatter": [3.0], "reduce_scatter": [9.0]}
    assert second == first | rest


def more_ranks_than_devices():
    with pytest.raises(WorldError, match=r"3 processes run on this machine .* sees 2 \(toy\)"):
        Accelerator()


def test_more_ranks_than_devices_are_refused():
    run_ranks(more_ranks_than_devices, 3)


class Recorder(Tracker):
    """A tracker that keeps what it is told."""

    name = "recorder"

    def __init__(self):
        self.told = []

    def start(self, run):
        pass

    def log(self, values, step):
        self.told.append(values)

    def log_histograms(self, values, step):
        self.told.append({name: bins.counts for name, bins in values.items()})

    def log_table(self, name, table, step):
        self.told.append(table.rows)


def test_values_on_the_device_are_recorded_as_they_were_without_waiting_for_each(monkeypatch):
    recorder = Recorder()
    accelerator = Accelerator(log_with=recorder)
    accelerator.init_trackers("toys")
    losses = {f"loss {number}": torch.tensor(float(number), device="toy") for number in range(5)}
    weights = torch.arange(4.0, device="toy")
    item = torch.Tensor.item

    def guarded(tensor):
        assert tensor.device.type == "cpu", "item() waits for the device"
        return item(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", guarded)
        accelerator.log({**losses, "weights": Histogram(weights, bins=2)})
        accelerator.log_table("losses", ["name", "loss"], list(losses.items()))
    for tensor in (*losses.values(), weights):
        tensor.fill_(-1)  # as a loop uses its buffers again
    accelerator.end_training()
    expected = {name: float(name[-1]) for name in losses}
    assert recorder.told == [expected, {"weights": (2, 2)}, tuple(expected.items())]
