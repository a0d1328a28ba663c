"""From a file of Accelerate's to ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accel_compat.configuration.blocks import BLOCKS, Block
from accel_compat.configuration.rules import NOTHING, Carry, Leave, Outcome, PeerFile, Rule, plain, says_nothing
from accel_compat.configuration.top_level import TOP
from accel_core.api.component import nearest
from accel_launch import Carried, Imported, Left

_PEER = "Accelerate 1.15"
_UNDER_NO_SHARD = ("sharding_strategy", "reshard_after_forward")


def translate(data: Mapping[str, Any]) -> Imported:
    """Translates a file of Accelerate's. Every key ends either in `carried` or in `left`.

    A key whose value has no exact counterpart is left, with a reason that says what to do. Keys and
    values of older versions are understood too. Raises `ValueError` if the file is for SageMaker,
    where runs are not started from here.
    """
    if str(data.get("compute_environment", "")).strip().upper() == "AMAZON_SAGEMAKER":
        raise ValueError(
            "The file says compute_environment: AMAZON_SAGEMAKER, which starts jobs in a service of Amazon's; accel launch starts "
            "processes on machines. Nothing of it is carried over: in the job, start the script with accel launch, and type "
            "`accel config default` for a file to begin with."
        )
    peer = PeerFile(data)
    result = Imported({}, [], [])
    origins: dict[str, str] = {}
    for old, value, outcome in _outcomes(peer):
        if isinstance(outcome, Carry):
            twice = [new for new, each in outcome.values.items() if new in origins and _find(result.data, new) != each]
            if twice:
                result.left.append(Left(old, value, f"{origins[twice[0]]} says something else about {twice[0]}"))
                continue
            for new, each in outcome.values.items():
                origins.setdefault(new, old)
                _put(result.data, new, each)
                result.carried.append(Carried(old, new, each))
            if not outcome.values:
                result.carried.append(Carried(old, "", None))
        else:
            result.left.append(Left(old, value, outcome.reason))
    options = sorted(result.data.items(), key=lambda item: isinstance(item[1], dict))  # sections come last
    return Imported(dict(options), result.carried, result.left)


def _outcomes(peer: PeerFile) -> Iterator[tuple[str, Any, Outcome]]:
    """Every key, its value and its outcome, in the order of the table; unknown ones are last."""
    yield from _known(peer, "", peer.data, TOP)
    for name, block in BLOCKS.items():
        content = peer.data.get(name)
        if name not in peer.data:
            continue
        if says_nothing(content):
            yield name, content, NOTHING
        elif isinstance(content, Mapping):
            yield from _of_block(peer, name, content, block)
        else:
            yield name, content, Leave("expected a mapping such as {key: value}")
    for key, value in peer.data.items():
        if key not in TOP and key not in BLOCKS:
            yield key, value, _unknown(key, [*TOP, *BLOCKS])


def _of_block(
    peer: PeerFile, name: str, content: Mapping[str, Any], block: Block
) -> Iterator[tuple[str, Any, Outcome]]:
    kind, rules = block.distributed_type, block.rules
    if kind and peer.text("distributed_type") != kind:
        found = peer.data.get("distributed_type", "not given")
        reason = f"distributed_type is {found}, and Accelerate reads {name} under {kind} only"
        for key, value in content.items():
            yield f"{name}.{key}", value, NOTHING if says_nothing(value) else Leave(reason)
        return
    for key, value, outcome in _known(peer, name, content, rules):
        if peer.shards_nothing and name == "fsdp_config" and plain(name, key.partition(".")[2]) not in _UNDER_NO_SHARD:
            yield (
                key,
                value,
                NOTHING if outcome == NOTHING else Leave("NO_SHARD is strategy ddp here, which has no such option"),
            )
        else:
            yield key, value, outcome
    for key, value in content.items():
        if plain(name, key) not in rules:
            if block.left:
                yield f"{name}.{key}", value, NOTHING if says_nothing(value) else Leave(block.left)
                continue
            yield f"{name}.{key}", value, _unknown(key, [_with_prefix(name, each, content) for each in rules])


def _known(
    peer: PeerFile, block: str, content: Mapping[str, Any], rules: Mapping[str, Rule]
) -> Iterator[tuple[str, Any, Outcome]]:
    for name, rule in rules.items():
        for key, value in content.items():
            if plain(block, key) == name:
                path = f"{block}.{key}" if block else key
                yield path, value, NOTHING if says_nothing(value) else rule(peer, value)


def _unknown(key: str, known: list[str]) -> Leave:
    meant = nearest(key, known)
    hint = f". If {meant} was meant, change it there and import the file again" if meant else ""
    return Leave(f"{_PEER} does not know it either{hint}")


def _with_prefix(block: str, key: str, content: Mapping[str, Any]) -> str:
    """A key of a block as the other keys of this file are spelled."""
    prefixes = {each.removesuffix(plain(block, each)) for each in content}
    return f"{max(prefixes, key=len, default='')}{key}"


def _put(data: dict[str, Any], new: str, value: Any) -> None:
    section, _, option = new.rpartition(".")
    (data.setdefault(section, {}) if section else data)[option] = value


def _find(data: Mapping[str, Any], new: str) -> Any:
    section, _, option = new.rpartition(".")
    return (data[section] if section else data)[option]
