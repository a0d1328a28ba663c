"""State of one optimizer, between hooks and checkpoints: on this rank, and as it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from accel_core.contract.tensor_layouts import Entry


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer on this rank; every tensor is live.

    Args:
        kind: the class of the optimizer: "module:QualName".
        groups: its `param_groups`, the same on all ranks, with "names" of all parameters instead of
            "params". Of an optimizer that is captured whole, the names alone.
        values: by the name of a parameter, the values of its state that hold no tensors.
        entries: "<parameter>/<key>" for tensors; "<parameter>" alone where its whole state is
            opaque: a dict of "state", values by key, and "laid_out", the keys of those laid out
            like it.
        whole: its `state_dict()`, for an optimizer that defines that itself; None otherwise.
    """

    kind: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    whole: Any = None


class SavedEntry(NamedTuple):
    """An entry of a checkpoint: "elementwise", "replicated" or "opaque"; signatures are by part."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    signatures: Mapping[str, str]


class SavedOptimizer(Protocol):
    """The state of an optimizer in a checkpoint: the first four as in `OptimizerState`, of all ranks together."""

    @property
    def kind(self) -> str:
        """The class."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups."""

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """The values that are no tensors."""

    @property
    def whole(self) -> Any:
        """The whole state, or None."""

    def described(self) -> Mapping[str, SavedEntry]:
        """Every entry."""

    def read(self, name: str, entry: Entry) -> Any:
        """Fills the tensors of `entry` in place; for an `Opaque`, returns the value of its part."""
