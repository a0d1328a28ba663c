"""The object that the user holds, in one process: arguments, preparing, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import (
    DDP,
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    Layout,
    NotInstalledError,
    PluginError,
    Precision,
    PrecisionPolicy,
    Shard,
    Single,
    World,
    WorldError,
    build,
    hookimpl,
)
from accel_core.api.component import how_to_install
from accel_core.plugins import offers


def pieces() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Listens:
    @hookimpl
    def finish(self) -> None: ...


class Halves(Single):
    """Says that it shares the data with somebody who is not there."""

    @hookimpl
    def layout(self, world: World) -> Layout:
        return Layout(Shard(0, 2))


@dataclasses.dataclass
class _HalvedKwargs(KwargsHandler):
    by: float = 2.0


@dataclasses.dataclass
class _OtherKwargs(KwargsHandler):
    by: float = 3.0


class _Halved(Precision):
    handlers = (_HalvedKwargs, _OtherKwargs)


class LowCompute(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


def test_the_environment_serves_what_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp32")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator()
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.mixed_precision == "fp32"
    assert "ACCELERATE_MIXED_PRECISION" in str(accelerator.explain())
    assert Accelerator(gradient_accumulation_steps=1).gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
            ValueError,
            "gradient_accumulation_steps=2 and gradient_accumulation_plugin=.* were both given.* leave the other out",
        ),
        ({"gradient_accumulation_steps": 0}, ValueError, r"num_steps=0\): expected an integer of at le"),
        ({"gradient_accumulation_steps": True}, ValueError, r"num_steps=True\): expected an integer"),
        ({"mixed_precision": 16}, TypeError, "mixed_precision=16 .argument. gives a int, expected a name such as 'no'"),
        ({"mixed_precision": "bf17"}, PluginError, "'bf17' was asked for.*"),
        (
            {"strategy": "megatron_lm"},
            PluginError,
            "'megatron_lm' was asked for.*\nType 'megatron' if that was meant",
        ),
        (
            {"mixed_precision": _Halved(), "kwargs_handlers": [_HalvedKwargs()]},
            ValueError,
            r"mixed_precision=_Halved\(...\) and kwargs_handlers=\[_HalvedKwargs\(...\)\] were both given",
        ),
        (
            {"mixed_precision": _Halved(), "kwargs_handlers": [_HalvedKwargs(), _OtherKwargs()]},
            ValueError,
            r"kwargs_handlers has _HalvedKwargs\(...\) and _OtherKwargs\(...\), and each of them configures mixed_precision=",
        ),
        ({"strategy": "dpp"}, PluginError, "'dpp' was asked for.*\nType 'ddp' if that was meant"),
        ({"strategy": 7}, TypeError, "strategy=7 .argument. gives a int, expected a name such as 'single'"),
        ({"strategy": Single}, TypeError, "The class .*Single was passed as strategy; an object of it is needed"),
        ({"strategy": "ddp"}, WorldError, "this process is alone .* Start the script with `torchrun"),
        ({"fsdp_plugin": 3}, TypeError, "fsdp_plugin=3 is a int, expected a strategy object, such as DDP"),
        ({"my_plugin": DDP(), "strategy": "single"}, ValueError, "were both given, and one run has one strategy"),
        (
            {"log_with": 7},
            TypeError,
            "log_with gives a int, expected trackers: names of installed ones, 'all', or accel_core.Tracker",
        ),
        ({"mixed_pecision": "no"}, TypeError, "'mixed_pecision' that nothing installed takes. Did you mean 'mixed_pr"),
        ({"zzz": 1}, TypeError, r"'zzz' that nothing installed takes\.$"),
        ({"dynamo_backend": "foo"}, ValueError, "dynamo_backend='foo' .argument. is not a backend .* Known: .*eager"),
        ({"kwargs_handlers": [3]}, TypeError, "kwargs_handlers holds a int, expected objects such as"),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            ValueError,
            "kwargs_handlers holds two AutocastKwargs. Put all options into one",
        ),
        (
            {"strategy": DDP(), "kwargs_handlers": [DistributedDataParallelKwargs()]},
            ValueError,
            r"strategy=DDP\(...\) and kwargs_handlers=\[DistributedDataParallelKwargs",
        ),
        ({"plugins": [object()]}, PluginError, "implements no hook"),
        ({"plugins": Listens()}, TypeError, r"plugins=<.*> is a Listens: expected a list, e.g. plugins=\[...\]"),
        ({"kwargs_handlers": AutocastKwargs()}, TypeError, "kwargs_handlers=.* is a AutocastKwargs: expected a list"),
        ({"cpu": "no"}, TypeError, "cpu='no' is a str: expected True or False"),
        ({"split_batches": "no"}, TypeError, "split_batches='no' is a str: expected True or False"),
        ({"loader": "shraded"}, PluginError, "The loader 'shraded' was asked for"),
        (
            {"strategy": Halves()},
            PluginError,
            "'Halves' shares the data out to 2 .* has 1 .the whole world.*data_group",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        Accelerator(**arguments)


@pytest.mark.parametrize(
    ("option", "name", "package"), [("mixed_precision", "fp16", "accel-precision"), ("strategy", "fsdp", "accel-fsdp")]
)
def test_what_is_not_installed_never_becomes_something_else_without_a_word(
    option: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [each for each in offers.list_offers() if each.distribution != package]
    monkeypatch.setattr(build, "list_offers", lambda: installed)
    with pytest.raises(NotInstalledError, match=how_to_install(package)):
        Accelerator(**{option: name}, cpu=True)  # type: ignore[arg-type]


def test_an_option_without_effect_warns_once_and_names_itself() -> None:
    """A script written for several processes runs in one."""
    with pytest.warns(
        UserWarning, match="which nothing that is active takes: 1 process.* 'single'.* no effect"
    ) as warned:
        Accelerator(
            kwargs_handlers=[
                DistributedDataParallelKwargs(bucket_cap_mb=50),
                InitProcessGroupKwargs(timeout=timedelta(seconds=9)),
                AutocastKwargs(cache_enabled=False),
            ]
        )
    assert [re.findall(r"has a (\w+)", str(warning.message)) for warning in warned] == [
        ["DistributedDataParallelKwargs"],
        ["InitProcessGroupKwargs"],
        ["AutocastKwargs"],
    ]
    assert {warning.filename for warning in warned} == {__file__}


def test_the_options_of_ddp_are_those_of_its_handler() -> None:
    """Law 10: one declaration, and one older name for it."""
    constructor = inspect.signature(DDP).parameters
    handler = {field.name: field for field in dataclasses.fields(DistributedDataParallelKwargs)}
    assert list(constructor) == list(handler)
    for name, parameter in constructor.items():
        if name != "comm_state_option":  # None there, an empty dict here
            assert parameter.default == handler[name].default


def test_explain_shows_where_every_option_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 2."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    settings = {setting.option: setting for setting in Accelerator(cpu=True).explain().settings}
    assert settings["gradient_accumulation_steps"][1:] == ("4", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    assert settings["cpu"][1:] == ("True", "argument")
    assert settings["dynamo_backend"][1:] == ("no", "default")
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in str(Accelerator().explain())


class MyLoader:
    @hookimpl
    def prepare_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        loader.prepared_by_me = True  # type: ignore[attr-defined]
        return loader


def test_a_loader_component_of_ones_own_takes_the_place_of_the_default() -> None:
    """A third party's loader beside accel-data."""
    accelerator = Accelerator(loader=MyLoader())
    assert accelerator.prepare(DataLoader([1])).prepared_by_me
    assert accelerator.explain().owners["prepare_loader"].startswith("loader 'MyLoader'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_wrapper": "fp16"}, r"configures PowerSGD, but comm_hook is 'no'. Add comm_hook='power_sgd'"),
        ({"comm_hook": "fp16", "comm_state_option": {"x": 1}}, "configures PowerSGD, but comm_hook is 'fp16'"),
    ],
)
def test_contradictory_options_of_ddp_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDP(**options)


