"""Megatron-core on a CPU, for tests: `use_cpu()` turns what it asks of CUDA into what a CPU can do, for one rank's process.

Megatron-core names CUDA in its sources: devices, streams, random number generators, and the types of parameters. This changes
the answers that it gets, and nothing of what it computes. A run with it tries the logic of the host over gloo, and no kernel.
"""

from __future__ import annotations

import contextlib
import sys
import warnings

import torch
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt  # noqa: F401  (all of it, before anything is changed)
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import moe_utils

CPU = torch.device("cpu")


class _NoStream:
    """A stream on which nothing has to be waited for."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass


class _OnCPU(TorchFunctionMode):
    """Puts tensors that are asked for on "cuda" on the CPU, and tells Megatron's sources that tensors are of CUDA types."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (
            isinstance(device, (str, int))
            and not isinstance(device, bool)
            and str(device).partition(":")[0] in {"cuda", "0"}
        ):
            kwargs = {**kwargs, "device": CPU}
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron."):
                return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **kwargs)


def _share_autocast() -> None:
    """Has backwards of Megatron's own functions find the autocast of the CPU, where they look for that of CUDA."""
    mode = torch.amp.autocast_mode
    enabled, dtype, autocast = torch.is_autocast_enabled, torch.get_autocast_dtype, mode.autocast

    def here(device_type):
        return "cpu" if device_type == "cuda" else device_type

    torch.is_autocast_enabled = lambda device_type="cpu": enabled(here(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype(here(device_type))
    mode.autocast = lambda device_type, **options: autocast(here(device_type), **options)


def use_cpu() -> None:
    """Changes this process for good: ranks of `run_ranks` end with their function."""
    import torch._dynamo

    torch._dynamo.config.disable = True  # compiling what Megatron decorates takes longer than what it computes here
    # Megatron-core 0.16.1 asks whether this is None, but gives the name a value only with Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    _share_autocast()
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.Stream = _NoStream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: _NoStream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    _OnCPU().__enter__()
