"""Options of the loader component: arguments, variables and one object of options; what they agree on between ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator, DistributedDataParallelKwargs, KwargsHandler, RNGType, hookimpl
from accel_core.base.seeds import derive_seed, loader_seed, was_chosen
from accel_core.collectives.run_seed import agree_seed
from accel_core.options.resolution import VARIABLES, Option, in_force, resolve_options
from accel_core.processes.world import World
from accel_testing import run_ranks


@dataclass
class Options(KwargsHandler):
    """What `Told` takes, but for its random streams."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    uneven: str = "pad"


class Told:
    """A loader component that keeps what it was told."""

    handler = Options

    def __init__(
        self,
        split_batches=False,
        dispatch_batches=None,
        even_batches=True,
        use_seedable_sampler=False,
        data_seed=None,
        non_blocking=False,
        use_stateful_dataloader=False,
        rng_types=("generator",),
        uneven="pad",
    ):
        self.split_batches = split_batches
        self.dispatch_batches = dispatch_batches
        self.even_batches = even_batches
        self.use_seedable_sampler = use_seedable_sampler
        self.data_seed = data_seed
        self.non_blocking = non_blocking
        self.use_stateful_dataloader = use_stateful_dataloader
        self.rng_types = rng_types
        self.uneven = uneven
        self.seeds = []

    @hookimpl
    def prepare_loader(self, loader, seed):
        self.seeds.append(seed)
        return loader