def test_steps_of_the_accumulation_plugin_are_checked_where_it_is_built() -> None:
    with pytest.raises(
        ValueError, match=r"GradientAccumulationPlugin\(num_steps=0\): expected an integer of at least 1"
    ):
        GradientAccumulationPlugin(num_steps=0)


def test_a_policy_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PrecisionPolicy\(compute=torch.int8\): expected a floating torch.dtype"):
        PrecisionPolicy(compute=torch.int8)


def test_a_handler_gives_only_what_was_set() -> None:
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {"backend": "gloo"}
    assert DistributedDataParallelKwargs().to_kwargs() == {}


def test_one_object_comes_back_alone_and_several_in_their_order() -> None:
    accelerator = Accelerator()
    model, optimizer = pieces()
    assert accelerator.prepare(model) is model
    tokenizer = object()
    assert accelerator.prepare(optimizer, None, tokenizer, model) == (optimizer, None, tokenizer, model)


@pytest.mark.parametrize("container", [list, tuple, lambda objects: dict(enumerate(objects))])
def test_a_container_of_models_is_refused(container: Any) -> None:
    """Never silently half prepared."""
    model, optimizer = pieces()
    with pytest.raises(TypeError, match=r"was given a \w+ that holds a Linear. .*: prepare\(\*objects\)"):
        Accelerator().prepare(container([model, optimizer]))


