"""MXFP8 by torchao, emulated: what is converted, that it trains, and what is refused."""

import copy
import pickle
import sys
from importlib.metadata import version

import pytest
import torch
from torch import nn

from accel_core import Accelerator, PluginError
from accel_precision import FP8, MXFP8

with_mx = pytest.mark.skipif(
    tuple(map(int, version("torchao").split(".")[:2])) < (0, 18),
    reason="MXFP8 is in torchao from 0.18 on, which needs torch 2.11",
)


class Net(nn.Module):
    """Two inner layers fit blocks of 32, one does not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh())
        self.narrow = nn.Linear(48, 32)
        self.late = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.late(torch.tanh(self.narrow(self.body(torch.tanh(self.first(x)))))))


def build():
    torch.manual_seed(0)
    return Net()


def train(precision, steps=6, rows=24):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = torch.linspace(-1, 1, rows * 8).sin().view(rows, 8) * 2, torch.linspace(-1, 1, rows * 4).view(rows, 4)
    losses, gradients = [], {}
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, model, accelerator


@with_mx
@pytest.mark.parametrize("high_precision_weight_gradient", [False, True])
def test_it_trains_close_to_bf16_on_batches_that_fill_no_block(high_precision_weight_gradient):
    precision = MXFP8(high_precision_weight_gradient=high_precision_weight_gradient)
    expected_losses, expected, *_ = train("bf16")
    losses, gradients, model, accelerator = train(precision)

    assert precision.converted == {"Net": ("body.0", "late")}
    assert losses == pytest.approx(expected_losses, abs=0.02 * losses[0])
    assert losses[-1] < 0.8 * losses[0]
    errors = {name: ((gradients[name] - each).norm() / each.norm()).item() for name, each in expected.items()}
    assert 0.01 < errors["body.0.weight"] < 0.15
    assert list(model.state_dict()) == list(build().state_dict())
    assert all(type(each) is nn.Parameter for each in model.parameters())
    details = precision.details()
    assert details["products"] == "emulated"
    assert "narrow (32 x 48: 48 not divisible by 32)" in details["converted of Net"]
    assert "2 of 6 nn.Linear" in str(accelerator.explain())


@with_mx
def test_copies_and_pickles_compute_the_same_and_other_formats_convert_anew():
    _, _, model, _ = train("mxfp8", steps=1)
    x = torch.ones(3, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    Accelerator(cpu=True, mixed_precision=FP8()).prepare(model)
    assert type(model.late).__name__ == "Float8Linear"
    assert model(x).isfinite().all()


@with_mx
def test_a_checkpoint_of_it_loads_in_full_precision(tmp_path):
    _, _, trained, saver = train("mxfp8", steps=2)
    saver.save_state(tmp_path)
    _, _, model, accelerator = train("no", steps=1)
    accelerator.load_state(tmp_path)
    assert all(torch.equal(each, trained.state_dict()[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ["*"]}, "mxfp8 was asked for, but no layer of Net can be converted: first .skip"),
        (
            {"module_filter_func": lambda module, name: name == "narrow"},
            "chose 1 layers of Net that mxfp8 cannot compute",
        ),
        ({"skip": ["head"]}, "has 'head', which no linear layer of Net matches: first, body.0"),
    ],
)
def test_what_cannot_be_converted_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Accelerator(cpu=True, mixed_precision=MXFP8(**options)).prepare(build())


def test_a_torchao_without_its_layer_is_refused_with_the_one_that_has_it(monkeypatch):
    """Such as 0.15, the newest for torch 2.9."""
    monkeypatch.setitem(sys.modules, "accel_precision.mx_layers", None)
    with pytest.raises(
        PluginError, match=r"tried with torchao 0.18, which needs torch 2.11: pip install 'torchao==0.18"
    ):
        Accelerator(cpu=True, mixed_precision="mxfp8").prepare(build())
