"""Reading a command line: options of starting, of the run, of its components; then the program.

    accel launch --num-processes 2 --fsdp --fsdp.cpu-offload script.py --its-own options

Underscores equal hyphens. A truth value is a flag, `--cpu`, `--no-cpu` or `--cpu=false`; it never
takes the next word, which may be the script. Everything behind the program belongs to the program.
A component is imported when one of its options is met.

What is given stays text here: `accel_launch.settings.resolution` makes values of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from accel_core import PluginError
from accel_core.api.launcher import expected, from_data, members, section_name
from accel_launch.errors import SettingsError
from accel_launch.settings.catalog import ROLES, SEVERAL, chosen_names, flag_of
from accel_launch.settings.unknown import unknown_option

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog, Option

ALIASES: Mapping[str, str] = {"gpu_ids": "device_ids"}
"""Older names on the command line: name → the option's own."""

CHOOSING = ("strategy", "mixed_precision")
"""The options of which each value is a flag as well: `--fsdp` is `--strategy fsdp`."""


IN_FRONT = ("num_processes", "num_machines")
"""Options that scripts seldom have: where one stands behind the program alone, it was perhaps meant to start more processes."""


class Switch(NamedTuple):
    """An option of one command alone, which stands in no file."""

    help: str  # what it does, for the user
    takes: str = ""  # what its value is called in help; empty for a flag
    short: str = ""  # its letter, if any


class Given(NamedTuple):
    """One value that was given."""

    section: str  # of the option; empty for options without one
    option: str  # its name
    data: Any  # text, or data as JSON has them
    source: str  # where it was given, as tables show it: a flag, a variable, a file
    place: str = ""  # the same with the line of a file; empty if there is none

    @property
    def key(self) -> str:
        """`fsdp.cpu_offload`, or `num_processes`."""
        return f"{self.section}.{self.option}" if self.section else self.option

    @property
    def told_by(self) -> str:
        """The source of the value, for messages: with the line of a file."""
        return self.place or self.source


@dataclass(frozen=True)
class CommandLine:
    """The content of a command line."""

    given: tuple[Given, ...] = ()  # values of options; each option at most once
    # what was given for the command's own switches: a text, or True
    switches: Mapping[str, str | bool] = field(default_factory=dict)
    # The components that it names, by an option of theirs or by choosing them, in order.
    mentioned: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()  # the program and its arguments
    notes: tuple[str, ...] = ()  # what the user should know of how it was read

    def switch(self, name: str) -> bool:
        """Whether a flag of the command was given."""
        return bool(self.switches.get(name))

    def text(self, name: str) -> str | None:
        """The value of a switch of the command; None if it was not given."""
        value = self.switches.get(name)
        return value if isinstance(value, str) else None


def parse(arguments: Sequence[str], catalog: Catalog, switches: Mapping[str, Switch]) -> CommandLine:
    """Reads a command line: what stands behind the name of the command.

    `switches` are the command's own options, by name with underscores. Raises `SettingsError` for
    options that do not exist, lack values or contradict others; `PluginError` for broken ones.
    """
    # What words mean depends on what is chosen, perhaps behind them; where the program begins depends on what words mean. So the words
    # that choose are looked for everywhere first, then before the last one that may be the program's own, and so on.
    places = [place for place, word in enumerate(arguments) if _chooses(word)]
    problem: SettingsError | PluginError | None = None
    for end in [len(arguments), *reversed(places)]:
        chosen = _chosen(arguments[:end])
        try:
            found = _Reader(list(arguments), catalog.with_loader(chosen.get("loader")), switches, chosen).read()
        except (SettingsError, PluginError) as error:
            problem = error
            continue
        if _chosen(arguments[: len(arguments) - len(found.rest)]) == chosen:
            return found
    assert problem is not None, "the words before the program are among those that were tried"
    raise problem


def is_flag(kind: Any) -> bool:
    """Whether an option may be given without a value: it takes a truth value, and not any word."""
    return bool in members(kind) and not _is_value(kind, "script.py")


