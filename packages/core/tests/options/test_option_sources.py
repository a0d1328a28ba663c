"""What is given outside of the code: who is asked first, what reaches the components, and what is refused or without effect."""

from __future__ import annotations

import json
import logging
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core import (
    DDP,
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    PartialState,
    TorchDynamoPlugin,
    World,
    get_logger,
)
from accel_core.base.errors import WorldError
from accel_core.options.component_options import SECTIONS, Sections
from accel_core.options.option_sources import CHANNEL, LOADER_OPTIONS, OPTIONS, GivenOption, given_outside, variable_of
from accel_core.options.resolution import Option, resolve_options
from accel_testing import run_ranks

BF16 = "ACCELERATE_MIXED_PRECISION"


def channel(line: dict[str, Any] | None = None, file: dict[str, Any] | None = None) -> str:
    """What a launcher writes: variable → [data, source] by level."""
    levels = {"command line": line or {}, "file": file or {}}
    sources = {"command line": lambda name: f"--{name}", "file": lambda _: "config.yaml"}
    return json.dumps(
        {
            level: {name: [value, sources[level](name)] for name, value in values.items()}
            for level, values in levels.items()
        }
    )


def settings(**arguments: Any) -> dict[str, tuple[str, str]]:
    """Option → (value, source), as `explain()` shows them."""
    return {each.option: (each.value, each.source) for each in Accelerator(**arguments).explain().settings}


def test_the_variable_of_an_option_says_its_name() -> None:
    assert variable_of("mixed_precision") == "ACCELERATE_MIXED_PRECISION"
    assert variable_of("cpu") == "ACCELERATE_USE_CPU"
    assert variable_of("output_dtype", "bf16-true") == "ACCELERATE_BF16_TRUE__OUTPUT_DTYPE"


def test_command_line_before_environment_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    assert settings()["gradient_accumulation_steps"] == ("1", "default")
    monkeypatch.setenv(CHANNEL, channel(file={name: 2}))
    assert settings()["gradient_accumulation_steps"] == ("2", "config.yaml")
    monkeypatch.setenv(name, "3")
    assert settings()["gradient_accumulation_steps"] == ("3", name)
    monkeypatch.setenv(CHANNEL, channel({name: 4}, {name: 2}))
    assert settings()["gradient_accumulation_steps"] == ("4", f"--{name}")
    assert settings(gradient_accumulation_steps=1)["gradient_accumulation_steps"] == ("1", "argument")


@pytest.mark.parametrize("value", [False, "no", "0"])
def test_a_value_equal_to_the_default_counts_as_given(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    monkeypatch.setenv("ACCELERATE_DETECT_NONFINITE", "yes")
    monkeypatch.setenv(CHANNEL, channel({"ACCELERATE_DETECT_NONFINITE": value}))
    assert settings()["detect_nonfinite"] == ("False", "--ACCELERATE_DETECT_NONFINITE")


def options_of_ddp() -> list[object]:
    accelerator = Accelerator()
    shown = {each.option: (each.value, each.source) for each in accelerator.explain().settings}
    options = accelerator._parts.strategy._options
    accelerator.end_training()
    return [options["bucket_cap_mb"], options["static_graph"], shown["ddp.bucket_cap_mb"], shown["ddp.static_graph"]]


def test_the_option_of_a_component_reaches_its_constructor() -> None:
    file = channel(file={"ACCELERATE_DDP__STATIC_GRAPH": True, "ACCELERATE_DDP__BUCKET_CAP_MB": 9})
    found = run_ranks(options_of_ddp, world_size=2, env={CHANNEL: file, "ACCELERATE_DDP__BUCKET_CAP_MB": "7"})
    assert found == [[7.0, True, ("7.0", "ACCELERATE_DDP__BUCKET_CAP_MB"), ("True", "config.yaml")]] * 2


def test_shared_sections_reach_their_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ACCUMULATION__SYNC_WITH_DATALOADER", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO__FULLGRAPH", "yes")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    accelerator = Accelerator()
    assert accelerator._parts.accumulation == GradientAccumulationPlugin(sync_with_dataloader=False)
    assert accelerator._parts.compile_options == {"backend": "eager", "fullgraph": True}


