"""Components that installed distributions name by entry points, and whether they fit the core.

Only a chosen offer is imported. Versions: as build tools write them, without epoch; else refused.
(`packaging` would cost 9.5 ms to import.)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from accel_core.base.errors import NotInstalledError, PluginError
from accel_core.base.installation import how_to_install
from accel_core.base.suggestions import nearest
from accel_core.base.vocabulary import KNOWN_PROVIDERS

Group = Literal[
    "accel.strategies", "accel.precisions", "accel.loaders", "accel.trackers", "accel.checkpoints", "accel.importers",
    "accel.configurations", "accel.diagnostics", "accel.recorders", "accel.placements", "accel.commands",
]  # fmt: skip
"""The groups of entry points in which distributions offer names."""

CORE = "accel-core"
NOUNS: dict[Group, str] = {
    "accel.strategies": "strategy", "accel.precisions": "precision", "accel.loaders": "loader", "accel.trackers": "tracker",
    "accel.checkpoints": "checkpoint format", "accel.importers": "importer", "accel.configurations": "importer of configuration",
    "accel.diagnostics": "diagnostic", "accel.recorders": "recorder", "accel.placements": "placement", "accel.commands": "command",
}  # fmt: skip
"""The groups in which offers are looked for, and what one member of each is called."""

# Compiled on first use: most runs compare no version.
_VERSION = r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?(?:\+[a-z0-9.]+)?"
_COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt, "~=": ge}

SHOW_ALL = "`python -m accel_core plugins` shows everything that is installed."


@dataclass(frozen=True)
class Offer:
    """A distribution's name for `value`, `module:attribute`, and the accel-core it asks for."""

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

    def makes(self, kind: type) -> bool:
        """Whether it stands for this class, in whichever module of its package. Imports nothing."""
        module, _, attribute = self.value.partition(":")
        return (module.partition(".")[0], attribute) == (kind.__module__.partition(".")[0], kind.__name__)

    def misfit(self) -> str | None:
        """The reason why it cannot run with the installed core; None if it can. Imports nothing."""
        installed = metadata.version(CORE) if self.core else ""
        try:
            fits = not self.core or admits(self.core, installed)
        except ValueError as error:
            return f"{self.provider} asks for {CORE} {self.core}, which cannot be compared with {installed}: {error}"
        return None if fits else f"{self.provider} needs {CORE} {self.core}, and {CORE} {installed} is installed"

    def load(self) -> Callable[..., Any]:
        """Imports the component's factory. `PluginError` for a wrong core or a failed import."""
        asked = f"The {self.noun} {self.name!r} was asked for, but"
        if (misfit := self.misfit()) is not None:
            newer = how_to_install(self.distribution, upgrade=True)
            raise PluginError(f"{asked} {misfit}.\n{newer}; or, to keep that one, install {CORE} {self.core}")
        try:
            factory = metadata.EntryPoint(self.name, self.value, self.group).load()
            if not callable(factory):
                raise TypeError(f"{self.value} is {type(factory).__name__}, which cannot be called")
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{asked} {self.provider} is broken: {self.value} could not be imported: {type(error).__name__}: {error}.\n"
                f"{how_to_install(self.distribution, upgrade=True)}, or choose another {self.noun}. {SHOW_ALL}"
            ) from error
        return cast("Callable[..., Any]", factory)


