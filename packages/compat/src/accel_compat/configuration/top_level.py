"""Rules for the top-level keys of Accelerate's files: key → rule, in the order of the result."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from accel_compat.configuration.blocks import backend
from accel_compat.configuration.rules import (
    NOTHING,
    Carry,
    Leave,
    Outcome,
    PeerFile,
    Rule,
    carry,
    leave,
    nothing,
    only_if,
    same,
)
from accel_core.api.launcher import from_data

_PLAIN_TYPES = (
    "NO",
    *(f"MULTI_{kind}" for kind in ("GPU", "HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU")),
    "MPS",
)
_STRATEGIES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
_TPU = "TPUs are not started here: start the script with the launcher of torch_xla"


def _several(peer: PeerFile) -> bool:
    return peer.number("num_machines", 1) > 1


def _on_cpu(peer: PeerFile) -> bool:
    return peer.flag("use_cpu") or peer.text("distributed_type") == "MULTI_CPU"


def _environment(_: PeerFile, value: Any) -> Outcome:
    known = str(value).strip().upper() == "LOCAL_MACHINE"
    return (
        NOTHING
        if known
        else Leave("expected LOCAL_MACHINE. Runs are started on the machines where accel launch is typed")
    )


def _distributed_type(peer: PeerFile, value: Any) -> Outcome:
    kind = "NO" if same(value, False) else str(value).strip().upper()
    if kind == "NO" and peer.number("num_processes", 1) > 1:
        return Leave(
            "Accelerate starts one process for it, whatever num_processes says; here, num_processes are started. For one, set "
            "num_processes: 1"
        )
    if kind in _PLAIN_TYPES:
        return NOTHING
    if kind == "MULTI_CPU":
        return Carry({"cpu": True})
    if peer.shards_nothing:
        return Carry({"strategy": "ddp"})
    if kind in _STRATEGIES:
        return Carry({"strategy": _STRATEGIES[kind]})
    return Leave(_TPU if kind in {"XLA", "TPU"} else "no strategy goes by this name. Set strategy yourself")


def _processes(peer: PeerFile, value: Any) -> Outcome:
    return carry("num_processes", int, nothing=(-1,))(peer, value)


def _devices(peer: PeerFile, value: Any) -> Outcome:
    if same(value, "all"):
        return NOTHING
    if _on_cpu(peer):
        return Leave("the run is on the CPU, where there are none to choose. Set cpu: false first")
    try:
        return Carry({"device_ids": from_data(list[int], [value] if isinstance(value, int) else value)})
    except ValueError:
        return Leave("expected indices of accelerators, such as 0,1. Set device_ids: [0, 1] yourself")


def _cpu(peer: PeerFile, value: Any) -> Outcome:
    if same(value, False) and peer.text("distributed_type") == "MULTI_CPU":
        return Leave("distributed_type is MULTI_CPU, which says otherwise. Set cpu yourself")
    return carry("cpu", bool, nothing=(False,))(peer, value)


def _precision(_: PeerFile, value: Any) -> Outcome:
    known = {"bf16", "fp16", "fp8"}
    if same(value, "no") or same(value, False):
        return NOTHING
    name = str(value).strip().lower()
    return (
        Carry({"mixed_precision": name})
        if name in known
        else Leave("no precision goes by this name. Set mixed_precision yourself")
    )


def _old_fp16(peer: PeerFile, value: Any) -> Outcome:
    if peer.data.get("mixed_precision") is not None:
        return Leave("mixed_precision is given too, and Accelerate follows that")
    if same(value, False):
        return NOTHING
    return (
        Carry({"mixed_precision": "fp16"})
        if same(value, True)
        else Leave("expected true or false. Set mixed_precision yourself")
    )


def _meeting(peer: PeerFile, value: Any) -> Outcome:
    if same(value, "static") or not _several(peer):
        return NOTHING  # one machine meets at a free port of its own, several by their ranks
    return carry("rdzv_backend", str)(peer, value)


TOP: Mapping[str, Rule] = MappingProxyType(
    {
        "compute_environment": _environment,
        "num_machines": carry("num_machines", int, nothing=(1,)),
        "machine_rank": only_if(
            _several,
            "num_machines is 1, and one machine has rank 0",
            only_if(
                lambda peer: peer.text("rdzv_backend", "STATIC") == "STATIC",
                "the rendezvous of rdzv_backend numbers machines as they come",
                carry("machine_rank", int),
            ),
            nothing=(0,),
        ),
        "main_process_ip": carry("main_process_ip", str),
        "main_process_port": carry("main_process_port", int, nothing=(0,)),
        "same_network": nothing,
        "rdzv_backend": _meeting,
        "num_processes": _processes,
        "gpu_ids": _devices,
        "use_cpu": _cpu,
        "distributed_type": _distributed_type,
        "mixed_precision": _precision,
        "fp16": _old_fp16,
        "dynamo_backend": backend,
        "enable_cpu_affinity": only_if(
            lambda peer: not _on_cpu(peer),
            "the run is on the CPU, and only processes of accelerators are bound to cores",
            carry(
                "numa_binding", Literal["node"], nothing=(False,), names={"TRUE": "node", "YES": "node", "ON": "node"}
            ),
            nothing=(False,),
        ),
        "debug": carry("debug", bool, nothing=(False,)),
        "main_training_function": leave(
            "the script is run from its first line, as python does: call the function under `if __name__ == '__main__':`",
            nothing=("main",),
        ),
        "downcast_bf16": leave("set XLA_DOWNCAST_BF16=1, which torch_xla reads", nothing=("no", False)),
        "tpu_name": leave(_TPU),
        "tpu_zone": leave(_TPU),
        "tpu_use_cluster": leave(_TPU, nothing=(False,)),
        "tpu_use_sudo": leave(_TPU, nothing=(False,)),
        "tpu_vm": leave(_TPU),
        "tpu_env": leave(_TPU),
        "command_file": leave(_TPU),
        "commands": leave(_TPU),
        "ipex_config": leave(
            "torch runs on Intel's devices by itself; call ipex.optimize in the script if it is needed"
        ),
        "use_xpu": leave("accelerators are used where there are any, unless cpu: true is set", nothing=(False, True)),
        "use_mps_device": leave(
            "accelerators are used where there are any, unless cpu: true is set", nothing=(False, True)
        ),
    }
)
"""Keys of the top level that are no blocks."""
