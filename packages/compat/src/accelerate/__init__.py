"""The names of Hugging Face Accelerate, served by accel-compat. The modules below have names, and no code."""

from accel_compat.distribution import VERSION as __version__  # noqa: N811  (libraries read it)
from accel_compat.distribution import refuse_another

refuse_another()

from accel_compat.missing_names import refuse_from  # noqa: E402
from accelerate.accelerator import Accelerator  # noqa: E402
from accelerate.big_modeling import (  # noqa: E402
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.data_loader import skip_first_batches  # noqa: E402
from accelerate.launchers import debug_launcher, notebook_launcher  # noqa: E402
from accelerate.parallelism_config import ParallelismConfig  # noqa: E402
from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    find_executable_batch_size,
    infer_auto_device_map,
    is_rich_available,
    load_checkpoint_in_model,
    synchronize_rng_states,
)

__getattr__ = refuse_from(__name__)

__all__ = [
    "Accelerator", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
    "DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin", "GradScalerKwargs",
    "InitProcessGroupKwargs", "ParallelismConfig", "PartialState", "ProfileKwargs", "__version__", "cpu_offload",
    "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model", "find_executable_batch_size",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_rich_available", "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model", "notebook_launcher", "skip_first_batches", "synchronize_rng_states",
]  # fmt: skip