def test_a_wrapper_around_an_optimizer_is_refused() -> None:
    """Neither its steps nor its zero_grad could be held back."""

    class WarmUp:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TypeError, match="a WarmUp, which wraps an optimizer: .* Prepare the optimizer inside it"):
        Accelerator().prepare(WarmUp(pieces()[1]))


def test_zipped_loaders_do_not_pair_every_sample_with_itself() -> None:
    accelerator = Accelerator()
    left, right = accelerator.prepare(*(DataLoader(range(64), 8, shuffle=True) for _ in range(2)))
    assert any(not torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_bare_tensor_that_would_be_trained_is_refused() -> None:
    with pytest.raises(TypeError, match="a tensor that requires a gradient, .* Make it a parameter"):
        Accelerator().prepare(torch.zeros(2, requires_grad=True))


def test_device_placement_has_one_entry_per_object() -> None:
    accelerator = Accelerator()
    model, optimizer = pieces()
    with pytest.raises(ValueError, match="given 2 objects and device_placement with 1 entries. Give one True or False"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert accelerator.prepare(model, optimizer, device_placement=[True, False]) == (model, optimizer)


class PlacesModels(Single):
    places_models = True


def test_device_placement_is_refused_where_the_strategy_places_models() -> None:
    with pytest.raises(ValueError, match="the chosen strategy places models by itself. Leave device_placement out"):
        Accelerator(strategy=PlacesModels()).prepare(nn.Linear(1, 1), device_placement=[True])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.prepare_model(3), r"prepare_model\(\) was given a int, expected a torch.nn.Module"),
        (
            lambda a: a.prepare_optimizer(nn.Linear(1, 1)),
            r"prepare_optimizer\(\) was given a Linear, expected a torch.optim",
        ),
        (
            lambda a: a.prepare_data_loader([1]),
            r"prepare_data_loader\(\) was given a list, expected a torch.utils.data",
        ),
        (
            lambda a: a.prepare_scheduler(object()),
            r"prepare_scheduler\(\) was given a object, expected an LR scheduler",
        ),
        (lambda a: a.prepare(None, device_placement=True), "device_placement=True is a bool: expected a list"),
        (lambda a: a.save_model(3, "x"), r"save_model\(\) was given a int, expected a torch.nn.Module"),
    ],
)
def test_objects_of_another_kind_are_refused(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Accelerator())


def test_a_model_that_was_prepared_for_evaluation_is_not_trained_by_accident() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
    with pytest.raises(
        ValueError, match="Linear was prepared with evaluation_mode=True.* Prepare it for training first"
    ):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_an_object_is_saved_once(tmp_path: Path) -> None:
    Accelerator().save({"weight": torch.ones(2)}, tmp_path / "object.bin")
    assert torch.load(tmp_path / "object.bin", weights_only=True)["weight"].tolist() == [1.0, 1.0]


def test_preparing_again_returns_the_same() -> None:
    accelerator = Accelerator()
    model, optimizer = pieces()
    loader = DataLoader(range(4))
    first = accelerator.prepare(model, optimizer, loader)
    assert all(one is other for one, other in zip(first, accelerator.prepare(*first), strict=True))


def test_an_optimizer_of_another_model_is_allowed_in_one_process() -> None:
    accelerator = Accelerator()
    model, optimizer = pieces()
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


def test_what_is_no_scalar_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a loss of shape \(3,\), expected a scalar, e.g. loss.mean"):
        Accelerator().backward(torch.ones(3, requires_grad=True))


def test_backward_takes_what_torch_takes() -> None:
    weight = torch.ones(3, requires_grad=True)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    accelerator.backward(weight * 2, gradient=torch.ones(3))
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0, 1.0]
    accelerator.backward((weight * 2).sum().reshape(1), retain_graph=True)
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_accumulate_inside_accumulate_is_refused() -> None:
    accelerator = Accelerator()
    with (
        pytest.raises(RuntimeError, match=r"inside another accumulate\(\) .* accumulate\(generator, discriminator\)"),
        accelerator.accumulate(),
        accelerator.accumulate(),
    ):
        pass


