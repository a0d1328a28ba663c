"""DDP on two real gloo ranks: what synchronises when, clipping, orphans, unused parameters, options."""

from __future__ import annotations

import gc
import resource
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from together import Together
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from accel_core import (
    DDP,
    Accelerator,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    NotInstalledError,
    Precision,
    PrecisionPolicy,
    PrepareRequest,
    Strategy,
    hookimpl,
    place_model,
)
from accel_core.api.component import how_to_install
from accel_testing import RanksFailed, run_ranks

ON_TWO, ON_THREE = Together(2), Together(3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def own(x: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """This rank's part of a global batch."""
    return x.chunk(accelerator.num_processes)[accelerator.process_index]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def reference_gradients(x: torch.Tensor) -> list[torch.Tensor]:
    model = net()
    model(x).pow(2).mean().backward()
    return gradients(model)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    """Whether they are equal, bit by bit."""
    return torch.tensor(all(torch.equal(a, b) for a, b in zip(left, right, strict=True)))


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(left, right, strict=True)
    )


@ON_TWO
def synchronisation() -> dict[str, bool]:
    accelerator = Accelerator()
    x, found = rows(), {}
    reference = reference_gradients(x)
    model = accelerator.prepare(net())
    loss = lambda: model(own(x, accelerator)).pow(2).mean()

    accelerator.backward(loss())
    found["a backward synchronises"] = close(gradients(model), reference)

    model.zero_grad()
    with accelerator.no_sync():
        inside = loss()
    accelerator.backward(inside)
    found["a forward inside no_sync does not, wherever its backward runs"] = not close(gradients(model), reference)
    accelerator.backward(loss())
    twice = [2 * gradient for gradient in reference]
    found["the next forward outside synchronises what is pending"] = close(gradients(model), twice)

    model.zero_grad()
    with accelerator.no_sync(model):
        first, second = loss(), loss()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    found["trigger_sync_in_backward synchronises what is pending"] = close(gradients(model), twice)
    found["and leaves the model as it was"] = model.require_backward_grad_sync

    frozen = accelerator.prepare(net().requires_grad_(False))
    evaluated = accelerator.prepare_model(net(), evaluation_mode=True)
    with accelerator.no_sync(frozen), accelerator.trigger_sync_in_backward(evaluated):
        found["frozen and evaluated models are not wrapped, and fit in everywhere"] = (
            not hasattr(frozen, "module") and not hasattr(evaluated, "module") and bool(frozen(x).isfinite().all())
        )
    found["the wrapper has the name that users know"] = type(model).__name__ == "DistributedDataParallel"
    return found


def test_where_the_forward_ran_decides_whether_a_backward_synchronises() -> None:
    for found in ON_TWO.run(synchronisation):
        assert [name for name, holds in found.items() if not holds] == []


def train(steps: int, accumulation: int, order: str, options: dict[str, Any] | None = None) -> list[torch.Tensor]:
    handlers = [DistributedDataParallelKwargs(**options)] if options else None
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, kwargs_handlers=handlers)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if order == "together":
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    elif order == "scheduler, optimizer, model":
        scheduler, optimizer, model = accelerator.prepare(scheduler, optimizer, model)
    elif order == "one by one, optimizer first":
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
        scheduler = accelerator.prepare(scheduler)
    else:
        model = accelerator.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer, scheduler = accelerator.prepare(optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1)))
    rates, norms = [], []
    for step in range(steps):
        for micro in rows().roll(step, 0).chunk(accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(own(micro, accelerator)).pow(2).mean())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    weights = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    return [*weights, torch.tensor(rates), torch.stack(norms)]


ORDERS = ["together", "scheduler, optimizer, model", "one by one, optimizer first", "optimizer made after prepare"]


@ON_TWO
def every_order() -> dict[str, list[torch.Tensor]]:
    return {f"{order}, {accumulation}": train(3, accumulation, order) for order in ORDERS for accumulation in (1, 4)}


def test_any_order_of_prepare_trains_alike_on_one_process_and_on_two() -> None:
    """With the trace of learning rates; the norm is that of one process."""
    alone = every_order()
    reference = alone["together, 1"]
    for results in (alone, *ON_TWO.run(every_order)):
        for name, values in results.items():
            assert close(values, reference), name


