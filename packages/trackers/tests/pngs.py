"""A reader of the PNG files that are written here, to check them with: it takes nothing for granted but what it says."""

from __future__ import annotations

import struct
import zlib

import torch

CHANNELS = {0: 1, 2: 3, 6: 4}


def decoded(content: bytes) -> torch.Tensor:
    """The pixels (height, width, channels) of a file of 8 bits, not interlaced, whose rows are not filtered."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        kind, data = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", content, at + 8 + length) == (zlib.crc32(kind + data),)
        chunks.append((kind, data))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, bits, colour, *methods = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (bits, methods) == (8, [0, 0, 0])
    channels = CHANNELS[colour]
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[1][1])), dtype=torch.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)
