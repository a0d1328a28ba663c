"""Whatever a loop may have prepared goes on, bit for bit, where a checkpoint was saved."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from sharded_strategies import Rows
from torch import nn

from accel_core import Accelerator, CheckpointError, LocalSGD, Precision, PrecisionPolicy, Single, World, hookimpl
from accel_core.api.component import capture_random_state, restore_random_state
from accel_core.api.diagnostics import run_and_feed
from accel_testing import run_ranks


@pytest.fixture(autouse=True)
def own_streams():
    before = capture_random_state(None)
    yield
    restore_random_state(before, None)


def states(*objects):
    """Copies of what these objects hold, and what every random stream gives next."""
    drawn = [random.random(), np.random.rand(), torch.rand(1)]
    return copy.deepcopy([each.state_dict() for each in objects]), drawn


def is_same(one, other):
    """Whether two structures are the same, to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


def resumes(case, folder, steps=3, mode=False, strategy=lambda: None, **options):
    """Checks that three steps after loading give what they give without; returns the objects of the run that was loaded."""
    accelerator = Accelerator(cpu=True, strategy=strategy(), **options)
    step, objects = case(accelerator)
    for number in range(steps):
        step(number)
    accelerator.save_state(folder, asynchronous=mode)
    for number in range(steps, steps + 3):
        step(number)
    expected = states(*objects)
    accelerator.free_memory()

    accelerator.wait_for_checkpoint()
    other = Accelerator(cpu=True, strategy=strategy(), **options)
    step, again = case(other)
    other.load_state(folder)
    for number in range(steps, steps + 3):
        step(number)
    found = states(*again)
    other.free_memory()
    assert is_same(found, expected), (found, expected)
    return again


def train(accelerator, model, optimizer, scale=1.0):
    x = torch.randn(4, 3)
    accelerator.backward((model(x) * scale).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()


def plain(accelerator, layers=None, optimizer_class=torch.optim.AdamW):
    """One model and its optimizer."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)) if layers is None else layers
    model, optimizer = accelerator.prepare(layers, optimizer_class(layers.parameters(), lr=0.1))
    return lambda number: train(accelerator, model, optimizer), [layers, optimizer]


def adversaries(accelerator):
    """Two models with two optimizers and schedulers, which step in turns."""
    pair = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in pair]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    generator, critic, first, second, *_ = accelerator.prepare(*pair, *optimizers, *schedulers)

    def step(number):
        x = torch.randn(4, 3)
        accelerator.backward(critic(generator(x).detach()).mean() - critic(x).mean())
        second.step()
        second.zero_grad()
        schedulers[1].step()
        if number % 2:
            accelerator.backward(-critic(generator(x)).mean())
            first.step()
            first.zero_grad()
            schedulers[0].step()

    return step, [*pair, *optimizers, *schedulers]


def averaged(accelerator):
    """A model, and a moving average of it that is only evaluated."""
    layers = nn.Linear(3, 2)
    mean = torch.optim.swa_utils.AveragedModel(layers, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9))
    accelerator.prepare_model(mean, evaluation_mode=True)

    def step(number):
        train(accelerator, model, optimizer)
        mean.update_parameters(layers)

    return step, [layers, optimizer, mean]


def evaluated(accelerator):
    """A model without an optimizer, that changes all the same."""
    model = accelerator.prepare(nn.BatchNorm1d(3))
    return lambda number: model(torch.randn(4, 3)), [accelerator.unwrap_model(model)]


def with_criterion(accelerator):
    """A module without parameters is prepared like any other."""
    layers, criterion = nn.Linear(3, 2), nn.MSELoss()
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    criterion, model, optimizer = accelerator.prepare(criterion, layers, optimizer)

    def step(number):
        accelerator.backward(criterion(model(torch.randn(4, 3)), torch.ones(4, 2)))
        optimizer.step()
        optimizer.zero_grad()

    return step, [layers, optimizer]


class Remembering(nn.Module):
    """Keeps what is no tensor as extra state, and has a buffer that is nobody's business."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.seen = Counter()
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self):
        return {"seen": dict(self.seen), "last": torch.tensor(float(sum(self.seen.values())))}

    def set_extra_state(self, state):
        self.seen = Counter(state["seen"])
        assert state["last"] == sum(self.seen.values())

    def forward(self, x):
        self.seen[len(self.seen) // 2] += 1
        self.scratch += 1
        return self.inner(x) * (1 + len(self.seen))


class Hooked(nn.Linear):
    """Hooks on its state_dict add an entry, and take it back."""

    def __init__(self):
        super().__init__(3, 2)
        self.calls = 0
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}calls": module.calls}))
        self._register_load_state_dict_pre_hook(self._take)

    def _take(self, state, prefix, *_):
        if f"{prefix}calls" in state:
            self.calls = state.pop(f"{prefix}calls")

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Renamed(nn.Linear):
    """Its state_dict has the weight by another name and in another dtype; nothing takes it back."""

    def __init__(self):
        super().__init__(3, 2)
        self._register_state_dict_hook(lambda module, state, *_: state.update(half=state.pop("weight").half()))