def list_offers(group: Group | None = None) -> list[Offer]:
    """Every offer of one group, or of all, sorted by group, name, distribution. Imports none."""
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
    """The one offer of `name`, or of `distribution:name`: `other-fsdp:fsdp`. Imports nothing.

    Raises `NotInstalledError` if a distribution is known that offers it, else `PluginError`.
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
    """The offer of a default name that nobody asked for: `call` needs it. Errors as of `find`."""
    installed = list_offers(group) if offers is None else offers
    found = [offer for offer in installed if (offer.group, offer.name) == (group, name)]
    if not found:
        provider = KNOWN_PROVIDERS[group][name]
        raise NotInstalledError(f"{call} needs {provider}, which is not installed. {how_to_install(provider)}")
    if len(found) > 1:
        what = f"{call} needs a {NOUNS[group]}, and {len(found)} distributions offer it under the name {name!r}:"
        raise PluginError(f"{what} {', '.join(each.provider for each in found)}. Uninstall all but one.")
    return found[0]


def _not_found(group: Group, name: str, installed: Sequence[Offer]) -> PluginError:
    """The error for a name that nothing installed offers."""
    known = KNOWN_PROVIDERS.get(group, {})
    distribution, _, plain = name.rpartition(":")
    listing = ", ".join(map(str, installed)) or "none"
    asked = f"The {NOUNS[group]} {name!r} was asked for"
    opening = f"{asked}, and nothing that is installed offers it. Installed: {listing}.\n"
    provider = canonical(distribution) if distribution else known.get(plain, "")
    if provider not in {canonical(offer.distribution) for offer in installed} and (distribution or plain in known):
        return NotInstalledError(f"{opening}{how_to_install(provider)}")
    names = [offer.name for offer in installed]
    meant = nearest(plain, [*names, *known])
    if meant is None or meant == plain:
        return PluginError(f"{opening}Choose one of these, or pass an object. {SHOW_ALL}")
    hint = "" if meant in names else f" It is not installed. {how_to_install(known[meant])}."
    return PluginError(f"{opening}Type {meant!r} if that was meant.{hint} {SHOW_ALL}")


class Version(NamedTuple):
    """A version in order: release without trailing zeros, pre-, post- and dev-release."""

    release: tuple[int, ...]
    pre: tuple[int, int]
    post: float
    dev: float

    @classmethod
    def parse(cls, text: str) -> Version:
        """Reads a normalised version, ignoring a local part (`+cpu`). Else raises `ValueError`."""
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
    """Whether `version` satisfies every clause of `specifier`, such as ">=0.2,<1"."""
    installed = Version.parse(version)
    return all(_admits_clause(clause.strip(), installed) for clause in specifier.split(",") if clause.strip())


def _admits_clause(clause: str, installed: Version) -> bool:
    match = re.fullmatch(r"(>=|<=|==|!=|~=|>|<)\s*([^\s*<>=!~][^\s*]*)", clause)
    sign, text = match.groups() if match else ("", "")
    prefix = _numbers(re.split(r"\.?[a-z]", text)[0])[:-1] if sign == "~=" else ()
    if match is None or (sign == "~=" and not prefix):
        raise ValueError(f"{clause!r} is no version clause; type one of the form '>=1.2', with {', '.join(_COMPARE)}")
    padded = (*installed.release, *[0] * len(prefix))
    return padded[: len(prefix)] == prefix and bool(_COMPARE[sign](installed, Version.parse(text)))


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it: `Accel_FSDP` is `accel-fsdp`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_on(distribution: str, requirements: Iterable[str] | None) -> str:
    """The clauses of unmarked `Requires-Dist` lines (no extras) on a distribution, by commas."""
    matches = [re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?([^;@]*)$", line.strip()) for line in requirements or ()]
    found = [match[2].strip(" ()") for match in matches if match and canonical(match[1]) == canonical(distribution)]
    return ",".join(filter(None, found))


@dataclass(frozen=True, eq=False)
class Selected:
    """A component that is to be active, and its offer; passed ones have the name of their class."""

    component: Any
    name: str
    group: Group | None = None
    offer: Offer | None = None

    @property
    def noun(self) -> str:
        """Strategy, precision, loader, tracker, or plugin."""
        return "plugin" if self.group is None else NOUNS[self.group]

    @property
    def where(self) -> str:
        """The module and class of the component, or the name of the module that it is."""
        kind = type(self.component)
        is_module = isinstance(self.component, ModuleType)
        return self.component.__name__ if is_module else f"{kind.__module__}.{kind.__qualname__}"

    def provider(self) -> tuple[str, str] | None:
        """The distribution and version of the component; None for user code. May take 70 ms."""
        if self.offer is not None:
            return self.offer.distribution, self.offer.version
        package = self.where.partition(".")[0]
        ours = (offer for offer in list_offers() if offer.value.partition(":")[0].partition(".")[0] == package)
        if (offer := next(ours, None)) is not None:
            return offer.distribution, offer.version
        names = {*metadata.packages_distributions().get(package, ())}
        return next(((name, metadata.version(name)) for name in names), None) if len(names) == 1 else None

    def describe(self) -> str:
        """The component and its provider, as text for messages."""
        provider = self.provider()
        origin = "" if provider is None else " of {} {}".format(*provider)
        passed = "" if self.offer is not None else ", passed as an object"
        return f"the {self.noun} {self.name!r} ({self.where}{origin}{passed})"


def build(
    group: Group, choice: object, options: Mapping[str, Any] | None = None, offers: Sequence[Offer] | None = None
) -> Selected:
    """The component that `choice` names, made with `options`, or is. Errors as of `find`, too."""
    given = options or {}
    if not isinstance(choice, str):
        if given:
            what = f"Options for the {NOUNS[group]} were given ({', '.join(given)}) beside an object, {type(choice).__qualname__}"
            raise ValueError(f"{what}, and it is complete.\nGive them to its constructor, or choose it by name.")
        return passed(choice, group)
    offer = find(group, choice, offers)
    factory = offer.load()
    try:
        return Selected(factory(**given), offer.name, group, offer)
    except TypeError as error:
        asked = f"The {offer.noun} {offer} could not be made with {', '.join(given) or 'no options'}: {error}."
        raise TypeError(f"{asked}\nGive what {offer.value} takes, or build the object in code and pass it.") from error


def passed(component: object, group: Group | None = None) -> Selected:
    """Takes an object, or a module of marked functions. Raises `TypeError` for a class."""
    if isinstance(component, type):
        what = f"The class {component.__module__}.{component.__qualname__} was passed as"
        role = "plugin" if group is None else NOUNS[group]
        raise TypeError(f"{what} {role}; an object of it is needed.\nWrite {component.__name__}(...) with its options.")
    name = component.__name__ if isinstance(component, ModuleType) else type(component).__name__
    return Selected(component, name, group)
