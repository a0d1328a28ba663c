"""`accel` finds its commands among what is installed, imports only the one that is asked for, and speaks plainly when it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from accel_core.api.component import how_to_install
from accel_core.api.launcher import list_offers
from accel_launch import output
from accel_launch.main import main

COMMANDS = '''
import sys


def well(arguments=None):
    """Do well.

    And more.
    """
    print("did", arguments)


def wrong(arguments=None):
    raise ValueError("7 was asked for, and 3 to 5 are there. Take one of these.")


def missing(arguments=None):
    open("/absent/file")


def bug(arguments=None):
    return {}["seven"]


def interrupted(arguments=None):
    raise KeyboardInterrupt


def slow(arguments=None):
    import time

    print("started", flush=True)
    time.sleep(30)


def seven(arguments=None):
    return 7
'''
ENTRIES = """[accel.commands]
well = good_commands:well
wrong = good_commands:wrong
missing = good_commands:missing
bug = good_commands:bug
interrupted = good_commands:interrupted
slow = good_commands:slow
seven = good_commands:seven
twin = good_commands:seven
"""


def distribution(folder, name, entries, requires="accel-core>=0.1"):
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n")
    (about / "entry_points.txt").write_text(entries)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Third parties' commands: good ones, one that cannot be imported, one for another core, one of a name that is there twice."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "good_commands.py").write_text(COMMANDS)
    (site / "broken_command.py").write_text("import absent_engine\n")
    distribution(site, "good-commands", ENTRIES)
    distribution(site, "broken-command", "[accel.commands]\nbroken = broken_command:main\n")
    distribution(site, "late-command", "[accel.commands]\nlate = good_commands:well\n", "accel-core>=99")
    distribution(site, "other-commands", "[accel.commands]\ntwin = good_commands:well\n")
    monkeypatch.syspath_prepend(site)
    yield site
    for module in ("good_commands", "broken_command"):
        sys.modules.pop(module, None)


@contextmanager
def accel(*arguments, site, **options):
    """A real process, which does not outlive the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "accel_launch", *arguments]
    with subprocess.Popen(command, env=environment, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_help_lists_every_command_and_says_who_brings_those_of_others(site, capsys):
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    for name in ("config", "launch", "test", "env", "plugins", "merge-weights", "doctor"):
        assert re.search(rf"^{name} +\S.+$", text, re.MULTILINE), name
    assert re.search(r"^well +Do well\. +good-commands 1\.0$", text, re.MULTILINE)
    assert re.search(r"^env +Print versions, .*[a-z.]$", text, re.MULTILINE)
    assert re.search(r"^broken +broken: No module named 'absent_engine' +broken-command 1\.0$", text, re.MULTILINE)
    assert re.search(
        r"^late +broken: late-command 1\.0 needs accel-core >=99, and .* is installed +late-com", text, re.MULTILINE
    )
    assert re.search(r"^good-commands:twin .*\n.*^other-commands:twin +Do well\.", text, re.MULTILINE | re.DOTALL)


def test_a_command_gets_the_rest_of_the_line_and_nothing_else_is_imported(site, capsys):
    assert main(["well", "--fast", "x"]) == 0
    assert capsys.readouterr().out == "did ['--fast', 'x']\n"
    assert "broken_command" not in sys.modules
    assert main(["seven"]) == 7


def test_a_broken_command_fails_when_it_is_chosen(site, capsys):
    assert main(["broken"]) == 2
    assert "broken-command 1.0 is broken: broken_command:main could not be imported" in capsys.readouterr().err


def test_an_unknown_command_is_an_error_with_the_nearest_name(capsys):
    assert main(["lunch"]) == 2
    assert re.search(
        r"no command 'lunch'. Installed: .*Type `accel launch` if that was meant\.$", capsys.readouterr().err
    )
    assert main(["xyzzy"]) == 2
    assert "`accel -h` says what each does." in capsys.readouterr().err
    assert main(["--num-processes", "2"]) == 2
    assert "there is no command '--num-processes'. Installed: " in capsys.readouterr().err


def test_a_command_of_a_package_of_ours_that_is_not_installed_says_what_to_type(monkeypatch, capsys):
    found = [offer for offer in list_offers("accel.commands") if offer.name != "checkpoint"]
    monkeypatch.setattr("accel_launch.main.list_offers", lambda group: found)
    assert main(["checkpoint", "."]) == 2
    assert "there is no command 'checkpoint'" in (said := capsys.readouterr().err)
    assert f"{how_to_install('accel-checkpoint')}." in said


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: accel ")


def test_of_two_commands_of_one_name_one_is_chosen_by_its_distribution(site, capsys):
    assert main(["twin"]) == 2
    assert "2 distributions offer it: good-commands 1.0" in capsys.readouterr().err
    assert main(["other-commands:twin"]) == 0
    assert main(["good-commands:twin"]) == 7


def test_errors_for_the_user_have_no_traceback(site, capsys):
    assert main(["wrong"]) == 2
    assert capsys.readouterr().err == "accel: 7 was asked for, and 3 to 5 are there. Take one of these.\n"
    assert main(["missing"]) == 2
    assert capsys.readouterr().err == "accel: [Errno 2] No such file or directory: '/absent/file'\n"
    with pytest.raises(ValueError, match="3 to 5 are there"):
        main(["--traceback", "wrong"])


def test_a_mistake_of_the_program_shows_where_it_is(site):
    with pytest.raises(KeyError):
        main(["bug"])


def test_the_version_names_what_a_report_needs(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"accel-launch \S+, accel-core \S+, torch \S+, Python 3\.\S+\n", capsys.readouterr().out)


def test_plugins_are_listed_with_their_state(site, capsys):
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^accel\.strategies +ddp +accel-core +\S+ +ok$", text, re.MULTILINE)
    assert re.search(
        r"^accel\.commands +broken +broken-command +1\.0 +broken: ModuleNotFoundError: No mod", text, re.MULTILINE
    )
    assert main(["plugins", "--json"]) == 0
    assert '"name": "ddp"' in capsys.readouterr().out


def test_ctrl_c_and_a_reader_that_leaves_end_it_quietly(site, capsys):
    assert main(["interrupted"]) == 130
    read, write = os.pipe()
    os.close(read)  # as `head` does when it has seen enough
    ends = {"stderr": subprocess.PIPE}
    with (
        accel("slow", site=site, stdout=subprocess.PIPE, **ends) as slow,
        accel("well", site=site, stdout=write, **ends) as piped,
    ):
        os.close(write)
        assert slow.stdout.readline() == "started\n"
        slow.send_signal(signal.SIGINT)
        assert (slow.communicate(timeout=60)[1], slow.returncode) == ("", 130)
        assert (piped.communicate(timeout=60)[1], piped.returncode) == ("", 141)


SHOWS = """
import os

from accel_launch.output import BAD, GOOD, mark, say, table, warn

for variables in ({}, {"NO_COLOR": "1"}):
    os.environ.update(variables)
    say(f"{mark(GOOD)} fine [b]", GOOD)
    warn("not fine", BAD)
    table(("name", "about"), [("x" * 100, "[red]y[/red]")], "Title")
    table(("name", "about"), [])
    print("=" * 8)
"""


@pytest.fixture(scope="module")
def shown():
    """What a real pseudo-terminal of 80 columns gets: first as it is, then with NO_COLOR."""
    import pty

    leader, follower = pty.openpty()
    given = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", SHOWS], stdout=follower, stderr=follower, env=given)
    os.close(follower)
    printed = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        printed += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return printed.decode().split("=" * 8)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_gets_colour_and_a_table_that_fits(shown):
    shown = shown[0]
    assert "\x1b[32m✓ fine [b]\x1b[0m" in shown
    assert "\x1b[1;31mnot fine\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert "Title" in plain[2]
    assert max(map(len, plain)) <= 80
    assert "".join(re.findall("x+", shown)) == "x" * 100
    assert "[red]y[/red]" in shown


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_no_color_means_plain_whole_lines_on_a_terminal_too(shown):
    assert "\x1b" not in shown[1]
    assert "x" * 100 + "  [red]y[/red]" in shown[1]


def test_what_the_output_cannot_express_is_written_in_other_ways(monkeypatch, tmp_path):
    with (tmp_path / "out.txt").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        output.say(f"{output.mark(output.GOOD)} é")
    assert (tmp_path / "out.txt").read_text() == "ok \\xe9\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no sh")
def test_a_closed_standard_output_is_an_empty_one():
    command = ["sh", "-c", '"$0" -m accel_launch --version >&-', sys.executable]
    closed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
