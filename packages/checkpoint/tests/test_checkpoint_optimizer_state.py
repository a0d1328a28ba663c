"""Optimizer state: captured by the names of parameters, restored into fresh optimizers that train on bit-equally."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from accel_checkpoint import Extent, Whole, capture_optimizer, flat_range, list_misfits, restore_optimizer
from accel_checkpoint.codec import decode, encode
from accel_checkpoint.optimizers.optimizer_state import SHARED
from accel_core import CheckpointError, World
from accel_core.api.checkpoint import SavedEntry
from accel_core.api.layouts import Box, Elementwise, Opaque, Replicated
from accel_testing import run_ranks


def cloned(value):
    """As it comes out of a file."""
    encoded = encode(value, "a test")
    return decode(encoded.skeleton, {name: tensor.clone() for name, tensor in encoded.tensors.items()}, "a test")


class Saved:
    """What ranks captured, as a checkpoint would have it: assembled, and in memory of its own."""

    def __init__(self, *captured):
        first = captured[0]
        self.kind, self.groups, self.whole = first.kind, cloned(first.groups), cloned(first.whole)
        self.values = cloned({name: value for one in captured for name, value in one.values.items()})
        self.tensors, self.parts, self.entries = {}, {}, {}
        for name in dict.fromkeys(name for one in captured for name in one.entries):
            self._add(name, [one.entries[name] for one in captured if name in one.entries])

    def _add(self, name, entries):
        first = entries[0]
        assert len({type(entry) for entry in entries}) == 1, name
        if isinstance(first, Opaque):
            self.parts[name] = {entry.part: cloned(entry.value) for entry in entries}
            self.entries[name] = SavedEntry("opaque", (), None, {entry.part: entry.signature for entry in entries})
        elif isinstance(first, Replicated):
            self.tensors[name] = first.data.clone()
            self.entries[name] = SavedEntry("replicated", tuple(first.data.shape), first.data.dtype, {})
        else:
            assert len({(entry.shape, entry.dtype) for entry in entries}) == 1, name
            whole, written = torch.zeros(first.shape, dtype=first.dtype), torch.zeros(first.shape, dtype=torch.int)
            for box, data in {piece.box: piece.data for entry in entries for piece in entry.pieces}.items():
                assert tuple(data.shape) == box.sizes
                whole[box.slices] = data
                written[box.slices] += 1
            assert bool((written == 1).all()), name
            self.tensors[name] = whole
            self.entries[name] = SavedEntry("elementwise", first.shape, first.dtype, {})

    def described(self):
        return self.entries

    def read(self, name, entry):
        if isinstance(entry, Opaque):
            return cloned(self.parts[name][entry.part])
        for box, data in entry.pieces if isinstance(entry, Elementwise) else [(None, entry.data)]:
            data.copy_(self.tensors[name] if box is None else self.tensors[name][box.slices])
        return None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embedding(x.argmax(-1)))))


def seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


def mlp(width=6, dtype=torch.float32, bias=True):
    return seeded(lambda: nn.Sequential(nn.Linear(6, width, bias), nn.Tanh(), nn.Linear(width, 6, bias)).to(dtype))


def wide():
    return mlp(width=1024)  # 6144 elements: enough for 8 and 4 bits


def names_of(*models):
    return {id(p): f"{index}.{name}" for index, model in enumerate(models) for name, p in model.named_parameters()}


def backward(model, optimizer, x):
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, -1)).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        closure = partial(backward, model, optimizer, data(step).to(dtype))
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def data(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def taken(model, optimizer):
    return Saved(capture_optimizer(optimizer, names_of(model), Whole()))


def given(model, optimizer, saved):
    assert list_misfits(optimizer, names_of(model), Whole(), saved) == []
    restore_optimizer(optimizer, names_of(model), Whole(), saved)


def copied(model, make_model):
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    return fresh


def assert_equal_models(one, other):
    for (name, tensor), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


def assert_resumes(make_optimizer, make_model=mlp, fit=train):
    """Trains on from a restored state exactly as without the interruption; and capturing changes nothing."""
    straight, broken_off = make_model(), make_model()
    first, second = make_optimizer(straight), make_optimizer(broken_off)
    fit(straight, first, range(6))
    fit(broken_off, second, range(3))
    saved = taken(broken_off, second)
    resumed = copied(broken_off, make_model)
    third = make_optimizer(resumed)
    given(resumed, third, saved)
    fit(broken_off, second, range(3, 6))
    fit(resumed, third, range(3, 6))
    assert_equal_models(broken_off, straight)
    assert_equal_models(resumed, straight)
    return saved


def of_all(kind, **options):
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    "adam-fused": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "adam-tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "adamw-foreach-amsgrad": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "lbfgs": (torch.optim.LBFGS, {"max_iter": 3, "history_size": 4}),
    "lbfgs-wolfe": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_trains_on_bit_equally(name):
    kind, options = OPTIMIZERS[name]
    saved = assert_resumes(of_all(kind, **options))
    kinds = {entry.kind for entry in saved.described().values()}
    assert kinds == ({"opaque"} if kind is torch.optim.LBFGS else kinds & {"elementwise", "replicated"})


def test_muon_trains_on_bit_equally():
    saved = assert_resumes(of_all(torch.optim.Muon, lr=0.01), partial(mlp, bias=False))
    assert {entry.kind for entry in saved.described().values()} == {"elementwise"}


def test_sparse_adam_trains_on_bit_equally():
    def table():
        return seeded(lambda: nn.Embedding(20, 3, sparse=True))

    def fit(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(torch.tensor([step, step + 1, 7])).square().sum().backward()
            optimizer.step()

    assert_resumes(of_all(torch.optim.SparseAdam, lr=0.1), table, fit)


def test_low_precision_parameters_keep_their_full_precision_state():
    class Full(torch.optim.Optimizer):
        accel_layouts = {"momentum": "elementwise", "step": "replicated"}

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state.setdefault("step", torch.zeros((), dtype=torch.int64)).add_(1)
                momentum = state.setdefault("momentum", torch.zeros(parameter.shape))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_((momentum * self.param_groups[0]["lr"]).bfloat16())

    saved = assert_resumes(of_all(Full), partial(mlp, dtype=torch.bfloat16))
    assert saved.described()["0.0.weight/momentum"] == SavedEntry("elementwise", (6, 6), torch.float32, {})
    assert saved.described()["0.0.weight/step"] == SavedEntry("replicated", (), torch.int64, {})


def test_a_subclass_inherits_the_layouts_and_what_it_adds_is_opaque():
    class Norms(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["norms"] = [state["exp_avg"].norm(), state["exp_avg_sq"].norm()]

    saved = assert_resumes(of_all(Norms, lr=0.01))
    kinds = {name: entry.kind for name, entry in saved.described().items() if name.startswith("0.0.bias/")}
    assert kinds == {
        "0.0.bias/exp_avg": "elementwise",
        "0.0.bias/exp_avg_sq": "elementwise",
        "0.0.bias/step": "replicated",
        "0.0.bias/norms": "opaque",
    }


class Coded(torch.optim.Optimizer):
    """Somebody's own: codes of the parameter's shape, which mean nothing without their scale."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(calls=0, codes=torch.zeros(parameter.shape, dtype=torch.int8), scale=torch.ones(1))
                state["calls"] += 1
                momentum = state["codes"] * state["scale"] * 0.9 + parameter.grad
                state["scale"] = momentum.abs().max().clamp(min=1e-9).view(1) / 127
                state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
                parameter.sub_(momentum, alpha=group["lr"])


