"""The loop under Accelerate's defaults and meanings."""

from __future__ import annotations

import inspect
import pickle
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_testing import run_ranks
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin


def one_weight() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_arguments_have_their_usual_order():
    names = list(inspect.signature(Accelerator).parameters)
    assert names[:21] == [
        "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "dataloader_config",
        "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types", "log_with", "project_dir",
        "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers",
        "dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config",
    ]  # fmt: skip


def test_a_short_last_window_weighs_one_over_the_steps():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = one_weight()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(torch.ones(6, 1), batch_size=1)
    )
    weights = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1, 1, 1, 0, 0, -0.5]


def windows_of(accelerator, *sizes):
    """A function that runs one micro-batch, what it says of each, and prepared loaders of so many batches."""
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loaders = [DataLoader(torch.ones(size * accelerator.num_processes, 1), batch_size=1) for size in sizes]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    seen = []

    def run(batch):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(".S"[accelerator.sync_gradients])

    return run, seen, loaders


def policy_optimization(accelerator):
    run, seen, [loader] = windows_of(accelerator, 3)
    for batch in loader:
        for _ in range(3):
            run(batch)
    return seen


def policy_optimization_with_evaluation(accelerator):
    run, seen, [loader, evaluated] = windows_of(accelerator, 3, 2)
    for batch in loader:
        for _ in range(3):
            list(evaluated)
            run(batch)
    return seen


def drawn_before_use(accelerator):
    run, seen, [loader] = windows_of(accelerator, 10)
    batches = iter(loader)
    while window := list(islice(batches, 4)):
        for batch in window:
            run(batch)
    return seen


def nested_loaders(accelerator):
    run, seen, [outer, inner] = windows_of(accelerator, 2, 3)
    for batch in outer:
        for each in inner:
            run(each)
        run(batch)
    return seen


def after_an_iterator_that_is_held(accelerator):
    run, seen, [loader, evaluated] = windows_of(accelerator, 6, 1)
    held = iter(evaluated)
    next(held)
    for batch in loader:
        run(batch)
    return seen


# As Accelerate 1.15 has closed them, with four micro-batches in a window.
CLOSING = {
    policy_optimization: "...S..SSS",
    policy_optimization_with_evaluation: "...S..SSS",
    drawn_before_use: "...S...S..",
    nested_loaders: "..S...SS",
    after_an_iterator_that_is_held: "...S.S",
}


def closing_of_all():
    return ["".join(loop(Accelerator(cpu=True, gradient_accumulation_steps=4))) for loop in CLOSING]


def test_windows_close_where_they_do_with_several_micro_batches_of_a_batch():
    assert closing_of_all() == list(CLOSING.values())


def test_windows_close_in_two_processes_where_they_do_in_one():
    assert run_ranks(closing_of_all, 2) == [list(CLOSING.values())] * 2


def trained_twice():
    """Weights behind two trainings of one prepared model, and what the model inside it computes in."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inner = one_weight()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    weights = []
    for _ in range(2):
        accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(inner.weight.item())
        accelerator.free_memory()
        optimizer = accelerator.prepare(torch.optim.SGD(inner.parameters(), lr=1.0))
    nn.init.constant_(inner.weight, 1 + 2**-10)  # 1 in bfloat16
    return weights, inner(torch.ones(1, 1)).item()


def test_a_model_that_was_freed_trains_on_with_a_new_optimizer():
    """As transformers' Trainer has it, whose second train() prepares the optimizer alone."""
    assert run_ranks(trained_twice, 2) == [([-0.5, -2.0], 1.0)] * 2


def evaluated_before_trained():
    accelerator = Accelerator(cpu=True)
    inner = one_weight()
    model = accelerator.prepare_model(inner, evaluation_mode=True)
    with pytest.raises(
        ValueError, match=r"prepared with evaluation_mode=True, so its gradients would not be synchronised"
    ):
        accelerator.prepare(model)
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    optimizer.step()
    return inner.weight.item()


def test_a_model_that_was_evaluated_before_its_training_is_the_same_in_all_processes():
    """As transformers' Trainer has it, where evaluate() comes before train()."""
    assert run_ranks(evaluated_before_trained, 2) == [-0.5, -0.5]


def test_the_end_of_a_loader_closes_no_window_if_that_is_asked_for():
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    assert "".join(policy_optimization(Accelerator(cpu=True, gradient_accumulation_plugin=plugin))) == "...S...S."