def _is_value(kind: Any, text: str) -> bool:
    """Whether a text is a value of an option, and none of its truth values."""
    others = tuple(member for member in members(kind) if member not in {bool, NoneType})
    with suppress(ValueError):
        return bool(others) and from_data(Union[others], text) is not ...  # noqa: UP007
    return False


def _chooses(word: str) -> str:
    """The one of `ROLES` that a word names, as in `--loader` or `--loader=NAME`; empty: none."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    return name if word.startswith("--") and name in ROLES else ""


def _chosen(arguments: Sequence[str]) -> dict[str, str]:
    """The names that a command line chooses, by role, before anything else is known."""
    found = {}
    for place, word in enumerate(arguments):
        if word == "--":
            break
        if role := _chooses(word):
            _, equals, value = word.partition("=")
            found[role] = value if equals else "".join(arguments[place + 1 : place + 2])
    return found


class _Reader:
    """One walk over the words of a command line."""

    def __init__(
        self, words: list[str], catalog: Catalog, switches: Mapping[str, Switch], chosen: Mapping[str, str]
    ) -> None:
        self._words, self._catalog, self._switch_table = words, catalog, switches
        names = [name for role, given in chosen.items() for name in chosen_names(role, given)]
        self._references = {name.rpartition(":")[2]: name for name in names}
        self._letters = {switch.short: name for name, switch in switches.items() if switch.short}
        self._given: dict[tuple[str, str], Given] = {}
        self._switches: dict[str, str | bool] = {}
        self._mentioned: list[str] = []
        self._notes: list[str] = []
        self._last_flag = ""
        self._bare: list[tuple[str, str]] = []

    def read(self) -> CommandLine:
        while self._words and self._words[0].startswith("-") and self._words[0] != "-":
            word = self._words.pop(0)
            if word == "--":
                break
            self._option(word)
        self._check_flag()
        if self._bare and "help" not in self._switches:
            word, section = self._bare[0]
            choosing = "".join(f" {flag_of(role)} {section} chooses it." for role in self._catalog.roles(section))
            raise SettingsError(
                f"{word} was given, which has options but is none. Give one of them, {word}.OPTION; `accel launch "
                f"{word} -h` shows them.{choosing}"
            )
        self._note_words_behind()
        mentioned = tuple(dict.fromkeys(self._mentioned))
        return CommandLine(
            tuple(self._given.values()), self._switches, mentioned, tuple(self._words), tuple(self._notes)
        )

    def _note_words_behind(self) -> None:
        flags = {flag_of(name) for name in IN_FRONT if ("", name) not in self._given}
        for word in self._words[1:]:
            if word.partition("=")[0].replace("_", "-") in flags:
                self._notes.append(
                    f"{word} stands behind {self._words[0]}, which takes it. Type it in front of {self._words[0]} if it "
                    "was meant for this command."
                )

    def _option(self, word: str) -> None:
        self._last_flag = ""
        is_long = word.startswith("--")
        written, equals, value = word[2:].partition("=") if is_long else (self._letters.get(word[1:], word), "", "")
        name, text = written.replace("-", "_"), value if equals else None
        if name in self._switch_table:
            takes = self._switch_table[name].takes
            if not takes and text is not None:
                raise SettingsError(
                    f"{word} was given, and {word.partition('=')[0]} takes no value. Leave {text!r} out."
                )
            self._switches[name] = self._value(word, text, takes) if takes else True
        elif is_long and "." in name and not self._component_flag(word)[1]:
            self._of_section(name, word, text)
        elif is_long:
            self._of_run(name, word, text)
        else:
            raise self._unknown(word)

    def _unknown(self, word: str) -> SettingsError:
        return unknown_option(word, self._catalog, self._switch_table, self._mentioned)

    def _of_run(self, name: str, word: str, text: str | None) -> None:
        """An option without a section, or a component's name as a flag."""
        name = ALIASES.get(name, name)
        option, negated = _find(self._catalog.option, name)
        if option is not None:
            self._take(option, word, text, negated)
            return
        role, chosen = self._component_flag(word)
        if not chosen:
            part = self._catalog.section_called(name)
            if part is None or text is not None:
                raise self._unknown(word)
            self._mentioned.append(part)
            self._bare.append((word, part))
            return
        if text is not None:
            raise SettingsError(
                f"{word} was given, and --{chosen} chooses the {role.replace('_', ' ')}: it takes no value."
            )
        self._put(Given("", role, chosen, word))

    def _component_flag(self, word: str) -> tuple[str, str]:
        """The role and the name that a flag such as `--fsdp` chooses; two empty texts if none."""
        written = section_name(word[2:].partition("=")[0])
        known = [(role, name) for role in CHOOSING for name in self._catalog.names(role)]
        found = [(role, name) for role, name in known if section_name(name) == written]
        if len(found) > 1:
            ways = " or ".join(f"{flag_of(role)} {name}" for role, name in found)
            raise SettingsError(f"{word} was given, and more than one thing goes by that name. Type {ways}.")
        return found[0] if found else ("", "")

    def _of_section(self, name: str, word: str, text: str | None) -> None:
        spelled, _, wanted = name.rpartition(".")
        section = self._catalog.section_called(spelled)
        if section is None:
            raise self._unknown(word)
        self._mentioned.append(section)
        # Where two distributions offer the name, it was chosen with the one that is meant.
        options = self._catalog.section(self._references.get(section, section))
        option, negated = _find(options.get, wanted)
        if option is None:
            raise self._unknown(word)
        self._take(option, word, text, negated)

    def _take(self, option: Option, word: str, text: str | None, negated: bool) -> None:
        kind, flag = option.field.type, word.partition("=")[0]
        data: Any
        if negated and text is not None:
            raise SettingsError(f"{word} was given, and {flag} takes no value. Type {option.flag}={text}.")
        if negated:
            data = False
        elif text is not None or option.field.python_only:
            data = text if text is not None else True
        elif is_flag(kind):
            takes = self._words and not self._words[0].startswith("-") and _is_value(kind, self._words[0])
            data = self._words.pop(0) if takes else True
            self._last_flag = "" if takes else option.flag
        else:
            names = self._catalog.names(option.key) if option.key in ROLES else []
            which = "names between commas, of" if option.key in SEVERAL else "one of"
            data = self._value(word, None, f"{which} {', '.join(names)}" if names else expected(kind))
        self._put(Given(option.section, option.field.name, data, flag))

    def _value(self, word: str, text: str | None, wanted: str) -> str:
        if text is not None:
            return text
        following = self._words[0] if self._words else ""
        if not self._words or following.startswith("--") or following[1:] in self._letters:
            found = f"{following} follows" if following else "nothing follows"
            raise SettingsError(f"{word} was given without its value: {found}. Expected {wanted}. Type {word}=VALUE.")
        return self._words.pop(0)

    def _put(self, given: Given) -> None:
        key = (given.section, given.option)
        before = self._given.pop(key, None)
        if before is not None and before.data != given.data:
            both = f"{_written(before)} and {_written(given)} were both given"
            if given.option in CHOOSING and not given.section and given.source != before.source:
                raise SettingsError(
                    f"{both}, and a run has one {given.option.replace('_', ' ')}. Leave one of them out."
                )
            self._notes.append(f"{both}: the last one holds.")
        self._given[key] = given
        if given.option in CHOOSING and not given.section:
            self._mentioned.append(given.data.rpartition(":")[2])

    def _check_flag(self) -> None:
        """Words such as `--cpu false script.py`, where the value was meant for the flag."""
        following = self._words[0] if self._words else ""
        if self._last_flag and following.lower() in {"true", "false", "yes", "no", "0", "1", "on", "off"}:
            raise SettingsError(
                f"{self._last_flag} {following} was given, and a flag takes no next word, which is the program to "
                f"start. Type {self._last_flag}={following}."
            )


def _find(look: Callable[[str], Option | None], name: str) -> tuple[Option | None, bool]:
    """The option of a name, and whether the name is its negation, as in `--no-cpu`."""
    option = look(name)
    if option is not None or not name.startswith("no_"):
        return option, False
    option = look(name.removeprefix("no_"))
    return (option, True) if option is not None and is_flag(option.field.type) else (None, False)


def _written(given: Given) -> str:
    word = given.source.lstrip("-")
    return given.source if given.data in {True, False} or word == given.data else f"{given.source} {given.data}"