@ON_TWO
def with_options() -> dict[str, list[torch.Tensor]]:
    choices: dict[str, dict[str, Any]] = {
        "static graph": {"static_graph": True},
        "bucket copies": {"gradient_as_bucket_view": False, "bucket_cap_mb": 1},
        "unused": {"find_unused_parameters": True},
        "fp16": {"comm_hook": "fp16"},
        "bf16": {"comm_hook": "bf16"},
        "power_sgd": {
            "comm_hook": "power_sgd",
            "comm_wrapper": "bf16",
            "comm_state_option": {"matrix_approximation_rank": 1},
        },
    }
    return {name: train(2, 2, "together", options) for name, options in choices.items()}


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_the_options_and_hooks_of_ddp_train() -> None:
    """DDP with communication hooks. The static graph also under accumulation from the first iteration."""
    exact = train(2, 2, "together")
    for results in ON_TWO.run(with_options):
        for name in ("static graph", "bucket copies", "unused"):
            assert close(results[name], exact), name
        for name in ("fp16", "bf16", "power_sgd"):
            assert torch.allclose(results[name][0], exact[0], atol=3e-2), name
            assert not torch.equal(results[name][0], exact[0]), name


@ON_TWO
def two_models() -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    generator, critic = accelerator.prepare(net(), nn.Sequential(nn.Linear(1, 1)))
    g_optimizer = accelerator.prepare(torch.optim.SGD(generator.parameters(), lr=0.1))
    c_optimizer = accelerator.prepare(torch.optim.SGD(critic.parameters(), lr=0.1))
    for micro in rows().chunk(4):
        x = own(micro, accelerator)
        with accelerator.accumulate(generator, critic):
            accelerator.backward(critic(generator(x).detach()).pow(2).mean())
            c_optimizer.step()
            c_optimizer.zero_grad()
            accelerator.backward(generator(x).pow(2).mean())
            g_optimizer.step()
            g_optimizer.zero_grad()
    return [parameter.detach().clone() for model in (generator, critic) for parameter in model.parameters()]


