"""`accel config`: about ten questions, and a configuration file of the answers.

Enter takes what is shown: what the file says, else the default. Everything else that can be
configured is written into the file by hand, or given to `accel config default`; what the file says
already about it stays.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core.api.launcher import KNOWN_PROVIDERS, choices, from_data, to_data
from accel_launch.errors import SettingsError
from accel_launch.importing.places import is_of_peer, peer_paths
from accel_launch.output import BAD, DOUBTFUL, say, table
from accel_launch.settings.catalog import ALL, ROLES, SEVERAL, Catalog, Option, chosen_names, flag_of
from accel_launch.settings.command_line import CommandLine
from accel_launch.settings.files import ConfigFile, read, write
from accel_launch.settings.help_page import shown_value
from accel_launch.settings.resolution import resolve
from accel_launch.settings.showing import say_next
from accel_launch.starting.devices import find_accelerators

if TYPE_CHECKING:
    from questionary import Choice

_INTERRUPTED, _DECLINED = 130, 1
_NOT_GIVEN = "not given"
_ANSWER = Path("this answer")

Answers = dict[str, Any]


def _always(_: Answers) -> bool:
    return True


def _several_machines(answers: Answers) -> bool:
    return answers.get("num_machines", 1) not in {1, "1"}


def _numbered_machines(answers: Answers) -> bool:
    return _several_machines(answers) and answers.get("rdzv_backend") in {None, "static"}


def _has_accelerators(answers: Answers) -> bool:
    return "cpu" in answers or find_accelerators().count > 0


QUESTIONS: Mapping[str, Callable[[Answers], bool]] = {
    "num_machines": _always,
    "machine_rank": _numbered_machines,
    "main_process_ip": _several_machines,
    "main_process_port": _several_machines,
    "num_processes": _always,
    "cpu": _has_accelerators,
    "strategy": _always,
    "mixed_precision": _always,
    "gradient_accumulation_steps": _always,
    "log_with": _always,
}
"""Option → whether it is asked for, given the answers so far. What is not asked for is taken back."""


def ask(catalog: Catalog, path: Path) -> int:
    """Asks about a run, and writes the answers to a configuration file.

    Returns 0 if it was written, 1 if the user decided against it, 130 after Ctrl-C. Raises
    `ValueError` without a terminal for questions, or if the existing file is not valid.
    """
    _check_terminal()
    before = _read(catalog, path)
    peers = [each for each in peer_paths(os.environ) if each.is_file()]
    say(
        "Press Enter to accept the value shown, or edit it first; the arrow keys move in a list. Ctrl-C leaves and writes "
        "nothing."
    )
    if peers and not path.exists():
        say(f"Accelerate has a file at {peers[0]}: `accel config import` carries it over.")
    try:
        return _converse(catalog, path, before)
    except (KeyboardInterrupt, EOFError):
        say("\nInterrupted: nothing was written.", BAD)
        return _INTERRUPTED


def _check_terminal() -> None:
    is_dumb = os.environ.get("TERM") == "dumb"
    if is_dumb or not sys.stdin.isatty() or not sys.stdout.isatty():
        raise ValueError(
            f"accel config asks questions on a terminal, and found {'TERM=dumb' if is_dumb else 'no terminal'}. Type `accel "
            "config default` to write a file without questions, edit the file that `accel config path` names, or give "
            "options to `accel launch`."
        )


def _read(catalog: Catalog, path: Path) -> Answers:
    """The content of the existing file, checked: its mistakes are raised before any question."""
    if not path.exists():
        return {}
    file = read(path)
    if is_of_peer(file.data):
        raise SettingsError(
            f"{path} is in Accelerate's format, and its answers would be lost. Type `accel config import {path}`."
        )
    resolve(catalog, CommandLine(), file, {}, thorough=True)
    return {key: value for key, value in copy.deepcopy(dict(file.data)).items() if value is not None}


def _converse(catalog: Catalog, path: Path, before: Answers) -> int:
    import questionary

    answers = before
    while True:
        answers = _interview(catalog, answers)
        try:
            resolved = resolve(catalog, CommandLine(), ConfigFile(path, answers), {}, thorough=True)
        except SettingsError as error:
            for problem in error.problems:
                say(problem, DOUBTFUL)
            ways = ["answer again", "leave"]
        else:
            for note in resolved.notes:
                say(note, DOUBTFUL)
            ways = ["write", "answer again", "leave"]
        rows = [(key, _shown(value)) for key, value in answers.items()]
        table(("option", "value"), rows or [("none", "nothing to write: all answers are defaults")])
        picked = questionary.select(f"Write this to {path}?", ways).unsafe_ask()
        if picked == "write":
            return _write(catalog, path, answers)
        if picked == "leave":
            say("Nothing was written.")
            return _DECLINED


def _interview(catalog: Catalog, before: Answers) -> Answers:
    answers = dict(before)
    for name, matters in QUESTIONS.items():
        option = catalog.direct[name]
        if not matters(answers):
            answers.pop(name, None)
            continue
        current = answers.get(name, to_data(option.field.default))
        is_known = name in ROLES or choices(option.field.type)
        told = _pick(catalog, option, current) if is_known else _type(catalog, option, current, answers)
        if told == to_data(option.field.default):
            answers.pop(name, None)
        elif told != current:
            answers[name] = told
    return {**{name: answers[name] for name in catalog.own if name in answers}, **answers}


def _pick(catalog: Catalog, option: Option, current: Any) -> Any:
    """The answer to a question whose answers are known: truth values, and what is installed."""
    import questionary

    name = option.field.name
    if name not in ROLES:
        default = str(current).lower() in {"true", "yes", "on", "1"}
        return questionary.confirm(_question(option), default=default).unsafe_ask()
    hints = [each for each in KNOWN_PROVIDERS[ROLES[name]] if each not in catalog.names(name)]
    about = _question(option) + (f" Not installed: {', '.join(hints)}." if hints else "")
    names = chosen_names(name, current)
    if name in SEVERAL:
        listed = _listed(catalog, name, names)
        return (questionary.checkbox(about, listed).unsafe_ask() or None) if listed else None
    first = [questionary.Choice(_NOT_GIVEN)] if option.field.default is None else []
    listed = [*first, *_listed(catalog, name)]
    picked = questionary.select(about, listed, default=next(iter(names), _NOT_GIVEN)).unsafe_ask()
    return None if picked == _NOT_GIVEN else picked


def _question(option: Option) -> str:
    """The help of an option as a question, after its name."""
    return f"{option.field.name}: {option.help[0].upper()}{option.help[1:]}"


def _listed(catalog: Catalog, role: str, chosen: list[str] | None = None) -> list[Choice]:
    """Installed components, each with its docstring's first line, or why it cannot be chosen."""
    import questionary

    found = catalog.choices(role)
    longest = max((len(each.name) for each in found), default=0)
    picked = set(chosen or ()) | ({each.name for each in found} if ALL in (chosen or ()) else set())
    return [
        questionary.Choice(
            f"{each.name:<{longest}}  {each.summary}".rstrip(),
            value=each.name,
            disabled=_in_short(each.problem) if each.problem and each.name not in picked else None,
            checked=each.name in picked,
        )
        for each in found
    ]


