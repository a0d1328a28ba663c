"""Parts of a loop that no other file has: gradients that nobody clips, optimizers of a script's own, uneven data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks

WORLD, STAGES, STEPS, RATE, SAMPLES = 2, (0, 1, 2, 3), 3, 0.01, 7


class Counting(torch.optim.Optimizer):
    """Momentum that is warmed up by a number of steps; checkpoints know nothing of its state, and its number is no tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                before = state.get("average", torch.zeros_like(parameter))
                state["average"] = before * 0.9 + parameter.grad  # another tensor after each step
                parameter.sub_(state["average"], alpha=group["lr"] / state["step"])


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model, number):
    return 50 * model(torch.linspace(-1, 1, 12).view(3, 4) + number / 4).square().sum()


def prepared(stage):
    accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), cpu=True)
    model = built()
    return accelerator, *accelerator.prepare(model, Counting(model.parameters(), lr=RATE))


def weights_of(accelerator, model):
    return {name: each.clone() for name, each in accelerator.get_state_dict(model).items()}


def looped(stage, folder):
    accelerator, model, optimizer = prepared(stage)

    def step(number):
        accelerator.backward(loss_of(model, number + accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        step(number)
    trained = weights_of(accelerator, model)
    accelerator.save_state(folder / str(stage))
    step(STEPS)
    after = weights_of(accelerator, model)
    accelerator.load_state(folder / str(stage))
    step(STEPS)
    again = weights_of(accelerator, model)
    loader = accelerator.prepare(DataLoader(torch.arange(SAMPLES * 4.0).view(SAMPLES, 4), batch_size=2))
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model.eval()(batch)) for batch in loader]
        expected = accelerator.unwrap_model(model)(torch.arange(SAMPLES * 4.0).view(SAMPLES, 4))
    with pytest.raises(TypeError) as raised, accelerator.join_uneven_inputs([model]):
        pass
    accelerator.end_training()
    same = all(torch.equal(again[name], after[name]) for name in after)
    return trained, same, torch.cat(outputs), expected, str(raised.value)


def all_looped(folder):
    return {stage: looped(stage, folder) for stage in STAGES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(all_looped, WORLD, tmp_path_factory.mktemp("loop"), timeout=120)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_above_one_is_not_clipped_unasked(ranks, stage):
    model = built()
    optimizer = Counting(model.parameters(), lr=RATE)
    for number in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, number + rank) / WORLD).backward()
        assert nn.utils.get_total_norm([each.grad for each in model.parameters()]) > 2
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0][stage][0][name], value)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_checkpoints_do_not_know_goes_on_with_its_number_of_steps(ranks, stage):
    assert all(rank[stage][1] for rank in ranks)


@pytest.mark.parametrize("stage", STAGES)
def test_metrics_have_each_sample_once(ranks, stage):
    for rank in ranks:
        _, _, outputs, expected, _ = rank[stage]
        torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_joining_is_refused_with_what_to_do(ranks, stage):
    for rank in ranks:
        assert "which cannot join, as models do that prepare() returns under the strategy 'ddp'" in rank[stage][4]
        assert "even_batches=True" in rank[stage][4]


def trains_in_windows_of_its_own():
    """As transformers' Trainer does."""
    config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 0}
    accelerator = Accelerator(strategy=DeepSpeed(config=config), cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for value in (1.0, 3.0):
        accelerator.backward(model(torch.tensor([[value]])).sum() / 2, scale_wrt_gas=False)
    optimizer.step()
    return [value.item() for value in accelerator.get_state_dict(model).values()]  # of the main process


def test_a_loop_that_divides_by_its_own_steps_may_have_any_in_the_configuration_and_a_norm_of_zero_clips_nothing():
    assert run_ranks(trains_in_windows_of_its_own, 2, timeout=120)[0] == [-2.0]


def trains_one_model_after_the_other(keys):
    strategy = DeepSpeed(config={"zero_optimization": {"stage": 2}, **keys})
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=4, cpu=True)
    found = []
    for _ in range(2):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for value in (1.0, 2.0, 3.0, 4.0):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([[value]])).sum())
                optimizer.step()
                optimizer.zero_grad()
        found += accelerator.get_state_dict(model).values()
    return [value.item() for value in found]


@pytest.mark.parametrize("keys", [
    {"gradient_accumulation_steps": 4},
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
])  # fmt: skip
def test_a_model_may_be_prepared_after_a_backward_and_batch_sizes_say_the_steps(keys):
    assert run_ranks(trains_one_model_after_the_other, 1, keys, timeout=120) == [[-2.5, -2.5]]
