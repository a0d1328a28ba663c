"""Who computes where: devices, identities, the process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from acceptance.registry import ALL, Run, check, skip


@check(devices=ALL)
def a_device_each(run: Run) -> str:
    """Each rank has a device of its own, which is current, and all are of one kind."""
    from accel_core import gather_object

    accelerator = run.accelerator()
    assert accelerator.device == run.device, (accelerator.device, run.device)
    if run.device.type == "cpu":
        return "processes"
    assert torch.accelerator.current_device_index() == run.device.index, "another device is current"
    assert torch.ones(1, device=run.device.type).device == run.device
    module = torch.get_device_module(run.device)
    name = module.get_device_name(run.device) if hasattr(module, "get_device_name") else run.device.type
    facts = gather_object([(os.uname().nodename, run.device.index, identity(run), name)])
    seen = [identity or (host, index) for host, index, identity, _ in facts]
    assert len(set(seen)) == run.size, f"two ranks have one device: {facts}"
    names = {name for *_, name in facts}
    assert len(names) == 1, f"devices differ: {names}"
    return names.pop()


def identity(run: Run) -> str:
    """What the driver calls the device; empty where it does not say."""
    module = torch.get_device_module(run.device)
    found = module.get_device_properties(run.device) if hasattr(module, "get_device_properties") else None
    return str(getattr(found, "uuid", ""))


def one_visible(rank: int, kind: str) -> Mapping[str, str]:
    names = {"cuda": "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
    return {names[kind]: str(rank)} if kind in names else {}


@check(devices=2, on="cuda", environment=one_visible)
def one_visible_device(run: Run) -> str:
    """A scheduler that lets each rank see one device only: it takes that one, and the two communicate."""
    accelerator = run.accelerator()
    assert torch.accelerator.device_count() == 1, "the variable was read too early"
    assert accelerator.device.index == 0
    total = accelerator.reduce(torch.ones(1, device=accelerator.device) * (run.rank + 1))
    assert total.item() == 3, total
    return "both see one"


@check(devices=ALL, environment=lambda rank, kind: {"ACCELERATE_PROCESS_GROUP__TIMEOUT": "77s"})
def timeouts(run: Run) -> str:
    """Collectives give up after what was asked for, on every backend of the group."""
    found = backends(run.accelerator().device)
    assert {each.seconds for each in found.values()} == {77}, found
    return ", ".join(sorted(found))


@check(devices=ALL, on="cuda")
def default_timeout(run: Run) -> str:
    """Not asked for, NCCL's timeout is torch's for NCCL, ten minutes, and not gloo's thirty."""
    run.accelerator()
    found = backends(run.device)[run.device.type]
    assert found <= timedelta(minutes=10), found
    return str(found)


def backends(device: torch.device) -> dict[str, timedelta]:
    """The timeout of each backend of the default group that tells it."""
    group = dist.group.WORLD
    assert group is not None
    found = {kind: group._get_backend(torch.device(kind)) for kind in ("cpu", device.type)}
    return {kind: backend.options._timeout for kind, backend in found.items() if hasattr(backend, "options")}


@check(devices=ALL, on="cuda")
def connected_group(run: Run) -> str:
    """The process group is connected when it is made. It stays bound to its device only where its backend splits no groups."""
    run.accelerator()
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(run.device)
    bound = None if backend.supports_splitting else run.device
    assert group.bound_device_id == bound, f"bound to {group.bound_device_id}"
    assert backend._is_initialized(), "its communicator is made in the middle of the first step"
    return "connected"


@check(on="cuda")
def tf32(run: Run) -> str:
    """Matrix products of float32 are exact unless TF32 is asked for, and then they are not."""
    a = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(run.device)
    exact = a.double() @ a.double()
    error = ((a @ a).double() - exact).abs().max().item()
    assert error < 1e-3, f"{error:.1e} off without having asked: some library has switched TF32 on"
    if torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        skip("this device has no TF32")
    torch.set_float32_matmul_precision("high")
    rough = ((a @ a).double() - exact).abs().max().item()
    assert rough > error, "TF32 was asked for and makes no difference"
    return f"error {error:.0e}, {rough:.0e} with TF32"
