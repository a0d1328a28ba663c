"""Names for recorders: the trackers that were chosen, and the name of each."""

from accel_core.base.deprecation import level_of_the_user
from accel_core.contract.default_components import Recorder, RecorderFactory
from accel_core.loop.memory import call_allocator
from accel_core.processes.world import end_worlds, fatal_error
from accel_core.tracking.selection import Chosen, known_names, name_of

__all__ = [
    "Chosen", "Recorder", "RecorderFactory", "call_allocator", "end_worlds", "fatal_error", "known_names",
    "level_of_the_user", "name_of",
]  # fmt: skip