def test_two_models_and_optimizers_accumulate_in_one_loop() -> None:
    torch.manual_seed(0)
    first, second = ON_TWO.run(two_models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Averaging(Strategy):
    """A second way to train on many ranks: gradients are averaged one by one, after each parameter's own."""

    @hookimpl
    def prepare_model(self, model: nn.Module, request: PrepareRequest) -> nn.Module:  # type: ignore[override]
        place_model(model, request)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self.average)
        return model

    @staticmethod
    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Bf16(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


@ON_TWO
def gan() -> dict[str, Any]:
    under_ddp, by_hand = Accelerator(), Accelerator(strategy=Averaging(), mixed_precision=Bf16())
    torch.manual_seed(under_ddp.process_index)  # each rank starts elsewhere
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    critic.register_forward_hook(lambda model, args, output: dtypes.append(output.dtype))
    dtypes: list[torch.dtype] = []
    generator, g_optimizer = under_ddp.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    critic, c_optimizer = by_hand.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    for _ in range(2):
        noise, real = torch.randn(4, 3), torch.randn(4, 3)
        by_hand.backward(critic(generator(noise).detach()).mean() - critic(real).mean())
        c_optimizer.step()
        c_optimizer.zero_grad()
        critic.requires_grad_(False)
        under_ddp.backward(-critic(generator(noise)).mean())
        critic.requires_grad_(True)
        g_optimizer.step()
        g_optimizer.zero_grad()
    weights = [parameter.detach().clone() for model in (generator, critic) for parameter in model.parameters()]
    return {"weights": weights, "dtypes": set(dtypes), "wrapped": hasattr(generator, "module")}


def test_a_gan_trains_with_two_strategies_and_two_precisions_in_one_process() -> None:
    first, second = ON_TWO.run(gan)
    assert first["dtypes"] == {torch.bfloat16}
    assert first["wrapped"]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


def runs(count: int) -> tuple[int, float]:
    """After some runs, what more of them leave behind: objects, and MiB of memory."""

    def run() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer = accelerator.prepare(module := net(), torch.optim.SGD(module.parameters(), lr=0.1))
        for micro in rows(4).chunk(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(micro).mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.gather(torch.ones(2))

    def state() -> tuple[int, float]:
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    anchor = Accelerator()  # keeps the group
    for _ in range(5):
        run()
    objects, memory = state()
    for _ in range(count):
        run()
    after = state()
    anchor.end_training()
    return after[0] - objects, after[1] - memory


def test_fifty_runs_on_two_ranks_leave_nothing_behind() -> None:
    """Object counts and memory stay flat."""
    for objects, memory in run_ranks(runs, 2, 50):
        assert objects < 50
        assert memory < 10


@ON_TWO
def norms() -> dict[str, torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = net()
    model[0].requires_grad_(False)
    model = accelerator.prepare(model)
    path = "module" if hasattr(model, "module") else ""
    x = rows()
    found: dict[str, torch.Tensor] = {}
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(own(x, accelerator)).pow(2).mean())
            if not accelerator.sync_gradients:
                before = gradients(model)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
                accelerator.clip_grad_value_(model.parameters(), 1e-6)
                found["clipping in an open window touches nothing"] = same(before, gradients(model))
                expected = torch.cat([gradient.flatten() for gradient in before]).norm()
                found["the norm of an open window is that of this rank"] = torch.isclose(norm, expected)
                model.get_submodule(path)[2].bias.grad.fill_(torch.inf)
                accelerator.clip_grad_norm_(model.parameters(), 1e-6)
                found["also of gradients that are not finite"] = same(before[:-1], gradients(model)[:-1])
                model.get_submodule(path)[2].bias.grad.copy_(before[-1])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found["list"] = accelerator.clip_grad_norm_(parameters, 1e9)
    found["generator with a frozen backbone"] = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    found["subset"] = accelerator.clip_grad_norm_(parameters[:1], 1e9)
    found["one parameter"] = accelerator.clip_grad_norm_(parameters[0], 1e9)
    found["infinity norm"] = accelerator.clip_grad_norm_(parameters, 1e9, norm_type=float("inf"))
    accelerator.clip_grad_value_(parameters, 0.01)
    found["largest after clip_grad_value_"] = torch.stack([g.abs().max() for g in gradients(model)]).max()
    return found


def test_the_norm_is_that_of_one_process() -> None:
    alone = norms()
    for found in ON_TWO.run(norms):
        assert [name for name, value in found.items() if value.dtype is torch.bool and not value] == []
        for name, norm in found.items():
            torch.testing.assert_close(norm, alone[name], msg=name)


@ON_TWO
def orphan() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    accelerator.prepare(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as raised:
        accelerator.backward(model(rows(2)).mean())
    return str(raised.value)


def test_an_optimizer_of_another_model_is_refused_on_every_rank() -> None:
    for message in ON_TWO.run(orphan):
        assert "SGD holds parameters that belong to no prepared model: param_groups[0]['params'][0] (4, 3)" in message
        assert "Pass their model to prepare()" in message


@ON_TWO
def orphan_that_steps() -> str:
    accelerator = Accelerator()
    model = net()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows(2)).mean().backward()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_an_optimizer_whose_model_is_not_prepared_is_refused_at_its_step() -> None:
    for message in ON_TWO.run(orphan_that_steps):
        assert "Pass their model to prepare()" in message


@ON_TWO
def late_orphan() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(rows(2)).mean())
    optimizer.step()
    optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters())})
    with pytest.raises(RuntimeError) as raised:
        accelerator.backward(model(rows(2)).mean())
    return str(raised.value)


def test_a_group_that_is_added_later_is_checked_too() -> None:
    assert all("param_groups[1]['params'][0] (1, 1)" in message for message in ON_TWO.run(late_orphan))


@ON_TWO
def closing_without_backward() -> str:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for index, micro in enumerate(rows(4).chunk(2)):
        with accelerator.accumulate(model):
            loss = model(own(micro, accelerator)).mean()
            if index == 0:
                accelerator.backward(loss)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    optimizer.zero_grad()
    return str(raised.value)


def test_a_step_on_gradients_that_stayed_local_is_refused() -> None:
    """Law 8: parameters would drift apart in silence."""
    for message in ON_TWO.run(closing_without_backward):
        assert "closes this window of 2 ran no backward" in message
        assert "Leave the step out together with the backward" in message


