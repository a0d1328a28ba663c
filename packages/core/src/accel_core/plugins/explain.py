"""Active components and their sources, for `accelerator.explain()` and `python -m accel_core plugins`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_core.base.errors import PluginError
from accel_core.base.masking import masked
from accel_core.contract.default_components import CHECKPOINTS, DETECTOR, RECORDER
from accel_core.contract.hook_specs import CHECKPOINT_HOOKS
from accel_core.contract.precision_policy import Precision
from accel_core.contract.strategy import Strategy
from accel_core.plugins.offers import Offer, list_offers

if TYPE_CHECKING:
    from accel_core.options.resolution import Option
    from accel_core.plugins.manager import Activation
    from accel_core.plugins.relay import Listener
    from accel_core.plugins.selection import Selected

CORE_DEFAULT = "accel-core's default"


class Part(NamedTuple):
    """One active component: its role, what it is, who brings it (None: the user's own code), and why it runs."""

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

    Args:
        parts: the active components, in order.
        settings: the options that the environment may set.
        owners: for each owner hook, who owns it.
        listeners: for each listener hook, who listens, in order of call.
        inactive: what else is installed. Whether it can be imported is not tried.
        details: what components say of themselves, so far: of models that are prepared later, more.
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
        return {
            **{name: [row._asdict() for row in found] for name, found in rows.items()},
            "owners": dict(self.owners),
            "listeners": {hook: list(names) for hook, names in self.listeners.items()},
        }

    def __str__(self) -> str:
        parts = [(part.role, part.name, _provider(part), part.component, part.source) for part in self.parts]
        hooks = [
            *self.owners.items(),
            *((hook, ", ".join(names) or "nobody") for hook, names in self.listeners.items()),
        ]
        blocks = [
            format_table(("role", "name", "distribution", "component", "chosen by"), parts),
            *([format_table(("role", "name", "about", "what it says"), self.details)] if self.details else []),
            *([format_table(("option", "value", "set by"), self.settings)] if self.settings else []),
            format_table(("hook", "runs"), hooks),
            format_table(("installed, not active", "name", "distribution", "version", "state"), self.inactive),
        ]
        return "\n\n".join(blocks)


def explain(
    activation: Activation,
    selections: Sequence[tuple[str, Selected, str]],
    options: Mapping[str, Option[Any]] = MappingProxyType({}),
    further: Sequence[Detail] = (),
) -> Explanation:
    """Describes an activation.

    Args:
        activation: what `activate` has returned.
        selections: (role, component, source) of every part; the source says who chose it.
        options: further options by name, with their sources.
        further: details beside those that components give.
    """
    offers = list_offers()
    active = [selected.offer for _, selected, _ in selections]
    parts = []
    for role, selected, source in selections:
        distribution, version = selected.provider() or (None, None)
        parts.append(Part(role, selected.name, selected.where, distribution, version, source))
    return Explanation(
        parts=tuple(parts),
        settings=tuple(
            Setting(name, str(masked(name, option.value)), option.source) for name, option in options.items()
        ),
        owners={hook: _owner(selected, hook) for hook, selected in activation.owners.items()},
        listeners={hook: [_listener(one) for one in listeners] for hook, listeners in activation.listeners.items()},
        inactive=tuple(
            Inactive(offer.group, offer.name, offer.distribution, offer.version, _state(offer, offers))
            for offer in offers
            if offer not in active
        ),
        details=(
            *(
                Detail(role, selected.name, about, masked(about, text))
                for role, selected, _ in selections
                if isinstance(selected.component, (Precision, Strategy))
                for about, text in selected.component.details().items()
            ),
            *further,
        ),
    )


def _state(offer: Offer, offers: Iterable[Offer]) -> str:
    state = offer_state(offer, offers)
    is_default = (offer.group, offer.name) in (CHECKPOINTS, DETECTOR, RECORDER)
    return f"{state}: used where it is asked for" if state == "ok" and is_default else state


def offer_state(offer: Offer, offers: Iterable[Offer], *, load: bool = False) -> str:
    """Says "ok", or why an offer cannot simply be chosen by its name.

    Args:
        offers: all that is installed, among which another may have the same name.
        load: also import it, which runs the plugin's code and takes as long as its engine's import.
    """
    if (misfit := offer.misfit()) is not None:
        return f"misfit: {misfit}"
    if load:
        try:
            offer.load()
        except PluginError as error:
            cause = error.__cause__
            return f"broken: {type(cause).__name__}: {cause}"
        if (why := why_unusable(offer)) is not None:
            return f"unusable: {why}"
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
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _provider(part: Part) -> str:
    return "-" if part.distribution is None else f"{part.distribution} {part.version}"


def _owner(selected: Selected | None, hook: str = "") -> str:
    if selected is not None:
        return f"{selected.noun} {selected.name!r}"
    if hook in CHECKPOINT_HOOKS:
        return f"{CORE_DEFAULT}, by what {CHECKPOINTS[0]} offers as {CHECKPOINTS[1]!r}"
    return CORE_DEFAULT


def _listener(listener: Listener) -> str:
    name = _owner(listener.selected)
    return name if listener.failure is None else f"{name} (switched off: {listener.failure})"
