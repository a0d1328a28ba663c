"""Which value holds, for every option of what is installed: command line, then environment, then file, then default."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
import typing
from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest
import torch

from accel_core.api.component import how_to_install
from accel_core.api.launcher import (
    CHANNEL,
    LOADER_OPTIONS,
    OPTIONS,
    SECTIONS,
    from_data,
    given_outside,
    read_section,
    to_data,
)
from accel_launch.errors import SettingsError
from accel_launch.options import LaunchOptions
from accel_launch.settings.catalog import ROLES, SEVERAL, Catalog
from accel_launch.settings.command_line import CommandLine, parse
from accel_launch.settings.files import ConfigFile
from accel_launch.settings.files import read as load_file
from accel_launch.settings.resolution import resolve

CATALOG = Catalog()
EVERY = [
    option
    for options in (CATALOG.own, *map(CATALOG.section, CATALOG.sections))
    for option in options.values()
    if not option.field.python_only
]
FILE = Path("config.yaml")
SPECIAL = {"redirects": ["0", "1", "3"], "tee": ["0", "1", "3"], "dynamo_backend": ["no", "eager", "inductor"]}


def samples(kind):
    """Three values of a type, as data; those next to each other differ, if the type has two values."""
    origin = typing.get_origin(kind)
    if origin in {typing.Union, types.UnionType}:
        members = [each for each in typing.get_args(kind) if each is not types.NoneType]
        return next(found for each in members if (found := samples(each)))
    if origin is typing.Literal:
        words = typing.get_args(kind)
        return [words[0], words[-1], words[0]]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return samples(typing.Literal[tuple(each.value for each in kind)])
    if origin in {dict, typing.get_origin(typing.Mapping[str, str])}:
        return [{"a": "x"}, {"a": "y"}, {"b": "x"}]
    if origin is not None and issubclass(origin, os.PathLike):
        return ["here", "there", "elsewhere"]
    if origin is not None:
        each = samples(typing.get_args(kind)[0])
        return [each[:1], each[:2], each[1:2]]
    return {
        bool: [True, False, True],
        int: [1, 2, 3],
        float: [0.5, 1.5, 2.5],
        str: ["one", "two", "three"],
        torch.dtype: ["float32", "bfloat16", "float16"],
        timedelta: [30, "2m", "1.5h"],
        Path: ["here", "there", "elsewhere"],
    }.get(kind, [])


def values_for(option):
    name = option.field.name
    if not option.section and name in ROLES:
        names = CATALOG.names(name)
        several = [names[:1], names[-2:], names[:2]]
        return several if name in SEVERAL else [names[0], names[-1], names[0]]
    return SPECIAL.get(name, samples(option.field.type)) if not option.section else samples(option.field.type)


def as_text(data):
    if isinstance(data, bool):
        return str(data).lower()
    if isinstance(data, list):
        return ",".join(map(as_text, data))
    return ",".join(f"{key}={value}" for key, value in data.items()) if isinstance(data, dict) else str(data)


def as_file(option, data):
    return {option.section: {option.field.name: data}} if option.section else {option.field.name: data}


def choosing(option):
    """Words that make an option count: those that choose its component, or the number of machines that it is about."""
    if option.section == "dynamo":
        return ["--dynamo-backend", "eager"]
    if option.section and option.section not in SECTIONS:
        role = next(role for role in ROLES if option.section in CATALOG.names(role))
        return [f"--{role}", option.section]
    return ["--num-machines", "8"] if option.field.name in {"machine_rank", "min_machines"} else []


def resolved(words=(), environ=None, file=None, **further):
    line = parse(list(words), CATALOG, {})
    return resolve(CATALOG, line, None if file is None else ConfigFile(FILE, file), environ or {}, **further)


def problems(words=(), environ=None, file=None, **further):
    with pytest.raises(SettingsError) as caught:
        resolved(words, environ, file, **further)
    return str(caught.value)


@pytest.mark.parametrize("option", EVERY, ids=lambda option: option.key)
def test_the_command_line_wins_over_the_environment_and_that_over_the_file(option, monkeypatch):
    name, kind, chosen = option.field.name, option.field.type, choosing(option)
    low, middle, high = values_for(option)
    file, environ = as_file(option, low), {option.variable: as_text(middle)}
    words = [*chosen, f"{option.flag}={as_text(high)}"]

    def holds(found):
        value = found.get(name, option.section)
        assert value in found.values
        return value.value, value.source

    default = None if name == "strategy" else option.field.default
    assert holds(resolved(chosen)) == (default, "default")
    assert holds(resolved(chosen, file=file)) == (from_data(kind, low), str(FILE))
    assert holds(resolved(chosen, environ, file)) == (from_data(kind, middle), option.variable)
    over_all = resolved(words, environ, file)
    assert holds(over_all) == (from_data(kind, high), option.flag)

    if option.section or name in {*OPTIONS, *LOADER_OPTIONS, "debug", "log_level"}:
        monkeypatch.setenv(CHANNEL, over_all.channel)
        arrived = given_outside(option.variable)
        assert (from_data(kind, arrived.value), arrived.source) == (from_data(kind, high), option.flag)
        if option.section:
            elsewhere = SECTIONS[option.section].elsewhere if option.section in SECTIONS else {}
            given = read_section(option.section, option.owner, elsewhere)[name]
            assert (given.value, given.source) == (from_data(kind, high), option.flag)
    else:
        assert option.variable not in over_all.channel
        assert getattr(over_all.launch, name) == from_data(kind, high)


WITH_DEFAULTS = [option for option in EVERY if option.field.default is not None]  # None means that nothing was given


@pytest.mark.parametrize("option", WITH_DEFAULTS, ids=lambda option: option.key)
def test_a_value_that_equals_the_default_counts_as_given(option):
    data = to_data(option.field.default)
    environ = {option.variable: as_text(values_for(option)[0])}
    found = resolved([*choosing(option), f"{option.flag}={as_text(data)}"], environ)
    assert found.get(option.field.name, option.section).source == option.flag
    assert to_data(found.get(option.field.name, option.section).value) == data


def test_the_channel_holds_what_the_command_line_and_the_file_give_and_nothing_else():
    found = resolved(
        ["--fsdp", "--fsdp.cpu-offload", "--num-processes", "2"],
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        {"gradient_accumulation_steps": 3, "bf16": {"reduce_dtype": "float32"}, "debug": None},
    )
    assert json.loads(found.channel) == {
        "command line": {
            "ACCELERATE_STRATEGY": ["fsdp", "--fsdp"],
            "ACCELERATE_FSDP__CPU_OFFLOAD": [True, "--fsdp.cpu-offload"],
        },
        "file": {
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": [3, "config.yaml"],
            "ACCELERATE_BF16__REDUCE_DTYPE": ["float32", "config.yaml"],
        },
    }
    assert found.launch == LaunchOptions(num_processes=2)
    assert not found.notes


def test_a_number_in_a_file_stands_for_the_text_that_an_option_expects():
    found = resolved(file={"redirects": 3, "rdzv_id": 7, "rdzv_conf": {"timeout": 30}})
    assert (found.launch.redirects, found.launch.rdzv_id, found.launch.rdzv_conf) == ("3", "7", {"timeout": "30"})


def test_none_in_a_file_is_not_given_but_for_options_of_components_that_know_none():
    found = resolved(
        file={"num_processes": None, "mixed_precision": "bf16", "bf16": {"output_dtype": None}, "ddp": None}
    )
    assert found.get("num_processes").source == "default"
    assert found.get("output_dtype", "bf16") == ("bf16", "output_dtype", None, "config.yaml")


def test_an_empty_variable_is_not_given():
    assert resolved(environ={"ACCELERATE_STRATEGY": " "}).get("strategy").source == "default"


def test_a_wrong_type_says_option_value_source_and_what_is_expected():
    file = ConfigFile(FILE, {"ddp": {"static_graph": "maybe"}}, {("ddp", "static_graph"): 7})
    with pytest.raises(SettingsError) as caught:
        resolve(
            CATALOG,
            parse(["--num-processes", "two"], CATALOG, {}),
            file,
            {"ACCELERATE_CPU": "", "ACCELERATE_USE_CPU": "x"},
        )
    assert caught.value.problems == (
        "num_processes='two' was given by --num-processes: expected a whole number or 'none'.",
        "cpu='x' was given by ACCELERATE_USE_CPU: expected true or false.",
        "ddp.static_graph='maybe' was given by config.yaml, line 7: expected true or false.",
    )


def test_what_another_source_overrides_is_checked_all_the_same():
    assert "config.yaml" in problems(["--num-processes", "2"], file={"num_processes": "two"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file": {"num_proceses": 2}}, "there is no option 'num_proceses'.*Type 'num_processes' if that was meant"),
        ({"file": {"fsdpp": {"cpu_offload": True}}}, "Type 'fsdp' if that was meant"),
        (
            {"file": {"strategy": "fsdp", "fsdp": {"cpu_ofload": True}}},
            "'fsdp' has no option 'cpu_ofload'.*Type 'cpu_offload' if",
        ),
        ({"file": {"accumulation": {"num_steps": 2}}}, "'accumulation' has no option 'num_steps'"),
        ({"file": {"sharded": {"even_batches": True}}}, "'sharded' has no option 'even_batches'"),
        ({"file": {"fsdp": True}}, "such as `fsdp: {option: value}`. Write `strategy: fsdp` to choose it"),
        ({"file": {"dynamo": "inductor"}}, "expected a mapping of them, such as `dynamo: {option: value}`\\.$"),
        ({"file": {"strategy": "fdsp"}}, "'fdsp' was asked for, and nothing.*Type 'fsdp' if that was meant"),
        ({"file": {"mixed_precision": 16}}, "'16' was asked for, and nothing.*Type 'fp16' if that was meant"),
        ({"environ": {"ACCELERATE_STRATEGY": "megatron_lm"}}, "Type 'megatron' if that was meant"),
        ({"environ": {"ACCELERATE_FSDPP__CPU_OFFLOAD": "1"}}, "Type ACCELERATE_FSDP__CPU_OFFLOAD if that was meant"),
        (
            {"environ": {"ACCELERATE_QQQ__X": "1"}},
            "nothing that is installed goes by the name 'qqq'. Known: process_group",
        ),
        ({"environ": {"ACCELERATE_DDP__STATIC_GRAF": "1"}}, "'ddp' has no option 'static_graf'.*Type 'static_graph'"),
        ({"file": {"mixed_precision": "fp8", "fp8": {"module_filter_func": "f"}}}, "it is for Python only"),
        ({"words": ["--fsdp.cpu-offload"]}, "an option of 'fsdp', which is not chosen. Add --strategy fsdp"),
        ({"words": ["--bf16.reduce-dtype", "float32"]}, "which is not chosen. Add --mixed-precision bf16"),
        ({"words": ["--dynamo.fullgraph"]}, "which is not chosen. Add --dynamo-backend inductor"),
        ({"words": ["--machine-rank", "3"]}, "machine_rank=3 was given, and there are num_machines=1"),
        ({"words": ["--num-processes", "0"]}, "num_processes=0 was given"),
    ],
)
def test_what_does_not_exist_or_cannot_hold_is_refused_with_what_to_type(given, message):
    assert re.search(message, problems(**given), re.DOTALL)


def test_all_mistakes_are_told_at_once():
    told_all = problems(["--num-processes", "x"], {"ACCELERATE_QQQ__X": "1"}, {"nmu_processes": 1, "strategy": "fdsp"})
    assert [word in told_all for word in ("'x'", "QQQ", "nmu_processes", "fdsp")] == [True] * 4


def test_options_of_what_is_not_chosen_reach_the_processes_and_are_noted():
    found = resolved(
        environ={"ACCELERATE_FSDP__SHARD": "2"}, file={"fsdp": {"cpu_offload": True}, "dynamo": {"mode": "x"}}
    )
    assert [value.key for value in found.idle] == ["fsdp.shard", "fsdp.cpu_offload", "dynamo.mode"]
    assert json.loads(found.channel)["file"]["ACCELERATE_FSDP__CPU_OFFLOAD"] == [True, "config.yaml"]
    about_fsdp, about_dynamo = found.notes
    assert "ACCELERATE_FSDP__SHARD and 1 more: options of 'fsdp' without effect" in about_fsdp
    assert "Add --strategy fsdp" in about_fsdp
    assert "nothing is compiled" in about_dynamo


def test_options_of_what_is_not_chosen_are_checked_when_a_file_is_validated():
    file = {"fsdp": {"cpu_ofload": True}, "fp16": {"init_scale": "much"}}
    assert resolved(file=file).idle
    told_all = problems(file=file, thorough=True)
    assert "Type 'cpu_offload' if" in told_all
    assert "fp16.init_scale='much' was given by config.yaml: expected a number" in told_all


def test_a_variable_that_is_close_to_one_of_ours_is_noted_and_any_other_is_left_alone():
    found = resolved(environ={"ACCELERATE_NUM_PROCESES": "2", "ACCELERATE_XQZ": "1"})
    assert any(
        "ACCELERATE_NUM_PROCESES is set" in note and "Type ACCELERATE_NUM_PROCESSES" in note for note in found.notes
    )
    assert len(found.notes) == 1


AROUND = {
    "command line": {
        "ACCELERATE_STRATEGY": ["fsdp", "--fsdp"],
        "ACCELERATE_FSDP__SHARD": [2, "--fsdp.shard"],
        "ACCELERATE_FSDP__CPU_OFFLOAD": [True, "--fsdp.cpu-offload"],
    },
    "file": {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": [4, "outer.yaml"],
        "ACCELERATE_DEBUG_MODE": [True, "outer.yaml"],
        "ACCELERATE_LOG_LEVEL": ["info", "outer.yaml"],
        "ACCELERATE_WHO": [1, "outer.yaml"],
    },
}


def test_what_a_launcher_around_this_one_was_told_holds_behind_what_this_one_is_told():
    environ = {CHANNEL: json.dumps(AROUND), "ACCELERATE_FSDP__CPU_OFFLOAD": "no", "ACCELERATE_LOG_LEVEL": "error"}
    found = resolved(["--fsdp.shard", "4"], environ, {"gradient_accumulation_steps": 5})
    sources = {key: (value.value, value.source) for (_, key), value in found.given.items()}
    around = "(of the launcher around this one)"
    assert sources == {
        "strategy": ("fsdp", f"--fsdp {around}"),
        "shard": (4, "--fsdp.shard"),
        "cpu_offload": (True, f"--fsdp.cpu-offload {around}"),
        "gradient_accumulation_steps": (5, "config.yaml"),
        "debug": (True, f"outer.yaml {around}"),
        "log_level": ("error", "ACCELERATE_LOG_LEVEL"),
    }
    channel = json.loads(found.channel)
    assert channel["command line"]["ACCELERATE_FSDP__SHARD"] == [4, "--fsdp.shard"]
    assert channel["command line"]["ACCELERATE_FSDP__CPU_OFFLOAD"] == [True, f"--fsdp.cpu-offload {around}"]
    assert channel["file"]["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == [5, "config.yaml"]
    assert channel["file"]["ACCELERATE_LOG_LEVEL"] == ["info", f"outer.yaml {around}"]
    assert found.notes == (
        f"ACCELERATE_WHO was given by outer.yaml {around}, and no option goes by that name: it has no effect.",
    )
    again = resolved([], {CHANNEL: found.channel}).given["fsdp", "cpu_offload"].source
    assert again == f"--fsdp.cpu-offload {around}"


def test_another_strategy_than_the_launcher_around_this_one_chose_leaves_its_options_idle_and_says_so():
    found = resolved(["--ddp"], {CHANNEL: json.dumps({"command line": AROUND["command line"]})})
    assert found.get("strategy").value == "ddp"
    assert (
        "--fsdp.shard (of the launcher around this one) and 1 more: options of 'fsdp' without effect" in found.notes[0]
    )


def test_a_number_that_is_not_written_as_usual_stands_for_no_text(tmp_path):
    path = tmp_path / "config.yaml"
    for text in ("007", "0x10", "1_000"):
        path.write_text(f"rdzv_id: {text}\n")
        with pytest.raises(SettingsError, match=r"rdzv_id=\d+ was given by .*line 1: expected a text"):
            resolve(CATALOG, CommandLine(), load_file(path), {})
    path.write_text("rdzv_id: 0\nnum_processes: 0x2\n")
    found = resolve(CATALOG, CommandLine(), load_file(path), {})
    assert (found.get("rdzv_id").value, found.get("num_processes").value) == ("0", 2)


def test_variables_of_sections_are_in_capital_letters():
    given_outside = problems(environ={"ACCELERATE_fsdp__CPU_OFFLOAD": "yes"})
    assert "variables are written in capital letters. Type ACCELERATE_FSDP__CPU_OFFLOAD=yes." in given_outside


def test_a_name_may_be_qualified_by_its_distribution():
    found = resolved(["--strategy", "accel-fsdp:fsdp", "--fsdp.cpu-offload"], {"ACCELERATE_FSDP__SHARD": "2"})
    assert found.get("cpu_offload", "fsdp").value is True
    assert found.get("shard", "fsdp").value == 2


def test_options_of_loaders_without_a_loader_say_what_to_install():
    bare = Catalog([offer for offer in CATALOG.offers if offer.group != "accel.loaders"])
    with pytest.raises(
        SettingsError, match="even_batches was given by ACCELERATE_EVEN_BATCHES.*" + how_to_install("accel-data")
    ):
        resolve(bare, CommandLine(), None, {"ACCELERATE_EVEN_BATCHES": "no"})
    with pytest.raises(SettingsError, match="--no-even-batches was given.*" + how_to_install("accel-data")):
        parse(["--no-even-batches"], bare, {})


JOB = """
import json
from accel_core import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
told = accelerator.explain().as_dict()
if accelerator.is_main_process:
    print(json.dumps({each["option"]: [each["value"], each["source"]] for each in told["settings"]}))
    print(json.dumps({each["role"]: [each["name"], each["source"]] for each in told["parts"]}))
