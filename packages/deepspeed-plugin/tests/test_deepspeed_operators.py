"""Operators of DeepSpeed: what is said of them, how they are compiled, and what becomes of locks that nobody holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel_core import World
from accel_deepspeed import operators
from accel_deepspeed.command import main
from accel_deepspeed.operators import (
    OperatorError,
    build,
    chosen_accelerator,
    clear_lock,
    examine,
    folder_of,
    prepare_operators,
)
from accel_testing import run_ranks

NAME = "toy"


class Builder:
    """An operator whose compiler is a line of Python."""

    name, error_log = NAME, None

    def __init__(self, compiles=True, fits=True):
        self.compiles, self.fits = compiles, fits

    def is_compatible(self, verbose=False):
        if verbose and not self.fits:
            print("\x1b[93m [WARNING] \x1b[0m toy needs a toy box")
        return self.fits

    def load(self, verbose):
        if not self.compiles:
            raise RuntimeError(f"Error building extension {NAME!r}: toy.cpp:1: no toy")
        folder_of(NAME).mkdir(parents=True, exist_ok=True)
        with (folder_of(NAME) / f"{NAME}.so").open("a") as library:
            library.write("compiled\n")


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path) -> Builder:
    """DeepSpeed has this operator alone, and it is compiled in a folder of the test's own."""
    made = Builder()
    use(made, tmp_path, monkeypatch.setattr, monkeypatch.setenv)
    return made


def use(builder: Builder, folder: Path, set_attribute, set_variable) -> None:
    set_attribute(operators, "_builders", lambda: {NAME: builder})
    set_attribute(operators, "_is_installed", lambda name: False)
    set_attribute(operators, "default_names", lambda: [NAME])
    set_variable("TORCH_EXTENSIONS_DIR", str(folder))


def test_an_operator_is_missing_until_it_is_compiled(tmp_path, capsys):
    assert examine(NAME) == (NAME, "missing", str(tmp_path / NAME))
    assert main(["build"]) == 0
    output, errors = capsys.readouterr()
    assert output == f"toy: compiled in 0 s, {tmp_path / NAME}\n"
    assert errors.endswith("toy: compiling, a minute or several …\n")  # behind what torch may say of the compiler
    assert examine(NAME).state == "built"
    assert main(["build", NAME]) == 0
    assert capsys.readouterr() == (f"toy: built in 0 s, {tmp_path / NAME}\n", "")


def test_the_list_says_what_is_impossible_and_why(toy, capsys):
    toy.fits = False
    assert main(["build", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "toy       impossible  toy needs a toy box"
    assert main(["build"]) == 0  # nothing that is needed is possible
    assert main(["build", NAME]) == 1
    assert "'toy' was to be compiled, but cannot be here: toy needs a toy box" in capsys.readouterr().err


def test_without_ninja_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(operators, "_has_ninja", lambda: False)
    assert examine(NAME) == (NAME, "impossible", "ninja is not installed: pip install ninja")


def test_a_failed_build_ends_with_what_the_compiler_says(toy, capsys):
    toy.compiles = False
    assert main(["build", NAME]) == 1
    assert "toy.cpp:1: no toy" in capsys.readouterr().err


def test_an_unknown_operator_is_refused_with_the_nearest_name(capsys):
    for arguments in (["build", "toi"], ["build", "--list", "toi"]):
        assert main(arguments) == 1
        assert "has no operator 'toi' for this machine. It has: toy. Was 'toy' meant?" in capsys.readouterr().err


def test_the_lock_of_a_killed_build_is_removed_and_that_of_a_running_one_is_not():
    lock = folder_of(NAME) / "lock"
    lock.parent.mkdir()
    program = (
        f"import os, sys; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('locked', flush=True); sys.stdin.read()"
    )
    builder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    said: list[str] = []
    try:
        assert builder.stdout.readline() == b"locked\n"
        clear_lock(NAME, said.append)
        assert lock.exists()
    finally:
        builder.kill()
        builder.communicate()
    assert not said
    build(NAME, said.append)
    assert not lock.exists()
    assert said == [f"removed {lock}: the process that was compiling 'toy' has ended without"]


def test_a_lock_that_cannot_be_judged_is_left_to_the_user(monkeypatch, tmp_path):
    lock = folder_of(NAME) / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(operators, "_PROCESSES", tmp_path / "absent")
    with pytest.raises(OperatorError, match="If nobody is, remove that file"):
        clear_lock(NAME, print)
    assert lock.exists()


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(operators, "torch", SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: False)))
    with chosen_accelerator():
        assert os.environ["DS_ACCELERATOR"] == "cpu"
        monkeypatch.setenv("SET_BY_AN_IMPORT", "1")
    assert not {"DS_ACCELERATOR", "SET_BY_AN_IMPORT"} & os.environ.keys()
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with chosen_accelerator():
        assert os.environ["DS_ACCELERATOR"] == "cuda"


def prepare(folder: Path, compiles: bool) -> list[str]:
    use(Builder(compiles), folder, setattr, os.environ.__setitem__)
    world, said = World.current(cpu=True), []
    for _ in range(2):
        prepare_operators([NAME], world, said.append)
    return said


def test_one_rank_of_a_machine_compiles_and_the_main_process_says_so(tmp_path):
    first, second = run_ranks(prepare, 2, tmp_path, True)
    assert (tmp_path / NAME / f"{NAME}.so").read_text() == "compiled\n"
    assert second == []
    (text,) = first
    assert "DeepSpeed compiles 'toy' now" in text
    assert "`accel deepspeed build` does it ahead of time" in text


def test_a_failed_build_ends_all_ranks(tmp_path):
    with pytest.raises(AssertionError) as raised:
        run_ranks(prepare, 2, tmp_path, False)
    assert str(raised.value).count("OperatorError: ") >= 2
    assert "no toy" in str(raised.value)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_an_operator_of_deepspeeds_is_compiled(tmp_path):
    command = [sys.executable, "-c", "from accel_deepspeed.command import main; raise SystemExit(main())", "build"]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "deepspeed_shm_comm"], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "deepspeed_shm_comm: compiled in" in done.stdout
    listed = subprocess.run([*command, "--list"], env=environment, capture_output=True, text=True, timeout=60)
    (line,) = (line for line in listed.stdout.splitlines() if line.startswith("deepspeed_shm_comm"))
    assert line.split()[1] == "built"