def test_the_undeclared_state_of_somebodys_optimizer_stays_together():
    saved = assert_resumes(of_all(Coded))
    assert {entry.kind for entry in saved.described().values()} == {"opaque"}
    assert sorted(saved.described()) == ["0.0.bias", "0.0.weight", "0.2.bias", "0.2.weight"]
    signature = "of [6, 6]: calls=value; codes=int8[6, 6]; scale=float32[1]"
    assert saved.described()["0.0.weight"].signatures == {"whole": signature}


def test_named_parameters_of_torch_may_be_given_in_another_order():
    model = mlp()
    first = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, first, range(2))
    resumed = copied(model, mlp)
    second = torch.optim.AdamW(reversed(list(resumed.named_parameters())), lr=0.5)
    given(resumed, second, taken(model, first))
    train(model, first, range(2, 4))
    train(resumed, second, range(2, 4))
    assert_equal_models(resumed, model)
    assert second.param_groups[0]["param_names"] == ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_several_groups_come_back_with_the_options_of_each():
    def groups(model):
        decayed, others = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.1}], lr=0.01)

    def fit(model, optimizer, steps):
        for step in steps:
            train(model, optimizer, [step])
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

    saved = assert_resumes(groups, fit=fit)
    assert [group["names"] for group in saved.groups] == [["0.0.weight", "0.2.weight"], ["0.0.bias", "0.2.bias"]]
    assert [group["lr"] for group in saved.groups] == pytest.approx([0.01 * 0.9**3, 0.1 * 0.9**3])


