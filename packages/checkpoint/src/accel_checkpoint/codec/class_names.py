"""Classes by their names, among those that the program has imported: the codec imports none."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from accel_checkpoint.codec.path import Unfit, type_name


def class_name(kind: type) -> str:
    """The name, `module:qualified.name`, by which `find_class` finds a class; `Unfit` if none."""
    # The children of multiprocessing know the program's main module under both names.
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    name = f"{module}:{kind.__qualname__}"
    if _member(module, kind.__qualname__) is not kind:
        raise Unfit(
            f"is a {type_name(kind)}, and its module has no such class under that name",
            "Define it at the top level of a module, or give plain data in its place.",
        )
    return name


def find_class(name: str, base: type, member: str, kind: str) -> Any:
    """The class of that name in an imported module, a `base` with that member; else `Unfit`."""
    module, _, path = name.partition(":")
    if module not in sys.modules:
        raise Unfit(f"is of the class {name}, whose module is not imported", f"Import {module} before load_state().")
    found = _member(module, path)
    if found is None:
        raise Unfit(
            f"is of the class {name}, which that module does not have",
            f"Import the version of {module} that it was saved with, or load another checkpoint.",
        )
    if not (issubclass(type(found), type) and issubclass(found, base) and hasattr(found, member)):
        raise Unfit(f"is of the class {name}, which is no {kind}")
    return found


def _member(module: str, path: str) -> Any:
    """The object at a path in an imported module. Runs none of its code, which could import."""
    found: Any = sys.modules.get(module)
    if not issubclass(type(found), ModuleType):
        return None
    members = object.__getattribute__(found, "__dict__")
    for step in path.split("."):
        found = members.get(step)
        members = vars(found) if issubclass(type(found), type) else {}
    return found
