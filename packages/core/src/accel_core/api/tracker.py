"""Names for recorders: what trackers are chosen from, and made of."""

from accel_core.base.deprecation import level_of_the_user
from accel_core.contract.default_components import Chosen, Recorder, RecorderFactory
from accel_core.loop.memory import call_allocator
from accel_core.options.component_options import Sections
from accel_core.options.resolution import Option, as_list
from accel_core.plugins.offers import Selected, build, passed
from accel_core.processes.world import end_worlds, fatal_error

__all__ = [
    "Chosen", "Option", "Recorder", "RecorderFactory", "Sections", "Selected", "as_list", "build", "call_allocator",
    "end_worlds", "fatal_error", "level_of_the_user", "passed",
]  # fmt: skip
