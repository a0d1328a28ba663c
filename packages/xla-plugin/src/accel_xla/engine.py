"""torch_xla: whether it is here and fits torch, and the few things that are asked of it.

Operations on XLA tensors are recorded, and run when `sync` is called or a value is read. What was
recorded in between is one graph, which is compiled when its form is met for the first time.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_core import NotInstalledError, WorldError

NEWEST = "2.9.0"
"""The newest torch_xla, which is what this was tested with; it fits torch of the same two first numbers."""

_READS = ("aten::_local_scalar_dense", "aten::_copy_from", "aten::_to_copy", "aten::item")
# Counters of what a user asks for who reads a value, and not of operations that XLA lacks.


class Engine:
    """torch_xla in this process: a mesh of all devices, `replicate` by `shard`.

    Attributes:
        device: the one torch device that stands for all of the mesh.
        devices, shard: how many devices the mesh has, and how many share each parameter.
        kind: the word of the runtime for its devices, such as "TPU" or "CPU".
    """

    def __init__(self, shard: int) -> None:
        check_installed()
        import torch_xla
        from torch_xla import runtime
        from torch_xla.debug import metrics
        from torch_xla.distributed.spmd import Mesh, mark_sharding

        self._xla, self._metrics, self._mark = torch_xla, metrics, mark_sharding
        if runtime.process_count() > 1:
            raise WorldError(
                f"strategy 'xla' was asked for, and torch_xla runs in {runtime.process_count()} processes: this is one host of a "
                f"slice with several. Training over several hosts was never run, so it is refused. Start the script on a slice with "
                f"one host, or unset the variables of torch_xla's launcher (PJRT_LOCAL_PROCESS_COUNT and the like)."
            )
        if not runtime.is_spmd():
            runtime.use_spmd()
        self.kind, self.devices = str(runtime.device_type()), int(runtime.global_runtime_device_count())
        self.shard = self.devices if shard == -1 else shard
        if self.devices % self.shard:
            raise ValueError(
                f"XLA(shard={shard}) was asked for, and the mesh has {self.devices} devices ({self.kind}), which {shard} does not "
                f"divide. Give a number that does, -1 for all of them, or 1 for whole parameters on each."
            )
        shape = (self.devices // self.shard, self.shard)
        self.mesh: Any = Mesh(list(range(self.devices)), shape, ("replicate", "shard"))
        self.device: torch.device = torch_xla.device()
        register_device_module()

    def sync(self) -> None:
        """Runs what was recorded since the last call; does not wait for it."""
        self._xla.sync()

    def mark(self, tensor: torch.Tensor, spec: Sequence[Any]) -> None:
        """Has a tensor lie on the mesh as `spec` says: for each dim, axes that divide it, or None."""
        self._mark(tensor, self.mesh, tuple(spec))

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Whether it was said how a tensor lies on the mesh."""
        return bool(self._xla._XLAC._get_xla_sharding_spec(tensor))

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in CPU memory; of a tensor in parts it is put together here, and on no device."""
        if tensor.device.type != "xla":
            return tensor.detach()
        if not self.is_marked(tensor) or not tensor.dim():
            return tensor.detach().cpu()
        core = self._xla._XLAC
        core._xla_sync_multi([tensor], [], wait=True, sync_xla_data=True)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        parts, places = core._get_local_shards([tensor])[0], core._get_local_shard_replica_and_indices([tensor])[0]
        for (part, _), (_, place) in zip(parts, places, strict=True):
            if place is Ellipsis:
                whole.copy_(part)
                break
            target = whole[tuple(place)]
            target.copy_(part[tuple(slice(size) for size in target.shape)])  # the last part may be padded
        return whole

    def host_copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of small or few tensors in CPU memory, all computed as one graph."""
        found: list[torch.Tensor] = self._xla._XLAC._xla_get_cpu_tensors(list(tensors)) if tensors else []
        return found

    def compilations(self) -> int:
        """How many graphs were compiled in this process."""
        found = self._metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def fallbacks(self) -> dict[str, int]:
        """Operations that ran on the host, since XLA lacks them, with how often they did."""
        names = [name for name in self._metrics.counter_names() if name.startswith("aten::") and name not in _READS]
        return {name: int(self._metrics.counter_value(name)) for name in names}


def why_unusable() -> str | None:
    """The reason why torch_xla cannot be imported beside this torch, and what to type; None if it can."""
    advice = f"Type `pip install torch=={NEWEST} torch_xla=={NEWEST}` (torch_xla[tpu]=={NEWEST} on a TPU)."
    if importlib.util.find_spec("torch_xla") is None:
        return (
            f"torch_xla is not installed, beside torch {torch.__version__}. Each version of it fits the torch of the same number, "
            f"and {NEWEST} is the newest. {advice}"
        )
    found = importlib.metadata.version("torch_xla")
    if found.split(".")[:2] != torch.__version__.split(".")[:2]:
        fitting = ".".join(found.split("+")[0].split(".")[:2])
        return f"torch_xla {found} needs torch {fitting}, but this is torch {torch.__version__}. {advice}"
    return None


def check_installed() -> None:
    """Raises `NotInstalledError` without a torch_xla that fits this torch."""
    if (why := why_unusable()) is not None:
        raise NotInstalledError(f"strategy 'xla' was asked for, and {why}")


def warn_of_fallbacks(found: dict[str, int]) -> None:
    """Warns of operations that XLA lacks: values travel to the host and back, and the graph is cut."""
    names = ", ".join(f"{name.removeprefix('aten::')} ({count} times)" for name, count in sorted(found.items()))
    warnings.warn(
        f"The first step used operations that XLA lacks: {names}. Each of them waits for the devices, computes on the host and "
        f"cuts the graph in two, in every step. Replace them in the model, in the loss or in the optimizer.",
        stacklevel=2,
    )


def register_device_module() -> None:
    """Tells torch where the random stream of XLA devices is: `torch.get_device_module("xla")`."""
    if hasattr(torch, "xla"):
        return
    from torch_xla.core import xla_model

    module = types.ModuleType(
        "xla_devices", "Random numbers of XLA devices, for what asks torch for those of a device."
    )

    def get_rng_state(device: Any = None) -> torch.Tensor:  # noqa: ARG001  (one stream for all of the mesh)
        state = int(xla_model.get_rng_state())  # 64 bits without a sign
        return torch.tensor([state - 2**64 if state >= 2**63 else state], dtype=torch.int64)

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG001
        xla_model.set_rng_state(int(state) % 2**64)

    def manual_seed(seed: int) -> None:
        xla_model.set_rng_state(int(seed) % 2**63)

    @contextlib.contextmanager
    def device(_: Any) -> Iterator[None]:
        yield

    vars(module).update(
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        device=device,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,  # all devices of the mesh are one to torch
        current_device=lambda: 0,
        synchronize=lambda _=None: xla_model.wait_device_ops(),
    )
    torch._register_device_module("xla", module)
