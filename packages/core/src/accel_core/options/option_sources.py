"""Options from outside: a launcher's command line, the environment, a file, in this order.

The variable of an option is `ACCELERATE_<OPTION>`, that of a component's option
`ACCELERATE_<COMPONENT>__<OPTION>`. A launcher hands on what its command line and its file say in
one variable more, `ACCELERATE_CONFIG`, as JSON: variable → [data, where it was said].

    {"command line": {"ACCELERATE_FSDP__CPU_OFFLOAD": [true, "--fsdp.cpu-offload"]}, "file": {...}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

TRUE = ("1", "true", "yes", "on", "y", "t")
FALSE = ("0", "false", "no", "off", "n", "f")
"""The usual spellings of truth values in texts."""

CHANNEL = "ACCELERATE_CONFIG"
"""The variable in which a launcher hands on what its command line and its file said."""

PREFIX = "ACCELERATE_"
"""What the variables of options begin with."""

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "strategy": None, "mixed_precision": "no", "loader": None, "gradient_accumulation_steps": 1, "cpu": False,
        "dynamo_backend": "no", "detect_nonfinite": False, "project_dir": None, "log_with": None,
    }
)  # fmt: skip
"""The options of the Accelerator that may be given outside of the code, with what holds where nobody says anything; None: what there is
decides. They say where and how a script runs; what says how it is written is for the code."""

DEFAULT_STRATEGIES = ("ddp", "single")
"""The strategies where none is given: in a world larger than one, and in one process."""

DEFAULT_LOADER = "sharded"
"""The loader where none is given and a distribution offers this name."""

LOADER_OPTIONS = (
    "split_batches", "even_batches", "dispatch_batches", "use_seedable_sampler",
    "data_seed", "non_blocking", "use_stateful_dataloader", "rng_types",
)  # fmt: skip
"""The options of the loader component that stand beside those of the Accelerator, without its name: all loaders share them."""

_SPECIAL: Mapping[str, str] = {"cpu": "ACCELERATE_USE_CPU", "debug": "ACCELERATE_DEBUG_MODE"}
_LEVELS = ("command line", "file")


class GivenOption(NamedTuple):
    """A value given outside of the code, as text or JSON-like data; and where it was said."""

    value: Any
    source: str

    @property
    def text(self) -> str:
        """The value as the environment would have it."""
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return ",".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value).strip()


def variable_of(option: str, section: str = "") -> str:
    """The variable of an option of the component named `section`, empty for the Accelerator."""
    if not section:
        return _SPECIAL.get(option, f"{PREFIX}{option.upper()}")
    return f"{PREFIX}{section_name(section).upper()}__{option.upper()}"


def section_name(component: str) -> str:
    """The spelling of a component's name in `given_sections`."""
    return re.sub(r"\W", "_", component).lower()


def given_outside(variable: str) -> GivenOption | None:
    """An option's value by the first of command line, environment and file, or None."""
    return _first(variable, inherited())


def _first(variable: str, launched: Mapping[str, Mapping[str, GivenOption]]) -> GivenOption | None:
    if variable in launched["command line"]:
        return launched["command line"][variable]
    text = os.environ.get(variable, "").strip()
    return GivenOption(text, variable) if text else launched["file"].get(variable)


def given_sections() -> dict[str, dict[str, GivenOption]]:
    """Options given for components: `section_name` → option in small letters → value."""
    launched = inherited()
    found: dict[str, dict[str, GivenOption]] = {}
    for name in sorted({*launched["command line"], *launched["file"], *os.environ}):
        section, separator, option = name.removeprefix(PREFIX).partition("__")
        if not name.startswith(PREFIX) or not separator or (value := _first(name, launched)) is None:
            continue
        if name != name.upper():
            raise ValueError(f"{value.source} was given, and variables are written in capital letters: {name.upper()}.")
        found.setdefault(section.lower(), {})[option.lower()] = value
    return found


def inherited(environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, GivenOption]]:
    """The options given to launchers, by "command line" and "file", then by variable."""
    text = environ.get(CHANNEL, "").strip()
    try:
        content = json.loads(text or "{}")
        if content.keys() - {*_LEVELS}:
            raise ValueError(f"it speaks of {', '.join(sorted(content.keys() - {*_LEVELS}))}")
        levels = ((level, content.get(level, {}).items()) for level in _LEVELS)
        return {level: {name: GivenOption(value, str(at)) for name, (value, at) in given} for level, given in levels}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{CHANNEL} cannot be read ({error}): launchers write it, as JSON. Unset it, and give options on the "
            f"command line of the launcher, or in variables of their own, such as {PREFIX}MIXED_PRECISION=bf16."
        ) from error
