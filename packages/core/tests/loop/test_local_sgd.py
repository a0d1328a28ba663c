"""`LocalSGD`: gradients stay local, and parameters are averaged every few steps, as plain torch does by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_core import DDP, Accelerator, CollectiveMismatchError
from accel_core.loop.local_sgd import LocalSGD
from accel_testing import run_ranks

WORLD = 3


class Net(nn.Module):
    """Trained weights, a frozen one, and buffers of two dtypes that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def optimizer_of(model: nn.Module, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1, momentum=momentum)


def averaged(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for same in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack(list(same)).mean(0)
            for parameter in same:
                parameter.copy_(mean)
        for first, *others in zip(*(model.buffers() for model in models), strict=True):
            for buffer in others:
                buffer.copy_(first)


def by_hand(steps: int, between: int, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """All ranks in one process: `steps` optimizer steps of `accumulation` batches each, an average every `between`."""
    models = [Net() for _ in range(WORLD)]
    optimizers = [optimizer_of(model, 0.9) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for micro in range(accumulation):
                (model(batch(rank, step * accumulation + micro)).square().mean() / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % between == 0:
            averaged(models)
    averaged(models)
    return models[0].state_dict()


class Loop:
    """A prepared model that trains on batches of its rank."""

    def __init__(self, momentum: float = 0.9, **options) -> None:
        self.accelerator = Accelerator(**options)
        model = Net()
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer_of(model, momentum))

    def step(self, number: int, local_sgd: LocalSGD | None = None) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch(self.accelerator.process_index, number)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if local_sgd is not None:
                local_sgd.step()

    def train(self, steps: int, between: int, enabled: bool = True) -> dict[str, torch.Tensor]:
        with LocalSGD(self.accelerator, self.model, between, enabled) as local_sgd:
            for number in range(steps):
                self.step(number, local_sgd)
        return self.state()

    def state(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.accelerator.get_state_dict(self.model))


def raised(function, *args):
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def blocks():
    """What a rank has after blocks of all kinds."""
    rank = Accelerator().process_index
    seen = {
        "every 2": Loop().train(5, 2),
        "never but at the end": Loop().train(3, 100),
        "at the last step": Loop().train(4, 2),
        "in windows": Loop(gradient_accumulation_steps=2).train(8, 4),
        "in the middle of windows": Loop(gradient_accumulation_steps=2).train(8, 3),
        "every step": Loop(momentum=0).train(4, 1),
        "disabled": Loop().train(3, 2, enabled=False),
    }
    plain, gradients_meet = Loop(momentum=0), Loop()
    for number in range(4):
        plain.step(number)
    for number in range(3):
        gradients_meet.step(number)
    seen["gradients at every step"], seen["without a block"] = plain.state(), gradients_meet.state()

    static = Loop(strategy=DDP(static_graph=True))
    with LocalSGD(static.accelerator, static.model, 100) as local_sgd:
        for number in range(3):
            static.step(number, local_sgd)
        seen["inside, with a static graph"] = static.state()

    seen["errors"] = errors(rank)
    return seen


def errors(rank: int) -> dict[str, tuple[str, str] | None]:
    found = {}
    loop = Loop()

    def leaves(local_sgd_steps: int, steps: int) -> None:
        loop.train(steps, local_sgd_steps)

    found["other numbers of steps"] = raised(leaves, 2, 3 if rank else 4)
    found["other intervals"] = raised(leaves, 2 if rank else 3, 1)

    def fails_on_one() -> None:
        with LocalSGD(loop.accelerator, loop.model, 2) as local_sgd:
            loop.step(0, local_sgd)
            if rank == 1:
                raise ValueError("a sample that cannot be read")
            raise RuntimeError("the others leave too")

    found["an exception"] = *raised(fails_on_one), loop.state()["inner.weight"]
    loop.accelerator.backward(loop.model(batch(rank, 0)).square().mean())
    found["gradients after it"] = loop.model.module.inner.weight.grad.tolist()

    def joins() -> None:
        with loop.accelerator.join_uneven_inputs([loop.model]), LocalSGD(loop.accelerator, loop.model, 1) as local_sgd:
            local_sgd.step()

    found["joining"] = raised(joins)
    sharded = Loop(strategy=Sharding())
    found["sharding"] = raised(LocalSGD, sharded.accelerator, sharded.model, 2)
    found["sharding, disabled"] = raised(LocalSGD, sharded.accelerator, sharded.model, 2, False)
    found["inner model"] = raised(LocalSGD, loop.accelerator, loop.accelerator.unwrap_model(loop.model), 2)
    return found


class Sharding(DDP):
    replicates_parameters = False


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(blocks, WORLD, timeout=100)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "name, expected",
    [
        ("every 2", (5, 2)),
        ("never but at the end", (3, 100)),
        ("at the last step", (4, 2)),
        ("in windows", (4, 2, 2)),  # 4 micro-batches between averages are 2 windows
        ("in the middle of windows", (4, 2, 2)),  # 3 end inside the second window, so the average waits for its end
    ],
)
def test_parameters_are_those_of_averaging_by_hand(ranks, name, expected) -> None:
    for rank in ranks:
        assert_equal(rank[name], by_hand(*expected))


@pytest.mark.parametrize("name", ["every 2", "never but at the end", "at the last step", "in windows", "every step"])
def test_after_the_block_all_ranks_hold_the_same_model(ranks, name) -> None:
    first = ranks[0][name]
    assert len(first) == 9
    assert all(rank[name][key].equal(first[key]) for rank in ranks for key in first)


def parameters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the running statistics, which no rank shares while gradients are averaged."""
    return {name: tensor for name, tensor in state.items() if "running" not in name}


def test_an_average_after_every_plain_step_is_data_parallelism(ranks) -> None:
    for rank in ranks:
        assert_equal(parameters(rank["every step"]), parameters(rank["gradients at every step"]))


def test_disabled_it_changes_nothing(ranks) -> None:
    for rank in ranks:
        assert all(rank["disabled"][name].equal(tensor) for name, tensor in rank["without a block"].items())


def test_a_strategy_that_has_to_synchronise_the_first_backward_is_local_from_then_on(ranks) -> None:
    weights = [rank["inside, with a static graph"]["inner.weight"] for rank in ranks]
    assert not weights[0].equal(weights[1])


def test_ranks_that_count_differently_raise_everywhere(ranks) -> None:
    for rank in ranks:
        kind, message = rank["errors"]["other numbers of steps"]
        assert kind == CollectiveMismatchError.__name__
        assert "rank 0: 4 calls of step(), in the block, local_sgd_steps=2" in message
        assert "rank 2: 3 calls of step(), at the end of the block" in message
        assert (
            "rank 0: 1 calls of step(), at the end of the block, local_sgd_steps=3"
            in rank["errors"]["other intervals"][1]
        )


def test_an_exception_leaves_the_block_without_communication(ranks) -> None:
    _, messages, weights = zip(*(rank["errors"]["an exception"] for rank in ranks), strict=True)
    assert messages == ("the others leave too", "a sample that cannot be read", "the others leave too")
    assert not weights[0].equal(weights[1])


def test_gradients_meet_again_after_the_block(ranks) -> None:
    gradients = [torch.tensor(rank["errors"]["gradients after it"]) for rank in ranks]
    assert gradients[0].equal(gradients[1])
    assert gradients[0].abs().sum() > 0


def test_where_it_cannot_work_it_says_so(ranks) -> None:
    errors = ranks[1]["errors"]
    assert "the strategy Sharding does not say that every data-parallel rank holds them" in errors["sharding"][1]
    assert errors["sharding, disabled"] is None
    assert "given a Net that this Accelerator has not prepared for training" in errors["inner model"][1]
    assert "inside join_uneven_inputs() some may have ended" in errors["joining"][1]


def test_in_a_world_of_one_nothing_happens() -> None:
    with_block, without = Loop(), Loop()
    for number in range(3):
        without.step(number)
    found = with_block.train(3, 1)
    assert all(found[name].equal(tensor) for name, tensor in without.state().items())


def test_steps_belong_into_the_block() -> None:
    loop = Loop()
    local_sgd = LocalSGD(loop.accelerator, loop.model, 2)
    with pytest.raises(RuntimeError, match=r"LocalSGD\.step\(\) was called outside of its block"):
        local_sgd.step()


@pytest.mark.parametrize("steps", [0, 2.0, True])
def test_the_interval_is_a_number_of_steps(steps) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match="expected an integer of at least 1, the number of steps between two averages"):
        LocalSGD(loop.accelerator, loop.model, steps, enabled=False)