def test_the_project_folder_may_be_given_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_PROJECT_DIR", "runs/a")
    accelerator = Accelerator()
    assert accelerator.project_dir == "runs/a"
    assert settings()["project_dir"] == ("runs/a", "ACCELERATE_PROJECT_DIR")
    monkeypatch.setenv("ACCELERATE_PROJECT_DIR", "~/runs")
    assert Accelerator().project_dir == os.path.expanduser("~/runs")


def test_an_empty_list_in_a_file_is_an_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNEL, channel(file={"ACCELERATE_RNG_TYPES": []}))
    assert resolve_options({}, None)["rng_types"] == Option([], "config.yaml")


def test_the_level_of_loggers_may_be_given_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNEL, channel({"ACCELERATE_LOG_LEVEL": "error"}))
    assert get_logger("accel.test.outside").logger.level == logging.ERROR


def test_every_option_has_a_parameter_of_that_name() -> None:
    from inspect import signature

    assert set(OPTIONS) <= set(signature(Accelerator).parameters)
    assert set(LOADER_OPTIONS) - set(signature(Accelerator).parameters) == {
        "data_seed",
        "non_blocking",
        "use_stateful_dataloader",
    }


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "ACCELERATE_DDP__BUCKET_CAP",
            "7",
            r"'ddp' has no option 'bucket_cap'.*Type 'bucket_cap_mb' if that was meant",
        ),
        (
            "ACCELERATE_DDP__COMM_HOOK",
            "fp8",
            r"ddp\.comm_hook='fp8' was given by ACCELERATE_DDP__COMM_HOOK: expected one of 'no'",
        ),
        (
            "ACCELERATE_DDPP__STATIC_GRAPH",
            "1",
            r"'ddpp', and nothing that is installed goes by that name\. .*Type 'ddp' if",
        ),
        (
            "ACCELERATE_XYZZY__A",
            "1",
            r"'xyzzy', and nothing that is installed goes by that name\. Known: .*accumulation, ",
        ),
        (
            "ACCELERATE_ACCUMULATION__NUM_STEPS",
            "2",
            r"no option 'num_steps'\. That is an option of the Accelerator: gradient_acc",
        ),
        (
            "ACCELERATE_ddp__STATIC_GRAPH",
            "1",
            r"ddp__STATIC_GRAPH was given, and variables are written in capital letters: ACCELERATE_DDP__STATIC_GRAPH\.",
        ),
        ("ACCELERATE_SINGLE__A", "1", r"'single' has no option 'a'\. Its options: none"),
    ],
)
def test_what_no_component_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        Accelerator(strategy="single" if "SINGLE" in variable else "ddp")


def test_an_option_for_python_only_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "odd_strategy.py").write_text(
        "from collections.abc import Callable\nfrom accel_core import DDP\n"
        "class Odd(DDP):\n    def __init__(self, chooser: Callable[[], None] | None = None) -> None: super().__init__()\n"
    )
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.strategies]\nodd = odd_strategy:Odd\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACCELERATE_ODD__CHOOSER", "x")
    with pytest.raises(
        ValueError, match=r"odd\.chooser is for Python only: its type is collections.*Build the object in the code"
    ):
        Accelerator(strategy="odd")


@pytest.mark.parametrize(
    ("variable", "text", "arguments"),
    [
        ("ACCELERATE_DDP__STATIC_GRAPH", "1", {"strategy": DDP()}),
        (
            "ACCELERATE_DDP__STATIC_GRAPH",
            "1",
            {"strategy": "ddp", "kwargs_handlers": [DistributedDataParallelKwargs()]},
        ),
        ("ACCELERATE_PROCESS_GROUP__TIMEOUT", "9", {"kwargs_handlers": [InitProcessGroupKwargs()]}),
        (
            "ACCELERATE_ACCUMULATION__ADJUST_SCHEDULER",
            "1",
            {"gradient_accumulation_plugin": GradientAccumulationPlugin()},
        ),
        ("ACCELERATE_DYNAMO__FULLGRAPH", "1", {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}),
    ],
)
def test_an_object_built_in_code_is_complete(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, arguments: dict[str, Any]
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"{variable} was given.* built in code is complete\. Leave {variable} out"):
        Accelerator(**arguments)


