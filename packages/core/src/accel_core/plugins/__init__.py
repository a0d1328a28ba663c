"""Finding plugins, choosing among them, and binding the hooks of those that are active."""

from accel_core.plugins.manager import Activation, Relay, activate
from accel_core.plugins.offers import Group, Offer, Selected, build, find, list_offers, passed

__all__ = ["Activation", "Group", "Offer", "Relay", "Selected", "activate", "build", "find", "list_offers", "passed"]
