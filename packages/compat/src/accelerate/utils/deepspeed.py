"""Names of DeepSpeed."""

from accel_compat.deepspeed_names import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    HfDeepSpeedConfig,
    get_active_deepspeed_plugin,
)
from accel_compat.missing_names import refuse_from

__getattr__ = refuse_from(__name__)

__all__ = [
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim",
    "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin",
]  # fmt: skip
