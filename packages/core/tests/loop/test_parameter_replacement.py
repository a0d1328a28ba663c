"""What components replace before a model trains, and what the core sees to: modules, parameters, whole models, gradients."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_core import Accelerator, AutocastKwargs, Precision, PrecisionPolicy, Single, Strategy, hookimpl, place_model
from accel_core.contract.tensor_layouts import Elementwise, Partial
from accel_core.loop.preparation import ParameterReplacement


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Doubling(Precision):
    """Converts every layer, and gives it a new weight."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def convert_model(self, model, evaluation):
        self.seen.append(evaluation)
        for name, child in list(model.named_children()):
            doubled = Doubled(child.in_features, child.out_features)
            doubled.load_state_dict(child.state_dict())
            setattr(model, name, doubled)

    @hookimpl
    def revert_model(self, model):
        for layer in model.children():
            layer.__class__ = nn.Linear

    def details(self):
        return {"converted": f"{len(self.seen)} models"}


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_a_model_is_converted_before_it_is_prepared_and_optimizers_train_what_replaced_their_parameters():
    precision = Doubling()
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = chain()
    optimizer = torch.optim.SGD(
        [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters())}], lr=0.1
    )
    expected = 4 * model(torch.ones(1, 3))
    model, optimizer = accelerator.prepare(model, optimizer)
    evaluated = accelerator.prepare_model(chain(), evaluation_mode=True)

    assert [type(layer) for layer in [*model, *evaluated]] == [Doubled] * 4
    assert precision.seen == [False, True]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    output = model(torch.ones(1, 3))
    # The biases of the first layer are doubled twice, those of the second once: only without them it is four times.
    assert output.shape == expected.shape
    accelerator.backward(output.sum())
    optimizer.step()
    assert all(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_model_that_is_freed_computes_as_it_did_before():
    accelerator = Accelerator(mixed_precision=Doubling(), cpu=True)
    model = accelerator.prepare(chain())
    accelerator.free_memory()
    assert [type(layer) for layer in model] == [nn.Linear] * 2


def test_explain_shows_what_components_say_of_themselves_so_far():
    accelerator = Accelerator(mixed_precision=Doubling(), cpu=True)
    before, _ = str(accelerator.explain()), accelerator.prepare(chain())
    told = accelerator.explain()
    assert "converted  0 models" in before
    assert re.search(r"precision  Doubling  converted  1 models", str(told))
    assert told.as_dict()["details"] == [
        {"role": "precision", "name": "Doubling", "about": "converted", "text": "1 models"}
    ]


def test_a_policy_says_its_dtypes_in_words():
    class Narrow(Precision):
        policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)

    told = Accelerator(mixed_precision=Narrow(), cpu=True).explain()
    assert [detail.text for detail in told.details] == ["compute bfloat16, output float32"]
    assert str(PrecisionPolicy()) == "as it is"
    assert not Accelerator(cpu=True).explain().details


def test_state_of_an_optimizer_goes_where_its_parameter_went():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    old = model.weight
    momentum = optimizer.state[old]["momentum_buffer"]
    replacement = ParameterReplacement(model, [optimizer])
    model.weight = nn.Parameter(old.detach().clone())
    replacement.apply(lambda _, new, state: {key: value.to(new.dtype) for key, value in state.items()})
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert optimizer.param_groups[0]["params"][1] is model.bias
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum
    assert set(optimizer.state) == {model.weight, model.bias}


def test_autocast_options_hold_in_calls_of_models_too():
    class Narrow(Precision):
        policy = PrecisionPolicy(compute=torch.bfloat16)

    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        handlers = [AutocastKwargs(enabled=enabled)]
        accelerator = Accelerator(mixed_precision=Narrow(), cpu=True, kwargs_handlers=handlers)
        assert accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2)).dtype is dtype


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.cached = None

    def forward(self, x):
        self.cached = torch.is_autocast_cache_enabled()
        return self.layer(x)


def test_the_cache_of_autocast_can_be_left_off_in_calls_of_models():
    class Narrow(Precision):
        policy = PrecisionPolicy(compute=torch.bfloat16)

    for enabled in (True, False):
        handlers = [AutocastKwargs(cache_enabled=enabled)]
        model = Accelerator(mixed_precision=Narrow(), cpu=True, kwargs_handlers=handlers).prepare(Probe())
        model(torch.ones(1, 2))
        assert model.cached is enabled