"""


@pytest.mark.timeout(120)
def test_values_arrive_in_the_constructors_of_the_processes_with_their_sources(tmp_path):
    script, config = tmp_path / "job.py", tmp_path / "config.yaml"
    script.write_text(JOB)
    config.write_text(
        "gradient_accumulation_steps: 3\nsharded: {uneven: stop}\nmixed_precision: no\nddp: {bucket_cap_mb: 9}\n"
    )
    command = [sys.executable, "-m", "accel_launch", "launch", "--config-file", str(config), "--num-processes", "2"]
    words = ["--ddp", "--ddp.bucket-cap-mb", "7", "--ddp.static-graph=false", "--no-even-batches", str(script)]
    environ = {
        **os.environ,
        "ACCELERATE_BF16__REDUCE_DTYPE": "float32",
        "ACCELERATE_USE_CPU": "no",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=110, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    settings, parts = map(json.loads, done.stdout.splitlines()[-2:])
    assert settings["ddp.bucket_cap_mb"] == ["7.0", "--ddp.bucket-cap-mb"]
    assert settings["ddp.static_graph"] == ["False", "--ddp.static-graph"]
    assert settings["bf16.reduce_dtype"] == ["torch.float32", "ACCELERATE_BF16__REDUCE_DTYPE"]
    assert settings["sharded.uneven"] == ["stop", str(config)]
    assert settings["gradient_accumulation_steps"] == ["3", str(config)]
    assert settings["even_batches"] == ["False", "--no-even-batches"]
    assert settings["cpu"] == ["True", "argument"]
    assert parts["strategy"] == ["ddp", "--ddp"]
    assert parts["precision"] == ["bf16", "argument"]
