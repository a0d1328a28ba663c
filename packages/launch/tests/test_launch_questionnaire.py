"""`accel config` in a real terminal: what is asked, what is written, and that what is written starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from launch_terminal import DOWN, INTERRUPT, Terminal

from accel_launch.questionnaire import QUESTIONS, _in_short, ask
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.files import read
from accel_launch.starting import devices

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


@contextmanager
def terminal(*command: Any, size: tuple[int, int] = (50, 80), **environ: str) -> Iterator[Terminal]:
    opened = Terminal([sys.executable, *map(str, command)], {**NOWHERE, **environ}, size)
    try:
        yield opened
    finally:
        opened.close()


def type_over(text: str) -> str:
    """The keys that replace what is shown."""
    return "\x15" + text


@pytest.mark.full
def test_the_file_that_the_questionnaire_writes_launches_the_quickstart(tmp_path: Path):
    path = tmp_path / "config.yaml"
    with terminal("-m", "accel_launch", "config", "--config-file", path) as opened:
        opened.wait_for_text("accept the value shown, or edit it first")
        opened.wait_for(r"^\? num_machines: Number of machines in the run\.")
        opened.send(type_over("two"))
        opened.wait_for(r"expected a whole number")
        opened.answer("num_machines", type_over("1"))
        opened.answer("num_processes", type_over("2"))
        opened.wait_for_text("Fully sharded data parallelism: divides")
        offered = sorted({point.name for point in metadata.entry_points(group="accel.strategies")})
        opened.answer("strategy", DOWN * (1 + offered.index("fsdp")))
        opened.answer("mixed_precision")
        opened.answer("gradient_accumulation_steps")
        opened.answer("log_with")
        opened.wait_for(r"^ *strategy +fsdp")
        opened.answer("Write this to")
        opened.wait_for_text(f"{path} is written.")
        opened.wait_for_text("`accel launch --fsdp -h` shows the options of fsdp")
        assert opened.end() == 0
        text = opened.text
    assert "machine_rank" not in text, "there is one machine"
    assert "cpu:" not in text, "there is no accelerator that it could leave out"
    assert f"accel launch --config-file {path} script.py".replace(" ", "") in "".join(text.split())
    assert read(path).data == {"num_processes": 2, "strategy": "fsdp"}
    assert "# number of processes in the whole run" in path.read_text()

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


def test_why_something_cannot_be_chosen_is_said_in_one_sentence():
    reason = "unusable: aim is not installed. Type: pip install 'accel-trackers[aim]'"
    assert _in_short(reason) == "unusable: aim is not installed"
    assert _in_short("unusable: no chalk") == "unusable: no chalk"


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


def test_older_files_and_interruptions(tmp_path: Path):
    old, new, wrong, theirs = (tmp_path / name for name in ("old.yaml", "new.yaml", "wrong.yaml", "theirs.yaml"))
    content = (
        "# Mine.\n\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: node0\nnum_processes: 4  # two each\n"
        "mixed_precision: bf16\nbf16:\n  output_dtype: bfloat16\nlog_dir: logs\nmin_machines: 2\nrdzv_id: 7\n"
    )
    old.write_text(content)
    wrong.write_text("num_processes: 2\nfsdp:\n  cpu_ofload: true\n")
    theirs.write_text("distributed_type: FSDP\n")
    third_party(tmp_path / "site")
    files = ("dumb", wrong, theirs, old, old, old, new)
    path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    with terminal(JOB, *files, size=(60, 90), PYTHONPATH=path) as opened:
        opened.wait_for_text("[dumb was refused: accel config asks questions on a terminal, and found TERM=dumb")
        opened.wait_for_text(f"[wrong.yaml was refused: fsdp.cpu_ofload was given by {wrong}, line 3")
        opened.wait_for_text(f"[theirs.yaml was refused: {theirs} is in Accelerate's format")

        # Ctrl-C in the middle of a text, and Ctrl-D.
        opened.wait_for(r"^\? num_machines: .* 2$")
        opened.send("3" + INTERRUPT)
        opened.wait_for(r"\[old.yaml ended with 130\]")
        opened.wait_for(r"\[old.yaml ended with 130\]\n(.*\n)*^\? num_machines: .* 2$")
        opened.send(type_over("\x04"))
        opened.wait_for(r"(\[old.yaml ended with 130\][\s\S]*){2}")
        assert old.read_text() == content

        opened.wait_for(r"(^\? num_machines: [\s\S]*){3} 2$")
        # What the file says is the default; what no longer fits goes, and what does not fit together cannot be written.
        opened.answer("num_machines", type_over("-3"))
        opened.wait_for_text("num_machines=-3 was given. It counts machines: give 1 or more.")
        opened.answer("num_machines", type_over("1"))
        opened.answer("num_processes")
        opened.wait_for(r"broken .*\(.*missing")
        opened.wait_for(r"third +Distributes by turns\.$")
        opened.answer("strategy", "\x1b[A")
        opened.answer("mixed_precision")
        opened.answer("gradient_accumulation_steps", type_over("0"))
        opened.wait_for_text("expected an integer of at least 1.")
        opened.answer("gradient_accumulation_steps", type_over("8"))
        opened.wait_for(r"a_slate.*\(unusable: no chalk\)")
        opened.answer("log_with", " ")
        opened.wait_for_text("min_machines=2 was given beside num_machines=1")
        opened.answer("Write this to")
        opened.answer("num_machines", type_over("2"))
        opened.answer("machine_rank", type_over("2"))
        opened.wait_for_text("there are num_machines=2, with ranks from 0 to 1")
        opened.answer("machine_rank", type_over("1"))
        opened.answer("main_process_ip", type_over("node1"))
        opened.answer("main_process_port")
        for name in ("num_processes", "strategy", "mixed_precision", "gradient_accumulation_steps", "log_with"):
            opened.answer(name)
        opened.answer("Write this to")
        opened.wait_for(r"\[old.yaml ended with 0\]")
        assert read(old).data == {
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "node1",
            "num_processes": 4,
            "strategy": "third",
            "mixed_precision": "bf16",
            "gradient_accumulation_steps": 8,
            "log_with": ["a_diary"],
            "bf16": {"output_dtype": "bfloat16"},
            "log_dir": "logs",
            "min_machines": 2,
            "rdzv_id": 7,
        }
        assert "# Mine.\n\n" in old.read_text()
        assert "num_processes: 4  # two each\n" in old.read_text()

        # Nothing is written where the user decides so.
        for name in ("num_machines", "num_processes", "strategy", "mixed_precision", "gradient_accumulation_steps"):
            opened.answer(name)
        opened.answer("log_with")
        opened.wait_for(r"^ *none +nothing to write: all answers are defaults")
        opened.answer("Write this to", DOWN * 2)
        opened.wait_for(r"Nothing was written\.\n\[new.yaml ended with 1\]")
        assert not new.exists()
        assert opened.end() == 0


def test_without_a_terminal_it_says_what_to_type():
    with pytest.raises(ValueError, match=r"found no terminal\. Type `accel config default`.*`accel config path`"):
        ask(Catalog(), Path("none.yaml"))


def test_which_questions_matter(monkeypatch: pytest.MonkeyPatch):
    assert not QUESTIONS["machine_rank"]({})
    assert QUESTIONS["machine_rank"]({"num_machines": 2})
    assert not QUESTIONS["machine_rank"]({"num_machines": 2, "rdzv_backend": "c10d"})
    assert QUESTIONS["main_process_ip"]({"num_machines": 2, "rdzv_backend": "c10d"})
    assert not QUESTIONS["cpu"]({})
    assert QUESTIONS["cpu"]({"cpu": True})
    monkeypatch.setattr("accel_launch.questionnaire.find_accelerators", lambda: devices.Accelerators("cuda", 1))
    assert QUESTIONS["cpu"]({})