def test_how_a_process_computes_is_its_own_and_all_else_is_restored():
    model, resumed = mlp(), mlp()
    first = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), betas=(0.8, 0.9), foreach=False, eps=1e-6)
    second = torch.optim.Adam(resumed.parameters(), lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(first, 1)
    train(model, first, range(1))
    given(resumed, second, taken(model, first))
    group = second.param_groups[0]
    assert (group["fused"], group["foreach"], group["capturable"]) == (True, None, False)
    assert (group["lr"], group["betas"], group["eps"], group["initial_lr"]) == (
        0.25,
        (0.8, 0.9),
        1e-6,
        torch.tensor(0.25),
    )


def test_a_hyper_parameter_stays_a_tensor_where_it_is_one():
    model, resumed = mlp(), mlp()
    first, second = (
        torch.optim.SGD(model.parameters(), lr=0.25),
        torch.optim.SGD(resumed.parameters(), lr=torch.tensor(1.0)),
    )
    given(resumed, second, taken(model, first))
    assert torch.equal(second.param_groups[0]["lr"], torch.tensor(0.25))


def test_partial_training_saves_what_is_trained():
    def frozen(make):
        model = make()
        model[0].requires_grad_(False)
        return model

    every_parameter = assert_resumes(of_all(torch.optim.AdamW, lr=0.01), lambda: frozen(mlp))
    adapter = assert_resumes(lambda model: torch.optim.AdamW(model[2].parameters(), lr=0.01), lambda: frozen(mlp))
    for saved in (every_parameter, adapter):
        assert {name.partition("/")[0] for name in saved.described()} == {"0.2.weight", "0.2.bias"}


def test_tied_parameters_have_one_state():
    saved = assert_resumes(of_all(torch.optim.AdamW, lr=0.01), lambda: seeded(Tied))
    assert {name.partition("/")[0] for name in saved.described()} == {
        "0.embedding.weight",
        "0.body.weight",
        "0.body.bias",
    }


def test_two_optimizers_of_one_model_have_their_own_state():
    def pair(model):
        return torch.optim.Muon([model[0].weight, model[2].weight]), torch.optim.AdamW([model[0].bias, model[2].bias])

    def fit(model, optimizers, steps):
        for step in steps:
            x = data(step)
            (model(x) - x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model = mlp()
    optimizers = pair(model)
    fit(model, optimizers, range(3))
    saved = [taken(model, optimizer) for optimizer in optimizers]
    resumed = copied(model, mlp)
    fresh = pair(resumed)
    for optimizer, state in zip(fresh, saved, strict=True):
        given(resumed, optimizer, state)
    fit(model, optimizers, range(3, 6))
    fit(resumed, fresh, range(3, 6))
    assert_equal_models(resumed, model)


def test_a_parameter_without_a_name_is_called_by_its_place():
    model, extra = mlp(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=0.1, momentum=0.9)
    extra.grad = torch.ones(2)
    optimizer.step()
    state = capture_optimizer(optimizer, names_of(model), Whole())
    assert list(state.entries) == ["loose.1.0/momentum_buffer"]


def test_state_that_did_not_exist_is_absent_and_cleared():
    model = mlp()
    fresh, stepped = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    saved = taken(model, fresh)
    assert (saved.values, saved.described()) == ({}, {})
    train(model, stepped, range(1))
    assert stepped.state
    given(model, stepped, saved)
    assert not stepped.state


def test_state_under_keys_that_are_no_parameters_comes_back():
    class Global(torch.optim.SGD):
        def step(self, closure=None):
            self.state["calls"] = self.state.get("calls", 0) + 1
            self.param_groups[0]["lr"] = 0.1 / self.state["calls"]
            return super().step(closure)

    saved = assert_resumes(of_all(Global, lr=0.1))
    assert list(saved.described()) == [SHARED]


def test_entries_are_live_and_restoring_leaves_what_was_saved_alone():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    entries = capture_optimizer(optimizer, names_of(model), Whole()).entries
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert entries["0.0.weight/exp_avg"].pieces[0].data.data_ptr() == moments.data_ptr()


class SlowWeights(torch.optim.SGD):
    """Keeps something beside `state`, and says so in its state_dict()."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure=None):
        result = super().step(closure)
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            parameter.data.lerp_(slow.lerp_(parameter.data, 0.5), 0.5)
        return result

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state):
        self.slow = [tensor.clone() for tensor in state["slow"]]
        super().load_state_dict({key: value for key, value in state.items() if key != "slow"})


class Nesting(Coded):
    """Gives its state in another order, and nothing else."""

    def state_dict(self):
        given = super().state_dict()
        return {**given, "state": {key: {"nested": dict(value)} for key, value in given["state"].items()}}


def test_an_optimizer_that_gives_its_state_itself_is_saved_whole():
    saved = assert_resumes(of_all(SlowWeights))
    assert set(saved.whole) == {"state", "param_groups", "slow"}
    assert (saved.values, saved.entries) == ({}, {})


def test_a_state_dict_that_adds_nothing_is_not_needed():
    saved = assert_resumes(of_all(Nesting))
    assert saved.whole is None
    assert "0.0.weight" in saved.described()


def test_an_optimizer_with_hooks_on_its_state_is_saved_whole():
    def hooked(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
        return optimizer

    assert assert_resumes(hooked).whole["note"] == 1


# Other people's optimizers, as far as they run without an accelerator.


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Lion8bit", "AdamW"])
def test_eight_bit_state_trains_on_bit_equally(name):
    optimizers = pytest.importorskip("bitsandbytes").optim
    saved = assert_resumes(of_all(getattr(optimizers, name), lr=0.01), wide)
    assert saved.whole is None
    eight_bit = "absmax1=float32[24]" in saved.described()["0.0.weight"].signatures["whole"]
    assert eight_bit == name.endswith("8bit")


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_state_trains_on_bit_equally(name):
    optimizers = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        saved = assert_resumes(of_all(getattr(optimizers, name), lr=0.01), wide)
    assert "exp_avg=torchao.optim." in saved.described()["0.0.weight"].signatures["whole"]


def test_schedule_free_state_trains_on_bit_equally():
    schedulefree = pytest.importorskip("schedulefree")

    def trained(model):
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1, warmup_steps=4)
        optimizer.train()
        return optimizer

    assert_resumes(trained)


class Cut:
    """A sharding of the test: each rank has a flat tensor of some boxes of every parameter, or one box as it is."""

    def __init__(self):
        self.extents = {}

    def add(self, full, boxes):
        parts = [full.detach()[box.slices] for box in boxes]
        local = parts[0].clone() if len(parts) == 1 else torch.cat([full.new_empty(0), *(p.flatten() for p in parts)])
        parameter = nn.Parameter(local)
        self.extents[parameter] = Extent(tuple(full.shape), tuple(boxes))
        if full.grad is not None:
            grads = [full.grad[box.slices] for box in boxes]
            parameter.grad = (
                grads[0].clone() if len(parts) == 1 else torch.cat([local.new_empty(0), *map(torch.flatten, grads)])
            )
        return parameter

    def extent(self, parameter):
        return self.extents[parameter]

    def local(self, value):
        return value.detach()

    def like(self, parameter, local):
        return local

    def empty(self, parameter, key, dtype):
        return torch.empty_like(parameter.detach(), dtype=dtype)

    def versioned(self, value):
        return True


def by_rows(shape, rank, world):
    """Uneven: the first rank has a row, the last has the rest; where there are too few, others have none."""
    rows = shape[0]
    starts = [min(rank, rows) for rank in range(world)] + [rows]
    start, stop = starts[rank], starts[rank + 1]
    return [Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))] if stop > start else []


def by_flat_ranges(shape, rank, world):
    """Cuts inside of rows."""
    numel = math.prod(shape)
    return flat_range(shape, numel * rank // world, numel * (rank + 1) // world)


def ranks_of(model, make, cutting, world):
    """The optimizers of the ranks that share a model, over what each has of its parameters."""
    for rank in range(world):
        sharding = Cut()
        local = {name: sharding.add(p, cutting(p.shape, rank, world)) for name, p in model.named_parameters()}
        names = {id(parameter): f"0.{name}" for name, parameter in local.items()}
        yield make(local.values()), names, sharding


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.ASGD])
@pytest.mark.parametrize("before,after", [((by_rows, 2), (by_flat_ranges, 3)), ((by_flat_ranges, 2), (by_rows, 8))])
def test_state_of_parameters_cut_in_any_way_reassembles_exactly(kind, before, after):
    model = mlp()
    train(model, torch.optim.SGD(model.parameters()), range(1))  # leaves gradients
    whole = kind(model.parameters(), lr=0.1)
    cut = list(ranks_of(model, partial(kind, lr=0.1), *before))
    for optimizer in (whole, *(each[0] for each in cut)):
        optimizer.step()
    saved = Saved(*(capture_optimizer(*each) for each in cut))
    expected = Saved(capture_optimizer(whole, names_of(model), Whole()))
    assert saved.described() == expected.described()
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in expected.tensors.items())
    others = list(ranks_of(model, partial(kind, lr=0.5), *after))
    for each in others:
        assert list_misfits(*each, saved) == []
        restore_optimizer(*each, saved)
    again = Saved(*(capture_optimizer(*each) for each in others))
    assert again.described() == expected.described()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert [group["lr"] for group in again.groups] == [0.1]


def test_what_was_computed_over_a_part_comes_back_to_the_same_part_only():
    model = mlp()
    train(model, torch.optim.SGD(model.parameters()), range(1))
    cut = list(ranks_of(model, torch.optim.Adafactor, by_rows, 2))
    whole = torch.optim.Adafactor(model.parameters())
    for optimizer in (whole, *(each[0] for each in cut)):
        optimizer.step()
    saved = Saved(*(capture_optimizer(*each) for each in cut))
    assert set(saved.described()["0.0.weight/row_var"].signatures) == {"[0:1, 0:6]", "[1:6, 0:6]"}
    assert saved.described()["0.0.bias/variance"].kind == "elementwise"
    for each in ranks_of(model, torch.optim.Adafactor, by_rows, 2):
        assert list_misfits(*each, saved) == []
        restore_optimizer(*each, saved)
    (reason, *_) = list_misfits(whole, names_of(model), Whole(), saved)
    assert reason == (
        "the state '0.0.weight/row_var' cannot be cut: this rank has whole of the parameter, and the checkpoint has "
        "[0:1, 0:6], [1:6, 0:6]"
    )
    (reason, *_) = list_misfits(*cut[0], taken(model, whole))
    assert (
        reason
        == "the state '0.0.weight/row_var' was computed over the whole parameter, of which this rank has [0:1, 0:6]"
    )


def test_state_about_all_parameters_comes_back_where_all_are_cut_as_they_were():
    def three_rows_of_the_last(shape, rank, world):
        return [Box.whole(tuple(shape))] if len(shape) == 2 else by_rows(shape, rank, world)

    model = mlp()
    train(model, torch.optim.SGD(model.parameters()), range(1))
    (optimizer, names, sharding), _ = ranks_of(model, torch.optim.LBFGS, three_rows_of_the_last, 2)
    optimizer.step(lambda: torch.zeros(()))
    entry = capture_optimizer(optimizer, names, sharding).entries["0.0.weight/d"]
    assert entry.part == "[0:6, 0:6] and [0:1] and [0:6, 0:6] and [0:1]"


def partitioned(model, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    World.current()
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)


def goes_on_partitioned(state, saved, steps):
    """What each rank of a world has after some more steps: weights, and its state."""
    model = mlp()
    model.load_state_dict(state)
    optimizer = partitioned(model)
    if saved is not None:
        given(model, optimizer, saved)
    train(model, optimizer, steps)
    return model.state_dict(), capture_optimizer(optimizer, names_of(model), Whole())


def test_partitioned_state_moves_between_worlds_and_the_plain_optimizer():
    straight = mlp()
    train(straight, torch.optim.AdamW(straight.parameters(), lr=0.01), range(6))
    two = run_ranks(goes_on_partitioned, 2, mlp().state_dict(), None, range(2))
    owned = [set(captured.values) | {name.partition("/")[0] for name in captured.entries} for _, captured in two]
    assert all(owned)
    assert not owned[0] & owned[1]
    alone = mlp()
    alone.load_state_dict(two[0][0])
    plain = torch.optim.AdamW(alone.parameters(), lr=0.5)
    given(alone, plain, Saved(*(captured for _, captured in two)))
    train(alone, plain, range(2, 4))
    three = run_ranks(goes_on_partitioned, 3, alone.state_dict(), taken(alone, plain), range(4, 6))
    for weights, _ in three:
        assert all(torch.equal(tensor, straight.state_dict()[name]) for name, tensor in weights.items())


class OfDTensors:
    """What a strategy on `fully_shard` would declare."""

    def extent(self, parameter):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_of

        sizes, offsets = local_of(parameter.shape, parameter.device_mesh, parameter.placements)
        return Extent(tuple(parameter.shape), (Box(tuple(offsets), tuple(sizes)),) if math.prod(sizes) else ())

    def local(self, value):
        return value.detach().to_local() if hasattr(value, "to_local") else value.detach()

    def like(self, parameter, local):
        from torch.distributed.tensor import DTensor

        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride())

    def empty(self, parameter, key, dtype):
        return self.like(parameter, torch.empty_like(self.local(parameter), dtype=dtype))

    def versioned(self, value):
        return not hasattr(value, "to_local")


def sharded_by_torch():
    from torch.distributed.fsdp import fully_shard

    World.current()

    def made(kind, state=None):
        model = mlp(width=5)
        if state is not None:
            model.load_state_dict(state)
        fully_shard(model)
        return model, kind(model.parameters(), lr=0.01)

    def whole(model):
        return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

    results = []
    for kind in (torch.optim.AdamW, Plain):
        model, optimizer = made(kind)
        train(model, optimizer, range(3))
        captured = capture_optimizer(optimizer, names_of(model), OfDTensors())
        resumed, fresh = made(kind, whole(model))
        if kind is Plain:  # opaque: comes back on this rank, cut as it is
            saved = Saved(captured)
            assert list_misfits(fresh, names_of(resumed), OfDTensors(), saved) == []
            restore_optimizer(fresh, names_of(resumed), OfDTensors(), saved)
            train(resumed, fresh, range(3, 6))
            train(model, optimizer, range(3, 6))
        results.append((captured, whole(model), whole(resumed)))
    return results


class Plain(torch.optim.Optimizer):
    """Undeclared state laid out like the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])


