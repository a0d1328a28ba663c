"""The options of loading: their defaults, what differs from them, and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import asdict

import pytest

from accel_core import Accelerator, KwargsHandler
from accel_data import DataLoaderConfiguration, Sharded
from accel_data.configuration import check_options

FLAGS = [
    "split_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
    "use_stateful_dataloader",
    "presharded",
]


def test_the_defaults_are_those_of_the_seeds():
    """And `presharded` and `uneven`, which are ours."""
    assert asdict(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
        "presharded": False,
        "uneven": "pad",
    }


def test_it_hands_on_what_differs_from_the_defaults():
    configuration = DataLoaderConfiguration(split_batches=True, even_batches=True, data_seed=0, uneven="stop")
    assert isinstance(configuration, KwargsHandler)
    assert configuration.to_kwargs() == {"split_batches": True, "data_seed": 0, "uneven": "stop"}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_what_is_no_truth_value_is_refused(flag, value):
    pattern = rf"DataLoaderConfiguration\({flag}={value!r}\) is a {type(value).__name__}: expected True or False"
    with pytest.raises(TypeError, match=pattern):
        DataLoaderConfiguration(**{flag: value})


@pytest.mark.parametrize("value", [True, False, None])
def test_dispatching_may_be_left_open(value):
    assert DataLoaderConfiguration(dispatch_batches=value).dispatch_batches is value


def test_dispatching_is_no_text():
    with pytest.raises(TypeError, match=r"\(dispatch_batches='auto'\) is a str: expected True, False, or None for"):
        DataLoaderConfiguration(dispatch_batches="auto")


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_a_seed_is_any_that_torch_takes(seed):
    assert DataLoaderConfiguration(data_seed=seed).data_seed == seed


@pytest.mark.parametrize("seed", [True, "42", 4.0])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(
        TypeError, match=r"\(data_seed=.*\) is a \w+: expected a whole number, or None for the run's seed"
    ):
        DataLoaderConfiguration(data_seed=seed)


@pytest.mark.parametrize(("seed", "valid"), [(-1, 2**64 - 1), (2**64, 0)])
def test_a_seed_out_of_range_is_refused(seed, valid):
    with pytest.raises(
        ValueError, match=rf"data_seed={seed}\) is out of range: expected 0 to 2\*\*64 - 1, such as {valid}\."
    ):
        DataLoaderConfiguration(data_seed=seed)


@pytest.mark.parametrize("policy", ["pad", "stop", "join"])
def test_uneven_ends_have_three_policies(policy):
    assert DataLoaderConfiguration(uneven=policy).uneven == policy


def test_an_unknown_policy_gets_the_ones_that_there_are():
    with pytest.raises(ValueError, match=r"uneven='Padd'\) is no policy .*: expected one of 'pad', 'stop', 'join'"):
        DataLoaderConfiguration(uneven="Padd")
    with pytest.raises(ValueError, match=r"uneven='drop'\) is no policy .* 'join'\.$"):
        DataLoaderConfiguration(uneven="drop")
    with pytest.raises(ValueError, match=r"uneven=None\) is no policy"):
        DataLoaderConfiguration(uneven=None)


def test_the_receiver_is_named():
    with pytest.raises(TypeError, match=r"^Sharded\(even_batches='no'\) is a str"):
        check_options("Sharded", {"split_batches": True, "even_batches": "no"})


def test_an_accelerator_hands_every_field_to_the_loader_component():
    """Also those that are no arguments of the Accelerator; a component built in code checks the same."""
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, data_seed=3, uneven="join")
    accelerator = Accelerator(cpu=True, dataloader_config=config, rng_types=["torch"])
    told = {setting.option: setting.value for setting in accelerator.explain().settings}
    assert {name: told[name] for name in asdict(config)} == {name: str(value) for name, value in asdict(config).items()}
    assert told["rng_types"] == "['torch']"
    with pytest.raises(TypeError, match=r"Sharded\(split_batches='no'\) is a str"):
        Sharded(split_batches="no")
    with pytest.raises(ValueError, match=r"rng_types holds 'generators', .* 'generator' if that was meant"):
        Sharded(rng_types=["generators"])


def test_every_field_is_an_option_of_the_loader_component_with_the_same_default():
    options = {name: option.default for name, option in inspect.signature(Sharded).parameters.items()}
    assert options == {**asdict(DataLoaderConfiguration()), "rng_types": ("generator",)}