@pytest.mark.parametrize(
    "variable", ["ACCELERATE_DDP__STATIC_GRAPH", "ACCELERATE_DYNAMO__FULLGRAPH", "ACCELERATE_PROCESS_GROUP__TIMEOUT"]
)
def test_options_of_what_is_not_active_warn_and_name_themselves(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.warns(
        UserWarning, match=rf"{variable} was given.*not active: 1 process\(es\), strategy 'single'.*no effect"
    ):
        Accelerator()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"command line": []}', '{"file": {"ACCELERATE_X": 1}}', '{"wish": {}}', "[" * 100_000],
)
def test_a_channel_that_no_launcher_wrote_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(CHANNEL, text)
    with pytest.raises(ValueError) as caught:
        Accelerator()
    assert str(caught.value).startswith(f"{CHANNEL} cannot be read")
    assert "Unset it, and give options on the command line" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_two_active_components_whose_names_are_one_in_variables_share_no_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_A_B__BUCKET_CAP_MB", "7")
    sections = Sections()
    assert sections.take("a-b", lambda: DDP) == {"bucket_cap_mb": 7.0}
    with pytest.raises(
        ValueError, match=r"MB was given, an option of 'a_b', and two active components go by that name.* in the code"
    ):
        sections.take("a_b", lambda: DDP)


def test_what_was_told_has_the_form_that_the_environment_would_have() -> None:
    assert [GivenOption(value, "").text for value in (True, 3, ["a", "b"], " x ")] == ["true", "3", "a,b", "x"]
    assert given_outside("ACCELERATE_NOBODY_SAYS") is None


def asked_timeouts() -> list[list[str]]:
    """The timeouts of every group that a run makes, a PartialState first, and where they came from; twice."""
    found = []
    for given in ({}, {"timeout": timedelta(seconds=50)}):
        PartialState(**given)
        accelerator = Accelerator()
        groups = [accelerator._world.group, accelerator._world.subgroup([0, 1])]
        timeouts = {str(group._get_backend(torch.device("cpu")).options._timeout) for group in groups}
        sources = {each.option: each.source for each in accelerator.explain().settings}
        found.append([*timeouts, sources.get("process_group.timeout", "the code")])
        accelerator.end_training()
    return found


def test_a_timeout_given_outside_is_that_of_every_group() -> None:
    given_outside = channel({"ACCELERATE_PROCESS_GROUP__TIMEOUT": 77})
    outside, code = ["0:01:17", "--ACCELERATE_PROCESS_GROUP__TIMEOUT"], ["0:00:50", "the code"]
    assert run_ranks(asked_timeouts, world_size=2, env={CHANNEL: given_outside}) == [[outside, code]] * 2


def refused_timeout() -> list[str]:
    dist.init_process_group("gloo")
    refused = []
    for _ in range(2):
        with pytest.raises(WorldError) as caught:
            Accelerator()
        refused.append(str(caught.value))
    del os.environ["ACCELERATE_PROCESS_GROUP__TIMEOUT"]
    World.current()
    os.environ[CHANNEL] = "what nobody can read"
    World.current()  # is asked for in training loops, and does not read it again
    dist.barrier()  # rank 0 hosts the store, and leaves with it
    return refused


def test_a_timeout_given_outside_is_not_dropped_where_the_script_starts_the_group() -> None:
    found = run_ranks(refused_timeout, world_size=2, env={"ACCELERATE_PROCESS_GROUP__TIMEOUT": "77"})
    assert all("timeout=0:01:17 was asked for, it has 0:30:00" in each for refused in found for each in refused)
    assert set(SECTIONS) == {"process_group", "accumulation", "dynamo", "tracking"}