def test_sharded_tensors_are_saved_as_what_each_rank_has():
    (adam, opaque), (other_adam, other_opaque) = run_ranks(sharded_by_torch, 2)
    saved = Saved(adam[0], other_adam[0])
    assert saved.described()["0.0.weight/exp_avg"] == SavedEntry("elementwise", (5, 6), torch.float32, {})
    model = mlp(width=5)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, plain, range(3))
    for name, tensor in taken(model, plain).tensors.items():
        assert torch.allclose(saved.tensors[name], tensor, rtol=1e-4, atol=1e-6), name
    given(model, plain, saved)
    assert set(opaque[0].entries["0.0.weight"].value["laid_out"]) == {"momentum"}
    assert {opaque[0].entries["0.0.weight"].part, other_opaque[0].entries["0.0.weight"].part} == {
        "[0:3, 0:6]",
        "[3:5, 0:6]",
    }
    assert all(torch.equal(opaque[2][name], tensor) for name, tensor in opaque[1].items())


def fits(optimizer, model, saved):
    return list_misfits(optimizer, names_of(model), Whole(), saved)


def test_what_does_not_fit_is_listed_before_anything_is_changed():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    saved = taken(model, optimizer)
    assert fits(torch.optim.SGD(model.parameters()), model, saved) == [
        "the optimizer is a torch.optim:SGD, and the checkpoint holds the state of a torch.optim:AdamW"
    ]
    two_groups = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    assert fits(two_groups, model, saved) == ["the optimizer has 2 groups of parameters, and the checkpoint 1"]
    assert fits(torch.optim.AdamW([model[0].weight, nn.Parameter(torch.ones(1))]), model, saved) == [
        "group 0 of the checkpoint has '0.0.bias', '0.2.weight', '0.2.bias', which this optimizer has not there",
        "group 0 of this optimizer has 'loose.0.1', which the checkpoint has not there",
    ]
    wider = mlp(width=7)
    assert fits(torch.optim.AdamW(wider.parameters()), wider, saved)[:1] == [
        "the state '0.0.weight/exp_avg' has the shape [6, 6], and the parameter has [7, 6]"
    ]
    saved.groups[0]["temperature"] = 1.0
    assert fits(optimizer, model, saved) == [
        "group 0 of this optimizer has no option 'temperature', which the checkpoint sets"
    ]


