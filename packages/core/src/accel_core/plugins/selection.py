"""From what the user wrote to a component: a name with options, or an object that is complete already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from accel_core.plugins.offers import NOUNS, Group, Offer, find, list_offers


@dataclass(frozen=True, eq=False)
class Selected:
    """A component that is to be active, and where it came from.

    `name` is the offer's, or that of the class of an object that was passed, which has no offer;
    an object from `plugins=[...]` has no group.
    """

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
        """The distribution and version of the component; None for the user's own code. May take 70 ms: for messages."""
        package = self.where.partition(".")[0]
        ours = (offer for offer in list_offers() if offer.value.partition(":")[0].partition(".")[0] == package)
        if (offer := self.offer or next(ours, None)) is not None:
            return offer.distribution, offer.version
        distributions = {*metadata.packages_distributions().get(package, ())}
        return (
            next(((name, metadata.version(name)) for name in distributions), None) if len(distributions) == 1 else None
        )

    def describe(self) -> str:
        """The component and its provider, as text for messages."""
        provider = self.provider()
        origin = "" if provider is None else " of {} {}".format(*provider)
        passed = "" if self.offer is not None else ", passed as an object"
        return f"the {self.noun} {self.name!r} ({self.where}{origin}{passed})"


def build(
    group: Group, choice: object, options: Mapping[str, Any] | None = None, offers: Sequence[Offer] | None = None
) -> Selected:
    """Makes the component that `choice` names, with `options`, or takes the object that it is. `offers` is as for `find`.

    Raises `PluginError` as `find` and `Offer.load` do, `ValueError` for options beside an object,
    `TypeError` for a class instead of an object, or options that do not fit its constructor.
    """
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
        raise TypeError(
            f"The {offer.noun} {offer} could not be made with {', '.join(given) or 'no options'}: {error}.\n"
            f"Give what {offer.value} takes, or build the object in code and pass it."
        ) from error


def passed(component: object, group: Group | None = None) -> Selected:
    """Takes an object (or a module with marked functions) that the user built. Raises `TypeError` for a class."""
    if isinstance(component, type):
        raise TypeError(
            f"The class {component.__module__}.{component.__qualname__} was passed as {'plugin' if group is None else NOUNS[group]}; "
            f"an object of it is needed.\nWrite {component.__name__}(...) with its options."
        )
    name = component.__name__ if isinstance(component, ModuleType) else type(component).__name__
    return Selected(component, name, group)
