"""The search for the first value that is not finite holds in the loops that people write, costs no memory, and never hangs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from test_diagnostics_nonfinite import Layers, LogOf, RootOf, Zeroing, data, place
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from accel_core import DDP, Accelerator, LocalSGD, NonFiniteError, Precision, PrecisionPolicy, TorchDynamoPlugin
from accel_diagnostics import Finding, NonFiniteDetector
from accel_testing import run_ranks

BAD = 6
"""The sample of which a logarithm is infinite."""


def logarithm() -> nn.Module:
    torch.manual_seed(0)
    return Layers(nn.Identity(), Zeroing(), LogOf())


def loading(model: nn.Module, *bad: tuple[int, float], **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(detect_nonfinite=True, **options)
    prepared, loader = accelerator.prepare(model, DataLoader(data(*bad or [(BAD, -1.0)]), batch_size=2))
    return accelerator, prepared, loader


def raised(run: Callable[[], object]) -> Finding:
    with pytest.raises(NonFiniteError) as error:
        run()
    return error.value.first


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DETECT_NONFINITE", "1")
    accelerator = Accelerator()
    model, loader = accelerator.prepare(logarithm(), DataLoader(data((BAD, -1.0)), batch_size=2))
    finding = raised(lambda: [accelerator.backward(model(x).mean()) for (x,) in loader])
    assert place(finding)[1:] == ("layers.2", 0, 0, (BAD,))


def sums(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum(), len(batch[0])


@pytest.mark.parametrize(("taken", "samples"), [(islice, (BAD,)), (lambda it, n: list(islice(it, n)), None)])
def test_a_window_in_one_call_knows_its_samples_only_where_it_draws_them(
    taken: Callable[[Any, int], Iterable[Any]], samples: tuple[int, ...] | None
) -> None:
    accelerator, model, loader = loading(logarithm())
    finding = raised(lambda: accelerator.forward_backward(model, taken(iter(loader), 5), sums))
    assert (finding.module, finding.micro_batch, finding.offending) == ("layers.2", 3, samples)


def one_ahead(loader: Iterable[Any]) -> Iterable[Any]:
    batches = iter(loader)
    before = next(batches)
    for batch in batches:
        yield before
        before = batch
    yield before


@pytest.mark.parametrize("order", [list, one_ahead])
def test_samples_of_loops_that_draw_ahead_are_unknown(order: Callable[[Any], Iterable[Any]]) -> None:
    accelerator, model, loader = loading(logarithm())
    finding = raised(lambda: [accelerator.backward(model(x).mean()) for (x,) in order(loader)])
    assert (finding.module, finding.samples) == ("layers.2", (None,))


def test_samples_are_known_again_where_batches_are_used_one_by_one() -> None:
    accelerator, model, loader = loading(logarithm())
    for (x,) in list(loader)[:2]:
        accelerator.backward(model(x).mean())
    (x,) = next(iter(loader))
    accelerator.backward(model(x).mean())
    nested = DataLoader(data(), batch_size=4)
    finding = raised(
        lambda: [accelerator.backward(model(x).mean()) for _ in accelerator.prepare(nested) for (x,) in loader]
    )
    assert [each.ids for each in finding.samples if each] == [(0, 1, 2, 3), (6, 7)]


def test_a_batch_that_was_left_out_is_not_blamed_for_the_next_one() -> None:
    accelerator, model, loader = loading(logarithm(), (1, -1.0), (BAD, -1.0))

    def leave_out() -> None:
        for (x,) in loader:
            loss = model(x).mean()
            if not loss.isfinite() and x[0, 0] != -1:
                continue
            accelerator.backward(loss)

    assert raised(leave_out).offending == (BAD,)


def test_forwards_that_run_before_any_backward_belong_to_their_own() -> None:
    accelerator, model, loader = loading(logarithm())
    losses = [model(x).mean() for (x,) in loader]
    finding = raised(lambda: [accelerator.backward(loss) for loss in losses])
    assert (finding.kind, finding.module, finding.rows) == ("output", "layers.2", (0,))


def test_a_batch_that_is_overwritten_before_the_window_closes_is_said_to_be() -> None:
    accelerator = Accelerator(detect_nonfinite=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(logarithm())
    x = torch.full((1, 3), -1.0)
    with pytest.raises(NonFiniteError, match="not reproduced: .*; inputs were changed in place after the forward"):
        for value in (-1.0, 1.0):
            with accelerator.accumulate(model):
                accelerator.backward(model(x.fill_(value)).sum())


def test_forwards_without_a_backward_are_not_kept() -> None:
    accelerator, model, _ = loading(Layers(nn.Tanh()))
    detector = accelerator._detector
    assert detector is not None
    frozen = accelerator.prepare(nn.Linear(3, 3).requires_grad_(False))
    for _ in range(400):
        model(torch.ones(2, 3))
        model(torch.ones(2, 3)).sum().backward()
        frozen(torch.ones(2, 3))
        model.zero_grad()
    assert len(detector._records) < 300
    accelerator.backward(model(torch.ones(2, 3)).sum())
    for _ in range(4):
        accelerator.backward(model(torch.ones(2, 3)).sum())
    assert detector._records == []


def test_long_runs_keep_nothing() -> None:
    accelerator = Accelerator(detect_nonfinite=True, gradient_accumulation_steps=4)
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))

    def steps(count: int) -> int:
        for _ in range(count):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.rand(4, 3)).mean())
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    steps(20)
    before = steps(20)
    assert steps(200) - before < 100


def test_inputs_and_outputs_that_cannot_be_looked_at_disturb_nothing() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x + self.weight, torch.eye(3).to_sparse(), torch.ones(2).to(torch.float8_e5m2)

    accelerator = Accelerator(detect_nonfinite=True)
    model = accelerator.prepare(Odd())
    with torch.inference_mode():
        made = torch.ones(3)
    accelerator.backward(model(made)[0].sum())
    finding = raised(lambda: accelerator.backward(model(torch.full((3,), torch.nan))[0].sum()))
    assert (finding.kind, finding.module) == ("input", None)


def test_a_mask_in_the_outputs_is_told_from_what_the_loss_makes_of_it() -> None:
    accelerator = Accelerator(detect_nonfinite=True)

    class Masking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.index_fill(1, torch.tensor([2]), -torch.inf)

    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), Masking()))
    loss_fn = nn.CrossEntropyLoss()
    accelerator.backward(loss_fn(model(torch.ones(2, 3)), torch.tensor([0, 1])))
    with pytest.raises(NonFiniteError, match="if that is a mask, look at the loss function"):
        accelerator.backward(loss_fn(model(torch.ones(2, 3)), torch.tensor([0, 2])))


@dataclass
class Question:
    hidden: torch.Tensor


class Answer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root = RootOf()

    def forward(self, question: Question) -> torch.Tensor:
        result: torch.Tensor = self.root(question.hidden)
        return result


def test_a_replay_does_not_run_into_the_graphs_of_other_models() -> None:
    accelerator = Accelerator(detect_nonfinite=True)
    first, second = accelerator.prepare(nn.Linear(3, 3), Answer())
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    arrivals = []
    first.weight.register_post_accumulate_grad_hook(lambda each: arrivals.append(each.grad.clone()))
    finding = raised(lambda: accelerator.backward(second(Question(first(torch.ones(2, 3)))).sum()))
    assert (finding.kind, finding.module) == ("gradient", "root")
    assert len(arrivals) == 1


def test_a_gradient_that_overflows_in_the_sum_is_said_to() -> None:
    accelerator = Accelerator(detect_nonfinite=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 3e38)).sum() * 1.5)
    with (
        accelerator.accumulate(model),
        pytest.raises(NonFiniteError, match="sums over micro-batches or ranks may") as error,
    ):
        accelerator.backward(model(torch.full((1, 1), 3e38)).sum() * 1.5)
    assert error.value.first.kind == "not reproduced"


class Halves(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": Halves()}])
def test_checkpoints_dropout_and_running_statistics_together(options: dict[str, Any]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.drop = nn.Dropout(0.3)
            self.log = LogOf()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.norm(x)) * 1e-3
            result: torch.Tensor = self.log(x + 1) + self.log(x.detach() * 0 + 1)
            return result

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.last = LogOf()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return self.last((x[:, :1] != -1) + y.abs() * (x[:, :1] != -1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    accelerator, model, loader = loading(Layers(nn.Identity(), Saved()), **options)
    hooked: list[int] = []
    accelerator.unwrap_model(model).layers[0].register_forward_hook(lambda *_: hooked.append(1))
    finding = raised(lambda: [accelerator.backward(model(x).mean()) for (x,) in loader])
    assert (finding.kind, finding.module, finding.offending) == ("output", "layers.1.last", (BAD,))
    assert len(hooked) == 4 + 2  # repeated once, and once without the minus infinity of the logarithm


def test_a_model_that_has_to_be_compiled_in_one_piece_is() -> None:
    accelerator = Accelerator(detect_nonfinite=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    network = Layers(nn.Identity(), Zeroing(), LogOf())
    model, loader = accelerator.prepare(network, DataLoader(data((BAD, -1.0)), batch_size=2))
    twin = copy.deepcopy(model)
    finding = raised(lambda: [accelerator.backward(model(x).mean()) for (x,) in loader])
    assert place(finding) == ("output", "layers.2", 0, 0, (BAD,))
    twin(torch.ones(2, 3))
    accelerator.free_memory()
    model(torch.ones(2, 3))
    assert accelerator._detector is not None
    assert accelerator._detector._records == []
    assert network._compiled_call_impl is None
    torch.compiler.reset()


def test_what_the_user_has_compiled_is_so_again_afterwards() -> None:
    network = nn.Linear(3, 1)
    network.compile(backend="eager")
    compiled = network._compiled_call_impl
    accelerator = Accelerator(detect_nonfinite=True)
    model = accelerator.prepare(network)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    accelerator.free_memory()
    assert network._compiled_call_impl is compiled
    torch.compiler.reset()


def test_evaluation_frozen_parts_and_second_calls_come_in_between() -> None:
    network = Layers(nn.Linear(3, 3).requires_grad_(False), nn.Tanh(), LogOf())
    accelerator, model, loader = loading(network, (BAD, 0.0))
    nn.init.eye_(network.layers[0].weight)
    nn.init.zeros_(network.layers[0].bias)
    evaluated = accelerator.prepare(DataLoader(data((0, -1.0)), batch_size=2))

    def train() -> None:
        for (x,) in loader:
            with torch.no_grad():
                model(-x)
            loss = (model(x + 1) + model(x)).mean()
            model.eval()
            for (y,) in evaluated:
                model(y)
            model.train()
            accelerator.backward(loss)

    assert place(raised(train)) == ("output", "layers.2", 0, 0, (BAD,))


class Sharding(DDP):
    replicates_parameters: ClassVar[bool] = False


def test_strategies_whose_ranks_do_not_hold_the_model_are_refused() -> None:
    accelerator = Accelerator()
    owners = accelerator._parts.activation.owners
    with pytest.raises(ValueError, match="does not say that every rank holds the whole model.*replicates_parameters"):
        NonFiniteDetector(
            accelerator._world,
            accelerator._feed,
            accelerator._prepared,
            strategy=Sharding(),
            relay=accelerator._relay,
            owners=owners,
        )


def errors(run: Callable[[], object]) -> NonFiniteError | None:
    try:
        run()
    except NonFiniteError as error:
        return error
    return None


def places(error: NonFiniteError | None) -> list[Any]:
    assert error is not None
    return [each and (each.rank, each.kind, each.module, each.micro_batch) for each in error.findings]


class Branching(nn.Module):
    """Its second layer is used where `other` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.root, self.log = RootOf(), LogOf()
        for layer in (self.first, self.second):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, other: bool = True) -> torch.Tensor:
        x = self.second(self.first(x)) if other else self.first(x)
        result: torch.Tensor = self.root(x) + self.log((x != -1) * (x.abs() + 1))
        return result


