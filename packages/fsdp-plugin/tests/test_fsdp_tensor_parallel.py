"""Tensor parallelism: what plans say, and what is trained under it is what one process trains."""

from __future__ import annotations

import re
from functools import partial

import parallel_models as models
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import DDP, Accelerator, World
from accel_fsdp import FSDP
from accel_testing import run_ranks

STEPS, ROWS = 3, 4  # rows of a global batch


def loader(batch_size):
    data = [row for batch in models.make_batches(STEPS, ROWS) for row in zip(*batch, strict=True)]
    return DataLoader(data, batch_size=batch_size)


def two_by_two(accelerator, model, optimizer):
    """Steps over the prepared loader: (what was read, mean loss, norm, clipped gradients) of each."""
    steps = []
    for tokens, labels, positions in accelerator.prepare(loader(ROWS // 2)):
        loss = models.mean_loss(model(tokens, positions), labels)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        mean = accelerator.reduce(loss.detach(), "mean")
        steps.append((tokens.tolist(), mean.item(), norm.item(), models.gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def window(accelerator, model):
    """The gradients of two micro-batches: their mean with `accumulate`, exact by labels with `forward_backward`."""
    shard = accelerator.process_index // 2
    batches = [[part.chunk(2)[shard] for part in batch] for batch in models.make_batches(2, ROWS)]
    for tokens, labels, positions in batches:
        with accelerator.accumulate(model):
            accelerator.backward(models.mean_loss(model(tokens, positions), labels))
    mean = models.gradients_of(model)
    model.zero_grad()
    loss = accelerator.forward_backward(model, batches, models.counted_loss, lambda batch: ((batch[0], batch[2]), {}))
    counted = models.gradients_of(model)
    model.zero_grad()
    return mean, loss.item(), counted


def train(folder):
    """On each of four ranks, as 2 shards of 2 tensor-parallel peers."""
    accelerator = Accelerator(strategy=FSDP(tensor_parallel=2, parallelize_plan=models.PLAN))
    model = models.make_model(seed=accelerator.process_index)
    model.blocks[1].before.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = two_by_two(accelerator, model, optimizer)
    tied = model.head.weight is model.tokens.weight
    accelerator.save_state(folder)
    accumulating = Accelerator(
        strategy=FSDP(tensor_parallel=2, parallelize_plan=models.PLAN), gradient_accumulation_steps=2
    )
    other = accumulating.prepare(models.make_model(seed=accumulating.process_index))
    return steps, tied, window(accumulating, other)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor_parallel")


@pytest.fixture(scope="module")
def trained(checkpoint):
    return run_ranks(train, 4, checkpoint)


def reference_model():
    model = models.make_model()
    model.blocks[1].before.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def expected():
    model = reference_model()
    return models.reference(model, models.make_batches(STEPS, ROWS), momentum=0.9), model


def test_peers_read_the_same_and_shards_different_data(trained):
    read = [[step[0] for step in steps] for steps, *_ in trained]
    assert read[0] == read[1] != read[2] == read[3]


def test_two_by_two_trains_what_one_process_trains(trained, expected):
    for steps, tied, *_ in trained:
        assert tied
        for (_, loss, norm, gradients), (whole_loss, whole_norm, whole_gradients) in zip(
            steps, expected[0], strict=True
        ):
            assert loss == pytest.approx(whole_loss, abs=1e-6)
            assert norm == pytest.approx(whole_norm, rel=1e-6)
            assert models.largest_difference(gradients, whole_gradients) < 1e-6


def test_windows_are_exact(trained):
    batches = models.make_batches(2, ROWS)
    mean, loss, counted = models.reference_window(models.make_model(), batches)
    for *_, (found_mean, found_loss, found_counted) in trained:
        assert models.largest_difference(found_mean, mean) < 1e-6
        assert found_loss == pytest.approx(loss, abs=1e-6)
        assert models.largest_difference(found_counted, counted) < 1e-6


def test_a_checkpoint_of_two_by_two_loads_in_one_process(trained, expected, checkpoint):
    accelerator = Accelerator(strategy="single", cpu=True)
    model = reference_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, _ = accelerator.prepare(model, optimizer, loader(ROWS))
    accelerator.load_state(checkpoint)
    found, wanted = model.state_dict(), expected[1].state_dict()
    assert models.largest_difference(found, wanted) < 1e-6
    assert all(state["momentum_buffer"].abs().max() > 0 for state in optimizer.state.values())
    accelerator.free_memory()


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x))))


def failure(model, plan, mesh):
    from accel_fsdp.tensor_parallel import apply_plan

    with pytest.raises((ValueError, TypeError)) as raised:
        apply_plan(model, plan, mesh)
    return str(raised.value)


DROPPING = {"up": "colwise", "down": "rowwise"}
STRATEGIES = {"ddp": DDP, "fsdp": FSDP, "tensor": partial(FSDP, tensor_parallel=2, parallelize_plan=DROPPING)}