class Plain:
    """One without any option."""

    @hookimpl
    def prepare_loader(self, loader):
        return loader


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution that offers these loaders as "told" and "plain"."""
    folder = tmp_path / "told_loader-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: told-loader\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[accel.loaders]\ntold = {__name__}:Told\nplain = {__name__}:Plain\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("ACCELERATE_LOADER", "told")


def settings(accelerator):
    return {setting.option: (setting.value, setting.source) for setting in accelerator.explain().settings}


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.usefixtures("installed")
def test_an_argument_reaches_the_loader_and_wins(monkeypatch, name, value):
    """The older generation of arguments."""
    monkeypatch.setenv(VARIABLES[name], str(not value))
    accelerator = Accelerator(**{name: value})
    assert getattr(accelerator, name) is value
    assert settings(accelerator)[name] == (str(value), "argument")


@pytest.mark.parametrize(("name", "text", "value"), [
    ("split_batches", "yes", True),
    ("dispatch_batches", "no", False),
    ("even_batches", "off", False),
    ("use_seedable_sampler", "1", True),
    ("data_seed", "42", 42),
    ("non_blocking", "true", True),
    ("use_stateful_dataloader", "t", True),
    ("rng_types", "torch, generator", ["torch", "generator"]),
])  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_every_option_has_a_variable(monkeypatch, name, text, value):
    monkeypatch.setenv(VARIABLES[name], text)
    assert VARIABLES[name] == f"ACCELERATE_{name.upper()}"
    assert settings(Accelerator())[name] == (str(value), VARIABLES[name])


def test_no_variable_is_left_out_of_the_test_above():
    [mark] = [mark for mark in test_every_option_has_a_variable.pytestmark if mark.name == "parametrize"]
    assert {name for name, *_ in mark.args[1]} == set(VARIABLES)


@pytest.mark.usefixtures("installed")
def test_one_object_of_options_stands_for_the_arguments():
    config = Options(split_batches=True, even_batches=False, data_seed=7, non_blocking=True, uneven="stop")
    accelerator = Accelerator(dataloader_config=config, rng_types=["torch"])
    assert accelerator.dataloader_config is config
    assert (accelerator.split_batches, accelerator.even_batches, accelerator.non_blocking) == (True, False, True)
    assert accelerator.rng_types == ["torch"]
    told = settings(accelerator)
    assert told["uneven"] == ("stop", "dataloader_config")
    assert told["data_seed"] == ("7", "dataloader_config")
    assert told["use_seedable_sampler"] == ("False", "default")
    assert told["rng_types"] == ("['torch']", "argument")


@pytest.mark.usefixtures("installed")
def test_where_nothing_is_given_the_loader_s_own_defaults_hold():
    accelerator = Accelerator()
    assert (accelerator.split_batches, accelerator.even_batches, accelerator.dispatch_batches) == (False, True, None)
    assert (accelerator.use_seedable_sampler, accelerator.non_blocking) == (False, False)
    assert accelerator.rng_types == ["generator"]
    assert accelerator.dataloader_config is None
    assert settings(accelerator)["even_batches"] == ("True", "default")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.usefixtures("installed")
def test_an_object_of_options_and_an_argument_for_one_of_them_are_refused(value):
    """Also where they say the same."""
    message = rf"split_batches={value} and dataloader_config=Options\(.*\) were both given"
    with pytest.raises(ValueError, match=message):
        Accelerator(split_batches=value, dataloader_config=Options(split_batches=True))


@pytest.mark.usefixtures("installed")
def test_an_object_of_options_and_a_variable_for_one_of_them_are_refused(monkeypatch):
    """An object built in code is complete."""
    monkeypatch.setenv("ACCELERATE_DATA_SEED", "3")
    message = r"ACCELERATE_DATA_SEED='3' and dataloader_config=Options\(.*\) were both given.* leave the other out"
    with pytest.raises(ValueError, match=message):
        Accelerator(dataloader_config=Options())
    monkeypatch.setenv("ACCELERATE_DATA_SEED", " ")
    monkeypatch.setenv("ACCELERATE_RNG_TYPES", "torch")  # no field of the object
    assert Accelerator(dataloader_config=Options()).rng_types == ["torch"]


@pytest.mark.parametrize("config", [Options(), Options(split_batches=True)])
def test_an_object_of_options_beside_a_loader_built_in_code_is_refused(config):
    with pytest.raises(ValueError, match=r"dataloader_config=Options\(.*\) and loader=Told\(\.\.\.\) were both given"):
        Accelerator(loader=Told(), dataloader_config=config)


@pytest.mark.usefixtures("installed")
def test_an_object_of_options_is_of_the_loader_s_class():
    with pytest.raises(
        TypeError, match=r"dataloader_config=\{'split.*\} is a dict: expected an object of options, such as"
    ):
        Accelerator(dataloader_config={"split_batches": True})
    with pytest.raises(TypeError, match="The loader 'told' .* could not be made with static_graph: "):
        Accelerator(dataloader_config=DistributedDataParallelKwargs(static_graph=True))


@pytest.mark.usefixtures("installed")
def test_an_option_that_the_loader_does_not_have_is_refused(monkeypatch):
    with pytest.raises(TypeError, match="The loader 'plain' .* could not be made with split_batches: "):
        Accelerator(loader="plain", dataloader_config=Options(split_batches=True))
    monkeypatch.setenv("ACCELERATE_NON_BLOCKING", "yes")
    with pytest.raises(TypeError, match="The loader 'plain' .* could not be made with non_blocking: "):
        Accelerator(loader="plain")


def test_a_loader_built_in_code_says_itself_what_holds():
    accelerator = Accelerator(loader=Told(split_batches=True, rng_types=("torch",)))
    assert (accelerator.split_batches, accelerator.rng_types) == (True, ["torch"])
    assert settings(accelerator)["split_batches"] == ("True", "loader")
    with pytest.raises(ValueError, match="even_batches"):
        Accelerator(loader=Told(), even_batches=False)


NAMES = ["split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking", "rng_types"]


def test_a_loader_without_options_says_nothing():
    accelerator = Accelerator(loader=Plain())
    assert [getattr(accelerator, name) for name in NAMES] == [None] * len(NAMES)


def test_without_a_loader_component_no_option_has_a_value():
    options = in_force(resolve_options({}, None), None, from_object=False)
    assert options == dict.fromkeys(VARIABLES, Option(None, "default"))


@pytest.mark.parametrize("name", [*NAMES, "dataloader_config"])
def test_what_was_chosen_is_not_assigned_afterwards(name):
    with pytest.raises(AttributeError):
        setattr(Accelerator(loader=Plain()), name, True)


@pytest.mark.usefixtures("installed")
def test_random_streams_are_named_by_texts_and_members():
    assert Accelerator(rng_types=["torch", RNGType.CUDA, RNGType("xla")]).rng_types == ["torch", "cuda", "xla"]
    assert Accelerator(rng_types=[]).rng_types == []
    assert {"torch", "cuda", "xla", "generator", "npu", "xpu", "mlu"} <= {kind.value for kind in RNGType}


@pytest.mark.parametrize(("given", "error", "message"), [
    (["torhc"], ValueError, r"rng_types holds 'torhc', which names no random stream\. Known: torch, .* Type 'torch' if"),
    (["numpy1"], ValueError, r"rng_types holds 'numpy1', which names no random stream\. Known: torch, .*xpu\."),
    ([3], ValueError, "rng_types holds 3, which names no random stream"),
    ("torch", TypeError, r"rng_types='torch' is a str: expected a list"),
])  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_what_names_no_random_stream_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        Accelerator(rng_types=given)


@pytest.mark.parametrize(("variable", "text", "message"), [
    ("ACCELERATE_RNG_TYPES", "torch,genrator", r"ACCELERATE_RNG_TYPES holds 'genrator', .* Type 'generator' if"),
    ("ACCELERATE_DATA_SEED", "-1", r"ACCELERATE_DATA_SEED='-1' is not a seed: expected an integer from 0 to 2\*\*64 - 1"),
    ("ACCELERATE_DATA_SEED", str(2**64), r"is not a seed"),
    ("ACCELERATE_DISPATCH_BATCHES", "auto", r"ACCELERATE_DISPATCH_BATCHES='auto' is not a truth value"),
])  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_a_variable_that_cannot_be_read_is_refused(monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        Accelerator()


def test_a_data_seed_takes_the_place_of_the_run_s():
    with_seed, without = Told(data_seed=42), Told()
    for loader in (with_seed, without):
        accelerator = Accelerator(loader=loader)
        accelerator.prepare(DataLoader(range(4)), DataLoader(range(6)))
    assert with_seed.seeds == [42, 42]
    assert without.seeds == [torch.initial_seed()] * 2


def on_two_ranks():
    """The seeds agreed on, the error where they differ, and the steps of a scheduler whose loader splits batches."""
    world = World.current(cpu=True)
    torch.manual_seed(50 + world.rank)
    agreed = agree_seed(world, 9), agree_seed(world)
    errors = []
    for given in (world.rank, 5 if world.is_main else None):
        try:
            agree_seed(world, given)
        except ValueError as error:
            errors.append(str(error))
    loader = Told(data_seed=7)
    Accelerator(cpu=True, loader=loader).prepare(DataLoader(range(4)))
    return agreed, errors, loader.seeds, [scheduler_steps(loader) for loader in (Told(split_batches=True), Told())]


def scheduler_steps(loader):
    accelerator = Accelerator(cpu=True, loader=loader, step_scheduler_per_process=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 100))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    return scheduler.last_epoch


def test_ranks_have_one_seed_or_are_all_told():
    for agreed, errors, seeds, steps in run_ranks(on_two_ranks, 2):
        assert agreed == (9, 50)
        assert errors[0].startswith(
            "data_seed is 0 on rank 0 and 1 on rank 1, so the ranks would not read parts of one"
        )
        assert errors[1].startswith("data_seed is 5 on rank 0 and None on rank 1")
        assert all(error.endswith("Give all ranks the same data_seed, or none.") for error in errors)
        assert seeds == [7]
        assert steps == [1, 2]


def test_each_loader_has_an_order_of_its_own():
    assert loader_seed(42, 0) == 42
    assert loader_seed(42, 1) == derive_seed(42, 1)
    assert len({loader_seed(42, number) for number in range(100)}) == 100


@pytest.mark.parametrize(
    ("seed", "chosen"), [(0, True), (42, True), (2**32 - 1, True), (2**32, False), (2**64 - 1, False)]
)
def test_people_choose_small_seeds(seed, chosen):
    assert was_chosen(seed) is chosen


def test_what_torch_draws_by_itself_does_not_look_chosen():
    assert sum(was_chosen(torch.Generator().seed()) for _ in range(20)) <= 1  # one in two million does
