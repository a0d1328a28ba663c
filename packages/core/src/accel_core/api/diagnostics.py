"""Names for diagnostics in a loop: bound hooks, prepared objects, and loaders' notes on batches."""

from accel_core.base.nested import map_leaves
from accel_core.collectives.reduce_gather import reduce_tree
from accel_core.contract.default_components import Detector, DetectorFactory
from accel_core.contract.loader_progress import Drawn
from accel_core.facade.checkpoint_methods import run_and_feed
from accel_core.loop.preparation import Prepared
from accel_core.plugins.manager import Relay

__all__ = ["Detector", "DetectorFactory", "Drawn", "Prepared", "Relay", "map_leaves", "reduce_tree", "run_and_feed"]
