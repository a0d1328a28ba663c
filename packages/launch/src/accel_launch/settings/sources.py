"""The options from the environment, a launcher around this one and a file, and unknown names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_core import PluginError
from accel_core.api.component import nearest
from accel_core.api.launcher import CHANNEL, LOADER_OPTIONS, PREFIX, inherited, masked, variable_of
from accel_launch.settings.command_line import Given
from accel_launch.settings.unknown import no_key, what_to_install

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog
    from accel_launch.settings.files import ConfigFile


AROUND = " (of the launcher around this one)"
"""The suffix of the source of a value that was inherited."""

_MOST_PROBLEMS = 50


@dataclass
class Said:
    """The content of one source."""

    given: list[Given] = field(default_factory=list)  # values of options; those of sections not looked at yet
    problems: list[str] = field(default_factory=list)  # what is no option and no section
    notes: list[str] = field(default_factory=list)  # what the user should know


def said_by_environment(catalog: Catalog, environ: Mapping[str, str]) -> Said:
    """The options from variables; an unknown one without a section is not refused."""
    said, names = Said(), _names(catalog)
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        text = environ[variable].strip()
        option = variable.removeprefix(PREFIX).partition("__")[2]
        if not text or variable in {CHANNEL, variable_of("config_file")}:
            continue
        if option and variable != variable.upper():
            said.problems.append(
                f"{variable} was given, and variables are written in capital letters. Type "
                f"{variable.upper()}={masked(variable, text)}."
            )
        elif not _sort(catalog, names, variable, Given("", option, text, variable), said):
            _note_misspelling(variable, names, said)
    return said


def said_around(catalog: Catalog, environ: Mapping[str, str]) -> dict[str, Said]:
    """The options that launchers around this process handed on: "command line" and "file" → `Said`.

    Raises `ValueError` if no launcher can have written it.
    """
    names, levels = _names(catalog), {}
    for level, told in inherited(environ).items():
        levels[level] = said = Said()
        for variable, (data, source) in told.items():
            given = Given("", "", data, f"{source.removesuffix(AROUND)}{AROUND}")
            if not _sort(catalog, names, variable, given, said):
                said.notes.append(
                    f"{variable} was given by {given.source}, and no option goes by that name: it has no effect."
                )
    return levels


def said_by_file(catalog: Catalog, file: ConfigFile | None) -> Said:
    """The options from a file. An option without a section that is null there is not given."""
    said = Said()
    for key, value in {} if file is None else file.data.items():
        assert file is not None, "it has these keys"
        if len(said.problems) == _MOST_PROBLEMS:  # looking for what each may have meant takes a while
            said.problems.append(f"There are more mistakes in {file.path}: mend these first.")
            break
        place = file.place(key)
        if key in catalog.direct or key in LOADER_OPTIONS:
            if value is not None:
                said.given.append(Given("", key, value, str(file.path), place))
        elif problem := _problem_of_key(catalog, key, value, place):
            said.problems.append(problem)
        else:
            inner = (value or {}).items()
            said.given += [Given(key, name, each, str(file.path), file.place(key, name)) for name, each in inner]
    return said


def _names(catalog: Catalog) -> dict[str, str]:
    """Variable → option, of those without a section."""
    return {variable_of(name): name for name in (*catalog.direct, *LOADER_OPTIONS)}


def _sort(catalog: Catalog, names: Mapping[str, str], variable: str, given: Given, said: Said) -> bool:
    """Adds a variable's value to `said`, with option and section; False if it names no option."""
    section, _, option = variable.removeprefix(PREFIX).partition("__")
    if variable in names:
        said.given.append(given._replace(option=names[variable]))
        return True
    if not option:
        return False
    try:
        name = catalog.section_called(section)
    except PluginError as error:
        said.problems.append(f"{given.source} was given, and {error}")
        return True
    if name is not None:
        said.given.append(given._replace(section=name, option=option.lower()))
        return True
    spelled = section.lower()
    meant = nearest(spelled, catalog.sections)
    known = (
        f"Type {variable_of(option, meant)} if that was meant." if meant else f"Known: {', '.join(catalog.sections)}."
    )
    hint = what_to_install(catalog, spelled) or f"nothing that is installed goes by the name {spelled!r}. {known}"
    said.problems.append(f"{given.source} was given, and {hint}")
    return True


def _note_misspelling(variable: str, names: Iterable[str], said: Said) -> None:
    # What all of them begin with would make any two look alike.
    meant = nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in names])
    if meant is not None:
        said.notes.append(
            f"{variable} is set, which is no option and has no effect. Type {PREFIX}{meant} if that was meant."
        )


def _problem_of_key(catalog: Catalog, key: str, value: object, place: str) -> str:
    """The mistake in a key of a file that should be a section; empty if there is none."""
    if key not in catalog.sections:
        return f"{key} was given by {place}, and {no_key(catalog, key)}"
    try:
        catalog.section_called(key)
    except PluginError as error:
        return f"{key} was given by {place}, and {error}"
    if value is None or isinstance(value, Mapping):
        return ""
    choosing = "".join(f" Write `{role}: {key}` to choose it." for role in catalog.roles(key)[:1])
    return (
        f"{key}={masked(key, value)!r} was given by {place}, and {key!r} has options of its own: expected a mapping of "
        f"them, such as `{key}: {{option: value}}`.{choosing}"
    )
