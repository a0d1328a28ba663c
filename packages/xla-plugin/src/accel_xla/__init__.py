"""Training on TPUs and other XLA devices: one process per host, a mesh over all of its devices.

    strategy   the strategy `xla`
    engine     torch_xla: whether it fits, its mesh, when it runs, what its memory holds
    batches    batches on the mesh: padded to one shape, divided over its devices
    sharding   how parameters and optimizer state are cut, and their copies on the host

torch_xla is imported by the first Accelerator that is asked for this strategy.
"""

from accel_xla.strategy import XLA

__all__ = ["XLA"]

__version__ = "0.1.0"
