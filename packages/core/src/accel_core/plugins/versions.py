"""Whether an installed version is one that a plugin's metadata admits.

`packaging` would cost 9.5 ms to import. Metadata of plugins is narrower than what it reads:
versions as build tools write them, without epoch, and comparisons joined by commas. The rest is
refused. See https://packaging.python.org/en/latest/specifications/version-specifiers/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

# Compiled on first use: most runs compare no version.
_VERSION = r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?(?:\+[a-z0-9.]+)?"
_CLAUSE = r"(>=|<=|==|!=|~=|>|<)\s*([^\s*<>=!~][^\s*]*?)(\.\*)?"


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
        return cls(_strip(release), pre, -1 if post is None else int(post), math.inf if dev is None else int(dev))

    @property
    def is_early(self) -> bool:
        """A pre-release or a development release."""
        return self.pre < (3, 0) or self.dev != math.inf


def _strip(release: str) -> tuple[int, ...]:
    numbers = [int(part) for part in release.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _has_prefix(version: Version, prefix: str) -> bool:
    wanted = [int(part) for part in prefix.split(".")]
    padded = [*version.release, *[0] * len(wanted)]
    return padded[: len(wanted)] == wanted


def admits(specifier: str, version: str) -> bool:
    """True if `version` satisfies every clause of `specifier` (">=0.2,<1"; empty admits all).

    Pre-releases count like any version: `>=0.2` admits `0.3rc1`. Raises `ValueError` for a clause
    that it cannot read.
    """
    installed = Version.parse(version)
    return all(_admits_clause(clause.strip(), installed) for clause in specifier.split(",") if clause.strip())


def _admits_clause(clause: str, installed: Version) -> bool:
    match = re.fullmatch(_CLAUSE, clause)
    if match is None:
        raise ValueError(
            f"{clause!r} is no version clause; type one of the form '>=1.2', with >=, <=, ==, !=, ~=, > or <"
        )
    operator, text, wildcard = match.groups()
    target = Version.parse(text)
    if wildcard:
        if operator not in ("==", "!="):
            raise ValueError(f"{clause!r}: '.*' goes with '==' and '!=' only; type '{operator}{text}'")
        return _has_prefix(installed, text) == (operator == "==")
    if operator == "~=":
        release = re.split("[a-z]", text)[0].rstrip(".")
        if "." not in release:
            raise ValueError(f"{clause!r}: '~=' goes with two numbers or more only; type '~={release}.0'")
        return installed >= target and _has_prefix(installed, release.rpartition(".")[0])
    if operator == "<":
        # "<2" leaves out 2rc1, which comes before 2 but has its changes.
        leads_up = installed.is_early and not target.is_early and installed.post == target.post
        return installed < target and not (leads_up and installed.release == target.release)
    if operator == ">":
        # ">2" leaves out 2.post1, which comes after 2 but is the same release.
        amends = installed.post >= 0 and target.post < 0 and installed.pre == target.pre
        return installed > target and not (amends and installed.release == target.release)
    if operator in (">=", "<="):
        return installed >= target if operator == ">=" else installed <= target
    return (installed == target) == (operator == "==")


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it: `Accel_FSDP` is `accel-fsdp`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_on(distribution: str, requirements: Iterable[str] | None) -> str:
    """The clauses that `Requires-Dist` lines put on one distribution, joined by commas; empty if there are none.

    Lines with an environment marker are left out, for extras do not bind; so are direct references.
    """
    found = []
    for line in requirements or ():
        match = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?([^;@]*)$", line.strip())
        if match is not None and canonical(match[1]) == canonical(distribution):
            found.append(match[2].strip(" ()"))
    return ",".join(clauses for clauses in found if clauses)