class Added(nn.Linear):
    """Its state_dict has the weight in another dtype, too; nothing takes that back."""

    def __init__(self):
        super().__init__(3, 2)
        self._register_state_dict_hook(lambda module, state, *_: state.update(half=state["weight"].half()))


class Odd(nn.Module):
    """Parameters and buffers of every kind and shape."""

    def __init__(self):
        super().__init__()
        self.low = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.randint(0, 255, (3,), dtype=torch.uint8), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(3) > 0.5, requires_grad=False)
        self.small = nn.Parameter(torch.randn(3).to(torch.float8_e4m3fn), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.turned = nn.Parameter(torch.randn(2, 3).T)
        self.strided = nn.Parameter(torch.randn(3, 4)[:, ::2])
        self.register_buffer("positions", torch.arange(3).expand((1, -1)))
        self.image = nn.Parameter(torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last))
        storage = torch.randn(6)
        self.left, self.right = nn.Parameter(storage[:3]), nn.Parameter(storage[3:])
        self.register_buffer("count", torch.tensor(random.randrange(100)))
        self.register_buffer("nothing", None)
        self.plain = torch.zeros(1)

    def forward(self, x):
        terms = (x @ self.low.float(), self.wide.float(), self.wave.abs(), self.scalar, self.turned, self.strided)
        more = (self.left * self.right * self.frozen, self.image.mean(), self.positions, self.codes * self.mask)
        self.count += 1
        return sum(each.float().sum() for each in (*terms, *more)) + self.small.float().sum() + self.empty.sum()


@pytest.mark.parametrize(
    "case",
    [plain, adversaries, averaged, evaluated, with_criterion],
    ids=lambda case: case.__name__,
)
def test_a_run_goes_on_to_the_bit(case, tmp_path):
    resumes(case, tmp_path / "a")


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_may_have_made_no_step_yet(steps, tmp_path):
    resumes(plain, tmp_path / "a", steps)


def test_extra_state_comes_back_and_buffers_that_are_not_persistent_are_left_alone(tmp_path):
    module, _ = resumes(lambda accelerator: plain(accelerator, Remembering()), tmp_path / "a")
    assert sum(module.seen.values()) == 6
    assert module.scratch.tolist() == [3, 3], "the steps of this process alone"


def test_what_hooks_of_the_user_add_to_a_state_dict_comes_back_through_them(tmp_path):
    module, _ = resumes(lambda accelerator: plain(accelerator, Hooked()), tmp_path / "a")
    assert module.calls == 6


def test_a_parameter_that_a_hook_replaces_and_none_takes_back_is_not_lost_in_silence(tmp_path):
    resumes(lambda accelerator: plain(accelerator, Added()), tmp_path / "added")
    message = (
        r"of Renamed has 'half', which .* not take, and lacks weight: .* register_load_state_dict_pre_hook.*\nPart of"
    )
    with pytest.raises(CheckpointError, match=message):
        resumes(lambda accelerator: plain(accelerator, Renamed()), tmp_path / "a")


def test_parameters_of_any_dtype_and_shape_come_back_in_place(tmp_path):
    def case(accelerator):
        module = Odd()
        model = accelerator.prepare(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = accelerator.prepare(torch.optim.SGD(trained, lr=0.01, momentum=0.9))
        return lambda number: train(accelerator, model, optimizer, 0.1), [module, optimizer]

    module, _ = resumes(case, tmp_path / "a")
    assert module.left.untyped_storage().data_ptr() == module.right.untyped_storage().data_ptr(), "views stay views"
    assert module.turned.stride() == (1, 3)


def test_a_model_of_thousands_of_tiny_parameters_resumes(tmp_path):
    def case(accelerator):
        layers = nn.Sequential(*(Scale() for _ in range(5000)))
        model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=1e-6, momentum=0.9))
        return lambda number: train(accelerator, model, optimizer), [layers, optimizer]

    resumes(case, tmp_path / "a", 1)


