"""Messages on unknown options: the nearest name, the package to install, or our name for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from accel_core.api.component import nearest
from accel_core.api.launcher import DEFAULT_LOADER, KNOWN_PROVIDERS, LOADER_OPTIONS, NOUNS, how_to_install
from accel_launch.errors import SettingsError
from accel_launch.settings.catalog import ROLES, flag_of
from accel_launch.settings.peer_options import advice

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog

_ALL = "`accel launch -h` shows all options."


def unknown_option(
    word: str, catalog: Catalog, switches: Iterable[str], mentioned: Sequence[str] = ()
) -> SettingsError:
    """The error for a word that is no option of the command or of the `mentioned` components."""
    flag = word.partition("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    section, dot, option = name.rpartition(".") if "." in name else (name, "", "")
    known = catalog.section_called(section) if dot else None
    if known is not None:
        return SettingsError(f"{flag} was given, and {no_option(catalog, known, option, flags=True)}")
    if hint := what_to_install(catalog, section) or no_loader_option(catalog, name):
        return SettingsError(f"{flag} was given, and {hint}")
    if hint := advice(name):
        return SettingsError(f"{flag} was given, which is no option here. {hint}")
    meant = None
    if dot:
        nearby = nearest(section, [each.replace("-", "_") for each in catalog.sections])
        meant = nearby and f"{flag_of(nearby)}.{option.replace('_', '-')}"
    elif flag.startswith("--"):  # a letter is near to too much; so are two dashes, which all flags have
        nearby = nearest(flag_of(name)[2:], [each[2:] for each in _flags(catalog, switches, mentioned)])
        meant = nearby and f"--{nearby}"
    return SettingsError(f"{flag} was given, and there is no such option. {_if_meant(meant)}{_ALL}")


def _flags(catalog: Catalog, switches: Iterable[str], mentioned: Sequence[str]) -> list[str]:
    """All flags of this command line; imports only the components that it mentions."""
    names = [*switches, *catalog.direct, *LOADER_OPTIONS, *catalog.names("strategy"), *catalog.names("mixed_precision")]
    options = [option for section in mentioned for option in catalog.section(section).values()]
    return [*map(flag_of, names), *(option.flag for option in options)]


def no_option(catalog: Catalog, section: str, option: str, *, flags: bool = False) -> str:
    """`'fsdp' has no option 'cpu_ofload'. Its options: …` with the nearest; `flags`: as flags.

    Imports the component; its name may be qualified by a distribution.
    """
    options = {each.field.name: each.flag for each in catalog.section(section).values() if not each.field.python_only}
    shown = options.values() if flags else options
    meant = nearest(option, list(options))
    hint = f" {_if_meant(options[meant] if flags else repr(meant))}".rstrip() if meant else ""
    return f"{section.rpartition(':')[2]!r} has no option {option!r}. Its options: {', '.join(shown) or 'none'}.{hint}"


def no_key(catalog: Catalog, key: str) -> str:
    """The message on a key at the top of a file that is neither an option nor a section."""
    if hint := what_to_install(catalog, key) or no_loader_option(catalog, key):
        return hint
    meant = nearest(key, [*catalog.direct, *LOADER_OPTIONS, *catalog.sections])
    hint = _if_meant(meant and repr(meant))
    return f"there is no option {key!r}, and nothing that is installed goes by that name. {hint}{_ALL}"


def what_to_install(catalog: Catalog, section: str) -> str | None:
    """The message on a component that is known but not installed; None if the name is of none."""
    for role, group in ROLES.items():
        for name, provider in KNOWN_PROVIDERS.get(group, {}).items():
            if name.replace("-", "_") == section.replace("-", "_") and name not in catalog.names(role):
                return f"the {NOUNS[group]} {name!r} is not installed. {how_to_install(provider)}"
    return None


def no_loader_option(catalog: Catalog, name: str) -> str | None:
    """The message on a loader option that the loader lacks, or without a loader; else None."""
    plain = name if name in LOADER_OPTIONS else name.removeprefix("no_")
    if plain not in LOADER_OPTIONS:
        return None
    if catalog.loader is None:
        provider = KNOWN_PROVIDERS["accel.loaders"][DEFAULT_LOADER]
        return f"{plain!r} is an option of loader components, of which none is installed. {how_to_install(provider)}"
    known = ", ".join(catalog.data) or "none of these"
    return f"the loader {catalog.loader!r} has no option {plain!r}. It has: {known}. Choose another loader, or leave it out."


def _if_meant(word: str | None) -> str:
    return f"Type {word} if that was meant. " if word else ""
