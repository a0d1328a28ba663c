"""Precedence of values, for all commands: command line, environment, file, default.

What a launcher around this one was told and handed on holds as well: its command line counts right
behind the own one, its file right behind the own file. A value that equals the default counts as
given, and everything that was given is checked, also what another source overrides. Code wins over
all of it, in the processes, which are handed only what was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core import PluginError
from accel_core.api.launcher import (
    DEFAULT_STRATEGIES,
    LOADER_OPTIONS,
    OPTIONS,
    SECTIONS,
    expected,
    from_data,
    masked,
    to_data,
    variable_of,
    why_unusable,
)
from accel_launch.errors import SettingsError
from accel_launch.options import LaunchOptions
from accel_launch.settings.catalog import ALL, ROLES, SEVERAL, Catalog, Option, chosen_names, flag_of, has_default
from accel_launch.settings.files import Unusual
from accel_launch.settings.sources import Said, said_around, said_by_environment, said_by_file
from accel_launch.settings.unknown import no_loader_option, no_option
from accel_launch.starting.checks import check_values

if TYPE_CHECKING:
    from accel_launch.settings.command_line import CommandLine, Given
    from accel_launch.settings.files import ConfigFile

HANDED_ON = (*OPTIONS, *LOADER_OPTIONS, "debug", "log_level")
"""The options without a section that the processes read; all others end with the launcher."""


class Value(NamedTuple):
    """One option, its value, and its source: `--fsdp.cpu-offload`, variable, path, or "default"."""

    section: str
    option: str
    value: Any
    source: str

    @property
    def key(self) -> str:
        """`fsdp.cpu_offload`, or `num_processes`."""
        return f"{self.section}.{self.option}" if self.section else self.option


@dataclass(frozen=True)
class Resolved:
    """The resolved options of a run."""

    catalog: Catalog  # the options, with the loader that was chosen
    given: Mapping[tuple[str, str], Value]  # what was given and holds, by section and option
    active: tuple[str, ...]  # the sections in use, under the names that choose them
    idle: tuple[Value, ...]  # what was given for components that are not chosen, as it was given
    launch: LaunchOptions  # the launcher's own options
    channel: str  # what the processes are to read in `accel_core.options.option_sources.CHANNEL`
    notes: tuple[str, ...]  # what the user should know

    @property
    def values(self) -> tuple[Value, ...]:
        """Every textual option without a section, or of what is active. Imports what is active."""
        sections = [self.catalog.section(name) for name in self.active]
        options = [option for options in (self.catalog.own, *sections) for option in options.values()]
        return tuple(self._value(option) for option in options if not option.field.python_only)

    def get(self, option: str, section: str = "") -> Value:
        """The value of one option. Raises `KeyError` if there is none."""
        if (section, option) in self.given:
            return self.given[section, option]
        found = self.catalog.section(section).get(option) if section else self.catalog.option(option)
        if found is None:
            raise KeyError(f"{section}.{option}" if section else option)
        return self._value(found)

    def _value(self, option: Option) -> Value:
        name = option.field.name
        default = option.field.default if has_default(option) else None
        return self.given.get((option.section, name), Value(option.section, name, default, "default"))


def resolve(
    catalog: Catalog,
    command_line: CommandLine,
    file: ConfigFile | None,
    environ: Mapping[str, str],
    *,
    thorough: bool = False,
) -> Resolved:
    """Decides which values hold.

    `thorough` also imports components that are not active, to check what a file or the environment
    gives for them. Raises `SettingsError` with every mistake that was found.
    """
    around = said_around(catalog, environ)
    said = {
        "command line": Said([*command_line.given], [], [*(file.notes if file else ()), *command_line.notes]),
        "command line around": around["command line"],
        "environment": said_by_environment(catalog, environ),
        "file": said_by_file(catalog, file),
        "file around": around["file"],
    }
    resolution = _Resolution(catalog, said, thorough)
    resolved = resolution.resolve()
    if resolution.problems:
        raise SettingsError(resolution.problems)
    return resolved


class _Resolution:
    """One resolution: problems and notes are gathered on the way."""

    def __init__(self, catalog: Catalog, said: Mapping[str, Said], thorough: bool) -> None:
        self._catalog, self._thorough = catalog, thorough
        self._levels = {level: each.given for level, each in said.items()}
        self.problems = [problem for each in said.values() for problem in each.problems]
        self._notes = [note for each in said.values() for note in each.notes]
        self._given: dict[tuple[str, str], Value] = {}
        self._idle: dict[tuple[str, str], Value] = {}
        self._idle_places: dict[str, list[str]] = {}
        self._channel: dict[str, dict[str, tuple[Any, str]]] = {"command line": {}, "file": {}}
        self._chosen: dict[str, list[str]] = {}

    def resolve(self) -> Resolved:
        self._chosen = {role: self._choose(role) for role in ROLES}
        self._catalog = self._catalog.with_loader(next(iter(self._chosen["loader"]), None))
        references = self._references()
        for level, given in self._levels.items():
            for each in given:
                self._take(level, each, references)
        self._note_idle()
        active, idle = tuple(references.values()), tuple(self._idle.values())
        launch = self._launch()
        if self._thorough and not self.problems:
            self._try_values(references)
        channel, notes = json.dumps(self._channel), tuple(self._notes)
        return Resolved(self._catalog, self._given, active, idle, launch, channel, notes)

    def _first(self, option: str) -> Given | None:
        every = (each for given in self._levels.values() for each in given)
        return next((each for each in every if not each.section and each.option == option), None)

    def _choose(self, role: str) -> list[str]:
        """The chosen components of a role, by name; none if nobody chooses, or none is known."""
        given = self._first(role)
        if given is None:
            return []
        names = chosen_names(role, _as_texts(given.data))
        if role in SEVERAL and ALL in names:
            works = [
                each.name for each in self._catalog.choices(role) if each.problem.partition(":")[0] in {"", "unusable"}
            ]
            names = [*works, *(name for name in names if name != ALL)]
        return [name for name in names if self._is_there(role, name, given)]

    def _is_there(self, role: str, name: str, given: Given) -> bool:
        try:
            offer = self._catalog.component(name, role)
            if offer.misfit() is not None or self._thorough:
                offer.load()
        except PluginError as error:
            self.problems.append(f"{given.key}={masked(given.key, given.data)!r} was given by {given.told_by}. {error}")
            return False
        if self._thorough and (why := why_unusable(offer)):
            self._notes.append(f"{given.key} names {name!r} ({given.told_by}), which cannot be used here: {why}")
        return True

    def _references(self) -> dict[str, str]:
        """The sections in use: section → the name that chooses it."""
        chosen, loader = self._chosen, self._catalog.loader
        names = [
            *(chosen["strategy"] or DEFAULT_STRATEGIES),
            *(chosen["mixed_precision"] or ["no"]),
            *([loader] if loader else []),
            *(name for role in SEVERAL for name in chosen[role]),
        ]
        known = [name for name in names if name.rpartition(":")[2] in self._catalog.sections]
        backend = self._first("dynamo_backend")
        compiles = backend is not None and str(backend.data).lower() != "no"
        fixed = {name: name for name in SECTIONS if name != "dynamo" or compiles}
        return {**{name.rpartition(":")[2]: name for name in known}, **fixed}

    def _take(self, level: str, given: Given, references: Mapping[str, str]) -> None:
        if given.section and given.section not in references:
            self._take_idle(level, given)
            return
        try:
            option = self._option(given, references.get(given.section, given.section))
            value = self._converted(given, option)
        except (SettingsError, PluginError) as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return
        key = (option.section, option.field.name)
        self._given.setdefault(key, Value(*key, value, given.source))
        if option.section or option.field.name in HANDED_ON:
            self._hand_on(level, option.variable, to_data(value), given.source)

    def _option(self, given: Given, reference: str) -> Option:
        told = f"{given.key} was given by {given.told_by}, and"
        if not given.section:
            option = self._catalog.option(given.option)
            if option is None:
                raise SettingsError(f"{told} {no_loader_option(self._catalog, given.option)}")
            return option
        options = self._catalog.section(reference)
        option = options.get(given.option) or {name.lower(): each for name, each in options.items()}.get(given.option)
        if option is None:
            raise SettingsError(f"{told} {no_option(self._catalog, reference, given.option)}")
        if option.field.python_only:
            raise SettingsError(
                f"{told} it is for Python only: {option.field.python_only}. Build the object in the code."
            )
        return option

    def _converted(self, given: Given, option: Option) -> Any:
        kind = option.field.type
        for data in (given.data, _as_texts(given.data)):
            with suppress(ValueError):
                return from_data(kind, data)
        told = f"{given.key}={masked(given.key, given.data)!r} was given by {given.told_by}"
        raise SettingsError(f"{told}: expected {expected(kind)}.")

    def _hand_on(self, level: str, variable: str, data: Any, source: str) -> None:
        """Puts a value into the channel, unless a launcher's own source has given one there."""
        told = self._channel.get(level.removesuffix(" around"))
        if told is not None:
            told.setdefault(variable, (data, source))

    def _take_idle(self, level: str, given: Given) -> None:
        """Takes what was given for a component that is not chosen: the code may choose it."""
        if level == "command line":
            about = f"an option of {given.section!r}, which is not chosen. {self._how(given.section)}."
            self.problems.append(f"{given.source} was given, {about}")
            return
        if self._thorough:
            try:
                self._converted(given, self._option(given, given.section))
            except (SettingsError, PluginError) as error:
                self.problems.append(str(error))
        key = (given.section, given.option)
        self._idle.setdefault(key, Value(*key, given.data, given.source))
        self._idle_places.setdefault(given.section, []).append(given.told_by)
        self._hand_on(level, variable_of(given.option, given.section), given.data, given.source)

    def _how(self, section: str) -> str:
        """The advice on the option that chooses a component, or compilation."""
        if section in SECTIONS:
            return "Add --dynamo-backend inductor"
        role = self._catalog.roles(section)[0]
        beside = self._chosen[role] if role in SEVERAL else []
        return f"Add {flag_of(role)} {','.join([*beside, section])}"

    def _note_idle(self) -> None:
        for section, places in self._idle_places.items():
            what = "nothing is compiled" if section in SECTIONS else f"{section!r} is not chosen"
            where = places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
            self._notes.append(
                f"{where}: options of {section!r} without effect, for {what}, unless the code does that. "
                f"{self._how(section)} to use them."
            )

    def _launch(self) -> LaunchOptions:
        names = LaunchOptions.__dataclass_fields__
        launch = LaunchOptions(**{name: self._given["", name].value for name in names if ("", name) in self._given})
        try:
            check_values(launch)
        except ValueError as error:
            self.problems.append(str(error))
        return launch

    def _try_values(self, references: Mapping[str, str]) -> None:
        """Builds what is in use from what was given for it, as the Accelerator does: constructors refuse some values."""
        for section, reference in references.items():
            given = {value.option: value for value in self._given.values() if value.section == section}
            try:
                owner, elsewhere = self._catalog.constructor(reference)
                given |= {own: self._given["", name] for own, name in elsewhere.items() if ("", name) in self._given}
                if given:
                    owner(**{name: each.value for name, each in given.items()})
            except (ValueError, TypeError) as error:
                told = (f"{each.key}={masked(each.key, each.value)!r} by {each.source}" for each in given.values())
                self.problems.append(f"{error} Given was {', '.join(told)}.")
            except Exception:  # noqa: BLE001, S112  (something is not on this machine: no value is at fault)
                continue


def _as_texts(data: Any) -> Any:
    """Numbers as they are written, where a text was expected: `rdzv_id: 7`, `redirects: 3`."""
    if isinstance(data, Mapping):
        return {key: _as_texts(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_as_texts(value) for value in data]
    return str(data) if isinstance(data, int) and not isinstance(data, (bool, Unusual)) else data
