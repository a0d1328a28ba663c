"""`accel test` says that a set-up works where it does, and what is wrong where it does not."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from accel_core.api.component import how_to_install
from accel_launch.checking import communication
from accel_launch.checking.setup_job import Check
from accel_launch.checking.steps import CheckError
from accel_launch.commands import examination
from accel_launch.commands.test import main
from accel_testing import run_ranks

FAULTY = Path(__file__).parent / "faulty"
LAUNCH = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ACCEL.*|TORCHELASTIC.*|SLURM.*)"
)


class Told(NamedTuple):
    works: bool
    text: str


def check(environment=(), folder=None):
    """What the checks print on this rank, under some variables. It is a process of its own."""
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        job = Check(folder)
        works = job.run()
        job.accelerator.end_training()
    for name in dict(environment):
        del os.environ[name]
    return Told(works, out.getvalue())


STRATEGIES = ("alone", "summing", "forgetful", "amnesic", "raising")
LOADERS = ("repeating", "backwards", "stubborn")


def everything_that_is_wrong():
    """Every fault, one after another in one world. In the end the parts of the installation are wrong, too."""
    told = {name: check({"ACCELERATE_STRATEGY": name}) for name in STRATEGIES}
    told |= {name: check({"ACCELERATE_LOADER": name}) for name in LOADERS}
    told["right"] = check()
    told["mean of one"] = check({"ACCELERATE_EVEN_BATCHES": "false", "ACCELERATE_SPLIT_BATCHES": "true"})
    whole, gather = metadata.distributions, communication.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            communication,
            "gather",
            lambda tree: [each * 0 for each in gather(tree)] if isinstance(tree, list) else gather(tree),
        )
        patch.setattr(communication, "reduce", lambda tree, *_: tree)
        told["silent"] = check()
    with pytest.MonkeyPatch.context() as patch:
        rank = os.environ["RANK"]
        patch.setattr(communication.metadata, "version", lambda name: f"1.{rank}")
        told["versions"] = check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            metadata,
            "distributions",
            lambda: [each for each in whole() if each.name != "accel-data" and each.name != "faulty-parts"],
        )
        told["no loader"] = check()
    return told


@pytest.fixture(scope="module")
def told():
    """What rank 0 printed of every fault."""
    pytest.importorskip("accel_data", reason="accel-data reads in a world of two, and is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAULTY)
        first, second = run_ranks(everything_that_is_wrong, 2, timeout=100)
    assert {name: each.works for name, each in first.items()} == {name: each.works for name, each in second.items()}
    assert not any(
        each.text.replace("Rank", "") and "✓" in each.text for each in second.values()
    )  # rank 0 speaks for all
    return first


def on_two_machines(folder):
    """Each rank is the only one of its machine; rank 1 lies when it is asked whether it sees a folder."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    told = {"temporary": check(), "shared": check(folder=folder), "parts": check({"ACCELERATE_STRATEGY": "parted"})}
    if os.environ["RANK"] == "1":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "is_dir", lambda _: False)
            return told | {"unseen": check(folder=folder)}
    return told | {"unseen": check(folder=folder)}


def test_what_machines_do_not_share_is_said(tmp_path, monkeypatch):
    pytest.importorskip("accel_data", reason="accel-data reads in a world of two, and is not installed")
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    told, _ = run_ranks(on_two_machines, 2, tmp_path)
    assert told["temporary"].works
    assert "✓ checkpoint: saved and loaded" in told["temporary"].text
    assert "! checkpoint: each machine saved by itself. To check a folder that all machines" in told["temporary"].text
    assert told["shared"].works
    assert "! " not in told["shared"].text
    assert told["parts"].works
    assert "✓ checkpoint" not in told["parts"].text
    assert "! checkpoint: not looked at: parts of a checkpoint would lie on different machines" in told["parts"].text
    assert failed(told["unseen"]) == ["checkpoint"]
    assert "what rank 0 makes there is not seen by the ranks 1. Give" in told["unseen"].text
    assert not list(tmp_path.glob("accel-test-*"))


def failed(told):
    return re.findall(r"^✗ ([\w ]+):", told.text, re.MULTILINE)


def test_a_right_set_up_passes(told):
    assert told["right"].works
    assert not failed(told["right"])
    assert told["right"].text.endswith("This set-up works: 2 processes, ddp, no, cpu.\n")
    assert re.findall(r"^✓ ([\w ]+): .*\(\d+\.\d s\)$", told["right"].text, re.MULTILINE) == [
        "processes", "collectives", "data order", "training", "accumulation", "checkpoint",
    ]  # fmt: skip


def test_other_options_of_loaders_pass_too(told):
    assert told["mean of one"].works