def test_names_beyond_eight_are_counted():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6)))
    saved = taken(model, torch.optim.SGD(model.parameters()))
    (reason, _) = fits(torch.optim.SGD([nn.Parameter(torch.ones(1))]), model, saved)
    assert reason.endswith("'0.3.bias' and 4 more, which this optimizer has not there")


def test_opaque_state_of_another_shape_or_kind_is_refused():
    model, wider = mlp(), mlp(width=7)
    optimizer = Coded(model.parameters())
    train(model, optimizer, range(1))
    saved = taken(model, optimizer)
    assert "is of another parameter: here it is of [7, 6]: …" in fits(Coded(wider.parameters()), wider, saved)[0]
    optimizer.state[model[0].weight]["codes"] = torch.zeros(6, 6)
    (reason,) = fits(optimizer, model, saved)
    assert "'0.0.weight' is of another kind: here it is of [6, 6]: calls=value; codes=float32[6, 6]" in reason


def test_an_optimizer_saved_whole_goes_by_the_order_of_its_parameters():
    model = mlp()
    saved = taken(model, SlowWeights(model.parameters()))
    (reason,) = fits(SlowWeights(list(reversed(list(model.parameters())))), model, saved)
    assert "in this order, and the checkpoint [['0.0.weight', '0.0.bias'," in reason


