"""Nested structures: what a batch, a model's output or a bundle of metrics is made of.

A *tree* is built from lists, tuples (named ones too), dicts and other mappings; the rest is a
*leaf*, also a tuple with a `to` method of its own, such as `PackedSequence`. Rebuilding keeps the
types. One tensor, and one flat tuple, list or dict of tensors, take short ways.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch

Tree = Any
"""A nested structure, or a single leaf. (Recursive types would cost every caller a cast.)"""
T = TypeVar("T")


def flatten(tree: Tree) -> tuple[list[Any], Callable[[list[Any]], Tree]]:
    """The leaves of a tree, in order, and a function that makes such a tree of other leaves."""
    return flatten_with_shape(tree)[0], partial(unflatten, tree)


def flatten_with_shape(tree: Tree) -> tuple[list[Any], Any]:
    """The leaves, and a hashable value that is equal for trees of the same containers and keys."""
    flat = _flat_tensors(tree)
    if flat is not None:
        return flat, (type(tree), tuple(tree) if type(tree) is dict else len(flat))
    leaves: list[Any] = []
    return leaves, _collect(tree, leaves)


def unflatten(tree: T, leaves: list[Any]) -> T:
    """A tree like `tree`, with other leaves."""
    same: Any = tree
    kind = type(same)
    new: T
    if kind is torch.Tensor:
        new = leaves[0]
    elif _flat_tensors(tree) is not None:
        new = kind(zip(same, leaves, strict=True) if kind is dict else leaves)
    else:
        others = iter(leaves)
        new = map_leaves(lambda _: next(others), tree)
    return new


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """A tree like `tree`, with `function` applied to every tensor; other leaves stay."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree like `tree` in new containers, with `function` applied to every leaf."""
    children = children_of(tree)
    return function(tree) if children is None else rebuilt(tree, [map_leaves(function, child) for child in children])


def rebuilt(container: Tree, children: list[Any]) -> Tree:
    """A container like this one, of other children; mappings keep keys, and attributes if possible.

    A dataclass is made anew, for its attributes mirror its items. Dicts and `UserDict`s are copied
    and filled, which keeps the factory of a `defaultdict`; other mappings, whose copies may share
    their storage, are constructed from a dict.
    """
    kind = type(container)
    if not isinstance(container, Mapping):
        return kind._make(children) if hasattr(kind, "_make") else kind(children)
    items = dict(zip(container, children, strict=True))
    if kind is dict:
        return items
    if dataclasses.is_dataclass(kind):
        return dataclasses.replace(cast("Any", container), **items)
    if not isinstance(container, (dict, UserDict)):
        return kind(items)
    twin = copy.copy(container)
    for key, child in items.items():
        twin[key] = child
    return twin


def paths(tree: Tree, name: str = "") -> list[str]:
    """The path of each leaf, as typed in code: `batch['labels'][0]` for `name="batch"`."""
    children = children_of(tree)
    if children is None:
        return [name]
    if isinstance(tree, Mapping):
        steps = [f"[{key!r}]" for key in tree]
    else:
        steps = [f".{field}" for field in getattr(tree, "_fields", ())] or [f"[{at}]" for at in range(len(children))]
    return [path for step, child in zip(steps, children, strict=True) for path in paths(child, name + step)]


def outline(tree: Tree) -> str:
    """Containers and keys of a tree without leaves: `dict('logits': *, 'extra': list(*, *))`."""
    children = children_of(tree)
    if children is None:
        return "*"
    names = [f"{key!r}: " for key in tree] if isinstance(tree, Mapping) else [""] * len(children)
    return f"{type(tree).__name__}({', '.join(map(operator.add, names, map(outline, children)))})"


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Puts every tensor of a tree on a device; returns the same object if all are there already.

    Other leaves are moved by their `to` method, if they have one. With its index (`cuda:0`), it is
    cheap to see that a tensor is there. Copies out of pinned memory are not awaited, as whatever
    reads them on the device is queued behind them; with `non_blocking`, no copies are.
    """
    kind = type(tree)
    if kind is dict or kind is tuple or kind is list:
        try:
            for leaf in tree.values() if kind is dict else tree:
                if leaf.device != device:
                    break
            else:
                return tree
        except AttributeError:  # a nested container, a string, …: look closer
            pass
    elif kind is torch.Tensor:
        return tree if tree.device == device else tree.to(device, non_blocking=non_blocking or tree.is_pinned())
    return _moved(tree, device, non_blocking)


def _moved(tree: Tree, device: torch.device, non_blocking: bool) -> Tree:
    children = children_of(tree)
    if children is not None:
        new = [_moved(child, device, non_blocking) for child in children]
        return tree if all(map(operator.is_, new, children)) else rebuilt(tree, new)
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=non_blocking or (tree.device != device and tree.is_pinned()))
    return tree.to(device) if callable(getattr(tree, "to", None)) and not isinstance(tree, type) else tree


def _flat_tensors(tree: Tree) -> list[torch.Tensor] | None:
    """The leaves of a tensor, or of a flat tuple, list or dict of tensors; else None. Hot."""
    kind = type(tree)
    if kind is torch.Tensor:
        return [tree]
    if kind is not dict and kind is not tuple and kind is not list:
        return None
    leaves = list(tree.values() if kind is dict else tree)
    for leaf in leaves:
        if type(leaf) is not torch.Tensor:
            return None
    return leaves


def children_of(node: Any) -> list[Any] | None:
    """The direct children of a container; None for a leaf."""
    if isinstance(node, tuple):
        return None if hasattr(node, "to") else list(node)
    if isinstance(node, list):
        return list(node)
    return list(node.values()) if isinstance(node, Mapping) else None


def _collect(node: Any, leaves: list[Any]) -> Any:
    """Adds the leaves of a tree to a list, and returns its shape: None for a leaf."""
    children = children_of(node)
    if children is None:
        leaves.append(node)
        return None
    shapes = tuple([_collect(child, leaves) for child in children])
    return type(node), tuple(node) if isinstance(node, Mapping) else len(children), shapes
