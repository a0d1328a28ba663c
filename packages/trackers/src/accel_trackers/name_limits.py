"""Names, and where a service takes others than those that were given."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_log = logging.getLogger(__name__)


class Names:
    """Names that a service takes, different for different names; warns of each change once.

    Args:
        service: as it is called in the warning.
        fit: what the service takes in place of a name, at its best the name itself.
        longest: how many characters a name may have.
    """

    def __init__(self, service: str, fit: Callable[[str], str], longest: int = 1 << 20) -> None:
        self._service = service
        self._fit = fit
        self._longest = longest
        self._found: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The name, or one like it with a checksum."""
        if name not in self._found:
            found = self._found[name] = spelled(name, self._fit(name), self._longest)
            if found != name:
                _log.warning("%s takes no name like %r: it is recorded as %r.", self._service, name, found)
        return self._found[name]

    def of_all(self, config: Any) -> Any:
        """A configuration whose names are fitted, of dicts in it too."""
        if isinstance(config, Mapping):
            return {self.of(name): self.of_all(value) for name, value in config.items()}
        return [self.of_all(value) for value in config] if isinstance(config, list) else config


def spelled(name: str, fitting: str, longest: int) -> str:
    """A name, or a fitting one with a checksum, which no other name becomes.

    Args:
        name: that was given.
        fitting: the same, or one like it.
        longest: how many characters it may have.
    """
    if name == fitting and len(name) <= longest:
        return name
    return f"{fitting[: longest - 9]}_{zlib.crc32(name.encode(errors='backslashreplace')):08x}"


def short(text: str, most: int) -> str:
    """The beginning of a text that has so many bytes, as file systems count."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration by joined names; lists and empty dicts as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, json.dumps(value, ensure_ascii=False) if isinstance(value, (list, Mapping)) else value
