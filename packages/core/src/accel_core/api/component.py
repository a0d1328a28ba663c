"""Names for all components: class overrides, nested structures, seeds, random state, messages."""

from accel_core.base.class_override import ClassOverride, overridden_class, override_class, restore_class
from accel_core.base.installation import how_to_install
from accel_core.base.nested import Tree, children_of, flatten, map_tensors, paths, rebuilt, to_device
from accel_core.base.seeds import derive_seed, loader_seed, was_chosen
from accel_core.base.suggestions import listed, nearest
from accel_core.base.torch_versions import all_gather_single, memory_info, reduce_scatter_single
from accel_core.collectives.objects import broadcast_object, gather_objects
from accel_core.collectives.random_sync import synchronize_random_states
from accel_core.collectives.run_seed import agree_seed
from accel_core.options.resolution import as_rng_types, as_sequence
from accel_core.processes.channel import Channel, capacity_for
from accel_core.processes.random_state import capture_random_state, restore_random_state, restored_behind
from accel_core.processes.watch.collective_scope import collective

__all__ = [
    "Channel", "ClassOverride", "Tree", "agree_seed", "all_gather_single", "as_rng_types", "as_sequence",
    "broadcast_object", "capacity_for", "capture_random_state", "children_of", "collective", "derive_seed", "flatten",
    "gather_objects", "how_to_install", "listed", "loader_seed", "map_tensors", "memory_info", "nearest", "overridden_class",
    "override_class", "paths", "rebuilt", "reduce_scatter_single", "restore_class", "restore_random_state",
    "restored_behind", "synchronize_random_states", "to_device", "was_chosen",
]  # fmt: skip
