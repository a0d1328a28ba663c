"""The command line: flags, values, components, the program; and what is said of words that are none of these."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from accel_core import PluginError
from accel_core.api.launcher import Offer
from accel_launch.commands import launch
from accel_launch.errors import SettingsError
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import CommandLine, Given, is_flag, parse
from accel_launch.settings.files import ConfigFile
from accel_launch.settings.peer_options import PEER_OPTIONS
from accel_launch.settings.resolution import resolve

CATALOG = Catalog()


def read(*words):
    return parse(words, CATALOG, launch.SWITCHES)


def given(*words):
    return {each.key: each.data for each in read(*words).given}


def refused(*words):
    with pytest.raises(SettingsError) as caught:
        read(*words)
    return str(caught.value)


def test_everything_behind_the_program_belongs_to_the_program():
    line = read("--num-processes", "2", "script.py", "--num-processes", "3", "-h", "--x.y")
    assert line.given == (Given("", "num_processes", "2", "--num-processes"),)
    assert line.rest == ("script.py", "--num-processes", "3", "-h", "--x.y")
    assert read("--cpu", "--", "--odd-name.py").rest == ("--odd-name.py",)
    assert read("-m", "package.module", "-m").rest == ("package.module", "-m")
    assert read("-m", "module").switch("module")


def test_a_number_of_processes_behind_the_program_is_the_programs_and_it_is_said():
    for word in ("--num-processes", "--num_processes=2", "--num-machines"):
        line = read("--cpu", "train.py", word, "2", "--mixed-precision", "no")
        assert line.rest == ("train.py", word, "2", "--mixed-precision", "no")
        assert line.notes == (
            f"{word} stands behind train.py, which takes it. Type it in front of train.py if it was meant for this command.",
        )
    assert read("--num-processes", "2", "train.py", "--num-processes", "2").notes == ()


def test_what_the_program_chooses_for_itself_says_nothing_of_our_options():
    own = ("script.py", "--loader", "mine", "--strategy", "other:fsdp")
    line = read("--fsdp", "--fsdp.cpu-offload", "--even-batches", *own)
    assert line.rest == own
    assert {each.key for each in line.given} == {"strategy", "fsdp.cpu_offload", "even_batches"}
    with pytest.raises(PluginError, match="The loader 'typo' was asked for"):
        read("--even-batches", "--loader", "typo", *own)


def test_underscores_equal_hyphens_in_every_name():
    words = ("--num_processes=2", "--mixed_precision", "bf16", "--fsdp.cpu_offload", "--strategy=fsdp", "--no_python")
    assert given(*words) == {
        "num_processes": "2",
        "mixed_precision": "bf16",
        "fsdp.cpu_offload": True,
        "strategy": "fsdp",
    }
    assert given("--bf16_true", "--bf16_true.reduce_dtype", "float32") == {
        "mixed_precision": "bf16-true",
        "bf16-true.reduce_dtype": "float32",
    }


def test_the_name_of_a_component_may_be_spelled_in_capitals():
    assert given("--FSDP", "--Fsdp.cpu-offload") == {"strategy": "fsdp", "fsdp.cpu_offload": True}


def test_a_truth_value_is_a_flag_with_a_negation_and_never_takes_the_next_word():
    assert is_flag(Annotated[bool | None, "a remark"])
    assert given("--cpu", "script.py") == {"cpu": True}
    assert given("--no-cpu", "--no-even-batches") == {"cpu": False, "even_batches": False}
    assert given("--cpu=false") == {"cpu": "false"}
    assert given("--fsdp.no-cpu-offload", "script.py") == {"fsdp.cpu_offload": False}
    assert read("--fsdp.cpu-offload", "script.py").rest == ("script.py",)
    assert given("--no-non-blocking") == {"non_blocking": False}
    assert "--cpu false was given, and a flag takes no next word" in refused("--cpu", "false", "script.py")
    assert "Type --cpu=true" in refused("--no-cpu=true")


def test_a_flag_that_may_have_a_number_takes_the_next_word_only_if_it_is_one():
    assert given("--fsdp.reshard-after-forward", "2", "script.py") == {"fsdp.reshard_after_forward": "2"}
    assert given("--fsdp.reshard-after-forward", "script.py") == {"fsdp.reshard_after_forward": True}
    assert given("--fsdp.reshard-after-forward", "--cpu") == {"fsdp.reshard_after_forward": True, "cpu": True}
    assert given("--fsdp.no-reshard-after-forward") == {"fsdp.reshard_after_forward": False}
    assert read("--fsdp.reshard-after-forward", "script.py").rest == ("script.py",)


@pytest.mark.parametrize(("kind", "flag"), [(bool | int, True), (bool | Path, False), (bool | list[str], False)])
def test_what_may_be_any_word_is_no_flag_which_would_take_the_program_for_its_value(kind, flag):
    assert is_flag(kind) is flag


def test_the_name_of_a_component_may_have_points_and_two_that_variables_cannot_tell_apart_have_no_options():
    names = ["my.own", "a-b", "a_b"]
    offers = [Offer("accel.strategies", name, "accel_core:DDP", "elsewhere", "1.0") for name in names]
    catalog = Catalog([*CATALOG.offers, *offers])
    line = parse(["--my.own", "--my.own.bucket-cap-mb", "3"], catalog, launch.SWITCHES)
    assert [(each.key, each.data) for each in line.given] == [("strategy", "my.own"), ("my.own.bucket_cap_mb", "3")]
    with pytest.raises(SettingsError, match=r"--my\.owm\.x was given.*Type --my\.own\.x if that was meant"):
        parse(["--my.owm.x"], catalog, launch.SWITCHES)
    with pytest.raises(
        PluginError, match=r"variables cannot tell 'a-b' and 'a_b' apart.*Give their options in the code"
    ):
        parse(["--a-b.bucket-cap-mb", "3"], catalog, launch.SWITCHES)
    told = r"{} was given.*, and variables cannot tell 'a-b' and 'a_b' apart"
    with pytest.raises(SettingsError, match=told.format("a-b")):
        resolve(catalog, CommandLine(), ConfigFile(Path("c"), {"a-b": {"static_graph": True}}), {})
    with pytest.raises(SettingsError, match=told.format("ACCELERATE_A_B__STATIC_GRAPH")):
        resolve(catalog, CommandLine(), None, {"ACCELERATE_A_B__STATIC_GRAPH": "1"})


def test_the_name_of_a_strategy_or_precision_is_a_flag_that_chooses_it():
    line = read("--fsdp", "--bf16", "script.py")
    assert {each.option: (each.data, each.source) for each in line.given} == {
        "strategy": ("fsdp", "--fsdp"),
        "mixed_precision": ("bf16", "--bf16"),
    }
    assert line.mentioned == ("fsdp", "bf16")
    assert given("--fsdp", "--strategy", "fsdp") == {"strategy": "fsdp"}
    assert "--fsdp and --ddp were both given, and a run has one strategy" in refused("--fsdp", "--ddp")
    assert "--bf16 and --mixed-precision fp16 were both given" in refused("--bf16", "--mixed-precision", "fp16")
    assert "it takes no value" in refused("--fsdp=true")


def test_of_an_option_that_is_given_twice_the_last_holds_and_it_is_said():
    line = read("--num-processes", "2", "--num-processes=4")
    assert [each.data for each in line.given] == ["4"]
    assert line.notes == ("--num-processes 2 and --num-processes 4 were both given: the last one holds.",)
    assert read("--num-processes", "2", "--num-processes", "2").notes == ()


def test_the_older_name_of_the_devices_is_known():
    assert given("--gpu_ids", "0,1") == given("--gpu-ids=0,1") == {"device_ids": "0,1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-proceses", "2"], "no such option. Type --num-processes if that was meant"),
        (["--dry-rum"], "Type --dry-run if that was meant"),
        (["--fsdp", "--cpu-offload"], "Type --fsdp.cpu-offload if that was meant"),
        (["--fspd"], "Type --fsdp if that was meant"),
        (["--fsdp.cpu-ofload"], "'fsdp' has no option 'cpu_ofload'. .*Type --fsdp.cpu-offload if that was meant"),
        (["--fsdpp.cpu-offload"], "Type --fsdp.cpu-offload if that was meant"),
        (["--single.x"], "'single' has no option 'x'. Its options: none"),
        (["--single.cpu"], "'single' has no option 'cpu'"),
        (["--singles"], "Type --single if that was meant"),
        (["--multi_gpu"], "is no option here. Leave it out: several processes train data-parallel by themselves"),
        (["--use-fsdp"], "Type --strategy fsdp"),
        (["--fsdp_sharding_strategy", "FULL_SHARD"], "--fsdp.reshard-after-forward for FULL_SHARD"),
        (["--megatron_lm_tp_degree=2"], "Type --strategy megatron, and what"),
        (["--fp8_format", "E4M3"], "Type --mixed-precision fp8"),
        (["--nproc-per-node", "2"], "Type --num-processes"),
        (["--xqzw"], "no such option. `accel launch -h` shows all options"),
        (["-x"], "-x was given, and there is no such option. `accel launch -h` shows all options"),
        (["--gpus", "2"], "--gpus was given, which is no option here. Type --num-processes, which counts"),
        (["--nodes", "2"], r"--nodes was given, and there is no such option\. `accel launch -h` shows"),
        (["--hostfile", "x"], r"--hostfile was given, and there is no such option\. `accel launch -h` shows"),
        (["-np", "2"], "-np was given, which is no option here. Type --num-processes"),
        (
            ["--strategy"],
            "nothing follows. Expected one of ddp, (deepspeed, )?(dispatch, )?fsdp, (megatron, )?single(, xla)?. Type --strategy=VALUE",
        ),
        (["--num-processes"], "without its value: nothing follows. Expected a whole number"),
        (["--num-processes", "--cpu"], "without its value: --cpu follows"),
        (["--main-process-ip", "-m", "x"], "without its value: -m follows"),
        (["--dry-run=yes"], "takes no value"),
        (["--dynamo", "x.py"], "--dynamo was given, which has options but is none. Give one of them"),
    ],
)
def test_a_word_that_is_no_option_is_refused_with_what_to_type(words, message):
    assert re.search(message, refused(*words), re.DOTALL)


def test_a_value_may_begin_with_a_single_hyphen():
    assert given("--rdzv-id", "-1") == {"rdzv_id": "-1"}


def test_names_of_other_launchers_are_none_of_ours_and_their_advice_names_options_that_exist():
    assert not set(PEER_OPTIONS) & {*CATALOG.own, *launch.SWITCHES}
    later = {"megatron"}
    for text in PEER_OPTIONS.values():
        for flag in re.findall(r"--[a-z][\w.-]*[a-z0-9]", text):
            if not any(word in flag for word in later) and "`" not in text and "N" not in text:
                try:
                    read(flag, "1", "-h")
                except SettingsError as error:
                    assert "no such option" not in str(error), flag
                    assert "has no option" not in str(error), flag


def test_an_option_for_python_only_is_known_to_the_command_line(capsys):
    assert launch.main(["--fsdp", "-h"]) == 0
    shown = " ".join(
        capsys.readouterr().out.split()
    )  # without the breaks of lines, which follow the width of the terminal
    assert "For Python only: parallelize_plan (its type is Plan | None)." in shown


def test_help_shows_every_option_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert launch.main(["-h"]) == 0
    shown = capsys.readouterr().out
    assert [flag for option in CATALOG.own.values() if f"  {(flag := option.flag)}" not in shown] == []
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "[default: no; installed: bf16," in " ".join(shown.split())
    assert shown.startswith("usage: accel launch [options] script.py")


def test_help_behind_a_component_is_about_its_options_alone(capsys):
    assert launch.main(["--fsdp", "-h"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Fully sharded data parallelism: divides a model" in shown
    assert "--fsdp.cpu-offload keep parameters, gradients" in shown
    joined = "".join(shown.split())  # a line may break at a hyphen
    assert "[or--fsdp.no-cpu-offload;default:false;ACCELERATE_FSDP__CPU_OFFLOAD]" in joined
    assert "--fsdp.reshard-after-forward[=true|false|N]" in shown
    assert "--num-processes N" not in shown
    for words in (["--dynamo", "-h"], ["--sharded", "--help"], ["--single", "-h"]):
        assert launch.main(words) == 0
    shown = capsys.readouterr().out
    assert "--sharded.uneven {pad,stop,join}" in shown
    assert "It has no options." in shown


def test_what_cannot_be_started_is_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"nowhere\.py was to be started, and there is no such file"):
        launch.main(["nowhere.py"])
    with pytest.raises(SettingsError, match="Nothing was given that could be started"):
        launch.main([])
    with pytest.raises(SettingsError, match="--module and --no-python were both given"):
        launch.main(["-m", "--no-python", "x"])


def environment_without_files(empty):
    """This process's environment, where no configuration file lies."""
    return os.environ | dict.fromkeys(("XDG_CONFIG_HOME", "HF_HOME", "XDG_CACHE_HOME", "HOME"), str(empty))


