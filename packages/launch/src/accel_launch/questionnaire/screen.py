"""One question on the terminal: the name of an option, its help, and an answer that is picked or typed.

While a question is open, its help is there; when it is answered, one line stays: name and answer.
Enter takes what is shown.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from accel_launch.output import say

if TYPE_CHECKING:
    from questionary import Choice, Separator, Style
    from rich.text import Text

_NARROW, _WIDE = 40, 100
_NAMES = 32
_NOTHING = "none"
_MANY = 12
"""So many entries that typing to find one is better than walking."""


class Entry(NamedTuple):
    """Something to pick.

    Args:
        name: as it stands in the answer.
        about: what it is, in a line.
        problem: why it cannot be picked; empty if it can.
    """

    name: str
    about: str = ""
    problem: str = ""


def check_terminal() -> None:
    """Raises `ValueError` where no question can be asked, with what to type instead."""
    name = os.environ.get("TERM", "")
    if sys.stdin.isatty() and sys.stdout.isatty() and name != "dumb":
        return
    found = "TERM=dumb, which cannot move its cursor" if name == "dumb" else "no terminal"
    raise ValueError(
        f"accel config asks questions on a terminal, and found {found}. Type `accel config default` to write a file without questions, "
        f"edit the file that `accel config path` names, or give options to `accel launch`."
    )


def title(text: str) -> None:
    """Prints the heading of what follows."""
    _print_parts((f"\n{text}", "bold"))


def remark(text: str, style: str = "dim") -> None:
    """Prints something that is no question, wrapped to the window."""
    for line in text.splitlines():
        for part in textwrap.wrap(line, _width() - 2, break_on_hyphens=False) or [""]:
            say(f"  {part}", style)


def pick(
    name: str, about: str, entries: Sequence[Entry], current: str, hint: str = "", *, is_quiet: bool = False
) -> str:
    """Lets one of several entries be picked, and returns its name.

    Args:
        name: of what is asked for.
        about: its help.
        entries: at least one that can be picked.
        current: the name of the one that Enter takes.
        hint: a line at the end of the list.
        is_quiet: whether no line stays behind.
    """
    import questionary

    names = [entry.name for entry in entries if not entry.problem]
    question = questionary.select(
        _message(name, about),
        choices=_choices(entries, hint),
        default=current if current in names else names[0],
        qmark=f"{name}:",
        pointer=_pointer(),
        instruction="(arrows, Enter; type to search)" if len(entries) > _MANY else "(arrows, Enter)",
        use_search_filter=len(entries) > _MANY,
        use_jk_keys=False,
        style=_style(),
        erase_when_done=True,
    )
    picked = str(question.unsafe_ask())
    if not is_quiet:
        _print_answer(name, picked, is_kept=picked == current)
    return picked


def pick_several(name: str, about: str, entries: Sequence[Entry], current: Sequence[str], hint: str = "") -> list[str]:
    """Lets any number of entries be picked, and returns their names; in the order of `current` if these are picked.

    Args:
        name, about, hint: as for `pick`.
        entries: at least one that can be picked.
        current: the names of those that Enter takes, each that of an entry that can be picked.
    """
    import questionary

    question = questionary.checkbox(
        _message(name, about),
        choices=_choices(entries, hint, current),
        qmark=f"{name}:",
        pointer=_pointer(),
        instruction="(arrows, Space to pick, Enter)",
        use_jk_keys=False,
        style=_style(),
        erase_when_done=True,
    )
    picked = [str(each) for each in question.unsafe_ask()]
    is_kept = set(picked) == set(current)
    _print_answer(name, ", ".join(picked) or _NOTHING, is_kept=is_kept)
    return list(current) if is_kept else picked


def type_in(name: str, about: str, current: str, check: Callable[[str], str]) -> str:
    """Lets a text be typed, and returns it; empty if `current` is kept.

    Args:
        name: of what is asked for.
        about: its help.
        current: what Enter takes.
        check: says what is wrong with a text while it is typed; empty if nothing is.
    """
    import questionary

    def verdict(text: str) -> bool | str:
        return (check(text.strip()) if text.strip() else "") or True

    question = questionary.text(
        _message(name, about),
        qmark=f"{name}:",
        validate=verdict,
        style=_style(),
        placeholder=[("class:placeholder", current)],
        erase_when_done=True,
    )
    typed = str(question.unsafe_ask()).strip()
    _print_answer(name, typed or current, is_kept=not typed)
    return typed


def edit(name: str, about: str, current: str, check: Callable[[str], str]) -> str:
    """Lets the text `current` be changed, and returns it. Arguments are those of `type_in`."""
    import questionary

    question = questionary.text(
        _message(name, about),
        default=current,
        qmark=f"{name}:",
        validate=lambda text: check(text.strip()) or True,
        style=_style(),
        erase_when_done=True,
    )
    typed = str(question.unsafe_ask()).strip()
    _print_answer(name, typed, is_kept=typed == current)
    return typed


def _choices(entries: Sequence[Entry], hint: str, checked: Sequence[str] = ()) -> list[Choice | Separator]:
    """Entries as questionary has them, and the hint below."""
    import questionary

    longest = max(len(entry.name) for entry in entries)
    choices: list[Choice | Separator] = [
        questionary.Choice(
            _cut(f"{entry.name:<{longest}}  {entry.about}".rstrip(), _width() - 6),
            value=entry.name,
            disabled=_cut(entry.problem, _width() - longest - 12) or None,
            checked=entry.name in checked,
        )
        for entry in entries
    ]
    lines = textwrap.wrap(hint, _width() - 6, break_on_hyphens=False)
    return [*choices, *(questionary.Separator(line) for line in lines)]


def _message(name: str, about: str) -> str:
    """The help, whose first line stands beside the name, and a pointer in the line of the answer."""
    before = " " * (len(name) + 2)
    text = "\n".join(textwrap.wrap(about, _width() - 2, initial_indent=before, subsequent_indent="  "))
    return f"{text.removeprefix(before)}\n {_pointer()}"


def _print_answer(name: str, answer: str, *, is_kept: bool) -> None:
    _print_parts((f"  {name:<{_NAMES}} ", "cyan"), (_cut(answer, _width() - _NAMES - 4), "dim" if is_kept else "bold"))


def _print_parts(*parts: tuple[str, str]) -> None:
    from rich.text import Text

    from accel_launch.output import console

    text: Text = Text.assemble(*parts)
    console().print(text)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 1)]}…"


def _width() -> int:
    return max(min(shutil.get_terminal_size().columns, _WIDE), _NARROW)


def _pointer() -> str:
    try:
        "›".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ">"
    return "›"


def _style() -> Style:
    import questionary

    return questionary.Style(
        [
            ("qmark", "bold ansicyan"),
            ("question", "nobold"),
            ("instruction", "ansibrightblack"),
            ("placeholder", "ansibrightblack"),
            ("separator", "ansibrightblack"),
            ("disabled", "ansibrightblack"),
            ("pointer", "bold ansicyan"),
            ("highlighted", "bold"),
            ("answer", "bold"),
        ]
    )
