"""From what the user wrote to a component: a name with options, or an object that is complete already."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from accel_core.base.errors import PluginError
from accel_core.base.suggestions import nearest
from accel_core.plugins.offers import NOUNS, Group, Offer, find, list_offers


@dataclass(frozen=True, eq=False)
class Selected:
    """A component that is to be active, and where it came from.

    Args:
        component: the object whose marked methods are hooks.
        name: the offer's name, or the class's name of an object that was passed.
        group: the entry-point group of its role; None for an object from `plugins=[...]`.
        offer: the offer that it was made from; None if it was passed as an object.
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
        if isinstance(self.component, ModuleType):
            return self.component.__name__
        kind = type(self.component)
        return f"{kind.__module__}.{kind.__qualname__}"

    def provider(self) -> tuple[str, str] | None:
        """The distribution and version of the component; None for the user's own code. May take 70 ms: for messages."""
        if self.offer is not None:
            return self.offer.distribution, self.offer.version
        return _provider_of(self.where.partition(".")[0])

    def describe(self) -> str:
        """The component and its provider, as text for messages."""
        provider = self.provider()
        origin = "" if provider is None else " of {} {}".format(*provider)
        passed = "" if self.offer is not None else ", passed as an object"
        return f"the {self.noun} {self.name!r} ({self.where}{origin}{passed})"


def build(
    group: Group,
    choice: object,
    options: Mapping[str, Any] | None = None,
    offers: Sequence[Offer] | None = None,
) -> Selected:
    """Makes the component that `choice` names, or takes the object that it is.

    Args:
        choice: a name, looked up among what is installed, or an object, used as it is.
        options: arguments for the constructor of what is named; for an object they are an error.
        offers: what `list_offers` has returned, to build several components with one listing.

    Raises:
        PluginError: as `find` and `Offer.load` do, or if the component cannot be made from its name
            alone.
        ValueError: options for an object, or an option that the constructor does not have.
        TypeError: a class instead of an object.
    """
    if not isinstance(choice, str):
        if options:
            raise ValueError(
                f"Options for the {NOUNS[group]} were given ({', '.join(options)}) beside an object, "
                f"{type(choice).__qualname__}, and an object built in code is complete.\n"
                f"Give them to its constructor, or choose it by name."
            )
        return passed(choice, group)
    offer = find(group, choice, offers)
    factory = offer.load()
    _check_options(offer, factory, options or {})
    return Selected(factory(**(options or {})), offer.name, group, offer)


def passed(component: object, group: Group | None = None) -> Selected:
    """Takes an object (or a module with marked functions) that the user built. Raises `TypeError` for a class."""
    noun = "plugin" if group is None else NOUNS[group]
    if isinstance(component, type):
        raise TypeError(
            f"The class {component.__module__}.{component.__qualname__} was passed as {noun}; an object of it is needed.\n"
            f"Write {component.__name__}(...) with its options."
        )
    name = component.__name__ if isinstance(component, ModuleType) else type(component).__name__
    return Selected(component, name, group)


def _check_options(offer: Offer, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuses options that the constructor does not have, and a constructor that cannot do with those given."""
    parameters = inspect.signature(factory).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_any else [option for option in options if option not in names]
    if unknown:
        meant = nearest(unknown[0], names)
        hint = "Leave it out." if meant is None else f"Type {meant!r} if that was meant."
        raise ValueError(
            f"The option {unknown[0]!r} was given to the {offer.noun} {offer}, which does not have it.\n"
            f"Its options: {', '.join(names) or 'none'}. {hint}"
        )
    required = [name for name in names if parameters[name].default is parameters[name].empty and name not in options]
    if required:
        raise PluginError(
            f"The {offer.noun} {offer} was chosen by name, but it cannot be made without {', '.join(required)}.\n"
            f"Give these options, or build the object in code ({offer.value}) and pass it."
        )


def _provider_of(package: str) -> tuple[str, str] | None:
    """The one distribution that brings a top-level package, if exactly one can be named."""
    for offer in list_offers():
        if offer.value.partition(":")[0].partition(".")[0] == package:
            return offer.distribution, offer.version
    distributions = set(metadata.packages_distributions().get(package, ()))
    if len(distributions) != 1:
        return None
    name = distributions.pop()
    return name, metadata.version(name)
