"""The configuration file that `accel launch --config-file` takes: YAML, with the reason as remarks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_big_model.planning.choosing import TrainingPlan


def write_configuration(plan: TrainingPlan, path: Path, remarks: str) -> None:
    """Writes the file as a whole or not at all. Raises `FileExistsError` if there is one."""
    if path.exists():
        raise FileExistsError(f"{path} was to be written, and exists. Give another path to --output, or delete it.")
    text = "".join(f"# {line}".rstrip() + "\n" for line in remarks.splitlines()) + _yaml(plan.configuration)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _yaml(options: Mapping[str, Any], indent: str = "") -> str:
    lines = ""
    for key, value in options.items():
        if isinstance(value, Mapping):
            lines += f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
        else:
            lines += f"{indent}{key}: {str(value).lower() if isinstance(value, bool) else value}\n"
    return lines
