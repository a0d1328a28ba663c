"""The result of an importer, which translates another library's configuration file into ours.

Importers, of the entry-point group `accel.configurations`, are functions of a file's content that
return an `Imported`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from accel_core.api.launcher import Group, find

GROUP: Group = "accel.configurations"
PEER = "accelerate"
"""The name under which an importer of Accelerate's files is offered; `places` recognises them."""


class Carried(NamedTuple):
    """One key that was carried over.

    Args:
        old: their key, such as "fsdp_config.fsdp_offload_params".
        new: ours, such as "fsdp.cpu_offload"; empty if the key says nothing, or what is so here in
            any case.
        value: as data.
    """

    old: str
    new: str
    value: Any


class Left(NamedTuple):
    """One key that was not carried over.

    Args:
        old: their key.
        value: theirs.
        reason: why, and what to do instead.
    """

    old: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Imported:
    """The translation of another library's file.

    Args:
        data: as our own file would have it, with a mapping for each section.
        carried: the keys that were carried over; one key of theirs may be several of ours.
        left: the keys that were not. No key is in both.
    """

    data: dict[str, Any]
    carried: list[Carried]
    left: list[Left]


Importer: TypeAlias = Callable[[Mapping[str, Any]], Imported]


def translate(data: Mapping[str, Any]) -> Imported:
    """Translates the content of a file of Accelerate's by the importer that is installed.

    Raises `NotInstalledError` if there is none, `ValueError` for a file that cannot be translated.
    """
    importer: Importer = find(GROUP, PEER).load()
    return importer(data)