def _in_short(problem: str) -> str:
    """Why something cannot be chosen, without what to type: that would be cut at the edge of the screen."""
    return problem.partition(". ")[0]


def _type(catalog: Catalog, option: Option, current: Any, answers: Answers) -> Any:
    """The answer to a typed question, checked while typing; empty: the option is not given."""
    import questionary

    others = {"num_machines": answers.get("num_machines", 1)}  # which other numbers have to fit

    def verdict(text: str) -> bool | str:
        if text.strip() in {"", _NOT_GIVEN}:
            return True
        file = ConfigFile(_ANSWER, {**others, option.field.name: text.strip()})
        try:
            resolve(catalog, CommandLine(), file, {}, thorough=True)
        except SettingsError as error:
            return error.problems[0]
        return True

    typed = questionary.text(_question(option), default=_shown(current), validate=verdict).unsafe_ask().strip()
    if typed == _shown(current):
        return current
    return None if typed in {"", _NOT_GIVEN} else to_data(from_data(option.field.type, typed))


def _write(catalog: Catalog, path: Path, answers: Answers) -> int:
    write(path, answers, catalog.help_of(answers))
    say(f"{path} is written.")
    sections = [name for role in ROLES for name in chosen_names(role, answers.get(role)) if name in catalog.sections]
    for name in sections:
        place = f"which stand in the file as `{name}: {{option: value}}`"
        say(f"`accel launch {flag_of(name)} -h` shows the options of {name}, {place}.")
    say_next(path)
    return 0


def _shown(value: Any) -> str:
    return _NOT_GIVEN if value is None else shown_value(value)