def test_elements_that_share_memory_are_refused_before_anything_is_changed(tmp_path):
    def prepared():
        module = nn.Linear(2, 1)
        module.register_buffer("spread", torch.rand(1).expand(3))
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(module)
        return accelerator, module

    prepared()[0].save_state(tmp_path / "a")
    accelerator, module = prepared()
    before = module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"model\.0: 'spread' has several elements in one place of memory"):
        accelerator.load_state(tmp_path / "a")
    assert torch.equal(module.weight, before)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(1 + torch.rand(()) / 5000)

    def forward(self, x):
        return x * self.by


def test_a_compiled_model_has_the_names_of_the_users(tmp_path):
    model, _ = resumes(plain, tmp_path / "a", dynamo_backend="eager")
    accelerator = Accelerator(cpu=True)
    step, (bare, _) = plain(accelerator)
    accelerator.load_state(tmp_path / "a")
    step(3)
    assert bare.state_dict().keys() == model.state_dict().keys()


ORDERS = ("zero_grad first", "zero_grad last")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [4, 5])
def test_a_run_goes_on_inside_a_window_wherever_zero_grad_stands(order, steps, tmp_path):
    """Windows of three: after four micro-batches one has run, after five two."""

    def case(accelerator):
        layers = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), lr=0.1))

        def step(number):
            with accelerator.accumulate(model):
                if order == ORDERS[0]:
                    optimizer.zero_grad()
                accelerator.backward(model(torch.randn(4, 3)).pow(2).mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if order == ORDERS[1]:
                    optimizer.zero_grad()

        return step, [layers, optimizer]

    resumes(case, tmp_path / "a", steps, gradient_accumulation_steps=3)


def test_steps_are_due_after_a_load_whatever_happened_before_it(tmp_path):
    """The optimizer had stepped, and its window was settled, when the load began."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), 0.1))

    def window():
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 3)).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
        return layers.weight.detach().clone()

    window()
    accelerator.save_state(tmp_path / "a")
    second = window()
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(window(), second)
    accelerator.load_state(tmp_path / "a")
    assert layers.weight.grad is None
    with pytest.raises(RuntimeError, match="backward"):
        optimizer.step()


def test_optimizers_can_be_pickled_and_copied_after_a_load(tmp_path):
    accelerator = Accelerator(cpu=True)
    step, (_, optimizer) = plain(accelerator)
    step(0)
    accelerator.save_state(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")
    twins = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    for twin in twins:
        assert is_same(twin.state_dict(), optimizer.state_dict())
        assert "step" not in vars(twin), "a copy belongs to no Accelerator"
    optimizer.load_state_dict(twins[1].state_dict())
    step(1)


def test_memory_that_was_freed_and_prepared_again_is_loaded_into(tmp_path):
    accelerator = Accelerator(cpu=True)
    _, (layers, optimizer) = plain(accelerator)
    accelerator.save_state(tmp_path / "a")
    weight = layers[0].weight.detach().clone()
    layers, optimizer = accelerator.free_memory(layers, optimizer)
    _, (layers, _) = plain(accelerator)
    assert not torch.equal(layers[0].weight, weight)
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(layers[0].weight, weight)


def test_a_forward_from_before_a_load_has_no_backward_any_more(tmp_path):
    accelerator = Accelerator(cpu=True)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model = accelerator.prepare(layers)
    accelerator.save_state(tmp_path / "a")
    loss = model(torch.ones(1, 3)).sum()
    accelerator.load_state(tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerator.backward(loss)


@pytest.mark.parametrize("mode", [False, "eager", "lazy"])
def test_saving_and_loading_in_inference_mode_leaves_everything_trainable(mode, tmp_path):
    """As by a function that evaluates, and keeps the best."""
    accelerator = Accelerator(cpu=True)
    step, objects = plain(accelerator)
    step(0)
    with torch.inference_mode():
        accelerator.save_state(tmp_path / "a", asynchronous=mode)
    expected = states(*objects)[0]
    step(1)
    accelerator.save_state(tmp_path / "b", asynchronous=mode)
    accelerator.wait_for_checkpoint()
    other = Accelerator(cpu=True)
    step, objects = plain(other)
    with torch.inference_mode():
        other.load_state(tmp_path / "a")
    assert is_same(states(*objects)[0], expected)
    step(1)


def test_a_run_in_which_nothing_is_prepared_is_not_saved_over_another(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "a")
    accelerator.free_memory()
    with pytest.raises(ValueError, match=r"nothing is prepared or registered. .* after free_memory\(\)"):
        accelerator.save_state(tmp_path / "a")


def test_a_model_that_the_user_compiled_or_wrapped_has_its_own_names(tmp_path):
    layers = nn.Linear(3, 2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.compile(layers, backend="eager"))
    accelerator.save_state(tmp_path / "a")
    other = Accelerator(cpu=True)
    bare = other.prepare(nn.Linear(3, 2))
    other.load_state(tmp_path / "a")
    assert torch.equal(bare.weight, layers.weight)


def test_two_accelerators_in_one_process_have_checkpoints_of_their_own(tmp_path):
    runs = [Accelerator(cpu=True), Accelerator(cpu=True, gradient_accumulation_steps=2)]
    built = [plain(each) for each in runs]
    weights = [objects[0][0].weight.detach().clone() for _, objects in built]
    for number, accelerator in enumerate(runs):
        accelerator.save_state(tmp_path / str(number), asynchronous=True)
    for accelerator in runs:
        accelerator.wait_for_checkpoint()
    for number, accelerator in enumerate(runs):
        accelerator.load_state(tmp_path / str(1 - number))
    for (_, objects), weight in zip(built, reversed(weights), strict=True):
        assert torch.equal(objects[0][0].weight, weight)


class Scaling(Precision):
    """Has a state, as a loss scaler has."""

    def __init__(self):
        self.scale = 1.0

    @hookimpl
    def optimizer_step(self, step):
        self.scale *= 2
        return step()

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


class CountingStrategy(Single):
    """A strategy that keeps something for itself."""

    def __init__(self):
        self.clipped = 0

    @hookimpl
    def clip_gradients(self, parameters, max_norm, norm_type):
        self.clipped += 1
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def state_dict(self):
        return {"clipped": self.clipped}

    def load_state_dict(self, state):
        self.clipped = state["clipped"]


class Observer:
    """A plugin of the user's."""

    def __init__(self):
        self.started = []

    @hookimpl
    def start(self, world):
        self.started.append(world.size)

    def state_dict(self):
        return {"started": self.started}

    def load_state_dict(self, state):
        self.started = [*state["started"], *self.started]


def test_components_with_a_state_get_it_back(tmp_path):
    def components():
        return {"mixed_precision": Scaling(), "strategy": CountingStrategy(), "plugins": [Observer(), Observer()]}

    saved, loaded = components(), components()
    accelerator = Accelerator(cpu=True, **saved)
    step, (layers, _) = plain(accelerator)
    for number in range(3):
        step(number)
        accelerator.clip_grad_norm_(layers.parameters(), 1.0)
    accelerator.save_state(tmp_path / "a")
    other = Accelerator(cpu=True, **loaded)
    plain(other)
    other.load_state(tmp_path / "a")
    assert (loaded["mixed_precision"].scale, loaded["strategy"].clipped) == (8.0, 3)
    assert [each.started for each in loaded["plugins"]] == [[1, 1], [1, 1]]

    bare = Accelerator(cpu=True)
    plain(bare)
    with pytest.raises(CheckpointError, match="plugin.1 has a state in the checkpoint, and none here") as caught:
        bare.load_state(tmp_path / "a")
    assert "the precision has a state in the checkpoint" in str(caught.value)


class Stored(Precision):
    policy = PrecisionPolicy(param=torch.bfloat16, input=torch.bfloat16, output=torch.float32)


class Computed(Precision):
    policy = PrecisionPolicy(compute=torch.bfloat16, output=torch.float32)


@pytest.mark.parametrize("precision", [Stored, Computed])
def test_models_of_any_precision_go_on(precision, tmp_path):
    resumes(plain, tmp_path / "a", mixed_precision=precision())


def test_a_model_without_entries_does_not_stand_for_one_with_some(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.MSELoss())
    accelerator.save_state(tmp_path / "a")
    other = Accelerator(cpu=True)
    other.prepare(nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match=r"model\.0: the checkpoint has no 'weight', 'bias'"):
        other.load_state(tmp_path / "a")
    both = Accelerator(cpu=True)
    both.prepare(nn.MSELoss(), nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="there are 2 models here, and 1 in the checkpoint"):
        both.load_state(tmp_path / "a")


def ranked(folder):
    """What differs by rank comes back to each rank: random streams and registered objects; buffers are those of rank 0."""
    accelerator = Accelerator(cpu=True)
    world = World.current()
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)

    class Noise:
        value = torch.full((2,), float(world.rank))

        def state_dict(self):
            return {"value": self.value, "rank": world.rank}

        def load_state_dict(self, state):
            self.value, self.rank = state["value"], state["rank"]

    layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5))
    model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), lr=0.1))
    noise = Noise()
    accelerator.register_for_checkpointing(noise)
    layers.train()
    for _ in range(2):
        train(accelerator, model, optimizer)
    layers[0](
        torch.full((4, 3), float(world.rank)) + torch.randn(4, 3)
    )  # not through DDP, which would make them the same
    means = accelerator.gather(layers[0].running_mean[None])
    accelerator.save_state(folder)
    after_save = states(layers, optimizer)
    noise.value = torch.zeros(2)
    train(accelerator, model, optimizer)
    accelerator.load_state(folder)
    again = states(layers, optimizer)
    assert again[1] == after_save[1], "each rank has its own streams"
    assert is_same(again[0][1], after_save[0][1])
    assert (noise.value.tolist(), noise.rank) == ([world.rank] * 2, world.rank)
    assert torch.equal(layers[0].running_mean, means[0])
    accelerator.end_training()
    return torch.equal(means[0], means[1]), again[1]


