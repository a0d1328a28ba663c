"""Rows of a batch of any structure: counting, slicing and concatenating them.

The rule, for a batch of n rows:

- A tensor or NumPy array with n in its first dimension has n rows.
- A mapping, list or tuple whose members have n rows is made of **columns**, and cut in each of
  them.
- A list or tuple of n members that are not columns holds **one object per row**: strings, numbers,
  dicts, ragged tensors.
- Whatever else has no rows and belongs to everyone: numbers, strings, None, tensors without
  dimensions, objects; also lists and tuples of such, of another length. But an object that has a
  `to` method (a `PackedSequence`) holds tensors that nobody here knows how to cut, and so do
  tensors that are sparse or nested: a batch with one of these has no rows.

Where a list or tuple of n members can be read both ways, it is made of columns if a member is
itself a tensor of n rows, or if all of its content has n rows, because that is what
`default_collate` makes of n samples with n fields; yet n plain tuples with tensors in them are n
samples, for `default_collate` makes lists. The number of samples that were asked for decides
between several possible n.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from accel_core.api.component import Tree, children_of, flatten, map_tensors, rebuilt

Reading = Literal["array", "columns", "objects", "constant", "opaque"]
"""How a node of a batch relates to n rows. `constant`: it belongs to everyone; `opaque`: it cannot be cut."""


class Samples(list[Any]):
    """A batch that is known to be a list of samples, one per row, whatever they are made of."""


class Unsplittable(ValueError):  # noqa: N818  (what a batch is, not what somebody did)
    """A batch has no rows, or batches do not fit together row by row."""


def slice_tensors(
    data: Tree,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001
    num_processes: int | None = None,  # noqa: ARG001
) -> Tree:
    """Cuts every tensor of nested lists, tuples, dicts and other mappings along dim 0, as views.

    Other leaves, and tensors without dimensions, are passed on. The last two arguments are not
    needed here; a `slice_fn_for_dispatch` gets them too.
    """
    return map_tensors(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def count_rows(batch: Tree, expected: int | None = None) -> int | None:
    """The number of rows of a batch; None if it cannot be cut into rows.

    `expected`: how many samples were asked for, which settles what the batch alone leaves open.
    """
    if isinstance(batch, Samples):
        return len(batch)
    candidates = [expected, _guess(batch), len(batch) if isinstance(batch, (list, tuple)) else None]
    return next((rows for rows in candidates if rows is not None and _has_rows(_reading(batch, rows))), None)


def holds_samples(batch: Tree, rows: int) -> bool | None:
    """Whether a batch of `rows` rows is a sequence of samples; None if it is ambiguous."""
    if type(batch) not in (list, tuple):
        return False
    columns = bool(batch) and all(_is_whole(child, rows) for child in batch)
    if len(batch) == rows:
        return None if columns else True
    return False if columns else None


def slice_rows(batch: Tree, start: int, stop: int, rows: int) -> Tree:
    """Rows `start` to `stop` of a batch; what has no rows stays whole. Tensors are views."""
    if not _has_rows(_reading(batch, rows)):
        raise _no_rows(batch, rows)
    return _sliced(batch, slice(start, stop), rows)


def concatenate(batches: Sequence[Tree], rows: Sequence[int]) -> Tree:
    """One batch that has the rows of all, of the same structure, in order.

    Raises `Unsplittable` if a batch does not have that many rows, or they do not fit together: what
    has no rows must be equal in all of them.
    """
    for batch, count in zip(batches, rows, strict=True):
        if not _has_rows(_reading(batch, count)):
            raise _no_rows(batch, count)
    return batches[0] if len(batches) == 1 else _joined(list(batches), list(rows), "batch")


def _guess(node: Any) -> int | None:
    """The likely number of rows: the length of all tensors, else of lists; None if unclear."""
    lengths = {len(leaf) for leaf in flatten(node)[0] if _is_array(leaf) and leaf.ndim}
    if len(lengths) == 1:
        return lengths.pop()
    if isinstance(node, Mapping):
        guesses = {_guess(child) for child in node.values()} - {None}
        return guesses.pop() if len(guesses) == 1 else None
    return None if children_of(node) is None else len(node)


def _reading(node: Any, rows: int) -> Reading:
    if isinstance(node, Samples):
        return "objects" if len(node) == rows else "opaque"
    if _is_array(node):
        if not _is_sliceable(node):
            return "opaque"
        return "constant" if not node.ndim else "array" if len(node) == rows else "opaque"
    if isinstance(node, Mapping):
        return _of_columns([_reading(child, rows) for child in node.values()])
    children = children_of(node)
    if children is not None:
        readings = [_reading(child, rows) for child in children]
        if len(node) != rows or hasattr(node, "_fields"):
            return _of_columns(readings)
        likely = "array" in readings or all(_is_whole(child, rows) for child in node)
        return "columns" if likely and _of_columns(readings) == "columns" and not _are_samples(node) else "objects"
    return "opaque" if callable(getattr(node, "to", None)) and not isinstance(node, type) else "constant"


def _of_columns(readings: Sequence[Reading]) -> Reading:
    if "opaque" in readings:
        return "opaque"
    return "columns" if any(map(_has_rows, readings)) else "constant"


def _has_rows(reading: Reading) -> bool:
    return reading in {"array", "columns", "objects"}


def _is_whole(node: Any, rows: int) -> bool:
    reading = _reading(node, rows)
    if reading != "columns":
        return _has_rows(reading)
    return all(_is_whole(child, rows) for child in children_of(node) or ())


def _are_samples(node: Sequence[Any]) -> bool:
    return all(type(child) is tuple and any(map(_is_array, flatten(child)[0])) for child in node)


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(leaf, torch.Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray))


def _is_sliceable(array: Any) -> bool:
    return not isinstance(array, torch.Tensor) or (array.layout is torch.strided and not array.is_nested)


def _sliced(node: Any, part: slice, rows: int) -> Any:
    reading = _reading(node, rows)
    if reading == "array":
        return node[part]
    if reading == "objects":
        return rebuilt(node, list(node)[part])
    if reading == "columns":
        return rebuilt(node, [_sliced(child, part, rows) for child in children_of(node) or ()])
    return node


def _joined(nodes: list[Any], rows: list[int], path: str) -> Any:
    first = nodes[0]
    kinds = {type(node) for node in nodes}
    if len(kinds) > 1:
        raise _misfit(path, "has different types", sorted(kind.__name__ for kind in kinds))
    readings = {_reading(node, count) for node, count in zip(nodes, rows, strict=True)}
    if isinstance(first, Mapping) and "columns" in readings:
        return _joined_mappings(nodes, rows, path)
    if readings == {"array"}:
        return _joined_arrays(nodes, path)
    if "objects" in readings and all(len(node) == count for node, count in zip(nodes, rows, strict=True)):
        return rebuilt(first, [item for node in nodes for item in node])
    if readings == {"columns"}:
        lengths = [len(node) for node in nodes]
        if len(set(lengths)) > 1:
            raise _misfit(path, "has different lengths", lengths)
        columns = zip(*nodes, strict=True)
        return rebuilt(first, [_joined(list(column), rows, f"{path}[{i}]") for i, column in enumerate(columns)])
    if readings == {"constant"} and all(_same(first, node) for node in nodes[1:]):
        return first
    if readings == {"constant"}:
        raise _misfit(path, "has no rows and differs between the batches", nodes)
    raise _misfit(path, "has rows in one batch and none in another", sorted(readings))


def _joined_mappings(nodes: list[Any], rows: list[int], path: str) -> Any:
    keys = [list(node) for node in nodes]
    if any(set(other) != set(keys[0]) for other in keys):
        raise _misfit(path, "has different keys", keys)
    return rebuilt(nodes[0], [_joined([node[key] for node in nodes], rows, f"{path}[{key!r}]") for key in keys[0]])


def _joined_arrays(arrays: list[Any], path: str) -> Any:
    join: Callable[[list[Any]], Any]
    join = torch.cat if isinstance(arrays[0], torch.Tensor) else sys.modules["numpy"].concatenate
    if len({tuple(array.shape[1:]) for array in arrays}) > 1:
        raise _misfit(path, "has shapes that differ beyond the rows", [tuple(array.shape) for array in arrays])
    try:
        return join(arrays)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _misfit(
            path, f"cannot be joined ({error}), with the dtypes", [array.dtype for array in arrays]
        ) from error


def _same(one: Any, other: Any) -> bool:
    """Whether two values without rows are equal, as far as they can tell."""
    if _is_array(one) or _is_array(other):
        return _is_array(one) and _is_array(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if children_of(one) is not None:
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or bool(one == other)


def _no_rows(batch: Any, rows: int) -> Unsplittable:
    return Unsplittable(
        f"A batch of {rows} rows was to be shared out between the ranks, but this {type(batch).__name__} cannot be cut into "
        f"{rows} rows: it needs tensors with {rows} in their first dimension, or a list of {rows} objects. {_ADVICE}"
    )


def _misfit(path: str, problem: str, found: Sequence[Any]) -> Unsplittable:
    shown = ", ".join(f"{value!r:.80}" for value in found)
    return Unsplittable(
        f"Batches were to be joined into one and shared out between the ranks, but {path} {problem}: {shown}. {_ADVICE}"
    )


_ADVICE = (
    "Give a slice_fn_for_dispatch that cuts such batches, use split_batches=False, or let every rank read for itself with "
    "dispatch_batches=False."
)