def test_outputs_of_a_low_precision_model_are_in_the_dtype_of_the_policy() -> None:
    accelerator = Accelerator(mixed_precision=LowCompute())
    model, _ = pieces()
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1, 2)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_integers_are_never_cast() -> None:

    class Both(Precision):
        policy = PrecisionPolicy(input=torch.bfloat16, output=torch.float32)

    class Echo(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            assert batch["x"].dtype is torch.bfloat16
            return batch

    output = Accelerator(mixed_precision=Both()).prepare(Echo())({"x": torch.ones(1), "ids": torch.ones(1).long()})
    assert (output["x"].dtype, output["ids"].dtype) == (torch.float32, torch.int64)


def test_full_precision_leaves_the_model_alone() -> None:
    """Law 12."""
    accelerator = Accelerator()
    model, _ = pieces()
    assert type(accelerator.prepare(model)) is nn.Linear
    with accelerator.autocast(cache_enabled=True):
        assert not torch.is_autocast_enabled("cpu")


def test_unwrapping_without_the_fp32_wrapper_gives_the_original_class() -> None:
    accelerator = Accelerator(mixed_precision=LowCompute())
    model, _ = pieces()
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    assert type(model) is not nn.Linear
    assert type(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)) is nn.Linear
    assert accelerator.get_state_dict(prepared).keys() == {"weight", "bias"}


@pytest.mark.parametrize("evaluation", [False, True])
def test_compiled_models_unwrap_and_save_without_traces(evaluation: bool) -> None:
    accelerator = Accelerator(dynamo_backend="EAGER")
    model, _ = pieces()
    prepared = accelerator.prepare_model(model, evaluation_mode=evaluation)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prepared(torch.ones(1, 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert accelerator.unwrap_model(prepared) is model
    assert not any("_orig_mod" in name for name in accelerator.get_state_dict(prepared))
    assert accelerator.unwrap_model(torch.compile(prepared, backend="eager")) is model  # type: ignore[arg-type]


def test_free_memory_undresses_everything() -> None:
    accelerator = Accelerator(mixed_precision=LowCompute(), gradient_accumulation_steps=4)
    model, optimizer = pieces()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    assert accelerator.free_memory(model, optimizer, scheduler) == [None, None, None]
    assert accelerator.step == 0
    assert accelerator.sync_gradients
    assert type(model) is nn.Linear
    assert type(scheduler) is torch.optim.lr_scheduler.LambdaLR
    assert "_accel_gate" not in vars(optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_a_device_map_with_several_places_is_seen() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": 0, "b": "cpu"}
    assert accelerator.verify_device_map(model)
    assert accelerator.prepare(model) is model


def test_a_rescaled_window_counts_shared_parameters_once_and_unprepared_ones_too() -> None:
    """A loop left in the middle of a window, and a loader shorter than the rest of it."""
    shared, loose = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    first, second = accelerator.prepare(nn.Sequential(shared), nn.Sequential(shared))
    optimizer = accelerator.prepare(torch.optim.SGD(loose.parameters(), lr=1.0))
    longer, shorter = accelerator.prepare(DataLoader(torch.ones(9, 1)), DataLoader(torch.ones(1, 1)))
    for loader in (longer, shorter):
        for x in loader:
            with accelerator.accumulate(first, second):
                accelerator.backward(first(x).sum() + loose(x).sum())
            break
    assert accelerator.sync_gradients
    assert shared.weight.grad == 1.0
    assert loose.weight.grad == 1.0
    optimizer.step()


def test_an_accelerator_copies_as_itself_and_says_why_it_does_not_pickle() -> None:
    accelerator = Accelerator()
    assert copy.deepcopy({"accelerator": accelerator})["accelerator"] is accelerator
    with pytest.raises(TypeError, match="a handle on running processes. Build one in the new process"):
        pickle.dumps(accelerator)


def test_a_prepared_model_pickles_and_copies() -> None:
    """The copy keeps the precision, and runs its own weights."""
    model, _ = pieces()
    prepared = Accelerator(mixed_precision=LowCompute()).prepare(model)
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.zero_()
        assert twin(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
        assert twin(torch.ones(1, 2)).dtype is torch.float32


def test_a_gan_trains_with_two_accelerators_of_two_precisions() -> None:
    """Neither changes the other."""
    full = Accelerator(gradient_accumulation_steps=2)
    low = Accelerator(mixed_precision=LowCompute())
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    generator, g_optimizer = full.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    discriminator, d_optimizer = low.prepare(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1))
    dtypes: list[torch.dtype] = []
    discriminator.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    starts = generator.weight.detach().clone(), discriminator.weight.detach().clone()
    for _ in range(2):
        noise, real = torch.randn(4, 2), torch.randn(4, 2)
        with low.accumulate(discriminator):
            low.backward(discriminator(generator(noise).detach()).mean() - discriminator(real).mean())
            d_optimizer.step()
            d_optimizer.zero_grad()
        with full.accumulate(generator):
            full.backward(-discriminator(generator(noise)).mean())
            g_optimizer.step()
            g_optimizer.zero_grad()
        assert low.sync_gradients
    assert full.gradient_accumulation_steps == 2
    assert low.gradient_accumulation_steps == 1
    assert set(dtypes) == {torch.bfloat16}
    assert not torch.equal(starts[0], generator.weight)
    assert not torch.equal(starts[1], discriminator.weight)
