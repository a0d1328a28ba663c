"""`DummyOptim` and `DummyScheduler`: what they are before they are prepared, and what they become."""

import copy
import logging

import pytest
import torch
from torch import nn, optim

from accel_core import Accelerator
from accel_deepspeed import DummyOptim, DummyScheduler
from accel_deepspeed.configuration import Configuration
from accel_deepspeed.configured_objects import check_schedule, optimizer_kind, realise


@pytest.fixture(autouse=True)
def quiet():
    """DeepSpeed's schedules complain of being asked for a rate before their first step, by themselves."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def configured(params=None, kind="AdamW", scheduler=None):
    config = {"zero_optimization": {"stage": 2}}
    if kind is not None:
        config["optimizer"] = {"type": kind, "params": params or {}}
    if scheduler is not None:
        config["scheduler"] = scheduler
    return Configuration.read(config)


def real(optimizer, *args, **options):
    realise(optimizer, configured(*args, **options), "cpu")
    return optimizer


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(net, optimizer, steps=3):
    for _ in range(steps):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach().clone()


def test_a_placeholder_is_an_optimizer_over_the_parameters():
    net = model()
    optimizer = DummyOptim(net.parameters(), lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    assert isinstance(optimizer, optim.Optimizer)
    assert optimizer.param_groups[0]["params"] == list(net.parameters())
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0.2, {"betas": (0.8, 0.9)})


def test_it_becomes_the_configured_optimizer_and_trains_as_that():
    net, same = model(), model()
    optimizer = DummyOptim(net.parameters(), lr=0.1, weight_decay=0.2)
    groups = optimizer.param_groups[0]
    real(optimizer, {"lr": "auto", "weight_decay": "auto", "betas": [0.8, 0.9], "eps": "auto"})
    assert type(optimizer) is optim.AdamW
    assert optimizer.param_groups[0] is groups
    reference = optim.AdamW(same.parameters(), lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    assert torch.equal(train(net, optimizer), train(same, reference))
    assert optimizer.defaults == reference.defaults
    copy.deepcopy(optimizer)


def test_it_becomes_real_once():
    optimizer = real(DummyOptim(model().parameters()), {"lr": 0.5})
    optimizer.param_groups[0]["lr"] = 0.25
    real(optimizer, {"lr": 0.5})
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_hooks_on_its_steps_stay():
    net, steps = model(), []
    optimizer = DummyOptim(net.parameters())
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    train(net, real(optimizer, {"lr": 0.5}), steps=2)
    assert steps == [1, 1]


def test_options_come_from_the_script_where_the_section_has_auto_or_nothing():
    def options(params, **given):
        group = real(DummyOptim(model().parameters(), **given), params).param_groups[0]
        return group["lr"], group["weight_decay"]

    assert options({"lr": "auto"}) == (0.001, 0.0)  # torch's AdamW by itself decays by 0.01
    assert options({"torch_adam": True}) == (0.001, 0.01)
    assert options({"lr": 0.5}) == (0.5, 0.0)
    assert options({}, lr=0.3, weight_decay=0.1) == (0.3, 0.1)
    assert options({"lr": 0.3}, lr=0.3) == (0.3, 0.0)


def test_a_group_keeps_the_options_that_it_brought():
    net = model()
    optimizer = DummyOptim([{"params": [net.weight], "weight_decay": 0.7}, {"params": [net.bias]}], lr=0.2)
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra], "lr": 0.9})
    real(optimizer, {"lr": "auto", "weight_decay": 0.1})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.7, 0.1, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.9]


@pytest.mark.parametrize(
    ("given", "section", "message"),
    [
        (
            {"lr": 0.1},
            {"params": {"lr": 0.2}},
            r"DummyOptim\(lr=0\.1\) was given, but .* 'optimizer.params.lr' with 0\.2. Write \"auto\"",
        ),
        ({"betas": (0.1, 0.2)}, {"params": {"betas": [0.1, 0.3]}}, r"DummyOptim\(betas=\(0\.1, 0\.2\)\) was given"),
        (
            {},
            {"kind": None},
            r"A DummyOptim was given, but .* no section 'optimizer'. Write \"optimizer\": {\"type\": \"AdamW\"",
        ),
        (
            {},
            {"params": {"bias_correction": False}},
            "'optimizer.params.bias_correction' is false, .*offload_optimizer='cpu'",
        ),
    ],
)
def test_contradictions_of_script_and_section_are_refused(given, section, message):
    with pytest.raises(ValueError, match=message):
        real(DummyOptim(model().parameters(), **given), **section)


def test_the_same_betas_as_a_tuple_and_as_a_list_do_not_contradict():
    optimizer = real(DummyOptim(model().parameters(), betas=(0.1, 0.2)), {"betas": [0.1, 0.2]})
    assert optimizer.param_groups[0]["betas"] == (0.1, 0.2)


def test_an_optimizer_of_the_script_beside_a_section_is_refused():
    with pytest.raises(
        ValueError, match=r"section 'optimizer' \(AdamW\), and the script prepares a SGD. .* DummyOptim"
    ):
        real(optim.SGD(model().parameters()))


def test_a_scheduler_over_a_placeholder_is_refused():
    optimizer = DummyOptim(model().parameters())
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        ValueError, match=r"A scheduler was made from a DummyOptim, .* lr_scheduler_callable=make_scheduler"
    ):
        real(optimizer, {"lr": 0.2})


@pytest.mark.parametrize(
    ("name", "params", "offloaded", "device", "kind", "options"),
    [
        ("Adam", {"lr": 1}, False, "cpu", "torch.optim.adamw.AdamW", {"lr": 1, "weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False}, False, "cpu", "torch.optim.adam.Adam", {"weight_decay": 0.0}),
        ("adamw", {"adam_w_mode": False, "torch_adam": True}, False, "cpu", "torch.optim.adamw.AdamW", {}),
        ("AdamW", {"torch_adam": True}, False, "gpu", "torch.optim.adamw.AdamW", {"fused": True}),
        ("AdamW", {"torch_adam": True, "foreach": True}, False, "gpu", "torch.optim.adamw.AdamW", {"foreach": True}),
        ("AdamW", {"torch_adam": True}, True, "gpu", "torch.optim.adamw.AdamW", {}),
        ("AdamW", {}, True, "gpu", "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", {"adamw_mode": True}),
        (
            "Adam",
            {"adam_w_mode": False},
            True,
            "cpu",
            "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
            {"adamw_mode": False},
        ),
        ("Adagrad", {"lr": 1}, False, "gpu", "torch.optim.adagrad.Adagrad", {"lr": 1}),
        ("Adagrad", {}, True, "gpu", "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad", {}),
        ("Lamb", {"lr": 1}, False, "gpu", "deepspeed.ops.lamb.fused_lamb.FusedLamb", {"lr": 1}),
        ("Lion", {}, False, "gpu", "deepspeed.ops.lion.fused_lion.FusedLion", {}),
        ("Lion", {}, True, "gpu", "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion", {}),
        ("SGD", {"momentum": 0.5}, False, "gpu", "torch.optim.sgd.SGD", {"momentum": 0.5}),
    ],
)
def test_a_name_stands_for_a_class(name, params, offloaded, device, kind, options):
    found, given = optimizer_kind(name, params, offloaded, device)
    assert f"{found.__module__}.{found.__qualname__}" == kind
    assert given == options


def test_it_does_not_step_before_it_is_real():
    net = model()
    with pytest.raises(RuntimeError, match=r"DummyOptim\.step\(\) was called, .*strategy=DeepSpeed\(config=\.\.\.\)"):
        DummyOptim(net.parameters()).step()


def test_one_that_was_prepared_before_it_became_real_trains_on():
    net, same = model(), model()
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(DummyOptim(net.parameters()))
    real(optimizer, {"lr": 0.1})
    net = accelerator.prepare(net)
    for _ in range(3):
        accelerator.backward(net(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
    expected = train(same, optim.AdamW(same.parameters(), lr=0.1, weight_decay=0.0))
    assert torch.equal(net.weight.detach(), expected)


WARMUP = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_type": "linear"},
}


def rates(scheduler, steps):
    found = []
    for _ in range(steps):
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_a_schedule_begins_with_its_optimizer():
    optimizer = DummyOptim(model().parameters(), lr=0.8)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    real(optimizer, {"lr": "auto"}, scheduler=WARMUP)
    assert rates(scheduler, 6) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.8)


def test_a_schedule_begins_at_once_if_its_optimizer_is_real_already():
    optimizer = real(DummyOptim(model().parameters(), lr=0.8), {"lr": "auto"}, scheduler=DECAY)
    scheduler = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
    assert rates(scheduler, 7) == pytest.approx([0.0, 0.4, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_an_optimizer_of_the_script_may_have_a_configured_schedule():
    optimizer = optim.SGD(model().parameters(), lr=0.8)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=2)
    real(optimizer, kind=None, scheduler=WARMUP)
    assert rates(scheduler, 3) == pytest.approx([0.0, 0.4, 0.8])


def test_a_schedule_may_come_from_a_function():
    optimizer = DummyOptim(model().parameters(), lr=0.8)
    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda real: optim.lr_scheduler.StepLR(real, 1, 0.5))
    real(optimizer, {"lr": "auto"})
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.4]
    assert scheduler.step_size == 1


def test_state_of_a_schedule_is_saved_and_restored():
    first, second = (
        DummyScheduler(real(DummyOptim(model().parameters()), scheduler=WARMUP), warmup_num_steps=4) for _ in "ab"
    )
    rates(first, 3)
    second.load_state_dict(first.state_dict())
    assert rates(second, 1) == rates(first, 1)


def test_groups_with_rates_of_their_own_are_warmed_up_to_them():
    net = model()
    optimizer = DummyOptim([{"params": [net.weight], "lr": 0.4}, {"params": [net.bias]}], lr=0.8)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=2)
    real(optimizer, {"lr": "auto"}, scheduler=WARMUP)
    rates(scheduler, 3)
    assert scheduler.get_last_lr() == pytest.approx([0.4, 0.8])


def test_no_warmup_is_one_step_of_it():
    scheduler = DummyScheduler(real(DummyOptim(model().parameters(), lr=0.8), {"lr": "auto"}, scheduler=WARMUP))
    assert scheduler.schedule.warmup_num_steps == 2  # the least that DeepSpeed's schedule has


@pytest.mark.parametrize(
    ("given", "section", "message"),
    [
        ({}, {}, r"A DummyScheduler was given, but .* no section 'scheduler'. Write one of the two"),
        ({"lr_scheduler_callable": id}, {"scheduler": WARMUP}, "a section 'scheduler', beside lr_scheduler_callable"),
        (
            {},
            {"scheduler": DECAY},
            r"\"auto\" for scheduler.params.total_num_steps, .* DummyScheduler\(optimizer, total_num_steps=",
        ),
        (
            {"total_num_steps": 3},
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}},
            r"DummyScheduler\(total_num_steps=3\) was given, but .* 'scheduler.params.total_num_steps' with 9",
        ),
    ],
)
def test_schedules_that_nobody_describes_or_two_do_are_refused(given, section, message):
    optimizer = real(DummyOptim(model().parameters()), **section)
    with pytest.raises(ValueError, match=message):
        DummyScheduler(optimizer, **given)


def test_a_length_that_a_schedule_does_not_take_is_left_out():
    optimizer = real(DummyOptim(model().parameters()), scheduler=WARMUP)
    assert not hasattr(DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=2).schedule, "total_num_steps")


def test_a_schedule_whose_optimizer_is_not_prepared_says_so():
    scheduler = DummyScheduler(DummyOptim(model().parameters()))
    with pytest.raises(
        RuntimeError, match="DummyScheduler stands for the schedule .* its optimizer is not prepared yet"
    ):
        scheduler.step()
    assert not hasattr(scheduler, "zero_grad")


def test_a_section_that_nothing_steps_by_is_refused_before_the_first_step():
    optimizer, configuration = DummyOptim(model().parameters()), configured(scheduler=WARMUP)
    realise(optimizer, configuration, "cpu")
    with pytest.raises(
        RuntimeError, match=r"section 'scheduler' \(WarmupLR\), and nothing steps it. Write .*DummyScheduler"
    ):
        check_schedule(optimizer, configuration)
    scheduler = DummyScheduler(optimizer)
    check_schedule(optimizer, configuration)
    assert scheduler.optimizer is optimizer
    check_schedule(optim.SGD(model().parameters()), configured(kind=None))


def test_the_core_steps_a_placeholder_of_a_schedule_once_per_step_of_the_optimizer():
    net = model()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = DummyOptim(net.parameters(), lr=0.8)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    real(optimizer, {"lr": "auto"}, scheduler=WARMUP)
    for _ in range(6):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 3)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert isinstance(scheduler, DummyScheduler)
    assert scheduler.get_last_lr() == pytest.approx([0.4])
