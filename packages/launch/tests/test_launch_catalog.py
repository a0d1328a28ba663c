"""The catalog: every option, read where it is declared."""

from __future__ import annotations

from dataclasses import fields

import pytest

from accel_core import Accelerator, PluginError
from accel_core.api.launcher import LOADER_OPTIONS, OPTIONS, SECTIONS, Offer
from accel_launch.options import LaunchOptions
from accel_launch.settings.catalog import GROUPS, Catalog

CATALOG = Catalog()


def offer(name, value="nowhere:Nothing", group="accel.strategies", distribution="elsewhere", core=""):
    return Offer(group, name, value, distribution, "1.0", core)


def test_every_option_without_a_section_is_there_once_and_in_a_group():
    names = [*(each.name for each in fields(LaunchOptions)), *OPTIONS, *LOADER_OPTIONS]
    assert sorted(CATALOG.own) == sorted(names)
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(names)
    assert {option.group for option in CATALOG.own.values()} == set(GROUPS)


def test_every_option_has_help_from_a_docstring():
    everything = [
        *CATALOG.own.values(),
        *(each for name in CATALOG.sections for each in CATALOG.section(name).values()),
    ]
    assert [option.key for option in everything if not option.help] == []


def test_help_is_about_what_can_be_typed_outside_of_python():
    everything = [
        *CATALOG.own.values(),
        *(each for name in CATALOG.sections for each in CATALOG.section(name).values()),
    ]
    unfit = ("in Python also", "None:", "; not given", "or a `", "or an object", "or a function")
    texts = [option.help for option in everything if not option.field.python_only]
    assert not [text for text in texts for words in unfit if words in text]
    assert CATALOG.own["strategy"].help.startswith(
        'way to divide the training among processes: the name of an installed one. Not given: "ddp", or "single"'
    )
    assert CATALOG.section("wandb")["name"].help == "name shown for the run. Not given: the service invents one."


def test_an_option_has_one_name_in_three_spellings():
    option = CATALOG.section("fsdp")["cpu_offload"]
    assert (option.key, option.flag, option.variable) == (
        "fsdp.cpu_offload",
        "--fsdp.cpu-offload",
        "ACCELERATE_FSDP__CPU_OFFLOAD",
    )
    assert CATALOG.own["cpu"].variable == "ACCELERATE_USE_CPU"
    assert CATALOG.section("bf16-true")["reduce_dtype"].variable == "ACCELERATE_BF16_TRUE__REDUCE_DTYPE"


def test_the_defaults_shown_are_those_that_hold_in_the_accelerator(monkeypatch):
    for name in OPTIONS:
        monkeypatch.delenv(CATALOG.own[name].variable, raising=False)
    explained = Accelerator().explain()
    held = {setting.option: setting.value for setting in explained.settings}
    held["mixed_precision"] = next(part.name for part in explained.parts if part.role == "precision")
    names = set(OPTIONS) - {"strategy", "loader", "log_with"}
    shown = {name: str(CATALOG.own[name].field.default) for name in names}
    assert {name: held[name] for name in shown} == shown


def test_sections_leave_out_what_stands_elsewhere():
    assert set(SECTIONS) <= set(CATALOG.sections)
    assert "num_steps" not in CATALOG.section("accumulation")
    assert "backend" not in CATALOG.section("dynamo")
    assert set(CATALOG.section("sharded")) == {"presharded", "uneven"}


def test_options_that_only_python_can_express_are_listed_as_such():
    assert CATALOG.section("fsdp")["parallelize_plan"].field.python_only


def test_choices_say_what_they_are():
    fsdp = next(choice for choice in CATALOG.choices("strategy") if choice.name == "fsdp")
    assert fsdp.summary.startswith("Fully sharded data parallelism")
    assert fsdp.problem == ""


def test_a_broken_component_is_listed_as_broken_and_raises_only_when_it_is_asked_for():
    catalog = Catalog([*CATALOG.offers, offer("torn"), offer("late", core=">=99")])
    torn, late = (next(each for each in catalog.choices("strategy") if each.name == name) for name in ("torn", "late"))
    assert torn.problem.startswith("broken: ModuleNotFoundError")
    assert late.problem.startswith("misfit: ")
    assert torn.summary == late.summary == ""
    with pytest.raises(PluginError, match="'torn' was asked for, but elsewhere 1.0 is broken"):
        catalog.section("torn")


def test_two_distributions_with_one_name_are_told_apart_by_a_qualified_one():
    catalog = Catalog([*CATALOG.offers, offer("fsdp", "accel_core.strategies.ddp:DDP")])
    assert [choice.name for choice in catalog.choices("strategy") if "fsdp" in choice.name] == [
        "accel-fsdp:fsdp",
        "elsewhere:fsdp",
    ]
    with pytest.raises(PluginError, match="Say which: 'accel-fsdp:fsdp' or 'elsewhere:fsdp'"):
        catalog.section("fsdp")
    assert "bucket_cap_mb" in catalog.section("elsewhere:fsdp")
    assert catalog.section("elsewhere:fsdp")["static_graph"].key == "fsdp.static_graph"


def test_a_name_of_a_strategy_and_a_precision_has_no_options_outside_of_python():
    catalog = Catalog(
        [*CATALOG.offers, offer("ddp", "accel_core.contract.precision_policy:FullPrecision", "accel.precisions")]
    )
    with pytest.raises(PluginError, match="both a strategy and a mixed_precision go by that name"):
        catalog.section("ddp")


def test_options_of_the_data_are_those_of_the_loader_that_is_chosen():
    assert CATALOG.loader == "sharded"
    other = CATALOG.with_loader("sharded")
    assert other is CATALOG
    assert Catalog([]).data == {}