def test_the_environment_says_how_many_micro_batches_a_window_has(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert Accelerator().gradient_accumulation_steps == 3
    plugin = GradientAccumulationPlugin(num_steps=2)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 2
    with pytest.raises(ValueError, match="both given"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)


def steps_of_a_schedule(split_batches: bool) -> int:
    accelerator = Accelerator(split_batches=split_batches)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    return int(scheduler.last_epoch)


def test_a_schedule_steps_once_for_each_process():
    assert steps_of_a_schedule(split_batches=False) == 1
    assert run_ranks(steps_of_a_schedule, 2, False) == [2, 2]
    assert run_ranks(steps_of_a_schedule, 2, True) == [1, 1]


def test_prepared_objects_are_of_the_known_types():
    accelerator = Accelerator()
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not isinstance(optimizer, AcceleratedOptimizer)
    accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert optimizer.optimizer is optimizer
    assert scheduler.scheduler is scheduler
    assert "scheduler" not in scheduler.state_dict()
    assert accelerator._models == [model]
    assert accelerator._optimizers == [optimizer]
    assert accelerator._schedulers == [scheduler]
    accelerator.free_memory()
    assert accelerator._models == accelerator._optimizers == accelerator._schedulers == []
    assert not isinstance(scheduler, AcceleratedScheduler)


def test_engines_wrap_by_subclasses():
    class OptimizerOfAnEngine(AcceleratedOptimizer):
        def step(self, closure=None):
            return "stepped by the engine"

    class SchedulerOfAnEngine(AcceleratedScheduler):
        pass

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    wrapped = OptimizerOfAnEngine(optimizer, device_placement=False)
    assert wrapped.step() == "stepped by the engine"
    assert wrapped.param_groups is optimizer.param_groups
    assert isinstance(wrapped, AcceleratedOptimizer)
    schedule = SchedulerOfAnEngine(torch.optim.lr_scheduler.StepLR(optimizer, 1), wrapped)
    assert schedule.get_last_lr() == [1.0]


def test_autocast_takes_its_options_by_position():
    accelerator = Accelerator(mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")


def test_a_model_is_unwrapped_from_compilation_if_that_is_asked_for():
    accelerator = Accelerator()
    model = one_weight()
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(compiled)._orig_mod is model
    assert isinstance(compiled._orig_mod, nn.DataParallel)


def test_an_accelerator_is_pickled_as_its_arguments_and_loaders():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=2))
    twin = pickle.loads(pickle.dumps(accelerator))
    assert twin.gradient_accumulation_steps == 3
    assert [batch.tolist() for batch in twin._dataloaders[0]] == [[0, 1], [2, 3], [4, 5]]


def test_options_may_be_assigned():
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator()
    accelerator.even_batches = False
    accelerator.dataloader_config = DataLoaderConfiguration(split_batches=True)
    assert accelerator.split_batches
    assert accelerator.parallelism_config is None
    assert not accelerator.is_fsdp2
    assert accelerator.scaler is None


def test_checkpoints_are_written_whatever_serialization_is_asked_for(tmp_path):
    accelerator = Accelerator()
    model = one_weight()
    accelerator.prepare(model)
    accelerator.save_state(tmp_path / "run", safe_serialization=False)
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "run")
    assert model.weight.item() == 1.0


def test_what_scripts_call_whether_or_not_there_is_anything_to_do(tmp_path, monkeypatch):
    """The modes of schedule-free optimizers, a tracker where nothing is recorded, arguments of `torch.load`."""
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model := one_weight(), torch.optim.AdamW(model.parameters()))
    optimizer.train()
    optimizer.eval()
    accelerator.get_tracker("wandb").log({"loss": 1.0}, step=0)
    assert accelerator.save_state("here") == "here", "as it was given"
    accelerator.load_state("here", load_kwargs={"weights_only": False})
    with pytest.raises(TypeError, match="strict"):
        accelerator.load_state("here", load_kwargs={"strict": False})


class Modes(torch.optim.SGD):
    mode = "train"

    def eval(self):
        self.mode = "eval"


def test_the_modes_of_an_optimizer_that_has_them_are_its_own():
    _, optimizer = Accelerator().prepare(model := one_weight(), Modes(model.parameters()))
    optimizer.eval()
    assert optimizer.mode == "eval"
