"""Active components and sources, for `accelerator.explain()`, `python -m accel_core plugins`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.base.errors import PluginError
from accel_core.base.masking import masked
from accel_core.contract.default_components import CHECKPOINTS, DETECTOR, PLACEMENT, RECORDER
from accel_core.contract.hook_specs import CHECKPOINT_HOOKS
from accel_core.contract.precision_policy import Precision
from accel_core.contract.strategy import Strategy
from accel_core.plugins.offers import Offer, list_offers

if TYPE_CHECKING:
    from accel_core.options.resolution import Option
    from accel_core.plugins.manager import Activation
    from accel_core.plugins.offers import Selected


class Part(NamedTuple):
    """An active component: role, name, class, provider (None: the user's code), and source."""

    role: str
    name: str
    component: str
    distribution: str | None
    version: str | None
    source: str


class Setting(NamedTuple):
    """One option that the environment may set: its value, and where that came from."""

    option: str
    value: str
    source: str


class Detail(NamedTuple):
    """One thing that an active component says of itself."""

    role: str
    name: str
    about: str
    text: str


class Inactive(NamedTuple):
    """One offer that is installed and not active."""

    group: str
    name: str
    distribution: str
    version: str
    state: str


@dataclass(frozen=True)
class Explanation:
    """The set-up that an Accelerator runs. `str()` gives tables; `as_dict()` gives data for JSON.

    `owners` and `listeners` are by hook. Whether `inactive` offers can be imported is not tried.
    `details` are what components say of themselves so far: of models prepared later, more.
    """

    parts: tuple[Part, ...]
    settings: tuple[Setting, ...]
    owners: dict[str, str]
    listeners: dict[str, list[str]]
    inactive: tuple[Inactive, ...]
    details: tuple[Detail, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and strings, under the names of the fields."""
        rows = {name: getattr(self, name) for name in ("parts", "details", "settings", "inactive")}
        hooks = {"owners": dict(self.owners), "listeners": {hook: [*names] for hook, names in self.listeners.items()}}
        return {name: [row._asdict() for row in found] for name, found in rows.items()} | hooks

    def __str__(self) -> str:
        parts = [
            (one.role, one.name, f"{one.distribution or '-'} {one.version or ''}", one.component, one.source)
            for one in self.parts
        ]
        hooks = self.owners | {hook: ", ".join(names) or "nobody" for hook, names in self.listeners.items()}
        tables: list[tuple[Sequence[str], Sequence[Sequence[str]], bool]] = [
            (("role", "name", "distribution", "component", "chosen by"), parts, True),
            (("role", "name", "about", "what it says"), self.details, False),
            (("option", "value", "set by"), self.settings, False),
            (("hook", "runs"), [*hooks.items()], True),
            (("installed, not active", "name", "distribution", "version", "state"), self.inactive, True),
        ]
        return "\n\n".join(format_table(header, rows) for header, rows, always in tables if rows or always)


def explain(
    activation: Activation,
    selections: Sequence[tuple[str, Selected, str]],
    options: Mapping[str, Option[Any]] = MappingProxyType({}),
    further: Sequence[Detail] = (),
) -> Explanation:
    """Describes an activation: `selections` have role, component and source of each part."""
    offers = list_offers()
    active = [selected.offer for _, selected, _ in selections]
    by = {selected: selected.provider() or (None, None) for _, selected, _ in selections}
    parts = [Part(role, each.name, each.where, by[each][0], by[each][1], source) for role, each, source in selections]
    details = [
        Detail(role, selected.name, about, masked(about, text))
        for role, selected, _ in selections
        if isinstance(selected.component, (Precision, Strategy))
        for about, text in selected.component.details().items()
    ]
    heard = {
        hook: [_name(one.selected) + (f" (switched off: {one.failure})" if one.failure else "") for one in listeners]
        for hook, listeners in activation.listeners.items()
    }
    settings = [Setting(name, str(masked(name, option.value)), option.source) for name, option in options.items()]
    idle = [offer for offer in offers if offer not in active]
    inactive = [Inactive(one.group, one.name, one.distribution, one.version, _state(one, offers)) for one in idle]
    owners = {hook: _name(selected, hook) for hook, selected in activation.owners.items()}
    return Explanation(tuple(parts), tuple(settings), owners, heard, tuple(inactive), (*details, *further))


def _state(offer: Offer, offers: Iterable[Offer]) -> str:
    state = offer_state(offer, offers)
    is_default = (offer.group, offer.name) in (CHECKPOINTS, DETECTOR, RECORDER, PLACEMENT)
    return f"{state}: used where it is asked for" if state == "ok" and is_default else state


def offer_state(offer: Offer, offers: Iterable[Offer], *, load: bool = False) -> str:
    """Says "ok" or why an offer cannot be chosen by name among `offers`; `load` imports it."""
    if (misfit := offer.misfit()) is not None:
        return f"misfit: {misfit}"
    try:
        if load and (why := why_unusable(offer)) is not None:
            return f"unusable: {why}"
    except PluginError as error:
        return f"broken: {type(error.__cause__).__name__}: {error.__cause__}"
    rivals = [other for other in offers if (other.group, other.name) == (offer.group, offer.name) and other != offer]
    if rivals:
        return f"conflicts with {', '.join(other.provider for other in rivals)}: choose '{offer.distribution}:{offer.name}'"
    return "ok"


def why_unusable(offer: Offer) -> str | None:
    """A component's own reason why it cannot be used here; None if it gives none. Imports it."""
    ask = getattr(offer.load(), "unusable", None)
    try:
        return None if ask is None else ask()
    except Exception as error:  # noqa: BLE001  (whatever a third party's says: it is shown)
        return f"{type(error).__name__}: {error}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns under a header; "none" where there are no rows."""
    lines = [header, *(rows or [("none", *[""] * (len(header) - 1))])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _name(selected: Selected | None, hook: str = "") -> str:
    if selected is not None:
        return f"{selected.noun} {selected.name!r}"
    by = f", by what {CHECKPOINTS[0]} offers as {CHECKPOINTS[1]!r}" if hook in CHECKPOINT_HOOKS else ""
    return f"accel-core's default{by}"