def test_what_differs_by_rank_comes_back_to_each_rank(tmp_path):
    (same, first), (_, second) = run_ranks(ranked, 2, str(tmp_path / "a"))
    assert not same
    assert first != second
    accelerator = Accelerator(cpu=True)
    layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5))
    accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), lr=0.1))
    noise = copy.copy(accelerator.project_configuration)
    noise.state_dict = dict
    noise.load_state_dict = lambda state: None
    accelerator.register_for_checkpointing(noise)
    with pytest.raises(
        CheckpointError, match=r"object\.0 was not the same on all of the 2 ranks that saved it, so 1 cannot"
    ):
        accelerator.load_state(tmp_path / "a")


def several(folder):
    """Cases on several ranks, each of which goes on to the bit."""
    world = World.current()

    def local(accelerator):
        layers = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), 0.1))

        def step(number):
            with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
                for _ in range(3):
                    train(accelerator, model, optimizer)
                    local_sgd.step()

        return step, [layers]

    def joined(accelerator):
        layers = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), 0.1))

        def step(number):
            with accelerator.join_uneven_inputs([model]):
                for _ in range(1 + world.rank):
                    train(accelerator, model, optimizer)

        return step, [layers, optimizer]

    def window(accelerator):
        layers = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), 0.1))

        def step(number):
            with accelerator.accumulate(model):
                train(accelerator, model, optimizer)

        return step, [layers, optimizer]

    for case in (local, joined, adversaries):
        for mode in (False, "lazy"):
            resumes(case, f"{folder}/{case.__name__}-{mode}", mode=mode)
    for mode in (False, "lazy"):
        resumes(window, f"{folder}/window-{mode}", mode=mode, gradient_accumulation_steps=2)
        resumes(window, f"{folder}/rows-{mode}", 2, mode, Rows, gradient_accumulation_steps=2)


