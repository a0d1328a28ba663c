"""Keys of `fsdp_config` that say something only together with others."""

from __future__ import annotations

import re
from typing import Any

from accel_compat.configuration.rules import NOTHING, Carry, Leave, Outcome, PeerFile, carry, same, sharding_strategy

_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_RESHARD, _REPLICATE, _WRAP = "fsdp.reshard_after_forward", "fsdp.replicate", "fsdp.wrap"
_NAMES = re.compile(r"(\w+|\\\.|\.\*)+")
"""Regular expressions that say no more than a pattern with `*` can."""


def sharding(peer: PeerFile, value: Any) -> Outcome:
    """`fsdp_sharding_strategy`, by name or number: of the first generation only."""
    if peer.fsdp_version != 1:
        return Leave("with fsdp_version 2 Accelerate does not read it either; fsdp.reshard_after_forward says it")
    return _sharding(peer, sharding_strategy(value))


def reshard(peer: PeerFile, value: Any) -> Outcome:
    """`fsdp_reshard_after_forward`: a sharding strategy in FSDP's version 1, a bool in 2."""
    if peer.fsdp_version != 1:
        return carry(_RESHARD, bool)(peer, value)
    name, other = sharding_strategy(value), peer.sharding_strategy
    if other and other != name:
        return Leave(f"Accelerate follows fsdp_sharding_strategy ({other}), which says otherwise")
    return _sharding(peer, name)


def wrap_policy(peer: PeerFile, value: Any) -> Outcome:
    """`fsdp_auto_wrap_policy`: which modules are units; the two keys below say more."""
    block, policy = peer.block("fsdp_config"), str(value).strip().upper()
    if policy == "NO_WRAP":
        return Carry({_WRAP: "none"})
    if policy == "TRANSFORMER_BASED_WRAP":
        if _classes(block.get("transformer_layer_cls_to_wrap")):
            return Carry({_WRAP: _classes(block["transformer_layer_cls_to_wrap"])})
        return Leave(
            "no classes are named, and Accelerate then asks the model. Units are the repeated blocks of the model here; name "
            "others by fsdp.wrap: [Block]"
        )
    if policy != "SIZE_BASED_WRAP":
        return Leave("expected TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP. Set fsdp.wrap yourself")
    outcome = carry(_WRAP, int)(peer, block.get("min_num_params", 0))
    if isinstance(outcome, Carry) and outcome.values[_WRAP] > 0:
        return outcome
    return Leave(
        "fsdp_min_num_params does not say how many parameters a unit has at least. Set fsdp.wrap: 100000000, for example"
    )


def wrap_classes(peer: PeerFile, value: Any) -> Outcome:
    """`fsdp_transformer_layer_cls_to_wrap`: read under one policy only."""
    if _policy(peer) == "TRANSFORMER_BASED_WRAP":
        return Carry({_WRAP: _classes(value)}) if _classes(value) else NOTHING
    return Leave(
        "Accelerate reads it under fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP only. To make modules of these classes units, "
        f"set fsdp.wrap: [{', '.join(_classes(value))}]"
    )


def wrap_least(peer: PeerFile, value: Any) -> Outcome:
    """`fsdp_min_num_params`: read under one policy only."""
    if same(value, 0):
        return NOTHING
    if _policy(peer) == "SIZE_BASED_WRAP":
        return carry(_WRAP, int)(peer, value)
    return Leave(
        "Accelerate reads it under fsdp_auto_wrap_policy: SIZE_BASED_WRAP only. For units of so many parameters, set "
        f"fsdp.wrap: {value}"
    )


def ignored(_: PeerFile, value: Any) -> Outcome:
    """`fsdp_ignored_modules`: a regular expression that matches whole names of modules."""
    parts = str(value).strip().split("|")
    if not all(_NAMES.fullmatch(part) for part in parts):
        return Leave(
            "it is a regular expression, and fsdp.ignored_modules is a list of names with *. Set "
            "fsdp.ignored_modules: [head, 'blocks.*.norm'], for example"
        )
    return Carry({"fsdp.ignored_modules": [part.replace(".*", "*").replace(r"\.", ".") for part in parts]})


def _sharding(peer: PeerFile, name: str) -> Outcome:
    if name == "NO_SHARD":
        return Carry({"strategy": "ddp"})
    if name not in _RESHARDS:
        return Leave(f"expected one of {', '.join([*_RESHARDS, 'NO_SHARD'])}. Set fsdp.reshard_after_forward yourself")
    replicas = {_REPLICATE: peer.number("num_machines", 1)} if name.startswith("HYBRID") else {}
    return Carry({_RESHARD: _RESHARDS[name], **replicas})


def _policy(peer: PeerFile) -> str:
    return str(peer.block("fsdp_config").get("auto_wrap_policy")).strip().upper()


def _classes(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]
