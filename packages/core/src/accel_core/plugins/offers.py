"""Names that installed distributions offer through entry points. Only the offer that is chosen is imported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, cast

from accel_core.base.errors import NotInstalledError, PluginError
from accel_core.base.suggestions import nearest
from accel_core.base.vocabulary import KNOWN_PROVIDERS
from accel_core.plugins.versions import admits, canonical, requirement_on

Group = Literal[
    "accel.strategies", "accel.precisions", "accel.loaders", "accel.trackers", "accel.checkpoints",
    "accel.importers", "accel.diagnostics", "accel.recorders", "accel.commands",
]  # fmt: skip
"""The groups of entry points in which distributions offer names."""

CORE = "accel-core"
NOUNS: dict[Group, str] = {
    "accel.strategies": "strategy",
    "accel.precisions": "precision",
    "accel.loaders": "loader",
    "accel.trackers": "tracker",
    "accel.checkpoints": "checkpoint format",
    "accel.importers": "importer",
    "accel.diagnostics": "diagnostic",
    "accel.recorders": "recorder",
    "accel.commands": "command",
}
"""The groups in which offers are looked for, and what one member of each is called."""

SHOW_ALL = "`python -m accel_core plugins` shows everything that is installed."


@dataclass(frozen=True)
class Offer:
    """One name that an installed distribution offers for `value`, `module:attribute`.

    `core` is the versions of accel-core that this distribution asks for; empty for all.
    """

    group: Group
    name: str
    value: str
    distribution: str
    version: str
    core: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.provider})"

    @property
    def noun(self) -> str:
        """Strategy, precision, loader, tracker or command."""
        return NOUNS[self.group]

    @property
    def provider(self) -> str:
        """The distribution with its version."""
        return f"{self.distribution} {self.version}"

    def misfit(self) -> str | None:
        """The reason why this offer cannot run with the installed accel-core; None if it can. Imports nothing."""
        installed = metadata.version(CORE) if self.core else ""
        try:
            fits = not self.core or admits(self.core, installed)
        except ValueError as error:
            return f"{self.provider} asks for {CORE} {self.core}, which cannot be compared with {installed}: {error}"
        return None if fits else f"{self.provider} needs {CORE} {self.core}, and {CORE} {installed} is installed"

    def load(self) -> Callable[..., Any]:
        """Imports what makes the component. Raises `PluginError` if it does not fit the core or cannot be imported."""
        asked = f"The {self.noun} {self.name!r} was asked for, but"
        if (misfit := self.misfit()) is not None:
            raise PluginError(
                f"{asked} {misfit}.\n"
                f"Type: pip install --upgrade {self.distribution}, or, to keep that one: pip install '{CORE}{self.core}'"
            )
        try:
            factory = metadata.EntryPoint(self.name, self.value, self.group).load()
            if not callable(factory):
                raise TypeError(f"{self.value} is {type(factory).__name__}, which cannot be called")
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{asked} {self.provider} is broken: {self.value} could not be imported: {type(error).__name__}: {error}.\n"
                f"Type: pip install --upgrade {self.distribution}, or choose another {self.noun}. {SHOW_ALL}"
            ) from error
        return cast("Callable[..., Any]", factory)


def list_offers(group: Group | None = None) -> list[Offer]:
    """Every offer of one group, or of all, sorted by group, name and distribution. Imports no plugin."""
    offers: dict[str, list[Offer]] = {}
    for distribution in metadata.distributions():
        # Most distributions have nothing for us; reading their whole metadata would take most of the time.
        text = distribution.read_text("entry_points.txt")
        if text is None or "[accel." not in text:
            continue
        about = distribution.metadata
        by = about["Name"], about["Version"], requirement_on(CORE, about.get_all("Requires-Dist"))
        points = [point for point in distribution.entry_points if point.group in NOUNS and group in (None, point.group)]
        found = [Offer(cast("Group", point.group), point.name, point.value, *by) for point in points]
        # Of a distribution that stands on `sys.path` twice the first counts, as it does for `import`.
        offers.setdefault(canonical(about["Name"]), found)
    return sorted(itertools.chain(*offers.values()), key=lambda offer: (offer.group, offer.name, offer.distribution))


def find(group: Group, name: str, offers: Sequence[Offer] | None = None) -> Offer:
    """The one offer of `name`, which may be qualified by its distribution: `other-fsdp:fsdp`. Imports nothing.

    `offers` is what `list_offers` has returned, to look up several names with one listing. Raises
    `NotInstalledError` if a distribution is known that offers it, `PluginError` if none is, or
    several are installed.
    """
    installed = [offer for offer in (list_offers(group) if offers is None else offers) if offer.group == group]
    distribution, _, plain = name.rpartition(":")
    named = [offer for offer in installed if offer.name == plain]
    found = [each for each in named if not distribution or canonical(each.distribution) == canonical(distribution)]
    if not found:
        raise _not_found(group, name, installed)
    if len(found) > 1:
        raise PluginError(
            f"The {NOUNS[group]} {name!r} was asked for, and {len(found)} distributions offer it: "
            f"{', '.join(f'{offer.provider} ({offer.value})' for offer in found)}.\n"
            f"Say which: {' or '.join(repr(f'{offer.distribution}:{plain}') for offer in found)}."
        )
    return found[0]


def find_default(group: Group, name: str, call: str, offers: Sequence[Offer] | None = None) -> Offer:
    """The offer under a default name, which nobody has asked for by that name: `call` needs it. Errors as of `find`."""
    installed = list_offers(group) if offers is None else offers
    found = [offer for offer in installed if (offer.group, offer.name) == (group, name)]
    if not found:
        provider = KNOWN_PROVIDERS[group][name]
        raise NotInstalledError(f"{call} needs {provider}, which is not installed. {how_to_get(provider)}")
    if len(found) > 1:
        raise PluginError(
            f"{call} needs a {NOUNS[group]}, and {len(found)} distributions offer it under the name {name!r}: "
            f"{', '.join(each.provider for each in found)}. Uninstall all but one."
        )
    return found[0]


def how_to_get(provider: str | None) -> str:
    """Advice for a component that is not installed, without a full stop. `KNOWN_PROVIDERS` has the distribution."""
    return "No package offers it yet: choose another" if provider is None else f"Type: pip install {provider}"


def _not_found(group: Group, name: str, installed: Sequence[Offer]) -> PluginError:
    """The error for a name that nothing installed offers."""
    known = KNOWN_PROVIDERS.get(group, {})
    distribution, _, plain = name.rpartition(":")
    listing = ", ".join(map(str, installed)) or "none"
    opening = (
        f"The {NOUNS[group]} {name!r} was asked for, and nothing that is installed offers it. Installed: {listing}.\n"
    )
    provider = canonical(distribution) if distribution else known.get(plain)
    if provider not in {canonical(offer.distribution) for offer in installed} and (distribution or plain in known):
        return NotInstalledError(f"{opening}{how_to_get(provider)}")
    names = [offer.name for offer in installed]
    meant = nearest(plain, [*names, *known])
    if meant is None or meant == plain:
        return PluginError(f"{opening}Choose one of these, or pass an object. {SHOW_ALL}")
    hint = "" if meant in names else f" It is not installed. {how_to_get(known[meant])}."
    return PluginError(f"{opening}Type {meant!r} if that was meant.{hint} {SHOW_ALL}")
