"""Under a narrow compute dtype, parameters are gathered in it: no copy of the model waits for the backward, and numbers stay."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from accel_core import DDP, Accelerator
from accel_fsdp import FSDP
from accel_precision import FP16
from accel_testing import run_ranks

WIDTH, BLOCKS = 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.often = nn.RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        # One norm runs in training alone: those of a unit are gathered together, and not all of them need to run.
        return self.often(x) if self.training else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.batch = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch(x))


def built():
    torch.manual_seed(0)
    return Model()


def batch(rank):
    return torch.arange(rank, rank + 6) % 10, torch.linspace(-1, 1, 18).view(6, 3) + rank


def saved_bytes(function):
    """How much autograd saves of weights, or of copies of them, meanwhile."""
    sizes = {}

    def pack(tensor):
        if tensor.dim() == 2 and set(tensor.shape) <= {WIDTH, 2 * WIDTH}:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(storage.nbytes() for storage in sizes.values())


def trained(strategy):
    accelerator = Accelerator(strategy=strategy, mixed_precision="bf16", cpu=True)
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids, targets = batch(accelerator.process_index)
    losses, kept, gradients = [], [], {}
    for _ in range(3):
        output, held = saved_bytes(lambda: model(ids))
        loss = (output - targets).pow(2).mean()
        accelerator.backward(loss)
        gradients = {
            name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).tolist()
            for name, parameter in accelerator.unwrap_model(model).named_parameters()
        }
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(ids)
        model.train()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        kept.append(held)
    told = {detail.about: detail.text for detail in accelerator.explain().details}
    return losses, kept, gradients, told


class Branch(nn.Module):
    """Uses one of two layers, and one of its norms, by what it is told."""

    def __init__(self):
        super().__init__()
        self.norm, self.often = nn.LayerNorm(5), nn.LayerNorm(5)
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, first):
        y = (self.one if first else self.other)(self.norm(x))
        return x + (self.often(y) if first else y)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Branch() for _ in range(2)), nn.Linear(5, 3)

    def forward(self, x, first):
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)


def window(strategy):
    """The gradients of a window whose micro-batches use different parameters of each unit."""
    accelerator = Accelerator(strategy=strategy, mixed_precision="bf16", cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Branches())
    x = torch.linspace(-1, 1, 20).view(4, 5) + accelerator.process_index
    with accelerator.no_sync(model):
        accelerator.backward(model(x, True).square().mean())
    accelerator.backward(model(2 * x, False).square().mean())
    named = accelerator.unwrap_model(model).named_parameters()
    return {
        name: (each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad).tolist()
        for name, each in named
    }


def windows():
    return {
        "ddp": window(DDP(find_unused_parameters=True)),
        "fsdp": window(FSDP()),
        "replicated": window(FSDP(replicate=2)),
        "offloaded": window(FSDP(cpu_offload=True)),
        "without norms": window(FSDP(ignored_modules=["blocks.*.norm", "blocks.*.often"])),
    }


class Adapted(nn.Module):
    """A frozen weight of another dtype than the two that are trained beside it, as with LoRA; it comes first."""

    def __init__(self, dtype):
        super().__init__()
        weight = torch.linspace(0, 3, 64).view(8, 8).sin().mul(3)
        self.base = nn.Parameter(weight.abs().to(dtype), requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return x + x @ self.base.to(x.dtype) / 8 + self.up(self.down(x))


def adapted(dtype):
    return nn.Sequential(*(Adapted(dtype) for _ in range(2)))


def narrow_blocks():
    return nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).bfloat16(), nn.Linear(8, 8))


def gradients(strategy, make, scale):
    """Those of what is trained, in order, of a loss that is scaled by a number."""
    accelerator = Accelerator(strategy=strategy, mixed_precision="bf16", cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(make())
    x = torch.linspace(-1, 1, 32).view(4, 8) + accelerator.process_index
    accelerator.backward(model(x).square().mean() * scale)
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


# The engine of torch 2.9 lets every parameter require gradients at first, which one of integers cannot.
INTEGERS = ["uint8", "int8"] if "requires_grad=" in inspect.getsource(FSDPParam._init_sharded_param) else []
BESIDE_OTHERS = {
    "float16, tiny": (partial(adapted, torch.float16), 1e-9),
    "float16, huge": (partial(adapted, torch.float16), 1e9),
    "bfloat16": (partial(adapted, torch.bfloat16), 1.0),
    **{name: (partial(adapted, getattr(torch, name)), 1.0) for name in INTEGERS},
    "units": (narrow_blocks, 1.0),
}


class Tied(nn.Module):
    """A language model whose head is its table, and whose residuals are larger than float16 can be."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + 5e4 * block(self.norm(x)).tanh()
        return self.head(self.norm(x))


