"""Every option of what is installed: its name, type, default and help, read where it is declared.

Three places declare options: `LaunchOptions`, those of starting; `Accelerator`, those of a run that
may be given outside of the code; and each component's constructor, its own. Only the components
that somebody asks for are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple, Union

from accel_core import LoggerType, PluginError
from accel_core.api.launcher import (
    DEFAULT_LOADER,
    KNOWN_PROVIDERS,
    LOADER_OPTIONS,
    OPTIONS,
    SECTIONS,
    Field,
    Group,
    Offer,
    fields_of,
    find,
    from_data,
    list_offers,
    members,
    offer_state,
    section_name,
    variable_of,
)
from accel_launch.options import LaunchOptions
from accel_launch.settings.documentation import option_help, summary

ROLES: Mapping[str, Group] = {
    "strategy": "accel.strategies",
    "mixed_precision": "accel.precisions",
    "loader": "accel.loaders",
    "log_with": "accel.trackers",
}
"""The options that choose a component by its name, and where such names come from."""

SEVERAL = ("log_with",)
"""Those of `ROLES` that choose any number of components: names between commas, or a list."""

ALL = LoggerType.ALL.value
"""The name that stands for everything that is installed for one of `SEVERAL`, and works."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(names.split())
    for group, names in {
        "processes": "num_processes cpu device_ids num_cpu_threads_per_process numa_binding",
        "training": "strategy mixed_precision gradient_accumulation_steps dynamo_backend project_dir log_with",
        "data": f"loader {' '.join(LOADER_OPTIONS)}",
        "machines": "num_machines machine_rank main_process_ip main_process_port local_addr min_machines meeting_timeout rdzv_backend "
        "rdzv_endpoint rdzv_id rdzv_conf",
        "failures": "max_restarts monitor_interval shutdown_timeout debug detect_nonfinite",
        "output": "log_level log_dir redirects tee local_ranks_filter log_line_prefix_template role",
    }.items()
}
"""How the options without a section are shown: group → names, in order."""


