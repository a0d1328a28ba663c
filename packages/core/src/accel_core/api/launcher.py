"""Names for launchers: installed offers, options and their hand-over, and the ranks' rendezvous."""

from accel_core.base.installation import how_to_install
from accel_core.base.masking import HIDDEN, masked, masked_words, without_secrets
from accel_core.base.vocabulary import KNOWN_PROVIDERS
from accel_core.options.component_options import SECTIONS, read_section
from accel_core.options.conversion import Field, choices, expected, fields_of, from_data, members, to_data
from accel_core.options.option_sources import (
    CHANNEL,
    DEFAULT_LOADER,
    DEFAULT_STRATEGIES,
    LOADER_OPTIONS,
    OPTIONS,
    PREFIX,
    GivenOption,
    given_outside,
    inherited,
    section_name,
    variable_of,
)
from accel_core.options.resolution import flag
from accel_core.plugins.explain import format_table, offer_state, why_unusable
from accel_core.plugins.offers import NOUNS, Group, Offer, find, list_offers
from accel_core.processes.failure_output import broken_connection_in
from accel_core.processes.launch_environment import Place, read_place
from accel_core.processes.rendezvous import loopback_listener, open_store

__all__ = [
    "CHANNEL", "DEFAULT_LOADER", "DEFAULT_STRATEGIES", "HIDDEN", "KNOWN_PROVIDERS", "LOADER_OPTIONS", "NOUNS",
    "OPTIONS", "PREFIX", "SECTIONS", "Field", "GivenOption", "Group", "Offer", "Place", "broken_connection_in",
    "choices", "expected", "fields_of", "find", "flag", "format_table", "from_data", "given_outside",
    "how_to_install", "inherited", "list_offers", "loopback_listener", "masked", "masked_words",
    "members", "offer_state", "open_store", "read_place", "read_section", "section_name", "to_data", "variable_of",
    "why_unusable", "without_secrets",
]  # fmt: skip