def draws_of_a_run(name, source, target):
    """What a rank draws after a load from `source`, if there is one, and after a save into `target`."""
    accelerator = Accelerator(strategy=STRATEGIES[name](), cpu=True)
    torch.manual_seed(0)  # alike before `prepare`, which sees to it for peers
    accelerator.prepare(WithDropout())
    torch.manual_seed(accelerator.process_index // (2 if name == "tensor" else 1))
    if source is not None:
        accelerator.load_state(source)
    accelerator.save_state(target)
    return torch.rand(8).tolist()


def test_peers_draw_alike_after_a_load_from_another_arrangement(tmp_path):
    def run(name, ranks, source=None):
        target = str(tmp_path / f"{name}-{ranks}")
        return run_ranks(draws_of_a_run, ranks, name, source and str(tmp_path / source), target)

    saved = run("ddp", 2)
    assert run("tensor", 2, "ddp-2") == [saved[0]] * 2
    grown = run("tensor", 4, "tensor-2")
    assert grown[:2] == [saved[0]] * 2
    assert grown[2] == grown[3] != saved[0], "another shard of the data, another stream"
    assert run("fsdp", 2, "tensor-4") == [grown[0], grown[2]]
    again = run("tensor", 4, "fsdp-2")
    assert again == grown, "as the first ranks of their shards of data"


def on_two_peers():
    """What `apply_plan` refuses on two ranks, and what it makes of functions and lists."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from accel_fsdp.tensor_parallel import apply_plan

    world = World.current()
    mesh = DeviceMesh.from_group(world.group, "cpu")
    make = models.make_model
    odd = nn.Sequential(nn.Linear(4, 5), nn.Embedding(3, 4))
    refused = {
        "no such module": failure(make(), {"blocks.*.attn.query": "colwise"}, mesh),
        "no style": failure(make(), {"head": 3}, mesh),
        "no such layer": failure(make(), {"norm": "colwise"}, mesh),
        "twice": failure(make(), {"blocks.*.up": "colwise", "blocks.0.up": "colwise"}, mesh),
        "uneven": failure(odd, {"0": "colwise"}, mesh),
        "uneven style": failure(odd, {"1": RowwiseParallel()}, mesh),
        "ties": failure(make(), {"tokens": "rowwise"}, mesh),
        "ties cut": failure(make(), {"tokens": "colwise", "head": "colwise_rep"}, mesh),
    }
    torch.manual_seed(world.rank)
    refused["dropout"] = failure(WithDropout(), {"up": "colwise", "down": "rowwise"}, mesh)
    torch.manual_seed(0)
    model = WithDropout()
    whole = WithDropout()
    whole.load_state_dict(model.state_dict())
    apply_plan(
        model, lambda module, mesh: apply_plan(module, {"up": [ColwiseParallel()], "down": "rowwise"}, mesh), mesh
    )
    local = model.up.weight.to_local().shape
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    found = model.eval()(x)
    return refused, tuple(local), torch.equal(found, whole.eval()(x)) or (found - whole(x)).abs().max().item()


@pytest.fixture(scope="module")
def peers():
    return run_ranks(on_two_peers, 2)


@pytest.mark.parametrize(
    ("case", "distinctive"),
    [
        (
            "no such module",
            r"'blocks\.\*\.attn\.query', which fits no module of Transformer.* blocks\.\*\.attention\.query, ",
        ),
        ("no style", r"gives 'head' a int, expected a word \(colwise, "),
        ("no such layer", r"gives 'norm' the style 'colwise', but it is a LayerNorm"),
        ("twice", r"fits 'blocks\.0\.up' twice, with 'blocks\.\*\.up' and 'blocks\.0\.up'"),
        ("uneven", r"cuts '0' along out_features=5, which 2 peers do not divide: 5 % 2 = 1\. Make it 6"),
        ("uneven style", r"cuts '1' along num_embeddings=3"),
        ("ties", r"tokens\.weight: .*Shard\(dim=0\).*head\.weight: \('whole',\).* are tied"),
        ("ties cut", r"tokens\.weight: .*Shard\(dim=1\).*head\.weight: .*Shard\(dim=0\).* cut it alike"),
        ("dropout", r"different random states, and 'drop' \(of 1 dropout layers\)"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(peers, case, distinctive):
    for refused, *_ in peers:
        assert re.search(distinctive, refused[case]), refused[case]


def test_a_plan_may_be_a_function_and_an_entry_a_list(peers):
    for _, local, same in peers:
        assert local == (4, 4)
        assert same is True or same < 1e-6


@pytest.mark.parametrize(
    ("options", "distinctive"),
    [
        ({"tensor_parallel": 2}, r"tensor_parallel=2\) was asked for without a plan"),
        ({"parallelize_plan": {"head": "colwise"}}, "tensor_parallel is 1, so there are no peers"),
        ({"tensor_parallel": 2, "parallelize_plan": "auto"}, "is str, expected a mapping"),
        (
            {"tensor_parallel": 2, "parallelize_plan": {"head": "columns"}},
            "'columns', which is none of the words: 'colwise': ",
        ),
    ],
)
def test_a_plan_is_checked_before_there_is_a_model(options, distinctive):
    with pytest.raises((ValueError, TypeError), match=distinctive):
        FSDP(**options)
