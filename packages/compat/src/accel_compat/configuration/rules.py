"""Rules for one key of Accelerate's file: carried over to a key of ours, or left with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from accel_core.api.launcher import expected, from_data, to_data

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NO_NAMES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Carry:
    """The key is carried over.

    Args:
        values: our key, such as "fsdp.cpu_offload", → value. Empty: the key says nothing, or what
            is so here in any case.
    """

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Leave:
    """The key is not carried over.

    Args:
        reason: why not, and what to do instead.
    """

    reason: str


Outcome: TypeAlias = Carry | Leave
NOTHING = Carry({})


class PeerFile:
    """A file of Accelerate's in one spelling: keys of a block have no prefix of the block.

    Args:
        data: as the file has them.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def text(self, key: str, default: str = "") -> str:
        """The value of a key of the top level, as text without regard to case."""
        value = self.data.get(key)
        return default if value is None else str(value).strip().upper()

    def number(self, key: str, default: int) -> int:
        """The value of a key of the top level; the default where it is no number."""
        return _number(self.data.get(key), default)

    def flag(self, key: str) -> bool:
        """Whether a key of the top level says yes."""
        return same(self.data.get(key), True)

    def block(self, name: str) -> Mapping[str, Any]:
        """A block such as `fsdp_config`: key without prefix → value, of the longer spelling."""
        found = self.data.get(name)
        if not isinstance(found, Mapping):
            return {}
        short = {str(key): value for key, value in found.items()}
        return {plain(name, key): short[key] for key in sorted(short, key=lambda key: key != plain(name, key))}

    @property
    def is_sharded(self) -> bool:
        """Whether training is distributed by FSDP."""
        return self.text("distributed_type") == "FSDP"

    @property
    def fsdp_version(self) -> int:
        """The generation of FSDP; the first one where nothing is said."""
        return _number(self.block("fsdp_config").get("version"), 1)

    @property
    def sharding_strategy(self) -> str:
        """The sharding strategy of FSDP's version 1, such as "FULL_SHARD"; empty if not given."""
        given = self.block("fsdp_config").get("sharding_strategy")
        return "" if given is None else sharding_strategy(given)

    @property
    def shards_nothing(self) -> bool:
        """Whether every process holds the whole model, although FSDP was chosen."""
        return self.is_sharded and self.fsdp_version == 1 and self.sharding_strategy == "NO_SHARD"

    @property
    def mixed_precision(self) -> str:
        """The precision by name, "no" where nothing is said."""
        given = self.data.get("mixed_precision")
        if given is None:
            return "fp16" if self.flag("fp16") else "no"
        return "no" if same(given, False) else str(given).strip().lower()

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        backend = self.block("dynamo_config").get("backend", self.data.get("dynamo_backend"))
        return backend is not None and not same(backend, False)


Rule: TypeAlias = Callable[[PeerFile, Any], Outcome]
"""Decides what becomes of a value that is not None, empty text, or an empty list or mapping: those say nothing anyway."""


def carry(new: str, kind: Any, nothing: Sequence[Any] = (), names: Mapping[str, Any] = _NO_NAMES) -> Rule:
    """Carries the value to our key `new`, as `kind`, unless in `nothing`; `names`: TEXT → value."""

    def rule(_: PeerFile, value: Any) -> Outcome:
        if any(same(value, each) for each in nothing):
            return NOTHING
        meant = names.get(str(value).strip().upper(), value)
        try:
            return Carry({new: to_data(from_data(kind, meant))})
        except ValueError:
            return Leave(f"expected {expected(kind)}. Set {new} yourself")

    return rule


def leave(reason: str, nothing: Sequence[Any] = ()) -> Rule:
    """The value is left, with this reason, unless it is among `nothing`."""
    return lambda _, value: NOTHING if any(same(value, each) for each in nothing) else Leave(reason)


def only_if(holds: Callable[[PeerFile], bool], reason: str, rule: Rule, nothing: Sequence[Any] = ()) -> Rule:
    """Applies `rule` where `holds`; else leaves the value with this reason, but for `nothing`."""
    otherwise = leave(reason, nothing)
    return lambda peer, value: (rule if holds(peer) else otherwise)(peer, value)


def nothing(_: PeerFile, __: Any) -> Outcome:
    """The rule of a key whose every value says nothing here."""
    return NOTHING


def says_nothing(value: Any) -> bool:
    """Whether a value is how Accelerate writes that nothing was said."""
    return any(type(value) is type(each) and value == each for each in _EMPTY)


def same(value: Any, other: Any) -> bool:
    """Whether both are the same; yes may be "yes" and 1 may be "1", as in YAML 1.1 and 1.2."""
    if isinstance(other, str):
        return str(value).strip().casefold() == other.casefold()
    try:
        return bool(from_data(type(other), value) == other)
    except ValueError:
        return False


def plain(block: str, key: str) -> str:
    """A key without Accelerate's prefix: "fsdp_version" of `fsdp_config` is "version"."""
    return key.removeprefix(PREFIXES.get(block, ""))


def sharding_strategy(value: Any) -> str:
    """The name of a sharding strategy of the first generation, which may be given by its number."""
    text = str(value).strip().upper()
    return SHARDING[int(text) - 1] if text.isdecimal() and 1 <= int(text) <= len(SHARDING) else text


PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "dynamo_config": "dynamo_",
        "fp8_config": "fp8_",
        "fsdp_config": "fsdp_",
        "megatron_lm_config": "megatron_lm_",
        "parallelism_config": "parallelism_config_",
    }
)
"""What keys of a block may begin with: block → prefix."""

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _number(value: Any, default: int) -> int:
    try:
        return int(from_data(int, value))
    except ValueError:
        return default
