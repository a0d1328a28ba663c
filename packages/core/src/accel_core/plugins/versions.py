"""Whether an installed version is one that a plugin's metadata admits. (`packaging` would cost 9.5 ms to import.)

Versions are as build tools write them, without epoch; comparisons are joined by commas. The rest is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

# Compiled on first use: most runs compare no version.
_VERSION = r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?(?:\+[a-z0-9.]+)?"
_COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt, "~=": ge}


class Version(NamedTuple):
    """A version in an order-preserving form: release without trailing zeros, then pre-, post- and dev-release."""

    release: tuple[int, ...]
    pre: tuple[int, int]
    post: float
    dev: float

    @classmethod
    def parse(cls, text: str) -> Version:
        """Reads a normalised version; a local part (`+cpu`) does not count. Raises `ValueError` for anything else."""
        match = re.fullmatch(_VERSION, text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no version; type one of the form 1.2.3, 1.2rc1, 1.2.post1 or 1.2.dev1")
        release, phase, number, post, dev = match.groups()
        if phase is not None:
            pre = (("a", "b", "rc").index(phase), int(number))
        else:
            pre = (-1, 0) if dev is not None and post is None else (3, 0)
        numbers = _numbers(re.sub(r"(\.0+)+$", "", release))
        return cls(numbers, pre, -1 if post is None else int(post), math.inf if dev is None else int(dev))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def admits(specifier: str, version: str) -> bool:
    """True if `version` satisfies every clause of `specifier` (">=0.2,<1"; empty admits all), in the order of versions.

    So `>=0.2` admits `0.3rc1`, and `<2` admits `2rc1`. Raises `ValueError` for what it cannot read.
    """
    installed = Version.parse(version)
    return all(_admits_clause(clause.strip(), installed) for clause in specifier.split(",") if clause.strip())


def _admits_clause(clause: str, installed: Version) -> bool:
    match = re.fullmatch(r"(>=|<=|==|!=|~=|>|<)\s*([^\s*<>=!~][^\s*]*)", clause)
    sign, text = match.groups() if match else ("", "")
    prefix = _numbers(re.split(r"\.?[a-z]", text)[0])[:-1] if sign == "~=" else ()
    if match is None or (sign == "~=" and not prefix):
        raise ValueError(
            f"{clause!r} is no version clause; type one of the form '>=1.2', with >=, <=, ==, !=, ~=, > or <"
        )
    padded = (*installed.release, *[0] * len(prefix))
    return padded[: len(prefix)] == prefix and bool(_COMPARE[sign](installed, Version.parse(text)))


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it: `Accel_FSDP` is `accel-fsdp`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_on(distribution: str, requirements: Iterable[str] | None) -> str:
    """The clauses that `Requires-Dist` lines put on one distribution, joined by commas; empty if there are none.

    Lines with an environment marker are left out, for extras do not bind; so are direct references.
    """
    matches = [re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?([^;@]*)$", line.strip()) for line in requirements or ()]
    found = [match[2].strip(" ()") for match in matches if match and canonical(match[1]) == canonical(distribution)]
    return ",".join(filter(None, found))