def saved_after_uneven_inputs(folder):
    accelerator = Accelerator(cpu=True)
    layers = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), 0.1))
    with accelerator.join_uneven_inputs([model]):
        for _ in range(1 + accelerator.process_index):
            train(accelerator, model, optimizer)
    accelerator.save_state(folder)
    accelerator.end_training()
    return layers.weight.detach().clone()


def test_a_run_with_uneven_inputs_goes_on_in_another_world(tmp_path):
    """Its ranks have counted backwards differently, which binds nothing to their number."""
    weight = run_ranks(saved_after_uneven_inputs, 2, str(tmp_path / "saved"))[0]
    accelerator = Accelerator(cpu=True)
    layers = nn.Linear(3, 2)
    accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), 0.1))
    accelerator.load_state(tmp_path / "saved")
    accelerator.end_training()
    assert torch.equal(layers.weight, weight)


def test_every_kind_of_loop_goes_on_at_two_ranks(tmp_path):
    run_ranks(several, 2, str(tmp_path))


class DrawsWhenAsked:
    """As torchdata's loader, which begins its next epoch when it is asked for its state."""

    def state_dict(self):
        torch.rand(1)
        return {}

    def load_state_dict(self, state):
        pass


def test_streams_are_saved_as_they_were_before_anything_is_asked_for_its_state(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    run, _ = run_and_feed(accelerator)
    run.prepared.loaders.append(DrawsWhenAsked())
    before = torch.get_rng_state()
    expected = torch.rand(3)
    torch.set_rng_state(before)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")  # numpy's own, which does not say what to do
def test_a_global_stream_of_numpy_that_could_not_be_loaded_is_not_saved(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(
            CheckpointError, match=r"numpy's global random stream: .*set_bit_generator\(\) made it a PCG64\. Leave"
        ):
            accelerator.save_state(tmp_path)
    finally:
        np.random.set_bit_generator(before)
    assert not list(tmp_path.iterdir())
    accelerator.save_state(tmp_path)
