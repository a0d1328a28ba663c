"""From `log_with` to trackers: names, objects, `"all"`, or a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from accel_core import GeneralTracker, NotInstalledError, Tracker
from accel_core.api.launcher import KNOWN_PROVIDERS, Group, Offer, find, list_offers
from accel_core.api.tracker import Selected, as_list, build, passed

if TYPE_CHECKING:
    from accel_core.api.tracker import Option, Sections

ALL = "all"
GROUP: Group = "accel.trackers"


@dataclass
class Chosen:
    """A run's trackers in order, who asked for them, and those `"all"` cannot use: name → why."""

    source: str = "default"
    selected: list[Selected] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the trackers."""
        return [name_of(each.component) for each in self.selected]


def choose(option: Option[Any], offers: Sequence[Offer], sections: Sections) -> Chosen:
    """The trackers that `log_with` asks for. Imports no service.

    Raises `NotInstalledError` for what is not installed, `PluginError` for a name that nothing
    offers, `TypeError` for what is no tracker, `ValueError` for two trackers of one name.
    """
    listed = option.value if isinstance(option.value, (list, tuple, set, frozenset)) else [option.value]
    listed = [each.value if isinstance(each, Enum) else each for each in listed]
    listed = [name for each in listed for name in (as_list(each, "") if isinstance(each, str) else [each])]
    chosen = Chosen(option.source)
    names: set[str] = set()
    for each in listed:
        if not isinstance(each, str):
            chosen.selected.append(_passed(each, offers, sections))
            continue
        if each not in names and each != ALL:  # a name that is given twice is one tracker
            selected, why = _named(find(GROUP, each, offers), offers, sections)
            if why is not None:
                asked = f"The tracker {each!r} was asked for ({chosen.source})"
                raise NotInstalledError(f"{asked}, and cannot be used here: {why}")
            chosen.selected.append(selected)
        names.add(each)
    _check_names(chosen)
    if ALL in names:
        _choose_all(chosen, offers, sections)
    return chosen


def name_of(tracker: object) -> str:
    """The name by which a tracker is asked for."""
    return str(getattr(tracker, "name", ""))


def _choose_all(chosen: Chosen, offers: Sequence[Offer], sections: Sections) -> None:
    """Adds everything that is installed and usable, and goes by a name of its own."""
    apart = {each.offer for each in chosen.selected}
    for offer in [each for each in offers if each.group == GROUP and each not in apart]:
        try:
            selected, why = _named(offer, offers, sections)
            if why is None and (name := name_of(selected.component)) in chosen.names:
                why = f"another tracker goes by the name {name!r}"
        except Exception as error:  # noqa: BLE001  (a broken tracker that nobody asked for by name)
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if why is None:
            chosen.selected.append(selected)
        else:
            chosen.left_out[offer.name] = why


def _named(offer: Offer, offers: Sequence[Offer], sections: Sections) -> tuple[Selected, str | None]:
    """The tracker that an offer makes, and why it cannot be used here, if it cannot."""
    choice = f"{offer.distribution}:{offer.name}"
    selected = build(GROUP, choice, sections.take(offer.name, offer.load), offers)
    _check_kind(selected.component, f"the name {offer.name!r}")
    unusable = getattr(selected.component, "unusable", None)
    return selected, None if unusable is None else unusable()


def _passed(tracker: object, offers: Sequence[Offer], sections: Sections) -> Selected:
    selected = passed(tracker, GROUP)
    _check_kind(tracker, "log_with")
    sections.refuse_beside_object(tracker, [offer for offer in offers if offer.group == GROUP])
    if isinstance(tracker, Tracker) and (why := tracker.unusable()) is not None:
        raise NotInstalledError(f"The tracker {type(tracker).__name__} was passed, and cannot be used here: {why}")
    return selected


def _check_kind(tracker: object, where: str) -> None:
    if not isinstance(tracker, (Tracker, GeneralTracker)):
        wanted = "trackers: names of installed ones, 'all', or accel_core.Tracker objects"
        raise TypeError(f"{where} gives a {type(tracker).__name__}, expected {wanted}.")
    if not name_of(tracker):
        raise TypeError(f"{type(tracker).__name__} has no name. Give its class the attribute name = '...'.")


def _check_names(chosen: Chosen) -> None:
    twice = {name for name in chosen.names if chosen.names.count(name) > 1}
    if twice:
        kinds = [type(each.component).__name__ for each in chosen.selected if name_of(each.component) in twice]
        what = f"log_with has {' and '.join(kinds)}, which go by the name {min(twice)!r}."
        raise ValueError(f"{what} Give one another name.")


def known_names(chosen: Chosen) -> list[str]:
    """Names for which options may be given: this run's, and those another one could have."""
    installed = [offer.name for offer in list_offers(GROUP)]
    return list(dict.fromkeys([*chosen.names, *installed, *KNOWN_PROVIDERS[GROUP]]))
