"""The answers so far: what an older file says, and what was changed since."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accel_core.api.launcher import from_data, to_data
from accel_launch.settings.catalog import has_default

if TYPE_CHECKING:
    from accel_launch.settings.catalog import Catalog, Option
    from accel_launch.starting.devices import Accelerators

NOT_GIVEN = "not given"


class Answers:
    """Values by option, as data.

    Args:
        catalog: the options of what is installed.
        data: the content of an older file, which stays as it is.
        accelerators: of this machine.
        meant: what the file's values stand for, by section and option: it may say "yes" for true,
            and "30m" for 1800.
    """

    def __init__(
        self,
        catalog: Catalog,
        data: Mapping[str, Any],
        accelerators: Accelerators,
        meant: Mapping[tuple[str, str], Any] = MappingProxyType({}),
    ) -> None:
        self.catalog = catalog
        self.accelerators = accelerators
        self._meant = dict(meant)
        self._data: dict[str, Any] = {
            key: value for key, value in copy.deepcopy(dict(data)).items() if value is not None
        }

    @property
    def data(self) -> dict[str, Any]:
        """The values that were given, in the order in which options are shown; sections come last."""
        known = [name for name in (*self.catalog.own, *self.catalog.sections) if name in self._data]
        return {name: self._data[name] for name in dict.fromkeys([*known, *self._data]) if self._data[name] != {}}

    def find(self, name: str) -> Option | None:
        """The option without a section of this name; None where no loader has it."""
        return self.catalog.option(name)

    def value(self, name: str) -> Any:
        """The value of an option without a section: the answer, else the default."""
        option = self.find(name)
        return None if option is None else self.value_of(option)

    def value_of(self, option: Option) -> Any:
        """The value of an option, as data: the answer, else the default."""
        if not self.has(option):
            return default_of(option)
        key = (option.section, option.field.name)
        return self._meant[key] if key in self._meant else self._place(option)[option.field.name]

    def is_given(self, name: str) -> bool:
        """Whether an option without a section has an answer."""
        return name in self._data

    def has(self, option: Option) -> bool:
        """Whether an option has an answer."""
        return option.field.name in self._place(option)

    def put(self, option: Option, value: Any) -> None:
        """Takes an answer over; one that is the default takes back what was given before."""
        if self.has(option) and _same(value, self.value_of(option)):
            return  # as the user has written it
        self._meant.pop((option.section, option.field.name), None)
        default = default_of(option)
        if _same(value, default):
            self.drop(option)
        elif option.section:
            section = self._data.get(option.section) or {}
            self._data[option.section] = {**section, option.field.name: value}
        else:
            self._data[option.field.name] = value

    def drop(self, option: Option) -> None:
        """Takes an answer back."""
        self._place(option).pop(option.field.name, None)

    def converted(self, options: Mapping[str, Option]) -> dict[str, Any]:
        """The values that were given for options, converted to the types of their constructor."""
        return {
            name: from_data(each.field.type, self.value_of(each)) for name, each in options.items() if self.has(each)
        }

    def given(self) -> Iterator[tuple[str, Any]]:
        """Every answer: `num_processes` or `fsdp.cpu_offload`, and its value."""
        for key, value in self.data.items():
            if isinstance(value, Mapping) and key in self.catalog.sections:
                yield from ((f"{key}.{name}", each) for name, each in value.items())
            else:
                yield key, value

    def _place(self, option: Option) -> dict[str, Any]:
        found = self._data.get(option.section) if option.section else self._data
        return found if isinstance(found, dict) else {}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def default_of(option: Option) -> Any:
    """The default as data; None where there is none, or where only Python can express it."""
    if not has_default(option):
        return None
    try:
        return to_data(option.field.default)
    except TypeError:
        return None


def shown(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return NOT_GIVEN
    if isinstance(value, list) and not any(isinstance(each, (list, dict)) or "," in str(each) for each in value):
        return ",".join(shown(each) for each in value) or "[]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
