"""What is compiled of a sharded model, and when its units are gathered: one graph and one message per unit."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from accel_core import Accelerator, TorchDynamoPlugin
from accel_fsdp import FSDP
from accel_testing import run_ranks

WIDTH, BLOCKS = 8, 3


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.mix, self.norm_2, self.feed = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            Feed(),
        )

    def forward(self, x):
        x = x + self.mix(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(rank):
    return torch.arange(rank, rank + 6) % 10


class Counter:
    """Runs graphs as they are, and notes how many operators each has."""

    def __init__(self):
        self.operators = []

    def __call__(self, graph, inputs):
        self.operators.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


STRATEGIES = {
    "default": (dict, "no"),
    "bf16": (dict, "bf16"),
    "gathered in float32": (lambda: {"gather_dtype": torch.float32}, "bf16"),
    "recomputed": (lambda: {"activation_checkpointing": True}, "bf16"),
    "kept": (lambda: {"reshard_after_forward": False}, "bf16"),
    "with a lookup": (lambda: {"wrap": ["Block", "Embedding"]}, "bf16"),
    "ignored": (lambda: {"ignored_modules": ["blocks.*.norm_1"]}, "bf16"),
    "one unit": (lambda: {"wrap": "none"}, "bf16"),
    "inner units": (lambda: {"wrap": ["Feed", "Block"]}, "no"),
}

# How many graphs there are, whole and by regions.
GRAPHS = {
    "with a lookup": (BLOCKS + 1, 1),
    "one unit": (1, 1),
}


def stepped(options, precision, plugin):
    """The loss of two steps, compiled or not."""
    accelerator = Accelerator(strategy=FSDP(**options), mixed_precision=precision, cpu=True, dynamo_plugin=plugin)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(2):
        loss = model(batch(accelerator.process_index)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator, model, optimizer


def graphs():
    """For each strategy: losses uncompiled; graphs and losses, whole and by regions."""
    found = {}
    for name, (options, precision) in STRATEGIES.items():
        found[name] = [stepped(options(), precision, None)[0]]
        for regional in (False, True):
            counter = Counter()
            plugin = TorchDynamoPlugin(backend=counter, fullgraph=True, use_regional_compilation=regional)
            losses = stepped(options(), precision, plugin)[0]
            found[name].append((counter.operators, losses))
            torch._dynamo.reset()
    return found


@pytest.fixture(scope="module")
def counted():
    return run_ranks(graphs, 2, timeout=150)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_unit_is_one_graph_and_equal_ones_share_it_by_regions(counted, name):
    whole, by_region = GRAPHS.get(name, (BLOCKS, 1))
    for rank in counted:
        plain, one, other = rank[name]
        assert (len(one[0]), len(other[0])) == (whole, by_region)
        assert one[1] == pytest.approx(plain, rel=1e-5)
        assert other[1] == pytest.approx(plain, rel=1e-5)


def moments():
    """What the engine does in a step, in order: (what, name of the unit); names and signatures of a compiled model."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    seen, patch = [], pytest.MonkeyPatch()

    def noting(name, original):
        def noted(self, *args):
            waits = self._all_gather_result is None
            result = original(self, *args)
            if name != "unshard" or (waits and self._all_gather_result is not None):
                seen.append((name, self._module_fqn))
            return result

        return noted

    for name in ("unshard", "pre_backward", "post_backward"):
        patch.setattr(FSDPParamGroup, name, noting(name, getattr(FSDPParamGroup, name)))
    plugin = TorchDynamoPlugin(backend=Counter(), use_regional_compilation=True)
    stepped({"wrap": ["Block", "Embedding"]}, "bf16", None)
    lookups = [what for what, name in seen if name == "table"]
    seen.clear()
    _, accelerator, model, _ = stepped({}, "bf16", plugin)
    patch.undo()
    names = list(accelerator.get_state_dict(model))
    signature = str(inspect.signature(model.blocks[0].forward))
    kinds = (type(accelerator.unwrap_model(model)).__name__, type(model.blocks[0]).__name__)
    accelerator.free_memory()
    left = [name for name, module in model.named_modules() if "forward" in vars(module) or module._compiled_call_impl]
    return seen, names, signature, kinds, left, lookups


@pytest.fixture(scope="module")
def seen():
    return run_ranks(moments, 2, timeout=60)


def test_a_unit_is_gathered_by_one_message_and_the_next_one_while_its_backward_runs(seen):
    units = [f"blocks.{number}" for number in range(BLOCKS)]
    for events, *_ in seen:
        step = events[len(events) // 2 :]  # the second
        gathered = [name for what, name in step if what == "unshard"]
        assert gathered == ["", *units, *reversed(units)]
        assert [name for what, name in step if what == "post_backward"] == [*reversed(units), ""]
        for number in range(1, BLOCKS):
            begins = step.index(("pre_backward", f"blocks.{number}"))
            ends = step.index(("post_backward", f"blocks.{number}"))
            earlier = len(step) - 1 - step[::-1].index(("unshard", f"blocks.{number - 1}"))
            assert earlier + 1 == begins < ends  # a call is noted when it returns: it has gathered the earlier unit


def test_a_table_that_is_a_unit_is_gathered_for_the_forward_alone(seen):
    for *_, lookups in seen:
        assert lookups == ["unshard", "pre_backward", "post_backward"] * 2


def test_compiling_leaves_names_classes_and_signatures(seen):
    assert seen[0][1] == list(Model().state_dict())  # on rank 0
    for _, _, signature, kinds, left, _ in seen:
        assert signature == "(x)"
        assert kinds == ("Model", "FSDPBlock")
        assert left == []