def tied(strategy, precision):
    """The losses of three steps."""
    accelerator = Accelerator(strategy=strategy, mixed_precision=precision, cpu=True)
    torch.manual_seed(0)
    model = Tied()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids, losses = torch.arange(8) + accelerator.process_index, []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(ids), ids)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TIED = {"of the whole model": FSDP, "together": lambda: FSDP(wrap=["Linear", "Embedding"])}


def ties():
    return {
        name: {unit: tied(make(), precision) for unit, make in {"ddp": DDP, **TIED}.items()}
        for name, precision in (("bf16", "bf16"), ("fp16", FP16(init_scale=256.0)))
    }


def several_dtypes():
    return {
        case: {strategy.__name__: gradients(strategy(), *BESIDE_OTHERS[case]) for strategy in (DDP, FSDP)}
        for case in BESIDE_OTHERS
    }


def strategies():
    return {
        "ddp": trained("ddp"),
        "fsdp": trained(FSDP()),
        "recomputed": trained(FSDP(activation_checkpointing=True)),
        "in bfloat16": trained(FSDP(gather_dtype=torch.bfloat16, wrap=["Block"], ignored_modules=["batch"])),
        "in float32": trained(FSDP(gather_dtype=torch.float32)),
    }


def jobs():
    return strategies(), windows()


@pytest.fixture(scope="module")
def both():
    return run_ranks(jobs, 2, timeout=100)


@pytest.fixture(scope="module")
def beside_others():
    return run_ranks(several_dtypes, 2)


@pytest.fixture(scope="module")
def with_ties():
    return run_ranks(ties, 2)


@pytest.fixture(scope="module")
def ranks(both):
    return [found for found, _ in both]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("unit", TIED)
def test_a_table_that_is_tied_to_a_head_keeps_its_dtype(with_ties, unit, precision):
    for rank in with_ties:
        assert rank[precision][unit] == pytest.approx(rank[precision]["ddp"], rel=1e-5)


@pytest.mark.parametrize("case", BESIDE_OTHERS)
def test_gradients_travel_in_the_dtype_of_what_is_trained_beside_parameters_of_other_dtypes(beside_others, case):
    for rank in beside_others:
        assert len(rank[case]["FSDP"]) == len(rank[case]["DDP"]) > 0
        for found, expected in zip(rank[case]["FSDP"], rank[case]["DDP"], strict=True):
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=torch.finfo(found.dtype).eps * 10, atol=0)


@pytest.mark.parametrize("strategy", ["fsdp", "replicated", "offloaded", "without norms"])
def test_a_window_may_use_other_parameters_in_each_micro_batch(both, strategy):
    for _, found in both:
        assert found[strategy].keys() == found["ddp"].keys()
        for name, gradient in found["ddp"].items():
            assert torch.allclose(torch.tensor(found[strategy][name]), torch.tensor(gradient), rtol=1e-6, atol=1e-8), (
                name
            )


@pytest.mark.parametrize("strategy", ["fsdp", "recomputed", "in float32"])
def test_numbers_are_those_of_whole_parameters_under_autocast(ranks, strategy):
    for found in ranks:
        assert found[strategy][0] == pytest.approx(found["ddp"][0], rel=1e-5)


def test_rounded_norms_and_embeddings_are_close_and_not_the_same(ranks):
    for found in ranks:
        assert found["in bfloat16"][0] == pytest.approx(found["ddp"][0], rel=5e-2)
        assert found["in bfloat16"][0] != pytest.approx(found["ddp"][0], rel=1e-6)


def test_no_copy_of_the_weights_waits_for_the_backward(ranks):
    whole = BLOCKS * 2 * WIDTH * 2 * WIDTH * 2  # bytes of the blocks' matrices in bfloat16
    for found in ranks:
        assert max(found["fsdp"][1] + found["recomputed"][1] + found["in bfloat16"][1]) < whole / 4
        assert min(found["in float32"][1]) >= whole
        assert min(found["ddp"][1]) >= whole


@pytest.mark.parametrize("strategy", ["fsdp", "in bfloat16"])
def test_gradients_travel_in_the_dtype_of_the_parameters(ranks, strategy):
    for found in ranks:
        gradients = {name: torch.tensor(values) for name, values in found[strategy][2].items()}
        for name in ("blocks.0.up.weight", "blocks.1.norm.weight", "table.weight"):
            assert not torch.equal(gradients[name].bfloat16().float(), gradients[name])


def test_explain_says_in_which_dtypes_parameters_are_gathered(ranks):
    told = ranks[0]
    assert told["fsdp"][3]["gathered"] == "bfloat16, norms and embeddings in their own dtype"
    assert told["in float32"][3]["gathered"] == "float32"
