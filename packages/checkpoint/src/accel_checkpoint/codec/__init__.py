"""Any structure of plain Python data, tensors and arrays ↔ JSON and named tensors.

The *skeleton* is JSON. Strings, `null`, booleans, integers up to ±2**53, finite floats, arrays and
objects stand for themselves: for `str`, `None`, `bool`, `int`, `float`, `list`, and `dict` with
strings as keys in this order. Everything else is an object with a tag under `$` and exactly the
fields of its tag; what stands in a field is encoded in the same way. The tags and their fields
are in docs/reference/checkpoint-values.md, and in `special_types`.

Tensors come back without gradient history; views of one memory come back as tensors of their own.
Of all other values that occur in several places, each place gets its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from accel_checkpoint.codec.decoder import Decoder
from accel_checkpoint.codec.encoder import Encoder
from accel_checkpoint.codec.path import Unfit
from accel_core import CheckpointError


class Encoded(NamedTuple):
    """A value as JSON, whose order counts, and its tensors: detached, copied only if needed."""

    skeleton: Any
    tensors: dict[str, torch.Tensor]


def encode(value: Any, where: str) -> Encoded:
    """Takes a structure apart for saving. Not a collective; mostly reads no data of tensors.

    `where` describes the value. CheckpointError names what cannot be encoded: `state['a'][3].b`.
    """
    encoder = Encoder()
    try:
        return Encoded(encoder.value(value), encoder.tensors)
    except Unfit as error:
        asked = f"{where[:1].upper()}{where[1:]} was to be saved"
        advice = error.advice or "Give a flatter structure of plain data, without circles."
        raise CheckpointError(f"{asked}, but {encoder.trail} {error.found}. {advice}") from error.__cause__


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """Puts a structure together from these tensors. No collective; imports only NumPy, for arrays.

    CheckpointError names the place of a value that `encode` does not make, or of an absent class.
    """
    decoder = Decoder(tensors)
    try:
        return decoder.value(skeleton)
    except Unfit as error:
        asked = f"{where[:1].upper()}{where[1:]} was to be loaded"
        advice = error.advice or "The checkpoint is damaged, or no checkpoint of accel-core: load another one."
        raise CheckpointError(f"{asked}, but {decoder.trail} {error.found}. {advice}") from error.__cause__