def test_state_given_whole_and_by_parameter_do_not_mix():
    def hooked():
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_state_dict_pre_hook(lambda _: None)
        return optimizer

    model = mlp()
    plain = torch.optim.AdamW(model.parameters())
    (reason,) = fits(hooked(), model, taken(model, plain))
    assert "has a state_dict() of its own, and the checkpoint has none such" in reason
    (reason,) = fits(plain, model, taken(model, hooked()))
    assert reason == "the checkpoint has the state_dict() of a torch.optim:AdamW with hooks on it, and here it has none"


def test_a_state_dict_of_ones_own_over_cut_parameters_is_refused():
    model = mlp()
    optimizer, names, sharding = next(iter(ranks_of(model, SlowWeights, by_rows, 2)))
    with pytest.raises(CheckpointError, match="of '0.0.weight', .* it has a part on each rank"):
        capture_optimizer(optimizer, names, sharding)


def test_a_class_of_a_script_is_the_same_where_the_script_is_imported():
    model = mlp()
    saved = taken(model, Coded(model.parameters()))
    saved.kind = "__main__:Coded"
    assert fits(Coded(model.parameters()), model, saved) == []
    saved.kind = "elsewhere:Coded"
    assert len(fits(Coded(model.parameters()), model, saved)) == 1