@pytest.mark.parametrize(
    ("fault", "steps", "words"),
    [
        (
            "alone",
            ["training", "accumulation", "checkpoint"],
            r"should be those of one process, give or take 0\.0001 .*try again with",
        ),
        ("summing", ["training", "accumulation"], "The strategy or the precision is at fault"),
        ("forgetful", ["checkpoint"], r"other values came for 0\.weight, .*The strategy is at fault"),
        ("amnesic", ["checkpoint"], "the state of the optimizer did not come back"),
        ("raising", ["training", "accumulation", "checkpoint"], "ValueError: This model was to be prepared, but none"),
        ("repeating", ["data order"], r"1 missing \(1\), 1 more than once \(0\).*`accel plugins` says who brings it"),
        ("backwards", ["data order"], r"expected in order. Found the order \[22, 21"),
        ("stubborn", ["data order"], "Two epochs of 23 shuffled samples came in the same order"),
        ("silent", ["collectives"], r"gather of unequal sizes, sum, mean, maximum gave other values .*`accel doctor`"),
        ("versions", ["processes"], r"one version of core, and found was 1\.0 on .*, 1\.1 on .*Install the same"),
        ("no loader", ["data order"], "NotInstalledError: .*" + how_to_install("accel-data")),
    ],
)
def test_a_fault_is_found_and_named(fault, steps, words, told):
    assert not told[fault].works
    assert failed(told[fault]) == steps
    assert re.search(words, told[fault].text, re.DOTALL), told[fault].text
    assert f"Failed: {', '.join(steps)}." in told[fault].text.splitlines()[-1]


def test_an_error_that_no_check_expects_shows_where_it_was_raised(told):
    assert re.search(r"Rank 0 raised:\nTraceback .*faulty_parts.py", told["raising"].text, re.DOTALL)
    assert "Traceback" not in told["alone"].text


def accel_test(*options, folder):
    environment = {name: value for name, value in os.environ.items() if not LAUNCH.fullmatch(name)}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(FAULTY),
        "XDG_CONFIG_HOME": str(folder),
        "TMPDIR": str(folder),
    }
    return subprocess.run(
        [sys.executable, "-m", "accel_launch", "test", *options],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.full
def test_the_command_starts_what_a_file_says(tmp_path):
    pytest.importorskip("accel_data", reason="accel-data reads in a world of two, and is not installed")
    (tmp_path / "two.yaml").write_text("num_processes: 2\ncpu: true\n")
    (tmp_path / "shared").mkdir()
    ended = accel_test("--config-file", "two.yaml", "--folder", "shared", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("This set-up works: 2 processes, ddp, no, cpu.\n")
    assert "\x1b" not in ended.stdout
    assert not list(tmp_path.glob("accel-test-*"))
    assert not list((tmp_path / "shared").iterdir())


@pytest.mark.parametrize(("processes", "strategy"), [("1", "ddp"), pytest.param("2", "single", marks=pytest.mark.full)])
def test_what_cannot_even_be_started_is_said_with_status_1(processes, strategy, tmp_path):
    ended = accel_test("--cpu", "--num-processes", processes, "--strategy", strategy, folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    expected = rf"^✗ configuration: strategy '{strategy}' was .*\nThis set-up does not work: nothing can be started"
    assert re.search(expected, ended.stdout, re.DOTALL)
    assert "Traceback" not in ended.stderr
    assert "failed first" not in ended.stderr  # no rank broke down
    assert not list(tmp_path.glob("accel-test-*"))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0, 1), "several have cuda:0 on here. Start fewer processes there"), ((0, 0), "Ranks 0 to 1 were expected, and")],
)
def test_ranks_that_share_a_device_or_a_number_are_found(ranks, words, monkeypatch):
    """Without accelerators, what the ranks would say is put into their mouths."""
    cards = [communication._Card(rank, "here", "cuda:0", "2", "1") for rank in ranks]
    monkeypatch.setattr(communication, "gather_object", lambda _: cards)
    with pytest.raises(CheckError, match=words):
        communication.check_processes(SimpleNamespace(rank=0, size=2, device=torch.device("cuda:0")))


def test_a_check_that_broke_off_is_no_pass(monkeypatch, capsys):
    monkeypatch.setattr(examination, "run", lambda *_: 3)
    assert main(["--num-processes", "2"]) == 3
    assert "This set-up does not work: the check broke off. What stands above says where." in capsys.readouterr().out


def test_what_is_no_option_is_said(tmp_path):
    with pytest.raises(
        ValueError, match="script.py was given, and accel test starts a program of its own; accel launch"
    ):
        main(["script.py"])
    with pytest.raises(ValueError, match="--folder .*absent was given, and there is no such folder. Make it: mkdir -p"):
        main(["--folder", str(tmp_path / "absent")])


def test_help_says_what_is_checked(capsys):
    assert main(["--help"]) == 0
    assert "Train a small model on this set-up" in capsys.readouterr().out
