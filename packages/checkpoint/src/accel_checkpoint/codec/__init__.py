"""Any structure of plain Python data, tensors and arrays ↔ JSON and named tensors.

The *skeleton* is JSON. Strings, `null`, booleans, integers up to ±2**53, finite floats, arrays and
objects stand for themselves: for `str`, `None`, `bool`, `int`, `float`, `list`, and `dict` with
strings as keys in this order. Everything else is an object with a tag under `$` and exactly the
fields of this table; what stands in a field is encoded in the same way, so that an integer may
again be a tagged object.

    $                   fields                          the value
    int                 value                           in hexadecimal, such as "-0x1f"
    float               value                           "inf", "-inf", "nan", or the 16 hexadecimal digits of another NaN's bits
    complex             real, imag                      two floats
    str                 code_points                     a list of integers; used where a string has surrogates
    bytes, bytearray    data                            base64; of more than 1024 bytes a tensor of uint8
    tuple, set, frozenset, torch.Size     items         a list
    deque               items, maxlen                   a list; an integer or null
    dict                items                           a list of [key, value]; used where a key is no string, or is "$"
    OrderedDict, Counter  value, attributes             two dicts; `attributes` are those of the object itself
    defaultdict         factory, value                  the name of a class of builtins or collections, or null; a dict
    namedtuple          class, value                    "module:qualified.name"; an object, which is never tagged
    enum                class, member                   the same; the name of the member, or the number of combined flags
    slice, range        start, stop, step
    torch.dtype         name                            "float32"
    torch.device        name                            "cpu", "cuda:0"
    Path, PurePosixPath, PureWindowsPath  value         a string
    date                value                           "2024-02-29"
    datetime            value, fold, tz                 "2024-02-29T12:00:00.000001"; 0 or 1; a timezone or null
    timedelta           days, seconds, microseconds
    timezone            offset, name                    a timedelta; a string, or null for the usual name
    numpy.ndarray       dtype, data                     "bool", "int8" … "uint64", "float16" … "float64", "complex64" or
                                                        "complex128", and a tensor of that dtype; else NumPy's code, such
                                                        as ">f4", and a tensor of the bytes: uint8, with one dim more
    numpy.scalar        dtype, bytes                    NumPy's code; the bytes in hexadecimal
    tensor, parameter   name, dtype, shape, requires_grad     the tensor with this name
    tensor_subclass     name, class, dtype, shape, stride, parameter, requires_grad, tensors, context
                                                        what its `__tensor_flatten__` gives: `tensors` is an object of
                                                        encoded tensors that is never tagged, `context` any value
    same                name                            the tensor, parameter or tensor_subclass that had this name before:
                                                        one object in several places

Order counts: in objects, and because `same` refers to what was before it. What `data` of a
numpy.ndarray or of bytes refers to is a tensor of its own. Nothing is nested deeper than 100
levels, where a tagged object and a list in it are two.

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
    """A value as JSON and tensors.

    Attributes:
        skeleton: of lists, dicts with strings as keys, strings, finite numbers, booleans and None;
            its order counts.
        tensors: what the skeleton names. They are detached and live: the memory of the value's own
            tensors, on any device and with any strides, where it need not be copied.
    """

    skeleton: Any
    tensors: dict[str, torch.Tensor]


def encode(value: Any, where: str) -> Encoded:
    """Takes a structure apart for saving. Not a collective; mostly reads no data of tensors.

    Args:
        value: whatever the table above has.
        where: what the value is, in words for messages: "the state of scheduler 0".

    Raises:
        CheckpointError: for what cannot be encoded, with its type and where it is:
            `state['a'][3].b`.
    """
    encoder = Encoder()
    try:
        return Encoded(encoder.value(value), encoder.tensors)
    except Unfit as error:
        asked = f"{where[:1].upper()}{where[1:]} was to be saved"
        advice = error.advice or "Give a flatter structure of plain data."
        raise CheckpointError(f"{asked}, but {encoder.trail} {error.found}. {advice}") from error.__cause__


def decode(skeleton: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """Puts a structure together again. Not a collective; imports nothing but NumPy, and only if the skeleton has arrays.

    Args:
        skeleton: as `encode` made it, or as JSON gave it back.
        tensors: those that the skeleton names, with the dtypes and shapes that it says; others may
            be among them. They are used, not copied; a name is asked for once.
        where: what the value is, in words for messages.

    Raises:
        CheckpointError: for a skeleton that this module has not made, or for other tensors, with
            the place; for classes that the program has not imported.
    """
    decoder = Decoder(tensors)
    try:
        return decoder.value(skeleton)
    except Unfit as error:
        asked = f"{where[:1].upper()}{where[1:]} was to be loaded"
        advice = error.advice or "The checkpoint is damaged, or no checkpoint of accel-core: load another one."
        raise CheckpointError(f"{asked}, but {decoder.trail} {error.found}. {advice}") from error.__cause__
