"""What a training loop may do to a sharded model: it trains as a whole one would, or is told why not; and nothing is left behind."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from accel_core import Accelerator
from accel_fsdp import FSDP
from accel_testing import run_ranks
from accel_testing.models import built

WIDTH = 6


class Scaled(nn.Module):
    """Units, a head that is gathered with the model, and a number that is not cut."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.head(torch.tanh(self.blocks(x))) * self.scale


class Recurrent(nn.Module):
    """A module that keeps references to its parameters beside the registered ones, and one whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, 2)
        self.head = weight_norm(nn.Linear(5, 3))

    def forward(self, x):
        return self.head(self.lstm(x[None])[0][0]).clone()


class Looking(nn.Module):
    """A table whose rows are computed from two parameters."""

    def __init__(self):
        super().__init__()
        self.table = weight_norm(nn.Embedding(10, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.table(x.mul(10).abs().long()))


COMPUTED = {"recurrent": (Recurrent, None), "looking": (Looking, ["Embedding"])}


def batch(step=0):
    return torch.arange(4.0 * WIDTH).view(4, WIDTH).add(10 * step).sin()


def part(accelerator, step=0):
    shard = accelerator._layout.shard
    return batch(step)[shard.index :: shard.count]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepared(net=Scaled, strategy=None, **options):
    accelerator = Accelerator(strategy=strategy or FSDP(), cpu=True, **options)
    return accelerator, accelerator.prepare(built(net))


def message(function, *arguments):
    try:
        function(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def weights_of(net, wrap):
    accelerator, model = prepared(net, FSDP(wrap=wrap))
    optimizer = accelerator.prepare(sgd(model))
    for step in range(3):
        accelerator.backward(model(part(accelerator, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter.detach()) for parameter in model.parameters()]


def thawed():
    """Gradients of a number that was frozen when its model was prepared."""
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = built(Scaled)
    model.scale.requires_grad_(False)
    model = accelerator.prepare(model)
    frozen = not model.scale.requires_grad
    model.scale.requires_grad_(True)
    accelerator.backward(model(part(accelerator)).mean())
    return frozen, model.scale.grad


def thawed_in_bfloat16():
    """Gradients of a layer which was in a unit frozen as a whole when its model was prepared, and of one that was not."""
    found = []
    for frozen in (True, False):
        accelerator = Accelerator(strategy=FSDP(), cpu=True, mixed_precision="bf16")
        model = built(Scaled)
        model.blocks[0].requires_grad_(not frozen)
        model = accelerator.prepare(model)
        model(part(accelerator))
        model.blocks[0].requires_grad_(True)
        accelerator.backward(model(part(accelerator)).mean())
        found.append(whole(model.blocks[0].weight.grad))
    return found


def watched_first():
    """Weights after a first call in inference mode, and steps behind it."""
    found = []
    for reshards in (True, False, 2):
        accelerator, model = prepared(strategy=FSDP(reshard_after_forward=reshards))
        optimizer = accelerator.prepare(sgd(model))
        with torch.inference_mode():
            seen = model(part(accelerator)).is_inference()
        for step in range(3):
            accelerator.backward(model(part(accelerator, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append((seen, [whole(each.detach()) for each in model.parameters()]))
    return found


def clipped_while_gathered():
    """Norms by what a model shows after a backward, and after one more call, which leaves parameters gathered."""
    norms = {}
    for kept in (False, True):
        accelerator, model = prepared(strategy=FSDP(reshard_after_forward=not kept))
        accelerator.backward(model(part(accelerator)).sum())
        plain = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        model(part(accelerator))
        gathered = any(parameter.dim() and not hasattr(parameter, "placements") for parameter in model.parameters())
        norms[kept] = gathered, plain, float(accelerator.clip_grad_norm_(model.parameters(), 1.0)), model
    return {kept: found[:3] for kept, found in norms.items()}


def cleared():
    """The gradient of the last backward, before which the model itself was told to clear the others."""
    found = {}
    for set_to_none in (True, False):
        accelerator, model = prepared()
        with accelerator.no_sync(model):
            accelerator.backward(model(part(accelerator)).sum())
        model.zero_grad(set_to_none)
        accelerator.backward(model(part(accelerator)).sum())
        loss = model(part(accelerator)).sum()
        model.zero_grad(set_to_none)  # between forward and backward, when parameters are gathered
        accelerator.backward(loss)
        found[set_to_none] = [whole(parameter.grad) for parameter in model.parameters()]
    return found


def changed_by_hand():
    """Outputs after parameters were changed in place between calls without gradients: what is shown is what is used."""
    outputs = []
    for kept in (False, True):
        accelerator, model = prepared(strategy=FSDP(reshard_after_forward=not kept))
        optimizer = accelerator.prepare(sgd(model))
        with torch.no_grad():
            model(batch())
            for parameter in model.parameters():
                parameter.mul_(0.5)
            once = model(batch())
            for parameter in optimizer.param_groups[0][
                "params"
            ]:  # as optimizers do that evaluate with other parameters
                parameter.mul_(0.5)
            outputs.append((once, model(batch())))
    return outputs


def held_at_a_step():
    """A window whose last micro-batch calls a part of the model, so that nobody hears that gradients are to travel."""
    accelerator, model = prepared(gradient_accumulation_steps=2)
    optimizer = accelerator.prepare(sgd(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(part(accelerator)).sum())
    with accelerator.accumulate(model):
        accelerator.backward(model.blocks[0](part(accelerator)).sum())
        return message(optimizer.step)


def shared():
    """Models that have something in common."""
    accelerator, first = prepared()
    module, parameter, evaluated = built(Scaled, 1), built(Scaled, 2), built(Scaled, 3)
    module.head = first.head
    before = whole(first.head.weight).clone()
    accelerator.prepare_model(evaluated, evaluation_mode=True)
    plain = built(Scaled, 4)
    tied = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    tied[0].weight = parameter.blocks[0].weight
    accelerator.prepare(parameter)
    plain.head.weight = evaluated.head.weight
    found = (
        message(accelerator.prepare, module),
        message(accelerator.prepare, tied),
        message(accelerator.prepare, plain),
    )
    return *found, torch.equal(before, whole(first.head.weight))


def later():
    """Optimizers of what was not there, or not trained, when models were prepared."""
    accelerator, model = prepared()
    model.head = built(lambda: nn.Linear(WIDTH, 3))
    frozen = accelerator.prepare(built(Scaled, 1).requires_grad_(False))
    frozen.requires_grad_(True)
    adapted = accelerator.prepare(built(Scaled, 2))
    return (
        message(accelerator.prepare, sgd(model)),
        message(accelerator.prepare, sgd(frozen)),
        message(accelerator.prepare, sgd(adapted)),
    )


def refused():
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    hooked = built(Scaled)
    hooked.head.weight.register_hook(torch.zeros_like)
    return (
        message(accelerator.prepare, nn.Sequential(nn.Embedding(4, WIDTH, max_norm=1.0))),
        message(accelerator.prepare, nn.Sequential(nn.EmbeddingBag(4, WIDTH, sparse=True))),
        message(accelerator.prepare, hooked),
    )


def noted():
    """What the user has written on parameters."""
    accelerator = Accelerator(strategy=FSDP(), cpu=True)
    model = built(Scaled)
    model.head.weight.no_decay = model.scale.no_decay = True
    model = accelerator.prepare(model)
    return [name for name, parameter in model.named_parameters() if getattr(parameter, "no_decay", False)]


def reverted():
    """Models with layers in fp8 after they were freed: units that are such layers, layers in units, weights gathered in fp8."""
    from accel_precision import FP8

    x, outputs = torch.ones(2, 16), []
    for gathers, wrap in ((False, ["Linear"]), (False, ["Sequential"]), (True, ["Linear"])):
        precision = FP8(enable_fsdp_float8_all_gather=gathers, convert_ends=True)
        accelerator = Accelerator(strategy=FSDP(wrap=wrap), cpu=True, mixed_precision=precision)
        model = accelerator.prepare(built(lambda: nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16))))
        accelerator.free_memory()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(x).float())
    return outputs, built(lambda: nn.Sequential(nn.Sequential(nn.Linear(16, 16)), nn.Linear(16, 16)))(x).detach()


def lives():
    """What outlives ten trainings, by kind."""

    def train():
        accelerator, model = prepared(mixed_precision="bf16")
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            accelerator.backward(model(part(accelerator)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [weakref.ref(each) for each in (accelerator, model, model.blocks[0], optimizer)]

    references = train()
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(10):
        train()
    gc.collect()
    return [type(each).__name__ for reference in references if (each := reference()) is not None], (
        len(gc.get_objects()) - objects
    )


JOBS = (
    thawed, thawed_in_bfloat16, watched_first, clipped_while_gathered, cleared, changed_by_hand, held_at_a_step, shared, later, refused, noted, reverted, lives
)  # fmt: skip


def two_ranks():
    facts = {job.__name__: job() for job in JOBS}
    return facts | {name: weights_of(*how) for name, how in COMPUTED.items()}


@pytest.fixture(scope="module")
def facts():
    return run_ranks(two_ranks, 2, timeout=90)


@pytest.mark.parametrize("name", COMPUTED)
def test_modules_that_hold_or_compute_their_weights_train_as_in_one_process(facts, name):
    model = built(COMPUTED[name][0])
    optimizer = sgd(model)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in facts:
        for found, expected in zip(rank[name], model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach())


def test_a_number_that_is_unfrozen_later_is_averaged_too(facts):
    model = built(Scaled)
    model(batch()).mean().backward()
    for frozen, gradient in (rank["thawed"] for rank in facts):
        assert frozen
        torch.testing.assert_close(gradient, model.scale.grad)


def test_a_unit_that_is_unfrozen_later_is_trained_in_mixed_precision(facts):
    for rank in facts:
        found, expected = rank["thawed_in_bfloat16"]
        assert expected.dtype is torch.float32
        assert expected.any()
        torch.testing.assert_close(found, expected)


def test_a_model_that_is_called_in_inference_mode_first_trains_as_any(facts):
    model = built(Scaled)
    optimizer = sgd(model)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for seen, weights in (case for rank in facts for case in rank["watched_first"]):
        assert seen
        for found, parameter in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.detach())


def test_the_norm_counts_parameters_that_are_gathered_at_the_time(facts):
    for rank in facts:
        for gathered, before, after in rank["clipped_while_gathered"].values():
            assert gathered
            assert before == after > 1


def test_a_model_that_clears_its_gradients_clears_held_and_hidden_ones(facts):
    model = built(Scaled)
    (model(batch()).sum() / 2).backward()
    for rank in facts:
        for gradients in rank["cleared"].values():
            for found, parameter in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(found, parameter.grad)


@torch.no_grad()
def test_changes_in_place_reach_the_next_call(facts):
    model, expected = built(Scaled), []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.mul_(0.5)
        expected.append(model(batch()))
    for rank in facts:
        for found in rank["changed_by_hand"]:
            torch.testing.assert_close(found, tuple(expected))


def test_a_step_without_gradients_that_are_held_back_raises(facts):
    for rank in facts:
        assert re.match(r"RuntimeError: SGD.step\(\) was called while Scaled holds back", rank["held_at_a_step"])


def test_models_that_share_what_is_cut_are_refused_and_left_as_they_were(facts):
    for module, tied, evaluated, untouched in (rank["shared"] for rank in facts):
        assert re.match("ValueError: .*cut already: 'head.weight', 'head.bias'.*parts of one nn.Module", module)
        assert re.match("ValueError: .*shares parameters with a Scaled.*'0.weight'.*parts of one", tied)
        assert re.match("ValueError: .*shares parameters with a Scaled.*'head.weight'", evaluated)
        assert untouched


def test_parameters_that_nobody_averages_are_refused_when_an_optimizer_has_them(facts):
    for added, frozen, usual in (rank["later"] for rank in facts):
        assert re.match("ValueError: SGD trains parameters that Scaled got after.*'head.weight', 'head.bias'", added)
        assert re.match("ValueError: SGD trains parameters of Scaled, which was frozen as a whole", frozen)
        assert usual == "nothing was raised"


def test_what_would_be_lost_in_parts_is_refused(facts):
    for renormed, sparse, hooked in (rank["refused"] for rank in facts):
        assert re.match("ValueError: .*'0' has max_norm=1.0", renormed)
        assert re.match("ValueError: .*'0' has sparse=True", sparse)
        assert re.match("ValueError: .*hooks on parameters: 'head.weight'.*register_post_accumulate", hooked)


def test_attributes_of_parameters_stay_on_their_parts(facts):
    for rank in facts:
        assert rank["noted"] == ["scale", "head.weight"]


def test_a_freed_model_with_layers_in_fp8_computes(facts):
    for outputs, expected in (rank["reverted"] for rank in facts):
        alone, inside, narrow = outputs
        torch.testing.assert_close(alone, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(inside, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(narrow, expected, rtol=0.2, atol=0.2)


def test_nothing_outlives_training(facts):
    for alive, growth in (rank["lives"] for rank in facts):
        assert alive == []
        assert growth < 300
