"""Batches as flat bytes and back: what a rank that reads the data sends to one that does not.

A message to one receiver is a row of words of 64 bits and, aligned, the bodies:

    words of the scatter | words of the encoder | tensor | tensor | pickle | …

What repeats, the *structure* (containers, keys, dtypes, numbers of dimensions), is pickled when it
is new, and a number from then on. Whatever is no plain tensor is pickled, all of it together, once
per batch; plain tensors and arrays inside of it still travel as bytes. What arrives equals what was
sent, but that tensors are contiguous, on the CPU, without `requires_grad`, and each in memory of
its own: whoever keeps the labels of an epoch must not keep its images with them. For an accelerator
that memory is page-locked: it is copied there without a wait.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from accel_core.api.component import flatten, paths

KEPT_STRUCTURES = 64
"""A sender that knows this many structures forgets them all, and has its receiver forget them, before the next message."""

KEPT_VIEWS = 1024
"""Views kept per frame."""

WORD = 8

_ALIGNMENT = 16
_RAW_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_RAW = frozenset(getattr(torch, name) for name in _RAW_NAMES.split())

Item = tuple[Any, Sequence[int]]
"""A batch, and the integers that go with it."""

Kind = tuple[torch.dtype, int] | None
"""A leaf: dtype and number of dimensions of a plain tensor; None for what is pickled."""

Body = torch.Tensor | bytes | memoryview


class Frame:
    """A buffer of bytes in memory that views look into; `capacity`: bytes, a multiple of 16."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory = bytearray(capacity)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def write_words(self, words: Sequence[int]) -> None:
        """Puts words at the beginning."""
        struct.pack_into(f"{len(words)}q", self._memory, 0, *words)

    def words(self, start: int, stop: int) -> tuple[int, ...]:
        """Words `start` to `stop`."""
        return struct.unpack_from(f"{stop - start}q", self._memory, start * WORD)

    def write(self, start: int, bodies: Sequence[Body]) -> None:
        """Puts bodies one after the other, the first at byte `start`."""
        for body in bodies:
            if isinstance(body, torch.Tensor):
                self.view(start, body.dtype, body.shape).copy_(body.detach() if body.requires_grad else body)
            else:
                self._memory[start : start + len(body)] = body
            start += nbytes(body)

    def content(self, start: int, count: int) -> memoryview:
        """`count` bytes from byte `start`."""
        return memoryview(self._memory)[start : start + count]

    def view(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """The tensor that begins at byte `start`."""
        key = start, dtype, sizes
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            view = self._views[key] = self._made(*key)
        return view

    def _made(self, start: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(sizes)
        if not count:  # which frombuffer refuses
            return torch.empty(sizes, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(sizes)


class Encoder:
    """Turns batches into words and bodies for one `Decoder`, which has to get all, in order."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def forget(self) -> None:
        """Forgets the structures; the decoder has to forget them as well."""
        self._numbers.clear()

    def encode(self, items: Sequence[Item]) -> tuple[list[int], list[Body]]:
        """The words and bodies of some batches. Raises `TypeError` for what cannot be pickled.

        After an error both sides have to forget.
        """
        forget = len(self._numbers) >= KEPT_STRUCTURES
        if forget:
            self.forget()
        structures: list[bytes] = []
        words: list[int] = []
        bodies: list[Body] = []
        for batch, numbers in items:
            self._encode(batch, numbers, structures, words, bodies)
        sizes = [len(structure) for structure in structures]
        return [int(forget), len(structures), *sizes, len(items), *words], [*structures, *bodies]

    def _encode(
        self, batch: Any, numbers: Sequence[int], structures: list[bytes], words: list[int], bodies: list[Body]
    ) -> None:
        leaves: list[Any] = []
        kinds: list[Kind] = []
        shape = _collect(batch, leaves, kinds)
        number = self._number(batch, (shape, tuple(kinds)), structures)
        content = b""
        buffers: list[memoryview] = []
        if None in kinds:
            content, buffers = _pickled(batch, [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is None])
            leaves = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is not None]
        words += [number, len(numbers), *numbers, len(content), len(buffers), *map(len, buffers)]
        for leaf in leaves:
            words += leaf.shape
        bodies += leaves
        if content:
            bodies.append(content)
            bodies += buffers

    def _number(self, batch: Any, structure: Any, structures: list[bytes]) -> int:
        number = self._numbers.get(structure)
        if number is None:
            try:
                structures.append(pickle.dumps(structure, pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                raise _unsendable("batch", batch, error) from error
            number = self._numbers[structure] = len(self._numbers)
        return number


class Decoder:
    """Rebuilds the batches that an `Encoder` has encoded; `pinned`: with tensors in page-locked memory."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._structures: list[tuple[Any, tuple[Kind, ...]]] = []

    def forget(self) -> None:
        """Forgets the structures."""
        self._structures.clear()

    def decode(self, frame: Frame, words: Iterator[int], start: int) -> list[tuple[Any, list[int]]]:
        """The batches and their integers: `words` are the encoder's, bodies begin at `start`.

        Raises RuntimeError if an object cannot be unpickled; the next message can be decoded all
        the same.
        """
        if next(words):
            self.forget()
        for count in _taken(words, next(words)):
            self._structures.append(pickle.loads(frame.content(start, count)))  # noqa: S301  (from another rank's memory)
            start = aligned(start + count)
        items = []
        for _ in range(next(words)):
            batch, numbers, start = self._decode(frame, words, start)
            items.append((batch, numbers))
        return items

    def _decode(self, frame: Frame, words: Iterator[int], start: int) -> tuple[Any, list[int], int]:
        shape, kinds = self._structures[next(words)]
        numbers = _taken(words, next(words))
        content = next(words)
        counts = _taken(words, next(words))
        leaves: list[Any] = []
        for kind in kinds:
            if kind is None:
                leaves.append(None)
                continue
            dtype, dimensions = kind
            view = frame.view(start, dtype, tuple(_taken(words, dimensions)))
            leaves.append(view.pin_memory() if self._pinned else view.clone())
            start = aligned(start + view.nbytes)
        if content:
            parts = []
            for count in (content, *counts):
                parts.append(bytearray(frame.content(start, count)))
                start = aligned(start + count)
            others = iter(_unpickled(parts[0], parts[1:]))
            leaves = [next(others) if kind is None else leaf for leaf, kind in zip(leaves, kinds, strict=True)]
        return _rebuilt(shape, iter(leaves)), numbers, start


def aligned(position: int) -> int:
    """The first byte from `position` on where a tensor may begin."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def nbytes(body: Body) -> int:
    """The size of a body in bytes, rounded up to the position where the next one may begin."""
    return aligned(body.nbytes if isinstance(body, torch.Tensor) else len(body))


def _is_plain(leaf: Any) -> bool:
    """Whether a tensor is nothing but its dtype, its shape and its values."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.dtype in _RAW
        and not leaf.is_nested
        and not leaf.is_meta
    )


def _collect(node: Any, leaves: list[Any], kinds: list[Kind]) -> Any:
    """Appends the leaves of a node and returns its shape: None for a leaf, else type, keys, shapes.

    Only containers that are their items and nothing else are opened; none without plain tensors:
    those are pickled anyway, and lists of varying lengths then need no structures of their own.
    """
    if _is_plain(node):
        leaves.append(node)
        kinds.append((node.dtype, node.ndim))
        return None
    kind = type(node)
    known = len(leaves)
    if kind is dict or kind is OrderedDict:
        shape = kind, tuple(node), tuple([_collect(child, leaves, kinds) for child in node.values()])
    elif kind is list or kind is tuple or _is_named(kind):
        shape = kind, (), tuple([_collect(child, leaves, kinds) for child in node])
    else:
        shape = None
    if not any(kinds[known:]):
        del leaves[known:], kinds[known:]
        leaves.append(node)
        kinds.append(None)
        return None
    return shape


def _is_named(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not hasattr(kind, "to")


def _rebuilt(shape: Any, leaves: Iterator[Any]) -> Any:
    if shape is None:
        return next(leaves)
    kind, keys, shapes = shape
    children = [_rebuilt(child, leaves) for child in shapes]
    if issubclass(kind, dict):
        return kind(zip(keys, children, strict=True))
    return kind._make(children) if hasattr(kind, "_make") else kind(children)


def _taken(words: Iterator[int], count: int) -> list[int]:
    return [next(words) for _ in range(count)]


class _Pickler(pickle.Pickler):
    """Hands plain tensors to the pickle as buffers outside of it (PEP 574), as NumPy does."""

    def reducer_override(self, obj: Any) -> Any:
        if _is_plain(obj):
            return _tensor_of, (pickle.PickleBuffer(_content_of(obj)), obj.dtype, tuple(obj.shape))
        if isinstance(obj, torch.Tensor) and obj.device.type not in {"cpu", "meta"}:
            # A device's index means another device to another rank.
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _content_of(tensor: torch.Tensor) -> bytearray:
    content = bytearray(tensor.nbytes)
    if content:
        _tensor_of(content, tensor.dtype, tensor.shape).copy_(tensor.detach())
    return content


def _tensor_of(content: bytearray, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor that shares the memory of `content`."""
    if not content:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype).view(sizes)


def _pickled(batch: Any, values: list[Any]) -> tuple[bytes, list[memoryview]]:
    """The pickle of what is no plain tensor, and what stays outside of it."""
    try:
        return _dumped(values)
    except Exception as error:
        leaves, _ = flatten(batch)
        for path, leaf in zip(paths(batch, "batch"), leaves, strict=True):
            try:
                _dumped(leaf)
            except Exception as reason:
                raise _unsendable(path, leaf, reason) from reason
        raise _unsendable("batch", batch, error) from error


def _dumped(value: Any) -> tuple[bytes, list[memoryview]]:
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def _unpickled(content: bytearray, buffers: Sequence[bytearray]) -> Any:
    try:
        return pickle.loads(content, buffers=buffers)  # noqa: S301  (from another rank's memory)
    except Exception as error:
        raise RuntimeError(
            f"A batch came from another rank, but what is no tensor in it cannot be unpickled here: {type(error).__name__}: "
            f"{error}. See that every rank can import its classes and rebuild its objects, or let every rank read for itself "
            f"with dispatch_batches=False."
        ) from error


def _unsendable(path: str, value: Any, error: Exception) -> TypeError:
    return TypeError(
        f"A batch was to be sent to another rank, but {path} is a {type(value).__module__}.{type(value).__qualname__} that "
        f"cannot be pickled: {type(error).__name__}: {error}. Leave it out of the batch in collate_fn, or let every rank read "
        f"for itself with dispatch_batches=False."
    )