def thaw() -> str:
    """A frozen model beside a trained one, held by one optimizer, is unfrozen after a step."""
    accelerator = Accelerator()
    backbone, head = net().requires_grad_(False), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    accelerator.prepare(backbone, trained := accelerator.prepare(head), optimizer)

    def step() -> None:
        accelerator.backward(trained(backbone(own(rows(), accelerator))).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    backbone.requires_grad_(True)
    before = [parameter.detach().clone() for parameter in (*backbone.parameters(), *head.parameters())]
    try:
        step()
    except RuntimeError as error:
        assert all(map(torch.equal, before, (*backbone.parameters(), *head.parameters())))
        return str(error)
    return "stepped"


ON_TWO.add(thaw)


def test_a_model_that_was_frozen_when_it_was_prepared_is_not_trained_apart() -> None:
    """Law 8: there is no wrapper that would average its gradients. Alone, there is nothing to average."""
    assert thaw() == "stepped"
    for message in ON_TWO.run(thaw):
        assert "SGD trains parameters that were unfrozen after prepare(): 0.weight of Sequential" in message
        assert "Unfreeze before prepare(); or call accelerator.free_memory()" in message


def wrappers_again() -> dict[str, Any]:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    accelerator.free_memory()
    again = accelerator.prepare(model)
    found = {
        "names": sorted(accelerator.get_state_dict(again)),
        "class": type(accelerator.unwrap_model(again)).__name__,
    }
    unused = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    with (
        pytest.raises(
            ValueError, match="called under DDP with find_unused_parameters=True.* Run the last forward outside"
        ),
        unused.trigger_sync_in_backward(unused.prepare(net())),
    ):
        pass
    unused.end_training()
    accelerator.end_training()
    with pytest.raises(
        RuntimeError, match=r"called after its process group had ended .*accelerator.unwrap_model\(model\)"
    ):
        again(rows(2))
    return found


def precision_inside_a_wrapper() -> float:
    """What the model inside a wrapper computes, prepared once, freed, and prepared again as the wrapper."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inner = nn.Linear(1, 1, bias=False)
    nn.init.constant_(inner.weight, 1 + 2**-10)  # 1 in bfloat16
    wrapper = accelerator.prepare(inner)
    accelerator.free_memory()
    accelerator.prepare(wrapper)
    return inner(torch.ones(1, 1)).item()


def test_the_model_inside_a_wrapper_that_is_prepared_again_has_the_precision() -> None:
    assert run_ranks(precision_inside_a_wrapper, 2) == [1.0, 1.0]


def test_a_wrapper_that_is_prepared_again_keeps_the_users_names() -> None:
    """And what a wrapper says once its group has ended."""
    for found in run_ranks(wrappers_again, 2):
        assert found == {"names": ["0.bias", "0.weight", "2.bias", "2.weight"], "class": "Sequential"}


@ON_TWO
def named_orphan() -> str:
    accelerator = Accelerator()
    accelerator.prepare(net())
    optimizer = accelerator.prepare(torch.optim.SGD(net().named_parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as raised:
        accelerator.forward_backward(net(), [rows(2)], lambda output, batch: (output.sum(), 1))
    del optimizer
    return str(raised.value)


def test_orphans_are_called_by_their_names_where_the_optimizer_knows_them() -> None:
    for message in ON_TWO.run(named_orphan):
        assert "0.weight (4, 3), 0.bias (4,), 2.weight (1, 4)" in message


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@ON_TWO
def unused() -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(Partial())
    accelerator.backward(model(rows(2)).mean())
    with pytest.raises(RuntimeError) as raised:
        model(rows(2))
    return str(raised.value)


def test_unused_parameters_are_named_with_the_option_to_set() -> None:
    for message in ON_TWO.run(unused):
        assert "2 parameters took no part in the loss" in message
        assert "spare.weight, spare.bias" in message
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in message


@ON_TWO
def other_errors_of_a_forward() -> str:
    model = Accelerator().prepare(net())
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 7))
    return str(raised.value)


def test_other_errors_of_a_forward_pass_through() -> None:
    assert all("shapes cannot be multiplied" in message for message in ON_TWO.run(other_errors_of_a_forward))


@ON_TWO
def refusals() -> dict[str, str]:
    found = {}
    spread = nn.Sequential(nn.Linear(1, 1))
    spread[0].hf_device_map = {"a": 0, "b": 1}

    class Odd(Precision):
        policy = PrecisionPolicy(reduce=torch.float64)

    for name, attempt in {
        "single": lambda: Accelerator(strategy="single"),
        "device map": lambda: Accelerator().prepare(spread),
        "reduce dtype": lambda: Accelerator(mixed_precision=Odd()).prepare(net()),
        "compressed": lambda: Accelerator(mixed_precision=Narrow(), strategy=DDP(comm_hook="bf16")).prepare(net()),
        "power_sgd": lambda: Accelerator(mixed_precision=Narrow(), strategy=DDP(comm_hook="power_sgd")).prepare(
            net().bfloat16()
        ),
        "timeout": lambda: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))]),
    }.items():
        try:
            attempt()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    """A device map, or a policy that the strategy cannot honour, raises."""
    for found in ON_TWO.run(refusals):
        assert "started 2 processes, which would train 2 separate models" in found["single"]
        assert (
            "is spread over several devices by its hf_device_map, and 2 processes were started" in found["device map"]
        )
        assert "asks for gradients that travel as torch.float64, but DDP has comm_hook='no'" in found["reduce dtype"]
        assert "travel as torch.float32, but DDP has comm_hook='bf16'" in found["compressed"]
        assert "travel as torch.float32, but DDP has comm_hook='power_sgd'" in found["power_sgd"]
        assert "WorldError" in found["timeout"]


def loader_without_a_plugin() -> str:
    from accel_core.contract.loader_progress import Feed
    from accel_core.contract.strategy import Shard
    from accel_core.facade.default_hooks import CoreDefaults

    with pytest.raises(NotInstalledError) as raised:
        CoreDefaults().prepare_loader(torch.utils.data.DataLoader(range(4)), Shard(0, 2), Feed(), None)  # type: ignore[arg-type]
    return str(raised.value)


def test_a_loader_without_a_loader_plugin_is_refused_in_a_larger_world() -> None:
    message = loader_without_a_plugin()
    assert f"all of them would read the same batches. {how_to_install('accel-data')}." in message


def a_rank_fails() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    if accelerator.process_index == 1:
        raise ValueError("bad sample 17")
    accelerator.backward(model(rows(2)).mean())


def test_the_first_cause_stands_in_the_failure() -> None:
    with pytest.raises(RanksFailed, match="bad sample 17"):
        run_ranks(a_rank_fails, 2)


def timeouts() -> list[timedelta]:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    model = accelerator.prepare(net())
    group = model.process_group
    return [accelerator._world.timeout, group._get_backend(torch.device("cpu")).options._timeout]


def test_the_timeout_asked_for_is_that_of_the_group_that_trains() -> None:
    for found in run_ranks(timeouts, 2):
        assert found == [timedelta(seconds=77)] * 2


@ON_TWO
def world_under_cpu() -> tuple[int, str, bool]:
    accelerator = Accelerator(cpu=True)
    return accelerator.num_processes, accelerator.device.type, accelerator.use_distributed


def test_cpu_chooses_the_device_and_not_the_number_of_processes() -> None:
    assert ON_TWO.run(world_under_cpu) == [(2, "cpu", True)] * 2


class Narrow(Precision):
    """Parameters as they are given, and gradients that travel in float32."""

    policy = PrecisionPolicy(reduce=torch.float32)


def row_of(rank: int) -> torch.Tensor:
    return torch.randn(1, 4096, generator=torch.Generator().manual_seed(rank))


class TwoDtypes(nn.Module):
    """A layer of bfloat16 beside one of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4096, 1, bias=False, dtype=torch.bfloat16), nn.Linear(4096, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(x.bfloat16()).float() + self.wide(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "unused": {"gradient_as_bucket_view": False, "find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@ON_THREE
def travelled() -> dict[str, list[torch.Tensor]]:
    """By options: the gradients after one backward, and those of two more."""
    found = {}
    for name, options in OPTIONS.items():
        accelerator = Accelerator(mixed_precision=Narrow(), strategy=DDP(**options))
        model = accelerator.prepare(TwoDtypes())
        x = row_of(accelerator.process_index)
        accelerator.backward(model(x).sum())
        once = gradients(model)
        model.zero_grad()
        with accelerator.no_sync(model):
            accelerator.backward(model(x).sum())
        accelerator.backward(model(x).sum())
        found[name] = [*once, *gradients(model)]
        accelerator.free_memory()
    return found


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", OPTIONS)
def test_narrow_gradients_travel_in_float32_where_the_precision_asks_for_it(options: str) -> None:
    """The mean is that of float32, rounded once; on two ranks it is so in bfloat16 too."""
    wide = [row_of(rank) for rank in range(3)]
    narrow = [row.bfloat16().float() for row in wide]
    for found in ON_THREE.run(travelled):
        once, once_wide, twice, twice_wide = found[options]
        assert once.dtype is twice.dtype is torch.bfloat16
        assert torch.equal(once, (sum(narrow) / 3).bfloat16())
        assert torch.equal(twice, (sum(narrow) * 2 / 3).bfloat16())
        torch.testing.assert_close(once_wide, sum(wide) / 3)
        torch.testing.assert_close(twice_wide, sum(wide) * 2 / 3)


class LowCompute(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, reduce=torch.bfloat16, output=torch.float32)


@ON_TWO
def policy_under_ddp() -> list[torch.dtype]:
    accelerator = Accelerator(mixed_precision=LowCompute())
    seen: list[torch.dtype] = []
    module = net()
    module.register_forward_hook(lambda model, args, output: seen.append(output.dtype))
    model = accelerator.prepare(module)
    output = model(rows(2))
    accelerator.backward(output.mean())
    return [*seen, output.dtype, gradients(model)[0].dtype]


def test_a_policy_holds_under_ddp() -> None:
    for dtypes in ON_TWO.run(policy_under_ddp):
        assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


@ON_TWO
def compiled() -> tuple[bool, list[torch.Tensor]]:
    accelerator = Accelerator(dynamo_backend="aot_eager")
    model = accelerator.prepare(net())
    accelerator.backward(model(own(rows(), accelerator)).pow(2).mean())
    names = accelerator.get_state_dict(model)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0 and "0.weight" in names, gradients(model)


def test_compiled_models_train_under_ddp() -> None:
    reference = reference_gradients(rows())
    for was_compiled, found in ON_TWO.run(compiled):
        assert was_compiled
        assert close(found, reference)


def lives() -> list[bool]:
    gone = []
    for _ in range(3):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        module = net()
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for micro in rows(4).chunk(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(micro).mean())
                optimizer.step()
                optimizer.zero_grad()
        references = [weakref.ref(each) for each in (accelerator, module, model, optimizer)]
        del accelerator, module, model, optimizer, micro
        gc.collect()
        gone += [reference() is None for reference in references]
    gone.append(dist.is_initialized())
    accelerator = Accelerator()
    other = Accelerator()
    accelerator.end_training()
    gone.append(dist.is_initialized())  # somebody else still lives
    other.end_training()
    gone.append(not dist.is_initialized())
    return gone


def test_everything_dies_with_its_last_reference_and_the_group_with_its_last_user() -> None:
    """Until `end_training`."""
    for gone in run_ranks(lives, 2):
        assert all(gone), gone


def test_an_object_passed_as_strategy_is_used_as_it_is() -> None:
    assert ON_TWO.run(object_strategy) == [3.0, 3.0]


def saves(folder: str) -> list[str]:
    accelerator = Accelerator()
    model = accelerator.prepare(net())
    accelerator.save_model(model, folder)
    return sorted(accelerator.get_state_dict(model, unwrap=False))


def test_saved_weights_have_the_names_of_the_users_model(tmp_path: Path) -> None:
    for wrapped in run_ranks(saves, 2, str(tmp_path)):
        assert wrapped == ["module.0.bias", "module.0.weight", "module.2.bias", "module.2.weight"]
    loaded = load_file(tmp_path / "model.safetensors")
    model = net()
    model.load_state_dict(loaded)
    assert all(torch.equal(loaded[name], value) for name, value in net().state_dict().items())


@ON_TWO
def default_buckets() -> tuple[bool, bool]:
    model = Accelerator().prepare(net())
    return model.bucket_bytes_cap_default, model.gradient_as_bucket_view


def test_the_first_bucket_is_small_and_gradients_are_kept_once() -> None:
    assert ON_TWO.run(default_buckets) == [(True, True)] * 2


@ON_TWO
def object_strategy() -> float:
    model = Accelerator(strategy=DDP(bucket_cap_mb=3)).prepare(net())
    return model.bucket_bytes_cap / 2**20