def test_a_model_is_built_by_its_factory_and_gets_the_weights_of_a_file(tmp_path):
    accelerator = Accelerator(cpu=True)
    save_file({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = accelerator.build_model(lambda: nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    torch.manual_seed(5)
    plain = nn.Linear(2, 2)
    torch.manual_seed(5)
    assert torch.equal(accelerator.build_model(lambda: nn.Linear(2, 2)).weight, plain.weight)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (nn.Linear, r"missing 2 required positional arguments"),
        (lambda: 3, r"build_model\(\) was given a int, expected a factory that returns a torch.nn.Module"),
    ],
)
def test_what_builds_no_model_is_refused(factory, message):
    with pytest.raises(TypeError, match=message):
        Accelerator(cpu=True).build_model(factory)


def test_sequences_stay_whole_without_a_strategy_that_shares_them_out():
    accelerator = Accelerator(cpu=True)
    ids = torch.arange(6).view(1, 6)
    with accelerator.maybe_context_parallel([ids], [1]):
        assert ids.shape == (1, 6)
    with accelerator.maybe_context_parallel():
        pass


class Holding(Strategy):
    """Keeps the gradients of backwards inside `no_sync` outside of `.grad`."""

    distributed_type = Single.distributed_type
    replicates_parameters = True

    def __init__(self):
        self.held = {}

    @hookimpl
    def prepare_model(self, model, request):
        place_model(model, request)
        return model

    @hookimpl
    @contextlib.contextmanager
    def no_sync(self, model):
        yield
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.held[name] = self.held.get(name, 0) + parameter.grad
                parameter.grad = None

    @hookimpl
    def gradient_state(self, model):
        named = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
        state = {name: [Elementwise.whole(gradient)] for name, gradient in named}
        for name, gradient in self.held.items():
            state.setdefault(name, []).append(Partial(gradient))
        return state

    @hookimpl
    def check_optimizer(self, optimizer):
        if type(optimizer) is not torch.optim.SGD:
            raise ValueError(f"{type(optimizer).__name__} cannot")


class Clipping(Holding):
    """And has a norm of its own."""

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        pending = [each.grad for each in parameters if each.grad is not None]
        return 2 * nn.utils.get_total_norm([*pending, *self.held.values()], norm_type)


def holding(strategy=None):
    strategy = strategy or Holding()
    accelerator = Accelerator(strategy=strategy, cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy, accelerator, model, optimizer


def test_gradients_that_a_strategy_holds_count_in_the_norm_of_an_open_window_and_are_rescaled():
    strategy, accelerator, model, _ = holding()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    assert strategy.held["weight"].tolist() == [[1.5, 2.0]]
    assert model.weight.grad is None
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == 2.5
    assert float(accelerator.clip_grad_norm_([], 1.0)) == 0.0
    accelerator._prepared.rescale(2.0)
    assert strategy.held["weight"].tolist() == [[3.0, 4.0]]


def test_the_norm_of_an_open_window_is_that_of_the_strategy_and_nothing_is_clipped():
    strategy, accelerator, model, _ = holding(Clipping())
    model.weight.grad = torch.tensor([[0.0, 6.0]])
    with accelerator.accumulate(model):
        model.weight.grad, kept = None, model.weight.grad
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    model.weight.grad = kept
    assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == 2 * 6.5
    assert strategy.held["weight"].tolist() == [[1.5, 2.0]]
    assert model.weight.grad.tolist() == [[0.0, 6.0]]


def test_clearing_gradients_clears_those_that_a_strategy_holds():
    strategy, accelerator, model, optimizer = holding()
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    other = nn.Linear(2, 1, bias=False)
    accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1)).zero_grad()
    assert strategy.held["weight"].any()
    optimizer.zero_grad()
    assert strategy.held["weight"].tolist() == [[0.0, 0.0]]


def test_a_strategy_refuses_an_optimizer_that_it_cannot_run_whenever_it_is_prepared():
    _, accelerator, model, _ = holding()
    with pytest.raises(ValueError, match="AdamW cannot"):
        accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="Adam cannot"):
        accelerator.prepare_optimizer(torch.optim.Adam(model.parameters()))