class Talking(nn.Module):
    """Communicates in its forward, and takes the logarithm of numbers below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        nn.init.constant_(self.layer.weight, -1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.sum(0)
        dist.all_reduce(total)
        result: torch.Tensor = self.layer(x + total).log()
        return result


def window(model: nn.Module, rows: list[float], *call: bool, **options: Any) -> NonFiniteError | None:
    """A window, with a micro-batch for each of these values."""
    accelerator = Accelerator(detect_nonfinite=True, gradient_accumulation_steps=len(rows), **options)
    prepared = accelerator.prepare(model)

    def run() -> None:
        for value in rows:
            x = torch.tensor([[1.0, 2.0, value]])
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x, *call).sum())

    return errors(run)


def joined() -> tuple[str, str]:
    """Ranks with different numbers of batches, of which the longest ends in a NaN."""
    accelerator = Accelerator(detect_nonfinite=True)
    model = accelerator.prepare(Branching())
    rows = [1.0] if accelerator.process_index else [1.0, 1.0]
    error = None
    with accelerator.join_uneven_inputs([model]):
        for _ in rows:
            accelerator.backward(model(torch.ones(1, 3)).sum())
    accelerator.free_memory()
    model = accelerator.prepare(Branching())
    try:
        with accelerator.join_uneven_inputs([model]):
            x = torch.tensor([[1.0, 1.0, 0.0 if accelerator.process_index else 1.0]])
            accelerator.backward(model(x).sum())
    except NonFiniteError as raised:
        error = raised
    assert error is not None
    return error.first.kind, str(error)


def local() -> list[Any]:
    accelerator = Accelerator(detect_nonfinite=True)
    model = accelerator.prepare(Branching())

    def run() -> None:
        with LocalSGD(accelerator, model, 2) as sgd:
            for step in range(4):
                value = 0.0 if step == 3 and accelerator.process_index == 1 else 1.0
                accelerator.backward(model(torch.tensor([[1.0, 2.0, value]])).sum())
                sgd.step()

    return places(errors(run))


def ranks_job() -> dict[str, Any]:
    rank = Accelerator().process_index
    return {
        "different": places(window(Branching(), [1.0, 0.0, 1.0, 1.0] if rank else [1.0, 1.0, -1.0, 1.0])),
        "unused": places(
            window(Branching(), [1.0, 0.0 if rank else 1.0], bool(rank), strategy=DDP(find_unused_parameters=True))
        ),
        "static": places(window(Branching(), [1.0, 1.0, 1.0 if rank else 0.0], strategy=DDP(static_graph=True))),
        "talking": str(window(Talking(), [-9.0 if rank else 1.0, 1.0])),
        "joined": joined(),
        "local": local(),
        "next": Accelerator().gather(torch.tensor(rank)).tolist(),
    }


def test_ranks_that_go_wrong_in_their_own_ways_raise_the_same_error() -> None:
    first, second = run_ranks(ranks_job, 2)
    assert first["different"] == second["different"] == [(0, "output", "log", 2), (1, "gradient", "root", 1)]
    assert first["unused"] == second["unused"] == [None, (1, "gradient", "root", 1)]
    assert first["static"] == second["static"] == [(0, "gradient", "root", 2), None]
    assert first["talking"] == second["talking"]
    assert "it communicates (c10d.allreduce_.default). Move that out of the model" in first["talking"]
    assert first["local"] == second["local"] == [None, (1, "gradient", "root", 0)]
    assert second["joined"][0] == "gradient"
    assert first["joined"][0] == "not reproduced"
    assert "other ranks are not asked in join_uneven_inputs()" in first["joined"][1]
    assert first["next"] == [0, 1]