def flag_of(name: str) -> str:
    """`--num-processes`."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """One option."""

    section: str  # the component that it belongs to, under the name that chooses it; empty without a section
    field: Field  # name, type and default
    group: str  # of `GROUPS`, or the section
    owner: Callable[..., Any]  # the constructor that declares it

    @property
    def key(self) -> str:
        """`fsdp.cpu_offload`, or `num_processes`."""
        return f"{self.section}.{self.field.name}" if self.section else self.field.name

    @property
    def flag(self) -> str:
        """`--fsdp.cpu-offload`, or `--num-processes`."""
        return flag_of(self.key)

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return variable_of(self.field.name, self.section)

    @property
    def help(self) -> str:
        """The description of it in the docstring of its owner, in one line."""
        return option_help(self.owner, self.field.name)


class Choice(NamedTuple):
    """One value of an option that chooses among what is installed."""

    name: str  # qualified by the distribution where several offer it
    problem: str  # why it cannot be chosen: broken, misfit, in conflict, unusable; or empty
    summary: str  # the first line of the component's docstring; empty if there is a problem


class Catalog:
    """The options of what is installed: of `offers`, None for `list_offers()`.

    `loader`: the component whose options stand beside the Accelerator's; None: the default one.
    """

    def __init__(self, offers: Sequence[Offer] | None = None, loader: str | None = None) -> None:
        self.offers = tuple(list_offers() if offers is None else offers)
        self.loader = loader or (DEFAULT_LOADER if DEFAULT_LOADER in self.names("loader") else None)
        self._sections: dict[str, Mapping[str, Option]] = {}

    def with_loader(self, loader: str | None) -> Catalog:
        """The catalog where this loader is chosen."""
        return self if loader in {None, self.loader} else Catalog(self.offers, loader)

    def names(self, role: str) -> list[str]:
        """The names to choose from for one of `ROLES`. Imports nothing."""
        return list(dict.fromkeys(offer.name for offer in self._offers(role)))

    def roles(self, name: str) -> list[str]:
        """Those of `ROLES` for which a name can be chosen. Imports nothing."""
        return [role for role in ROLES if name in self.names(role)]

    def choices(self, role: str) -> list[Choice]:
        """The choices for one of `ROLES`. Imports them all."""
        mine, found = self._offers(role), []
        every = [offer.name for offer in mine]
        for each in mine:
            name = each.name if every.count(each.name) == 1 else f"{each.distribution}:{each.name}"
            state = offer_state(each, self.offers, load=True)
            found.append(Choice(name, "", summary(each.load())) if state == "ok" else Choice(name, state, ""))
        return found

    def _offers(self, role: str) -> list[Offer]:
        return [offer for offer in self.offers if offer.group == ROLES[role]]

    @cached_property
    def direct(self) -> Mapping[str, Option]:
        """The options without a section, of starting and the Accelerator: no component needed."""
        from accel_core import Accelerator

        starting, fields = fields_of(LaunchOptions), fields_of(Accelerator)
        return {
            **{name: _own(field, LaunchOptions) for name, field in starting.items()},
            **{name: _own(self._adapted(name, fields[name]), Accelerator) for name in OPTIONS},
        }

    @cached_property
    def data(self) -> Mapping[str, Option]:
        """The loader's options beside those of the Accelerator; none without one. Imports it."""
        if self.loader is None:
            return {}
        owner = self.component(self.loader, "loader").load()
        fields = [field for name, field in fields_of(owner).items() if name in LOADER_OPTIONS]
        return {field.name: _own(replace(field, type=_without_none(field.type)), owner) for field in fields}

    @cached_property
    def own(self) -> Mapping[str, Option]:
        """Every option without a section, in the order of the help. Imports the loader."""
        known = {**self.direct, **self.data}
        shown = [name for names in GROUPS.values() for name in names if name in known]
        return {name: known[name] for name in (*shown, *known)}

    def option(self, name: str) -> Option | None:
        """The option without a section of this name. Imports the loader only for its options."""
        return (self.data if name in LOADER_OPTIONS else self.direct).get(name)

    @property
    def sections(self) -> tuple[str, ...]:
        """The names of all sections: of components, and those that are always there. No imports."""
        return (*SECTIONS, *dict.fromkeys(offer.name for offer in self.offers if offer.group in ROLES.values()))

    def section_called(self, spelling: str) -> str | None:
        """The section of a name that lost case and hyphens, as in a variable; None: there is none.

        Raises `PluginError` if several do.
        """
        found = [name for name in self.sections if section_name(name) == section_name(spelling)]
        if len(found) > 1:
            raise PluginError(
                f"variables cannot tell {' and '.join(map(repr, found))} apart, which are both installed. Give their "
                "options in the code; `accel plugins` shows who brings them."
            )
        return found[0] if found else None

    def section(self, name: str) -> Mapping[str, Option]:
        """The options of one section, also those that only Python can express. Imports it.

        The name may be qualified by a distribution: `other-fsdp:fsdp`. Raises `PluginError` if none
        has that name, if several are meant by it, or if it is broken.
        """
        if name not in self._sections:
            self._sections[name] = self._read_section(name)
        return self._sections[name]

    def help_of(self, data: Mapping[str, Any]) -> dict[str, str]:
        """The help of every option in the content of a file, where its component is installed."""
        found = {}
        for key, value in data.items():
            if isinstance(value, Mapping) and key in self.sections:
                found.update({f"{key}.{name}": option.help for name, option in self.section(key).items()})
            elif (option := self.option(key)) is not None:
                found[key] = option.help
        return found

    def component(self, name: str, role: str = "") -> Offer:
        """The component of a name, for one of `ROLES` (empty: any). No imports; raises as `find`.

        The name may be qualified by its distribution.
        """
        if role:
            return find(ROLES[role], name, self.offers)
        plain = name.rpartition(":")[2]
        roles = self.roles(plain)
        if len(roles) > 1:
            choosing = " and ".join(str(self.component(name, role)) for role in roles)
            raise PluginError(
                f"Options of {plain!r} were given, and both a {' and a '.join(roles)} go by that name: {choosing}. Give "
                "them in the code, to the constructor of the one that is meant."
            )
        known = (role for role, group in ROLES.items() if plain in KNOWN_PROVIDERS.get(group, {}))
        return find(ROLES[roles[0] if roles else next(known, "strategy")], name, self.offers)

    def constructor(self, name: str) -> tuple[Callable[..., Any], Mapping[str, str]]:
        """The constructor behind a section, and those of its parameters that are options without a section.

        Imports it; raises as `section`.
        """
        if name in SECTIONS:
            return SECTIONS[name].handler, SECTIONS[name].elsewhere
        offer = self.component(name)
        shared = LOADER_OPTIONS if offer.group == ROLES["loader"] else ()
        return offer.load(), {option: option for option in shared}

    def _read_section(self, name: str) -> dict[str, Option]:
        owner, elsewhere = self.constructor(name)
        plain = name.rpartition(":")[2]
        fields = [field for field in fields_of(owner).values() if field.name not in elsewhere]
        return {field.name: Option(plain, field, plain, owner) for field in fields}

    def _adapted(self, name: str, field: Field) -> Field:
        """A parameter of the Accelerator as an option: by name, and with the default that holds."""
        default = self.loader if name == "loader" else OPTIONS[name]
        if name in SEVERAL:
            return Field(name, list[str], default)
        by_name = name in ROLES or name == "dynamo_backend"
        return Field(name, str if by_name else _without_none(field.type), default)


def chosen_names(role: str, given: object) -> list[str]:
    """The names that a value of one of `ROLES` chooses; none of a value of another type."""
    if role not in SEVERAL:
        return [given] if isinstance(given, str) else []
    if isinstance(given, list):
        return [str(each) for each in given if isinstance(each, (str, int))]  # files have 3 for '3'
    try:
        names: list[str] = from_data(list[str], given)
    except ValueError:
        return []
    return names


def has_default(option: Option) -> bool:
    """Whether its constructor says what holds where nothing is given."""
    return option.field.default is not inspect.Parameter.empty


def _own(field: Field, owner: Callable[..., Any]) -> Option:
    group = next((group for group, names in GROUPS.items() if field.name in names), "further")
    return Option("", field, group, owner)


def _without_none(kind: Any) -> Any:
    """A type without None: to the Accelerator, None is what was not given, so nobody can say it."""
    others = tuple(member for member in members(kind) if member is not NoneType)
    return Union[others] if NoneType in members(kind) else kind  # noqa: UP007
