"""PNG files written with Python's own modules: a header, and rows of pixels through zlib."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch

from accel_core import RecordRefusedError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # channels → greyscale, RGB, RGBA (PNG specification, 11.2.2)
_BITS = 8
_UNFILTERED = 0  # what stands before each row


def encode(image: torch.Tensor) -> bytes:
    """The content of a PNG file.

    Args:
        image: (height, width, channels), uint8, on the CPU, with 1, 3 or 4 channels.

    Raises:
        RecordRefusedError: if it has no pixels, or another shape or dtype.
    """
    if image.dtype is not torch.uint8 or image.dim() != 3 or image.shape[2] not in _COLOUR_TYPES or not image.numel():
        raise RecordRefusedError(
            f"A PNG file was to be made of a tensor of shape {tuple(image.shape)} and {image.dtype}. Give (height, width, channels) of "
            f"torch.uint8, with 1, 3 or 4 channels and at least one pixel."
        )
    height, width, channels = image.shape
    header = struct.pack(">IIBBBBB", width, height, _BITS, _COLOUR_TYPES[channels], 0, 0, 0)
    rows = torch.cat([torch.full((height, 1), _UNFILTERED, dtype=torch.uint8), image.reshape(height, -1)], dim=1)
    pixels = bytearray(rows.numel())
    torch.frombuffer(pixels, dtype=torch.uint8).copy_(rows.flatten())
    chunks = _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(pixels)), _chunk(b"IEND", b"")
    return _SIGNATURE + b"".join(chunks)


def pillow(image: torch.Tensor) -> Any:
    """The tensor as an image of Pillow, for services that would scale an array's values."""
    from PIL import Image  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return Image.fromarray((image.squeeze(2) if image.shape[2] == 1 else image).numpy())


def _chunk(kind: bytes, content: bytes) -> bytes:
    """A length, a kind, the content, and a checksum of the last two."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
