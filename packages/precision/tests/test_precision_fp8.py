"""fp8 by torchao in one process: what is converted, that it trains, and what stays as it was."""

import copy
import pickle
from importlib.metadata import version

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_precision import FP8, MXFP8, AORecipeKwargs

with_mx = pytest.mark.skipif(
    tuple(map(int, version("torchao").split(".")[:2])) < (0, 18),
    reason="MXFP8 is in torchao from 0.18 on, which needs torch 2.11",
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Net(nn.Module):
    """Two inner layers fit fp8, one does not; the ends are left out by default."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.odd = nn.Linear(32, 20)
        self.last = nn.Linear(20, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.odd(self.body(torch.tanh(self.first(x))))))


def build(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(rows=16):
    return torch.linspace(-1, 1, rows * 8).sin().view(rows, 8) * 2, torch.linspace(-1, 1, rows * 4).view(rows, 4)


def train(precision, steps=8, **arguments):
    """The losses, the gradients of the first step, and the model, whose optimizer was built before it was prepared."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **arguments)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = batch()
    losses, gradients = [], {}
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, model, accelerator, optimizer


def relative(gradients, reference):
    return {
        name: ((gradients[name] - expected).norm() / expected.norm()).item() for name, expected in reference.items()
    }


@pytest.fixture(scope="module")
def in_bf16():
    return train("bf16")[:2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_close_to_bf16_with_gradients_that_show_eight_bits(recipe, in_bf16):
    expected_losses, expected = in_bf16
    losses, gradients, model, accelerator, _ = train(FP8(recipe))

    assert losses == pytest.approx(expected_losses, abs=0.02 * losses[0])
    assert losses[-1] < 0.8 * losses[0]
    errors = relative(gradients, expected)
    assert max(errors.values()) < 0.15
    assert errors["body.0.weight"] > 0.01  # bf16 alone would be 30 times closer
    said = {each["about"]: each["text"] for each in accelerator.explain().as_dict()["details"]}
    assert said["back end"].startswith("torchao 0.")
    assert said["recipe"] == recipe
    assert said["products"] == "emulated in float32"
    assert said["converted of Net"].startswith("2 of 5 nn.Linear; left: first (the first linear layer)")
    assert type(model.body[0]).__name__ == "Float8Linear"


def test_parameters_keep_identity_name_and_value():
    model = build()
    parameters, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    layers, seen = list(model.modules()), []
    model.body[0].register_forward_hook(lambda *_: seen.append(True))
    model.body[0].mark = "mine"
    model.eval()
    prepared = Accelerator(cpu=True, mixed_precision="fp8").prepare(model)

    assert all(parameters[name] is each for name, each in prepared.named_parameters())
    assert list(prepared.state_dict()) == list(before)
    assert all(torch.equal(before[name], value) for name, value in prepared.state_dict().items())
    assert all(one is other for one, other in zip(layers, prepared.modules(), strict=True))
    prepared(batch()[0])
    assert seen == [True]
    assert prepared.body[0].mark == "mine"
    assert not prepared.body[0].training


def test_outputs_are_full_precision_unless_asked_otherwise():
    x = batch()[0]
    assert Accelerator(cpu=True, mixed_precision="fp8").prepare(build())(x).dtype == torch.float32
    assert Accelerator(cpu=True, mixed_precision=FP8(output_dtype=None)).prepare(build())(x).dtype == torch.bfloat16


def test_the_report_names_what_was_converted_and_why_the_rest_was_not():
    precision = FP8(skip=["body.2"])
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    accelerator.prepare(build())
    accelerator.prepare_model(build(), evaluation_mode=True)

    assert precision.converted == {"Net": ("body.0",), "Net (2)": ("body.0",)}
    details = precision.details()
    assert details["converted of Net"] == (
        "1 of 5 nn.Linear; left: first (the first linear layer), body.2 (skip 'body.2'), odd (20 x 32: 20 not divisible by 16), "
        "last (the last linear layer)"
    )
    assert details["products"] == "emulated in float32"
    assert details["policy"] == "compute bfloat16, output float32"
    assert "1 of 5 nn.Linear" in str(accelerator.explain())


def test_a_filter_decides_about_the_ends_too():
    precision = FP8(module_filter_func=lambda module, name: name in ("body.0", "body.2") or name == "in")
    Accelerator(cpu=True, mixed_precision=precision).prepare(
        nn.ModuleDict({"in": nn.Linear(16, 32), "body": nn.ModuleList([nn.Linear(32, 32)]), "out": nn.Linear(32, 16)})
    )
    assert precision.converted == {"ModuleDict": ("in", "body.0")}


def test_a_model_that_is_one_layer_can_be_converted():
    precision = FP8(convert_ends=True)
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(nn.Linear(16, 32))
    assert precision.converted == {"Linear": ("",)}
    assert model(torch.ones(3, 16)).shape == (3, 32)
    assert model(torch.ones(16)).shape == (32,)


def test_rows_that_fill_no_block_change_nothing():
    model = Accelerator(cpu=True, mixed_precision="fp8").prepare(build())
    layer = model.body[0]
    x = batch(rows=5)[0].repeat(1, 4).requires_grad_()
    filled = torch.cat([x.detach(), torch.zeros(11, 32)]).requires_grad_()
    layer(x).square().sum().backward()
    weight_gradient, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
    layer(filled)[:5].square().sum().backward()

    assert torch.equal(layer(x), layer(filled)[:5])
    assert torch.equal(x.grad, filled.grad[:5])
    assert torch.equal(weight_gradient, layer.weight.grad)
    assert layer(x.view(5, 1, 32)).shape == (5, 1, 64)


def test_copies_and_pickles_compute_the_same():
    _, _, model, *_ = train(FP8("rowwise"), steps=2)
    x = batch()[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        assert other.body[0].weight is not model.body[0].weight


@pytest.mark.parametrize(("saved_in", "loaded_in"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_a_checkpoint_loads_in_any_precision(tmp_path, saved_in, loaded_in):
    _, _, trained, saver, _ = train(saved_in, steps=2)
    saver.save_state(tmp_path)
    _, _, model, accelerator, optimizer = train(loaded_in, steps=1)
    accelerator.load_state(tmp_path)

    assert all(
        torch.equal(value, trained.state_dict()[name]) for name, value in accelerator.get_state_dict(model).items()
    )
    assert all(type(value) is torch.Tensor for value in accelerator.get_state_dict(model).values())
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_a_model_that_is_prepared_again_is_converted_anew():
    model = build()
    Accelerator(cpu=True, mixed_precision="fp8").prepare(model)
    Accelerator(cpu=True, mixed_precision=FP8("rowwise")).prepare(model)

    granularity = model.body[0].config.cast_config_weight.scaling_granularity
    assert granularity.value == "axiswise"
    assert type(model.body[0]).__mro__.count(nn.Linear) == 1
    assert model(batch()[0]).isfinite().all()


def test_a_configuration_of_torchao_is_used_as_it_is():
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    precision = FP8(recipe=AORecipeKwargs(config=config))
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(build())

    assert model.body[0].config.round_scales_to_power_of_2
    assert model.body[0].config.emulate  # on a CPU, as details() says
    assert precision.details()["recipe"] == "a Float8LinearConfig of the user's"


def test_options_in_kwargs_handlers_configure_the_precision_that_is_named():
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(recipe="rowwise", skip=["body.0"])]
    )
    model = accelerator.prepare(build())
    assert type(model.body[0]) is nn.Linear
    assert model.body[2].config.cast_config_weight.scaling_granularity.value == "axiswise"


def test_real_products_can_be_asked_for_on_a_cpu_whose_torch_has_them():
    precision = FP8(emulate=False)
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(build())
    assert precision.details()["products"] == "in fp8, by the device"
    assert not model.body[0].config.emulate
    assert model(batch(rows=5)[0]).isfinite().all()


@pytest.mark.parametrize("kind", [FP8, pytest.param(MXFP8, marks=with_mx)])
def test_a_model_that_is_freed_computes_as_its_user_built_it(kind):
    accelerator = Accelerator(mixed_precision=kind(), cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    x = torch.randn(2, 32)
    expected = model(x)
    prepared = accelerator.prepare(model)
    assert not torch.equal(prepared(x), expected)
    accelerator.free_memory()
    assert [type(layer) for layer in model] == [nn.Linear] * 4
    assert torch.equal(model(x), expected)
