"""Repeating what one rank did, on that rank alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload


class Alone(TorchDispatchMode):
    """A block in which torch's collectives raise: the other ranks would not come to them."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Is asked about every operation."""
        if "c10d" in func.namespace:
            raise RuntimeError(
                f"the model was to be repeated on this rank alone, but it communicates ({func}). Move that out of the model, into "
                f"the loss function for instance"
            )
        return func(*args, **(kwargs or {}))
