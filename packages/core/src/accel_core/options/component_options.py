"""Options of components from outside of the code: a *section* each, named as it is chosen.

    ACCELERATE_FSDP__CPU_OFFLOAD=yes        --fsdp.cpu-offload        fsdp: {cpu_offload: true}

Its constructor says which options a section has. A section for a component that was built in code
is an error; one for a component that is not active has no effect, and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.base.suggestions import choices, nearest
from accel_core.options import handlers
from accel_core.options.option_sources import given_sections, section_name, variable_of
from accel_core.options.resolution import Option

if TYPE_CHECKING:
    from accel_core.plugins.offers import Offer

_NOWHERE: Mapping[str, str] = MappingProxyType({})


class Shared(NamedTuple):
    """A section that is always there: a class, and its fields that the Accelerator has too."""

    handler: type[handlers.KwargsHandler]
    elsewhere: Mapping[str, str] = _NOWHERE


SECTIONS: Mapping[str, Shared] = {
    "process_group": Shared(handlers.InitProcessGroupKwargs),
    "accumulation": Shared(handlers.GradientAccumulationPlugin, {"num_steps": "gradient_accumulation_steps"}),
    "dynamo": Shared(handlers.TorchDynamoPlugin, {"backend": "dynamo_backend"}),
    "tracking": Shared(handlers.TrackingKwargs),
}
"""Sections beside those of components."""


class Sections:
    """Options given for components outside of the code, and those in use; per Accelerator."""

    def __init__(self) -> None:
        self._sources = {name: next(iter(given.values())).source for name, given in given_sections().items()}
        self._used: set[str] = set()
        self.options: dict[str, Option[Any]] = {}

    def take(
        self, name: str, load: Callable[[], Callable[..., Any]], elsewhere: Mapping[str, str] = _NOWHERE
    ) -> dict[str, Any]:
        """The options given for the component chosen as `name`, whose constructor `load` gives.

        `elsewhere`: parameter → the Accelerator's option. `ValueError` for what does not fit.
        """
        section = section_name(name)
        is_taken = section in self._used
        self._used.add(section)
        if section not in self._sources:
            return {}
        if is_taken:
            what = (
                f"{self._sources[section]} was given, an option of {name!r}, and two active components go by that name"
            )
            raise ValueError(f"{what}. Give the options in the code, to the constructor of the one that is meant.")
        options = read_section(name, load(), elsewhere)
        self.use(name, options)
        return {option: value.value for option, value in options.items()}

    def share(self, name: str) -> dict[str, Any]:
        """The given options of one of `SECTIONS`; errors as in `take`."""
        return self.take(name, lambda: SECTIONS[name].handler, SECTIONS[name].elsewhere)

    def use(self, name: str, options: Mapping[str, Option[Any]]) -> None:
        """Notes that these options of a section are in use already."""
        self._used.add(section_name(name))
        self.options.update({f"{section_name(name)}.{option}": value for option, value in options.items()})

    def refuse_beside(self, name: str, given: str) -> None:
        """Raises `ValueError` for outside options of a component that `given` configures."""
        source = self._sources.get(section_name(name))
        if source is not None:
            what = f"{source} was given, an option of {name!r}, beside {given}, and an object built in code is complete"
            raise ValueError(f"{what}. Leave {source} out, or choose {name!r} by name.")

    def refuse_beside_object(self, component: object, offers: Iterable[Offer]) -> None:
        """Calls `refuse_beside` for a component built in code, under each name of its class."""
        for offer in offers:
            if offer.makes(type(component)):
                self.refuse_beside(offer.name, f"{type(component).__name__}(...)")

    def finish(self, offers: Iterable[Offer], active: str) -> None:
        """Refuses sections of nothing installed; warns of inactive ones (`active` says what is)."""
        known = {section_name(offer.name): offer.name for offer in offers} | {name: name for name in SECTIONS}
        for section in sorted(self._sources.keys() - self._used):
            given = f"{self._sources[section]} was given, an option of"
            if section not in known:
                hint = choices(nearest(section, list(known)), sorted(known.values()))
                raise ValueError(f"{given} {section!r}, and nothing that is installed goes by that name. {hint}")
            # At the line that calls Accelerator(...).
            warnings.warn(f"{given} {known[section]!r}, which is not active: {active}. It has no effect.", stacklevel=4)


def read_section(
    name: str, factory: Callable[..., Any], elsewhere: Mapping[str, str] = _NOWHERE
) -> dict[str, Option[Any]]:
    """The given options of one component, with sources. Arguments, errors: `Sections.take`."""
    told = given_sections().get(section_name(name), {})
    if not told:
        return {}  # before anything is looked into
    from accel_core.base.masking import masked
    from accel_core.options.conversion import expected, fields_of, from_data  # one ms, which most runs need not spend

    fields = {field.name.casefold(): field for field in fields_of(factory).values()}
    options = {}
    for folded, (value, source) in told.items():
        field = fields.get(folded)
        if field is None or field.name in elsewhere:
            own = [each.name for each in fields.values() if each.name not in elsewhere]
            meant = nearest(folded, [*own, *elsewhere])
            if meant is not None and meant in elsewhere:
                hint = f"That is an option of the Accelerator: {elsewhere[meant]}, or {variable_of(elsewhere[meant])}."
            else:
                hint = choices(meant, own, "Its options")
            raise ValueError(f"{source} was given, and {name!r} has no option {folded!r}. {hint}")
        option = f"{name}.{field.name}"
        if why := field.python_only:
            raise ValueError(f"{source}: {option} is for Python only: {why}. Build the object in the code.")
        try:
            options[field.name] = Option(from_data(field.type, value), source)
        except ValueError as error:
            given = f"{option}={masked(field.name, value)!r} was given by {source}"
            raise ValueError(f"{given}: expected {expected(field.type)}.") from error
    return options
