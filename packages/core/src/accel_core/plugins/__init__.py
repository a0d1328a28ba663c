"""Finding plugins, choosing among them, and binding the hooks of those that are active."""

from accel_core.plugins.manager import Activation, Relay, activate
from accel_core.plugins.offers import Group, Offer, find, list_offers
from accel_core.plugins.selection import Selected, build, passed

__all__ = ["Activation", "Group", "Offer", "Relay", "Selected", "activate", "build", "find", "list_offers", "passed"]
