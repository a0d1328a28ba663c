"""The first value that is not finite: planted in every place, and found there, in one process and on several ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, NonFiniteError, Precision, hookimpl
from accel_diagnostics import Finding, NonFiniteDetector
from accel_testing import run_ranks

ROWS = 16


def detecting(**options: Any) -> tuple[Accelerator, NonFiniteDetector]:
    """An Accelerator with detection on."""
    accelerator = Accelerator(detect_nonfinite=True, **options)
    assert accelerator._detector is not None
    return accelerator, accelerator._detector


class LogOf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class RootOf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


class Zeroing(nn.Module):
    """Gives 0 where the first feature is -1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * (x[:, :1] != -1)


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def data(*bad: tuple[int, float]) -> TensorDataset:
    """`ROWS` rows of three numbers in [0, 1); the first of row i is what `bad` says."""
    x = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(1))
    for row, value in bad:
        x[row, 0] = value
    return TensorDataset(x)


def mean(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return output.mean()


def train(
    model: nn.Module,
    dataset: TensorDataset,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mean,
    *,
    accumulation: int = 1,
    shuffle: bool = False,
    touch: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> NonFiniteError | None:
    """An epoch with two rows per rank in a batch; what it raised."""
    accelerator, _ = detecting(gradient_accumulation_steps=accumulation, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(dataset, batch_size=2, shuffle=shuffle)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        for step, (x,) in enumerate(loader):
            touch(model, step)
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_fn(prepared(x), x))
                optimizer.step()
                optimizer.zero_grad()
    except NonFiniteError as error:
        return error
    return None


def found(error: NonFiniteError | None) -> Finding:
    assert error is not None, "nothing was found"
    return error.first


def place(finding: Finding) -> tuple[str, str | None, int, int, tuple[Any, ...] | None]:
    return finding.kind, finding.module, finding.step, finding.micro_batch, finding.offending


def test_a_nan_in_the_data_is_traced_to_its_sample() -> None:
    torch.manual_seed(0)
    error = train(Layers(nn.Linear(3, 3)), data((9, torch.nan)), shuffle=True, accumulation=4)
    finding = found(error)
    assert (finding.kind, finding.name, finding.offending, finding.nan) == ("input", "argument 0", (9,), 1)
    assert 9 in finding.samples[0].ids  # type: ignore[union-attr]
    with pytest.raises(
        NonFiniteError, match=r"argument 0 of the model is not finite.*in rows [01]: index 9\."
    ) as raised:
        raise error  # type: ignore[misc]
    assert "what transforms them" in str(raised.value)


def test_a_logarithm_of_zero_is_traced_to_its_module_step_micro_batch_and_sample() -> None:
    torch.manual_seed(0)
    model = Layers(nn.Identity(), nn.Identity(), Zeroing(), LogOf())
    error = train(model, data((11, -1.0)), accumulation=2)
    finding = found(error)
    assert place(finding) == ("output", "layers.3", 2, 1, (11,))
    assert (finding.inf, finding.values, finding.low) == (3, 6, 0.0)
    assert "output of module 'layers.3' (LogOf) is the first that is not finite" in str(error)
    assert "the first NaN is in the output of module 'head'; 0 nan and 3 inf of 6 values; finite inputs" in str(error)
    assert "after 2 optimizer steps" in str(error)


class Filled(nn.Module):
    """Minus infinity where the numbers are below a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x < self.limit, -torch.inf)


class Attention(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.mask = Filled(limit)
        self.causal: torch.Tensor
        self.register_buffer("causal", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mask(x) + self.causal).softmax(dim=1)


def test_an_infinity_that_is_absorbed_is_not_blamed() -> None:
    finding = found(train(Layers(Attention(0.0), LogOf()), data()))
    assert (finding.kind, finding.module, finding.note) == ("output", "layers.1", "")


def test_a_mask_that_leaves_nothing_is_shown_with_the_module_that_makes_a_nan_of_it() -> None:
    error = train(Layers(nn.Tanh(), Attention(1.0)), data())
    assert found(error).module == "layers.1.mask"
    assert "the first NaN is in the output of module 'layers.1'" in str(error)


class Scored(nn.Module):
    """A mask that a softmax absorbs, before a logarithm of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Filled(0.1)
        self.log = LogOf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mask(x).softmax(dim=1) + self.log(x)


class ScoredByItself(Scored):
    """The same, with the logarithm in its own forward, and seen where it calls a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mask(x).softmax(dim=1) + self.log(x.log().exp())


@pytest.mark.parametrize("value, weight", [(-1.0, 1.0), (0.0, 1.0), (0.0, -1.0)])
def test_a_mask_is_not_blamed_for_what_comes_after_it(value: float, weight: float) -> None:
    """The logarithm of 0 reaches the output of the model as minus or plus infinity."""
    model = Layers(Scored())
    nn.init.constant_(model.head.weight, weight)
    assert place(found(train(model, data((11, value))))) == ("output", "layers.0.log", 5, 0, (11,))


class MaskedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": (self.scale * x).masked_fill(x < 0.5, -torch.inf), "extra": x.log()}


def test_a_mask_in_the_outputs_is_not_blamed_for_another_output() -> None:
    accelerator, _ = detecting()
    output = accelerator.prepare(MaskedOutput())(torch.tensor([[1.0, 0.2, -1.0]]))
    with pytest.raises(NonFiniteError) as raised:
        accelerator.backward(output["logits"].softmax(dim=1)[0, 0] + output["extra"].sum())
    assert raised.value.first.name == "output['extra']"


def test_a_mask_is_not_blamed_for_what_a_forward_makes_by_itself_after_it() -> None:
    finding = found(train(Layers(ScoredByItself()), data((11, -1.0))))
    assert finding.module == "layers.0"
    assert finding.note.startswith("made in its own forward before it calls 'layers.0.log'")


class Weighted(nn.Module):
    """Takes a mask with minus infinity, and makes a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Masked()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(x, mask)
        return result


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.scale * (x + mask).softmax(dim=1) + x.log()


@pytest.mark.parametrize("hidden, value, kind", [(1, -1.0, "output"), (3, 1.0, "input")])
def test_a_mask_in_the_inputs_is_blamed_only_if_it_hides_all(hidden: int, value: float, kind: str) -> None:
    accelerator, _ = detecting()
    model = accelerator.prepare(Weighted())
    x, mask = torch.tensor([[1.0, 2.0, value]]), torch.zeros(1, 3)
    mask[:, :hidden] = -torch.inf
    with pytest.raises(NonFiniteError) as raised:
        accelerator.backward(model(x, mask).sum())
    finding = raised.value.first
    assert (finding.kind, finding.module) == (kind, "head")
    assert finding.name == ("argument 1" if kind == "input" else "output")


def test_a_weight_that_is_not_finite_is_named() -> None:
    def spoil(model: nn.Module, step: int) -> None:
        if step == 3:
            model.get_parameter("layers.1.weight").data[0, 0] = torch.nan

    error = train(Layers(nn.Tanh(), nn.Linear(3, 3)), data(), touch=spoil)
    assert place(found(error))[:3] == ("parameter", "layers.1", 3)
    assert "'layers.1.weight' is not finite before the forward, and module 'layers.1' (Linear) uses it" in str(error)


def test_a_loss_that_is_not_finite_by_itself_is_told_from_the_model() -> None:
    error = train(Layers(nn.Tanh()), data((6, 5.0)), lambda y, x: (y * 0 + (x.amax() < 5)).log().mean())
    finding = found(error)
    assert (finding.kind, finding.module, finding.step) == ("loss", None, 3)
    assert finding.samples[0].ids == (6, 7)  # type: ignore[union-attr]
    assert "the loss is not finite, and the outputs of the model are" in str(error)


def test_a_derivative_that_is_not_finite_is_traced_to_its_module() -> None:
    class Residual(nn.Module):
        """The input of the root has another use, through which a finite gradient comes."""

        def __init__(self) -> None:
            super().__init__()
            self.root = RootOf()
            self.other = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x) + self.root(x)

    model = Layers(nn.Linear(3, 3), Residual(), nn.Tanh())
    nn.init.eye_(model.layers[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model.layers[0].bias)  # type: ignore[arg-type]
    error = train(model, data((4, 0.0)), accumulation=4)
    finding = found(error)
    assert place(finding) == ("gradient", "layers.1.root", 0, 2, (4,))
    assert finding.low == 0.0
    assert "the gradient of argument 0 in module 'layers.1.root' (RootOf)" in str(error)


def test_a_gradient_that_comes_so_from_the_loss_is_not_blamed_on_a_module() -> None:
    error = train(Layers(nn.Tanh()), data(), lambda y, x: (y - y.detach()).sqrt().sum())
    assert (found(error).kind, found(error).module) == ("gradient", None)
    assert "what computes the loss from the output made it" in str(error)


class Dropping(nn.Module):
    """Dropout, running statistics, and the logarithm of what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.drop = nn.Dropout(0.1)
        self.log = LogOf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.log(self.drop(self.norm(x).abs() + 1 + self.norm.num_batches_tracked % 2))


def test_dropout_and_buffers_are_replayed_and_put_back() -> None:
    torch.manual_seed(3)
    reference = Layers(Dropping())
    model = copy.deepcopy(reference)
    torch.manual_seed(4)
    torch.manual_seed(5)
    error = train(model, data(), touch=lambda model, step: torch.manual_seed(10 + step) and None)
    after = torch.get_rng_state()
    finding = found(error)
    torch.manual_seed(10 + finding.step)
    for start in range(0, 2 * finding.step, 2):
        reference.layers[0].norm(data().tensors[0][start : start + 2])  # type: ignore[operator]
    x = data().tensors[0][2 * finding.step : 2 * finding.step + 2]
    dropped = reference.layers[0].drop(reference.layers[0].norm(x).abs() + 1)  # type: ignore[operator,union-attr]
    expected = tuple(2 * finding.step + row for row in range(2) if (dropped[row] == 0).any())
    assert place(finding) == ("output", "layers.0.log", finding.step, 0, expected)
    assert torch.equal(after, torch.get_rng_state())
    assert torch.equal(model.layers[0].norm.running_mean, reference.layers[0].norm.running_mean)  # type: ignore[union-attr,arg-type]


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    """A tied module that is called three times, with keywords; a dataclass comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.tied = self.first
        self.log = LogOf()

    def forward(self, *, x: torch.Tensor, ids: torch.Tensor) -> Output:
        hidden = self.tied(input=self.first(x))
        scores = self.log(x=hidden.abs() + 1) + self.log(x=x)
        return Output(scores, {"ids": ids, "hidden": [hidden]})


def test_keywords_dataclasses_and_modules_called_twice() -> None:
    accelerator, _ = detecting()
    model = accelerator.prepare(Nested())
    x = torch.tensor([[1.0, 2.0, 0.0]])
    output = model(x=x, ids=torch.arange(3))
    with pytest.raises(NonFiniteError, match="module 'log'") as raised:
        accelerator.backward(output.logits.sum() + output.extra["hidden"][0].sum())
    assert raised.value.first.inf == 1
    assert "samples unknown" in str(raised.value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_replayed(reentrant: bool) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), RootOf())
            nn.init.eye_(self.inner[0].weight)
            nn.init.zeros_(self.inner[0].bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return result

    model = Layers(nn.Linear(3, 3), Saved())
    nn.init.eye_(model.layers[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model.layers[0].bias)  # type: ignore[arg-type]
    error = train(model, data((5, 0.0)), accumulation=4)
    assert place(found(error)) == ("gradient", "layers.1.inner.1", 0, 2, (5,))


def test_a_compiled_model_is_replayed_uncompiled() -> None:
    torch.manual_seed(0)
    model = Layers(nn.Identity(), Zeroing(), LogOf())
    finding = found(train(model, data((8, -1.0)), dynamo_backend="eager"))
    assert place(finding) == ("output", "layers.2", 4, 0, (8,))
    torch.compiler.reset()


def test_two_models_each_with_its_own_backward() -> None:
    accelerator, _ = detecting()
    generator, critic = accelerator.prepare(nn.Linear(3, 3), Layers(RootOf()))
    nn.init.zeros_(generator.weight)
    nn.init.constant_(generator.bias, 1.0)
    fake = generator(torch.ones(2, 3))
    accelerator.backward(critic(fake.detach()).mean())
    nn.init.zeros_(generator.bias)
    made = generator(torch.ones(2, 3))
    accelerator.backward(critic(fake).mean())  # the generator's forward has waited for a window
    with pytest.raises(NonFiniteError, match="module 'layers.0'"):
        accelerator.backward(critic(made).mean())


def test_evaluation_forwards_are_not_recorded_and_windows_are_dropped() -> None:
    accelerator, detector = detecting()
    model = accelerator.prepare(Layers(nn.Tanh()))
    x = torch.ones(2, 3)
    kept = weakref.ref(x)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    model.train()
    accelerator.backward(model(x).sum())
    for _ in range(8):
        model(torch.ones(2, 3))  # no backward reaches these
        accelerator.backward(model(torch.ones(2, 3)).sum())
    del x
    gc.collect()
    assert kept() is None
    assert len(detector._records) == 4 - 1  # KEPT_WINDOWS bounds what waits


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    accelerator, detector = detecting()
    model = accelerator.prepare(Layers(nn.Tanh()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(2, 3))
    assert detector._records == []
    detector.release()
    assert not model._forward_hooks


def test_a_window_in_one_call_is_looked_at() -> None:
    accelerator, _ = detecting()
    model = accelerator.prepare(Layers(Zeroing(), LogOf()))
    micro = [torch.ones(2, 3), torch.ones(2, 3), torch.full((2, 3), -1.0)]
    with pytest.raises(NonFiniteError, match="module 'layers.1'") as raised:
        accelerator.forward_backward(model, micro, lambda output, batch: (output.sum(), len(batch)))
    assert raised.value.first.micro_batch == 2


class Recurrent(nn.Module):
    """Keeps a second list of its weights, as torch's recurrent layers do; its embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3, bias=False)
        self.memory = nn.GRU(3, 3, batch_first=True)
        self.root = RootOf()
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.root(self.memory(self.embedding(x)[:, None])[0][:, 0]))
        return result


def test_the_replay_of_a_backward_leaves_parameters_and_gradients_alone() -> None:
    accelerator, _ = detecting()
    model = accelerator.prepare(Recurrent())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.init.eye_(model.head.weight)
    arrived: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    before = dict(model.named_parameters())
    for name, parameter in before.items():
        parameter.register_post_accumulate_grad_hook(
            lambda each, name=name: arrived[name].append(each.grad.clone())  # type: ignore[misc]
        )
    with pytest.raises(NonFiniteError, match="module 'root'"):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    assert all(len(each) == 1 for each in arrived.values())
    assert all(after is before[name] for name, after in model.named_parameters())
    assert model.head.weight is model.embedding.weight
    for name, parameter in before.items():
        torch.testing.assert_close(parameter.grad, arrived[name][0], equal_nan=True, rtol=0, atol=0)


class Scaling(Precision):
    """A scale so large that gradients overflow."""

    @hookimpl
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 3e38

    @hookimpl
    def optimizer_step(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        return None


def test_an_overflow_under_loss_scaling_is_the_scalers_business_and_a_loss_is_not() -> None:
    assert train(Layers(nn.Tanh()), data(), lambda y, x: 100 * y.sum(), mixed_precision=Scaling()) is None
    finding = found(train(Layers(Zeroing(), LogOf()), data((2, -1.0)), mixed_precision=Scaling()))
    assert finding.module == "layers.1"


class Once(nn.Module):
    """Gives a NaN the first time that it is called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (torch.nan if self.calls == 1 else 1.0)


def test_what_cannot_be_reproduced_is_said() -> None:
    error = train(Layers(Once()), data())
    assert found(error).kind == "not reproduced"
    assert "the loss was not finite, and repeating the micro-batch gave no such value" in str(error)


class Refusing(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("once is enough")
        return x * torch.nan


def test_a_forward_that_cannot_be_repeated_is_said() -> None:
    error = train(Layers(Refusing()), data())
    assert "repeating micro-batch 0 raised RuntimeError: once is enough" in str(error)


def weights(detect: bool) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    accelerator = Accelerator(gradient_accumulation_steps=2, detect_nonfinite=detect)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for x in data().tensors[0].split(4):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(x + accelerator.process_index).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


def test_a_clean_run_gives_the_same_weights() -> None:
    assert all(map(torch.equal, weights(detect=True), weights(detect=False)))


def test_an_error_survives_pickling() -> None:
    error = train(Layers(Zeroing(), LogOf()), data((2, -1.0)))
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.findings) == (str(error), error.findings)  # type: ignore[union-attr]


def ranks_find(planted: str) -> tuple[str, list[Any]]:
    torch.manual_seed(0)
    accelerator, _ = detecting(gradient_accumulation_steps=2)
    rank = accelerator.process_index
    model = Layers(
        nn.Linear(3, 3),
        nn.Dropout(0.5),
        Zeroing() if planted == "log" else nn.Tanh(),
        LogOf() if planted == "log" else nn.Tanh(),
    )
    model.layers[0].weight.data.copy_(torch.eye(3))
    model.layers[0].bias.data.zero_()
    model.layers[1].p = 0.0 if planted == "log" else 0.5
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    try:
        for step in range(6):
            x = torch.rand(2, 3)
            if step == 3 and rank == 1:
                x[1, 0] = {"log": -1.0, "data": torch.nan, "none": 0.5}[planted]
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x).mean())
                optimizer.step()
                optimizer.zero_grad()
    except NonFiniteError as error:
        return str(error), [
            None if each is None else (each.rank, each.kind, each.module, each.step, each.micro_batch)
            for each in error.findings
        ]
    return "", []


def ranks_job() -> list[Any]:
    return [
        ranks_find("log"),
        ranks_find("data"),
        ranks_find("none"),
        all(map(torch.equal, weights(True), weights(False))),
    ]


def test_all_ranks_raise_the_same_error_and_a_clean_run_is_the_same() -> None:
    for logarithm, from_data, clean, equal in (results := run_ranks(ranks_job, 3)):
        assert logarithm == results[0][0]
        assert logarithm[1] == [None, (1, "output", "layers.3", 1, 1), None]
        assert "other 2 rank(s) are finite by themselves" in logarithm[0]
        assert from_data[1] == [None, (1, "input", None, 1, 1), None]
        assert clean == ("", [])
        assert equal
