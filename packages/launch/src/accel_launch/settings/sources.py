"""The options that the environment and a file give, and the names in them that are no options."""

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
    """The content of one source.

    Args:
        given: values of options; those of sections not looked at yet.
        problems: what is no option and no section.
        notes: what the user should know.
    """

    given: list[Given] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def said_by_environment(catalog: Catalog, environ: Mapping[str, str]) -> Said:
    """The options that variables give. An unknown one without a section may be another program's: not refused."""
    said = Said()
    names = _names(catalog)
    ours = {CHANNEL, variable_of("config_file")}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        text = environ[variable].strip()
        if not text:
            continue
        section, separator, option = variable.removeprefix(PREFIX).partition("__")
        if variable in names:
            said.given.append(Given("", names[variable], text, variable))
        elif separator and option and variable != variable.upper():
            said.problems.append(
                f"{variable} was given, and variables are written in capital letters. Type {variable.upper()}={masked(variable, text)}."
            )
        elif separator and option:
            _of_section(catalog, section, Given("", option.lower(), text, variable), said)
        elif variable not in ours:
            _note_misspelling(variable, names, said)
    return said


def said_around(catalog: Catalog, environ: Mapping[str, str]) -> dict[str, Said]:
    """The options that launchers around this process handed on: "command line" and "file" → `Said`.

    Raises:
        ValueError: if no launcher can have written it.
    """
    names = _names(catalog)
    levels = {}
    for level, told in inherited(environ).items():
        levels[level] = said = Said()
        for variable, (data, source) in told.items():
            source = source if source.endswith(AROUND) else f"{source}{AROUND}"
            section, _, option = variable.removeprefix(PREFIX).partition("__")
            if variable in names:
                said.given.append(Given("", names[variable], data, source))
            elif option:
                _of_section(catalog, section, Given("", option.lower(), data, source), said)
            else:
                said.notes.append(
                    f"{variable} was given by {source}, and no option goes by that name: it has no effect."
                )
    return levels


def _names(catalog: Catalog) -> dict[str, str]:
    """Variable → option, of those without a section."""
    return {variable_of(name): name for name in (*catalog.direct, *LOADER_OPTIONS)}


def _note_misspelling(variable: str, names: Iterable[str], said: Said) -> None:
    # What all of them begin with would make any two look alike.
    meant = nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in names])
    if meant is not None:
        said.notes.append(
            f"{variable} is set, and no option goes by that name: it has no effect. Type {PREFIX}{meant} if that was meant."
        )


def said_by_file(catalog: Catalog, file: ConfigFile | None) -> Said:
    """The options that a file gives. An option without a section that is null there is not given."""
    said = Said()
    if file is None:
        return said
    for key, value in file.data.items():
        if len(said.problems) == _MOST_PROBLEMS:  # looking for what each may have meant takes a while
            said.problems.append(f"There are more mistakes in {file.path}: mend these first.")
            break
        place = file.place(key)
        if key in catalog.direct or key in LOADER_OPTIONS:
            if value is not None:
                said.given.append(Given("", key, value, str(file.path), place))
        elif key not in catalog.sections:
            said.problems.append(f"{key} was given by {place}, and {no_key(catalog, key)}")
        elif problem := _problem_of_name(catalog, key):
            said.problems.append(f"{key} was given by {place}, and {problem}")
        elif value is None or isinstance(value, Mapping):
            said.given += [
                Given(key, option, each, str(file.path), file.place(key, option))
                for option, each in (value or {}).items()
            ]
        else:
            said.problems.append(
                f"{key}={masked(key, value)!r} was given by {place}, and {key!r} has options of its own: expected a mapping of them, such as "
                f"`{key}: {{option: value}}`.{_choosing(catalog, key)}"
            )
    return said


def _choosing(catalog: Catalog, section: str) -> str:
    """The advice on how to choose a component in a file; empty for a section that is none."""
    return "".join(f" Write `{role}: {section}` to choose it." for role in catalog.roles(section)[:1])


def _problem_of_name(catalog: Catalog, section: str) -> str:
    """The reason why a component's name rules out options outside of the code; empty if it does not."""
    try:
        catalog.section_called(section)
    except PluginError as error:
        return str(error)
    return ""


def _of_section(catalog: Catalog, section: str, given: Given, said: Said) -> None:
    if problem := _problem_of_name(catalog, section):
        said.problems.append(f"{given.source} was given, and {problem}")
        return
    name = catalog.section_called(section)
    if name is not None:
        said.given.append(given._replace(section=name))
        return
    spelled = section.lower()
    meant = nearest(spelled, list(catalog.sections))
    known = (
        f"Type {variable_of(given.option, meant)} if that was meant."
        if meant
        else f"Known: {', '.join(catalog.sections)}."
    )
    hint = what_to_install(catalog, spelled) or f"nothing that is installed goes by the name {spelled!r}. {known}"
    said.problems.append(f"{given.source} was given, and {hint}")
