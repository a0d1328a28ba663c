"""What readers of services share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
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

    if isinstance(image, Path):
        with Image.open(image) as opened:
            return pixels(opened)
    array = torch.from_numpy(asarray(image).copy())
    return array if array.dim() == 3 else array.unsqueeze(2)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names of nested dicts, joined, with their values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