def test_a_declared_layout_that_does_not_hold_is_an_error():
    model = mlp()
    optimizer = Coded(model.parameters())
    train(model, optimizer, range(1))
    optimizer.accel_layouts = {"codes": "elementwise", "scale": "elementwise"}
    with pytest.raises(
        CheckpointError, match=r"'scale' of '0.0.weight' .* the shape \[1\] and the parameter has \[6, 6\]"
    ):
        capture_optimizer(optimizer, names_of(model), Whole())
    for wrong in ({"codes": "sharded"}, ["codes"]):
        optimizer.accel_layouts = wrong
        with pytest.raises(CheckpointError, match="laid out as its accel_layouts says, but that is"):
            capture_optimizer(optimizer, names_of(model), Whole())


def out_of_reach():
    model = mlp()
    optimizer = partitioned(model, overlap_with_ddp=True)
    with pytest.raises(CheckpointError, match="out of reach with overlap_with_ddp=True"):
        capture_optimizer(optimizer, names_of(model), Whole())
    hooked = partitioned(model)
    hooked.register_state_dict_pre_hook(lambda _: None)
    with pytest.raises(CheckpointError, match="under ZeroRedundancyOptimizer it has a part on each rank"):
        capture_optimizer(hooked, names_of(model), Whole())
    return True


def test_partitioned_state_out_of_reach_is_refused():
    assert run_ranks(out_of_reach, 2) == [True, True]
