"""`accel config import`: a file of Accelerate's becomes one of ours, once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_core import PluginError
from accel_core.api.launcher import masked
from accel_launch.importing.foreign import Imported, translate
from accel_launch.importing.places import is_of_peer, peer_paths
from accel_launch.output import DOUBTFUL, say, table
from accel_launch.settings.catalog import ROLES, Catalog, chosen_names
from accel_launch.settings.files import read, write
from accel_launch.settings.showing import say_next


def import_file(source: Path | None, target: Path, force: bool = False) -> int:
    """Writes a file of ours from a file of Accelerate's; prints what was carried over and what not.

    `source` is None for the first of the places where Accelerate keeps its own. A target that says
    something else is replaced with `force` only. Raises `ValueError` if there is no file, if it is
    not in Accelerate's format, or if the target may not be replaced.
    """
    found = _find(source)
    imported = translate(_read(found))
    say(f"{found} says:\n")
    carried = [(each.old, each.new, _text(masked(each.old, each.value))) for each in imported.carried if each.new]
    table(("in Accelerate", "here", "value"), carried, "Carried over")
    say()
    if imported.left:
        left = [(each.old, _text(masked(each.old, each.value)), each.reason) for each in imported.left]
        table(("in Accelerate", "value", "why, and what to do"), left, "Not carried over")
        say()
    if silent := [each.old for each in imported.carried if not each.new]:
        say(f"Says nothing, or what is so here in any case: {', '.join(silent)}.\n")
    already = _check_target(found, target, imported.data, force)
    catalog = Catalog()
    if not already:
        write(target, imported.data, catalog.help_of(imported.data), anew=True)
    say(f"{target} {'says so already: nothing was changed' if already else 'is written'}.")
    _say_missing(catalog, imported)
    say_next(target)
    return 0


def _find(source: Path | None) -> Path:
    if source is not None:
        if not source.is_file():
            raise ValueError(
                f"{source} was to be imported, and there is no such file. Type `accel config import FILE`."
            )
        return source
    places = peer_paths(os.environ)
    for place in places:
        if place.is_file():
            return place
    listing = "\n".join(f"  {place}" for place in places)
    raise ValueError(
        f"A file of Accelerate's was to be imported, and none was found. Looked for:\n{listing}\n"
        f"Type `accel config import FILE`, or `accel config` to write one anew."
    )


def _read(path: Path) -> Mapping[str, Any]:
    data = read(path).data
    if data and not is_of_peer(data):
        raise ValueError(
            f"{path} was to be imported, and is not in Accelerate's format: it has no key such as distributed_type. If it is one of "
            f"ours, type `accel launch --config-file {path} script.py`; `accel config validate {path}` says what is wrong with it."
        )
    return data


def _check_target(source: Path, target: Path, data: Mapping[str, Any], force: bool) -> bool:
    """Whether the target says so already. Raises `ValueError` if it may not be replaced."""
    if not target.exists():
        return False
    if target.resolve() == source.resolve():
        raise ValueError(
            f"{target} is the file that was to be imported, and what could not be carried over would be lost. Give another file to "
            f"write to, with --config-file."
        )
    if read(target).data == data:
        return True
    if not force:
        raise ValueError(
            f"{target} exists and says something else: nothing was written. Add --force to replace it, or give another file with "
            f"--config-file."
        )
    return False


def _say_missing(catalog: Catalog, imported: Imported) -> None:
    """Prints which components that the file chooses are missing, and how to install them."""
    for role in ROLES:
        for name in chosen_names(role, imported.data.get(role)):
            try:
                catalog.component(name, role)
            except PluginError as error:
                say(str(error), DOUBTFUL)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