@pytest.mark.timeout(120)
def test_a_dry_run_shows_what_holds_and_what_would_be_started_and_starts_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "accel_launch",
        "launch",
        "--dry-run",
        "--cpu",
        "--num-processes=2",
    ]
    environ = environment_without_files(tmp_path)
    words = ["--fsdp", "--fsdp.cpu-offload", str(script), "its argument"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=110, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["fsdp.cpu_offload", "true", "--fsdp.cpu-offload"] in rows
    assert ["num_processes", "2", "--num-processes"] in rows
    assert "more options have their defaults. `accel config show --all` lists them, too." in done.stdout
    assert ["max_restarts", "0", "default"] not in rows
    assert ["processes", "2", "in", "all"] in rows
    assert f"{script} 'its argument'" in done.stdout
    assert "it ran" not in done.stdout + done.stderr
    assert "rich" not in {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.timeout(120)
def test_a_mistake_ends_with_status_2_a_message_and_no_traceback_and_nothing_is_imported_for_it(tmp_path):
    environ = environment_without_files(tmp_path) | {"ACCELERATE_DDP__X": "1", "ACCELERATE_FSDP__SHARD": "2"}
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "accel_launch",
        "launch",
        "--bf16",
        "--num-processes",
        "two",
        "x.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ, check=False)
    assert done.returncode == 2
    assert "num_processes='two' was given by --num-processes" in done.stderr
    assert "'ddp' has no option 'x'" in done.stderr
    assert "Traceback" not in done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    slow = {"accel_fsdp", "accel_data", "accel_precision", "rich", "ruamel", "questionary", "docstring_parser", "click"}
    assert not slow & imported
