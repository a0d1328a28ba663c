"""What readers of services share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


class Lists(defaultdict[str, list[Any]]):
    """Records by name."""

    def __init__(self) -> None:
        super().__init__(list)


def pixels(image: Any) -> torch.Tensor:
    """Those of Pillow's image, or of a file with one: (height, width, channels)."""
    from numpy import asarray
    from PIL import Image

    if not isinstance(image, Image.Image):
        with Image.open(image) as opened:
            return pixels(opened)
    array = torch.from_numpy(asarray(image).copy())
    return array if array.dim() == 3 else array.unsqueeze(2)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as the tracker suite compares it: the names of dicts joined by "/"."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
