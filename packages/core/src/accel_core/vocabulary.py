"""Names that the core knows only as words.

No other file of the core names a strategy, a vendor or a service. What stands here is data: it completes messages and
serves older public names, and nothing branches on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

_TRACKERS = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "jsonl",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)

KNOWN_PROVIDERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "accel.strategies": {
            "deepspeed": "accel-deepspeed",
            "fsdp": "accel-fsdp",
            "megatron_lm": "accel-megatron",
        },
        "accel.precisions": dict.fromkeys(("bf16", "fp16", "fp8"), "accel-precision"),
        "accel.loaders": {"sharded": "accel-data"},
        "accel.trackers": dict.fromkeys(_TRACKERS, "accel-trackers"),
    }
)
"""Which distribution to install for a name that nothing installed offers: entry-point group → name → distribution."""


class RNGType(str, Enum):
    """Random streams that all ranks can be made to share, as in `Accelerator(rng_types=["generator"])`.

    `TORCH` is torch's global stream on the CPU, `GENERATOR` the generators that were handed to a loader's samplers; all others
    are the global streams of types of device.
    """

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
    HPU = "hpu"
    MLU = "mlu"
    MPS = "mps"
    MUSA = "musa"
    NPU = "npu"
    SDAA = "sdaa"
    XLA = "xla"
    XPU = "xpu"
