"""`accel completion`: what Tab makes of a line, in the shells that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pexpect
import pytest
import shtab

from accel_core import PluginError
from accel_launch.commands import completion
from accel_launch.main import main

SECONDS = 30
LINES = [
    ("accel plu", "accel plugins"),
    ("accel config sh", "accel config show"),
    ("accel launch --num-pr", "accel launch --num-processes"),
    ("accel launch --dynamo-b", "accel launch --dynamo-backend"),
    ("accel launch --strategy sing", "accel launch --strategy single"),
    ("accel launch --process-group.time", "accel launch --process-group.timeout"),
    ("accel launch a_scr", "accel launch a_script.py"),
    ("accel completion f", "accel completion fish"),
]
"""What is typed before Tab, and what the line is then."""


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell} on this machine")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folder of a script for each shell, with a file that a line may name."""
    folder = tmp_path_factory.mktemp("completion")
    whole = completion.whole_parser()
    for shell in completion.SHELLS:
        (folder / f"{'_' if shell == 'zsh' else ''}accel.{shell}").write_text(shtab.complete(whole, shell))
    (folder / "_accel.zsh").rename(folder / "_accel")
    (folder / "a_script.py").touch()
    return folder


def typed(folder, command, set_up, line):
    """The line that stands in a shell on a real terminal after Tab: the shell runs `echo` on it."""
    environment = {**os.environ, "HOME": str(folder), "TERM": "dumb", "PS1": "", "INPUTRC": "/dev/null"}
    shell = pexpect.spawn(
        command[0],
        command[1:],
        cwd=str(folder),
        env=environment,
        encoding="utf-8",
        timeout=SECONDS,
        dimensions=(60, 200),
    )
    try:
        shell.sendline(f"PS1='ready''> '; {set_up}; accel() {{ echo \"[accel $*]\"; }}")
        shell.expect("ready> ")
        shell.send(f"{line}\t\n")
        shell.expect(r"\[(accel .*?)\]")
        return shell.match[1].strip()
    finally:
        shell.close(force=True)


@needs("bash")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_tab_completes_a_line_in_bash(scripts, line, expected):
    set_up = "bind 'set enable-bracketed-paste off'; source accel.bash"
    assert typed(scripts, ["bash", "--norc", "-i"], set_up, line) == expected


@needs("zsh")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_tab_completes_a_line_in_zsh(scripts, line, expected):
    set_up = f"fpath=({scripts} $fpath); autoload -U compinit; compinit -u -d {scripts}/dump; bindkey -e"
    assert typed(scripts, ["zsh", "-f", "-i"], set_up, line) == expected


@needs("fish")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_tab_completes_a_line_in_fish(scripts, line, expected):
    """`complete -C` prints what Tab offers for a line; the first one is inserted if it is the only one."""
    command = ["fish", "--private", "-c", f"source accel.fish; complete -C '{line}'"]
    environment = {**os.environ, "HOME": str(scripts)}
    ended = subprocess.run(
        command, cwd=scripts, env=environment, capture_output=True, text=True, check=True, timeout=SECONDS
    )
    offered = [each.partition("\t")[0] for each in ended.stdout.splitlines()]
    assert offered == [expected.rpartition(" ")[2]]


def test_the_command_prints_a_script_and_nothing_else(capsys):
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr()
    assert "complete -o " in printed.out
    assert not printed.err
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n"], input=printed.out, text=True, check=True, timeout=SECONDS)


def test_another_shell_is_refused_with_those_that_are_there(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "csh"])
    assert "'csh' (choose from" in capsys.readouterr().err


def test_help_says_where_each_shell_looks(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "-h"])
    text = capsys.readouterr().out
    for shell, place in completion.SHELLS.items():
        assert f"mkdir -p {place.rpartition('/')[0]}\n  accel completion {shell} > {place}\n" in text


def test_a_command_without_a_parser_completes_files_and_a_broken_one_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "commands_of_others.py").write_text("def main(arguments=None):\n    '''Do it.'''\n")
    about = tmp_path / "commands_of_others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: commands-of-others\nVersion: 1.0\n")
    entries = "[accel.commands]\nplain = commands_of_others:main\nbroken = absent_module:main\n"
    (about / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    whole = completion.whole_parser()
    sys.modules.pop("commands_of_others", None)
    (commands,) = (action for action in whole._actions if action.choices)
    assert "plain" in commands.choices
    assert "broken" not in commands.choices
    assert "accel: 'broken' (commands-of-others 1.0) is left out: " in capsys.readouterr().err


def test_the_options_of_a_broken_component_are_left_out_and_it_is_named(monkeypatch, capsys):
    from accel_launch.settings.catalog import Catalog
    from accel_launch.settings.completion import run_parser

    read = Catalog.section

    def section(self, name):
        if name == "ddp":
            raise PluginError("it is broken")
        return read(self, name)

    monkeypatch.setattr(Catalog, "section", section)
    flags = {flag for action in run_parser("accel launch", {}, "")._actions for flag in action.option_strings}
    assert "--process-group.timeout" in flags
    assert not [flag for flag in flags if flag.startswith("--ddp.")]
    assert "accel: the options of ddp are left out: it is broken" in capsys.readouterr().err
