"""`accel config` in a real terminal: what is asked, what is written, and that what is written starts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch_terminal import DOWN, INTERRUPT, Terminal

from accel_launch.questionnaire import ask
from accel_launch.questionnaire.answers import Answers, shown
from accel_launch.questionnaire.topics import FURTHER, TOPICS
from accel_launch.settings.catalog import GROUPS, Catalog
from accel_launch.settings.files import read
from accel_launch.starting.devices import Accelerators

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).parent / "questionnaire_job.py"
NOWHERE = {
    "HOME": "/nonexistent",
    "XDG_CONFIG_HOME": None,
    "XDG_CACHE_HOME": None,
    "HF_HOME": None,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX"),
]


REMAINING = ("dynamo_backend", "log_with", "data options", "debug", "detect_nonfinite")
BEHIND = REMAINING[2:]


@contextmanager
def terminal(*command: Any, size: tuple[int, int] = (50, 80), **environ: str) -> Iterator[Terminal]:
    opened = Terminal([sys.executable, *map(str, command)], {**NOWHERE, **environ}, size)
    try:
        yield opened
    finally:
        opened.close()


def finish(opened: Terminal, path: Path) -> None:
    """Takes what is shown from the compiler to the end, and writes."""
    for name in REMAINING:
        opened.answer(name)
    opened.press("more")
    opened.press("file")
    opened.answer("file")
    opened.wait_for_text(f"{path} is written.")


@pytest.mark.full
def test_the_file_that_the_questionnaire_writes_launches_the_quickstart(tmp_path: Path):
    path = tmp_path / "config.yaml"
    with terminal("-m", "accel_launch", "config", "--config-file", path) as opened:
        opened.wait_for(r"^num_machines: machines that take part\.")
        opened.answer("num_machines")
        opened.wait_for(r"^ › not given: \d on this machine")
        opened.send("0")
        opened.wait_for(r"give 1 or more\.")
        opened.send("\x7ftwo")
        opened.wait_for(r"expected a whole number")
        opened.answer("num_processes", "\x7f" * 3 + "2")
        opened.wait_for_text("Fully sharded data parallelism, with")
        assert "deepspeed" not in opened.text  # no package offers it
        opened.answer("strategy", DOWN * 2)
        opened.answer("fsdp options", DOWN)
        opened.answer("fsdp.reshard_after_forward")
        opened.answer("fsdp.replicate")
        opened.answer("fsdp.tensor_parallel", "2")
        opened.answer("fsdp.context_parallel")
        opened.answer("fsdp.wrap", "Block")
        for name in ("cpu_offload", "activation_checkpointing", "ignored_modules", "gather_dtype"):
            opened.answer(f"fsdp.{name}")
        opened.answer("fsdp.reduce_unused_parameters")
        opened.answer("fsdp.shard")
        # What the run would have ended with.
        opened.wait_for_text("FSDP(tensor_parallel=2) was asked for without a plan")
        opened.press("fsdp options")
        opened.answer("fsdp.reshard_after_forward")
        opened.answer("fsdp.replicate")
        opened.wait_for(r"\(default: 1\)\n › 2")
        opened.answer("fsdp.tensor_parallel", "1")
        for name in ("context_parallel", "wrap", "cpu_offload", "activation_checkpointing", "ignored_modules"):
            opened.answer(f"fsdp.{name}")
        for name in ("gather_dtype", "reduce_unused_parameters", "shard"):
            opened.answer(f"fsdp.{name}")
        opened.answer("mixed_precision")
        opened.answer("gradient_accumulation_steps")
        finish(opened, path)
        assert opened.end() == 0
        text = opened.text
    assert "machine_rank" not in text, "there is one machine"
    assert "cpu " not in text.replace("fsdp.cpu_offload", ""), "there is no accelerator that it could leave out"
    assert f"accel launch --config-file {path} script.py".replace(" ", "") in "".join(text.split())
    assert read(path).data == {"num_processes": 2, "strategy": "fsdp", "fsdp": {"wrap": "Block"}}
    assert "# processes of the whole run" in path.read_text()

    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "accel_launch",
            "launch",
            "--config-file",
            path,
            "examples/quickstart.py",
            "--seconds",
            "3",
            "--steps",
            "2",
        ],
        cwd=ROOT,
        env=Terminal.environ(NOWHERE),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"processes +2\n +distributed +FSDP\n", run.stdout)


def third_party(folder: Path) -> None:
    """A distribution with a strategy, and with one that cannot be imported."""
    info = folder / "third-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[accel.strategies]\nthird = third:Third\nbroken = missing:Thing\n"
        "[accel.trackers]\na_diary = third:Diary\na_slate = third:Slate\n"
    )
    (folder / "third.py").write_text(
        "class Third:\n"
        '    """Distributes by turns.\n\n    Args:\n        pace: how fast it turns.\n    """\n\n'
        "    def __init__(self, pace: int = 3) -> None:\n"
        '        assert pace < 9, "no faster than 8"\n\n\n'
        "class Diary:\n"
        '    """Records in a book.\n\n    Args:\n        pages: how many it has.\n    """\n\n'
        "    def __init__(self, pages: int = 100) -> None:\n"
        "        pass\n\n\n"
        "class Slate:\n"
        '    """Records on stone."""\n\n'
        "    @classmethod\n"
        "    def unusable(cls) -> str:\n"
        '        return "no chalk"\n'
    )


def test_older_files_and_interruptions_in_a_narrow_window(tmp_path: Path):
    old, new, wrong, theirs = (tmp_path / name for name in ("old.yaml", "new.yaml", "wrong.yaml", "theirs.yaml"))
    content = (
        "# Mine.\n\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: node0\nnum_processes: 4  # two each\n"
        "mixed_precision: bf16\nbf16:\n  output_dtype: bfloat16\nlog_dir: logs\nrdzv_conf: {a: b}\ndebug: yes\n"
        "min_machines: 2\nmeeting_timeout: 30m\nrdzv_id: 7\n"
    )
    old.write_text(content)
    wrong.write_text("num_processes: 2\nfsdp:\n  cpu_ofload: true\n")
    theirs.write_text("distributed_type: FSDP\n")
    third_party(tmp_path / "site")
    files = ("dumb", wrong, theirs, old, old, old, new)
    with terminal(JOB, *files, size=(30, 60), PYTHONPATH=str(tmp_path / "site")) as opened:
        opened.wait_for_text("[dumb was refused: accel config asks questions on a terminal, and found TERM=dumb")
        opened.wait_for_text(f"[wrong.yaml was refused: fsdp.cpu_ofload was given by {wrong}, line 3")
        opened.wait_for_text(f"[theirs.yaml was refused: {theirs} is in Accelerate's format")

        # Ctrl-C in the middle of a text, and Ctrl-D.
        opened.wait_for(r"^num_machines: .*\n › 2")
        opened.send("3" + INTERRUPT)
        opened.wait_for(r"Interrupted: nothing was written\.\n\[old.yaml ended with 130\]")
        opened.wait_for(r"\[old.yaml ended with 130\]\n(.*\n)*^num_machines: .*\n › 2")
        opened.send("\x04")
        opened.wait_for(r"(\[old.yaml ended with 130\][\s\S]*){2}")
        assert old.read_text() == content

        # What the file says is the default; what no longer fits goes, and says so.
        opened.answer("num_machines", "1")
        opened.wait_for_text("machine_rank: 1 is left out: machines are not told apart by it.")
        opened.wait_for_text("main_process_ip: node0 is left out: there is one machine.")
        opened.answer("num_processes")
        opened.wait_for(r"^   - broken +third 1.5")
        opened.wait_for(r"^   third +third 1.5 +Distributes by turns\.$")
        opened.answer("strategy", DOWN * 4)  # not to the broken one
        opened.answer("third options", DOWN)
        opened.wait_for_text("third.pace: how fast it turns.")
        opened.answer("third.pace", "9")
        opened.wait_for_text("no faster than 8")
        opened.press("third options")
        opened.answer("third.pace", "4")
        opened.answer("mixed_precision")
        opened.answer("bf16 options")
        opened.answer("gradient_accumulation_steps", "8")
        opened.answer("dynamo_backend")
        opened.wait_for(r"a_slate +\(unusable: no chalk\)")
        opened.answer("log_with", " ")
        opened.answer("a_diary options", DOWN)
        opened.answer("a_diary.pages", "7")
        for name in BEHIND:
            opened.answer(name)

        # What does not fit together cannot be written.
        opened.press("more")
        opened.wait_for_text("min_machines=2 was given beside num_machines=1")
        opened.press("file")
        opened.answer("num_machines")
        opened.answer("num_processes")
        opened.answer("strategy")
        opened.answer("third options")
        opened.answer("mixed_precision")
        opened.answer("bf16 options")
        opened.answer("gradient_accumulation_steps")
        opened.answer("dynamo_backend")
        opened.answer("log_with")
        opened.answer("a_diary options")
        for name in BEHIND:
            opened.answer(name)
        opened.press("more", DOWN * 2)
        opened.answer("local_addr")
        opened.answer("min_machines", "none")
        for name in ("meeting_timeout", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"):
            opened.answer(name)
        opened.press("more")
        opened.press("file")
        opened.answer("file")
        opened.wait_for(r"\[old.yaml ended with 0\]")
        assert read(old).data == {
            "num_processes": 4,
            "strategy": "third",
            "third": {"pace": 4},
            "mixed_precision": "bf16",
            "gradient_accumulation_steps": 8,
            "log_with": ["a_diary"],
            "a_diary": {"pages": 7},
            "bf16": {"output_dtype": "bfloat16"},
            "log_dir": "logs",
            "rdzv_conf": {"a": "b"},
            "debug": "yes",
            "meeting_timeout": "30m",
            "rdzv_id": 7,
        }
        assert "# Mine.\n\n" in old.read_text()
        assert "num_processes: 4  # two each\n" in old.read_text()

        # Nothing is written where the user decides so.
        for name in ("num_machines", "num_processes", "strategy", "mixed_precision", "gradient_accumulation_steps"):
            opened.answer(name)
        for name in REMAINING:
            opened.answer(name)
        opened.press("more")
        opened.wait_for(r"^ *none +defaults hold")
        opened.press("file", DOWN * 2)
        opened.wait_for(r"Nothing was written\.\n\[new.yaml ended with 1\]")
        assert not new.exists()
        assert opened.end() == 0


def test_without_a_terminal_it_says_what_to_type():
    with pytest.raises(ValueError, match=r"found no terminal\. Type `accel config default`.*`accel config path`"):
        ask(Catalog(), Path("none.yaml"))


def test_every_option_can_be_reached_and_is_asked_for_once():
    asked = [question.option for questions in TOPICS.values() for question in questions]
    further = [name for group in FURTHER for name in GROUPS[group] if name not in asked]
    assert sorted([*asked, *further]) == sorted(Catalog().own)


def test_which_questions_matter():
    catalog = Catalog()
    questions = {question.option: question for questions in TOPICS.values() for question in questions}

    def matters(option: str, devices: int = 0, **data: Any) -> bool:
        return questions[option].matters(Answers(catalog, data, Accelerators("cuda" if devices else "", devices)))

    assert not matters("machine_rank")
    assert matters("machine_rank", num_machines=2)
    assert not matters("machine_rank", num_machines=2, rdzv_backend="c10d")
    assert matters("main_process_ip", num_machines=2, rdzv_backend="c10d")
    assert not matters("cpu")
    assert matters("cpu", cpu=True)
    assert matters("cpu", devices=1)
    assert not matters("device_ids", devices=1)
    assert matters("device_ids", devices=2)
    assert not matters("device_ids", devices=2, cpu=True)


def test_an_answer_that_is_the_default_is_not_given():
    answers = Answers(Catalog(), {"num_machines": 2, "debug": None}, Accelerators())
    machines, steps = answers.find("num_machines"), answers.find("gradient_accumulation_steps")
    assert machines is not None
    assert steps is not None
    answers.put(machines, 1)
    answers.put(steps, 4)
    assert answers.data == {"gradient_accumulation_steps": 4}
    offload = answers.catalog.section("fsdp")["cpu_offload"]
    answers.put(offload, True)
    assert answers.data["fsdp"] == {"cpu_offload": True}
    answers.put(offload, False)
    assert "fsdp" not in answers.data


def test_values_are_shown_as_they_are_typed():
    assert [shown(each) for each in (None, True, 1, 0.5, "bf16")] == ["not given", "true", "1", "0.5", "bf16"]
    assert shown([0, 1]) == "0,1"
    assert shown(["a,b"]) == '["a,b"]'
    assert shown({"a": 1}) == '{"a": 1}'
    assert shown([]) == "[]"
