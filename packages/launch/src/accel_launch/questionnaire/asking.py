"""From the file as it is, over the questions, to the file that is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core.api.launcher import to_data
from accel_launch.importing.places import is_of_peer, peer_paths
from accel_launch.output import BAD, DOUBTFUL, say, table
from accel_launch.questionnaire import screen
from accel_launch.questionnaire.answers import Answers, shown
from accel_launch.questionnaire.interview import Interview
from accel_launch.questionnaire.screen import Entry
from accel_launch.settings.command_line import CommandLine
from accel_launch.settings.errors import SettingsError
from accel_launch.settings.files import ConfigFile, own_path, read, write
from accel_launch.settings.resolution import resolve
from accel_launch.starting.devices import find_accelerators

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_launch.settings.catalog import Catalog

_INTERRUPTED = 130
_DECLINED = 1


def ask(catalog: Catalog, path: Path) -> int:
    """Asks about a run, and writes the answers to a configuration file.

    What a file at `path` says already is what Enter takes.

    Args:
        catalog: the options of what is installed.
        path: the file, unless another one is named at the end.

    Returns:
        The exit status: 0 if the file was written, 1 if the user decided against it, 130 if Ctrl-C
            ended it. Then nothing was
        written.

    Raises:
        ValueError: if there is no terminal that questions can be asked on; if the file that is
            there is not valid.
    """
    screen.check_terminal()
    data, meant = _read(catalog, path)
    answers = Answers(catalog, data, find_accelerators(), meant)
    try:
        return _converse(answers, path)
    except (KeyboardInterrupt, EOFError):
        say("\nInterrupted: nothing was written.", BAD)
        return _INTERRUPTED


def _read(catalog: Catalog, path: Path) -> tuple[Mapping[str, Any], Mapping[tuple[str, str], Any]]:
    """The file's data, and the values that they mean. A mistake in it is an error before the first question."""
    if not path.exists():
        return {}, {}
    file = read(path)
    if is_of_peer(file.data):
        raise SettingsError(
            f"{path} is in Accelerate's format, and its answers would be lost. Type `accel config import {path}` to carry them over, or "
            f"`accel config --config-file PATH` to write another file."
        )
    resolved = resolve(catalog, CommandLine(), file, {}, thorough=True)
    return file.data, {key: to_data(value.value) for key, value in resolved.given.items()}


def _converse(answers: Answers, path: Path) -> int:
    _greet(path)
    while True:
        Interview(answers).run()
        screen.title("Summary")
        notes, problems = _check(answers, path)
        table(
            ("option", "value"), [(key, shown(value)) for key, value in answers.given()] or [("none", "defaults hold")]
        )
        for text in (*notes, *problems):
            screen.remark(text, DOUBTFUL)
        entries = [Entry("answer again"), Entry("leave", "nothing is written")]
        if not problems:
            entries.insert(0, Entry("write"))
        picked = screen.pick("file", f"write these options to {path}?", entries, entries[0].name, is_quiet=True)
        if picked == "write":
            return _write(answers, path)
        if picked == "leave":
            say("Nothing was written.")
            return _DECLINED


def _greet(path: Path) -> None:
    peers = [each for each in peer_paths(os.environ) if each.is_file()]
    known = f"what {path} says" if path.exists() else "what is shown, the default"
    screen.remark(f"Enter takes {known}; arrow keys walk through lists; Ctrl-C leaves without writing anything.")
    if peers and not path.exists():
        screen.remark(f"Accelerate has a file at {peers[0]}: `accel config import` carries it over.")


def _check(answers: Answers, path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The notes about the answers, and the problems with them."""
    try:
        resolved = resolve(answers.catalog, CommandLine(), ConfigFile(Path(path.name), answers.data), {})
    except SettingsError as error:
        return (), error.problems
    return resolved.notes, ()


def _write(answers: Answers, path: Path) -> int:
    chosen = Path(
        screen.edit("file", "where the options are saved", str(path), lambda text: _place_problem(text, path))
    )
    target = chosen.expanduser()
    write(target, answers.data, _comments(answers))
    say(f"\n{target} is written.")
    option = "" if target.resolve() == own_path().resolve() else f" --config-file {target}"
    say(f"Type `accel launch{option} script.py` to start a script with it, `accel test{option}` to try it.")
    return 0


def _place_problem(text: str, path: Path) -> str:
    target = Path(text).expanduser()
    if not text or target.is_dir():
        return "expected the path of a file"
    if target.exists() and target.resolve() != path.resolve():
        return f"it exists: type `accel config --config-file {text}` to change it"
    return ""


def _comments(answers: Answers) -> dict[str, str]:
    comments = {}
    for key, _ in answers.given():
        section, _, name = key.rpartition(".")
        option = answers.catalog.section(section)[name] if section else answers.find(name)
        comments[key] = "" if option is None else option.help
    return comments
