"""Nested structures: what a batch, a model's output or a bundle of metrics is made of.

A *tree* is built from lists, tuples (named ones too), dicts and other mappings; the rest is a
*leaf*, also a tuple with a `to` method of its own, such as `PackedSequence`. Rebuilding keeps the
types. One tensor, and one flat tuple, list or dict of tensors, take short ways.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch

Tree = Any
"""A nested structure, or a single leaf. (Recursive types would cost every caller a cast.)"""

T = TypeVar("T")
Rebuild = Callable[[list[Any]], Tree]


def flatten(tree: Tree) -> tuple[list[Any], Rebuild]:
    """The leaves of a tree, in order, and a function that puts as many others in their places.

    `rebuild` makes new containers of the same types and never changes `tree`.
    """
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves, partial(unflatten, tree)


def flatten_with_shape(tree: Tree) -> tuple[list[Any], Any]:
    """The leaves, and a hashable value that is equal for trees of the same containers and keys."""
    flat = _flat_tensors(tree)
    if flat is not None:
        return flat, (type(tree), tuple(tree) if type(tree) is dict else len(flat))
    leaves: list[Any] = []
    return leaves, _collect(tree, leaves)


def unflatten(tree: T, leaves: list[Any]) -> T:
    """A tree like `tree`, with other leaves."""
    kind: Any = type(tree)
    new: T
    if _flat_tensors(tree) is None:
        new = _replace(tree, iter(leaves))
    elif kind is torch.Tensor:
        new = leaves[0]
    else:
        new = kind(zip(cast("dict[Any, Any]", tree), leaves, strict=True) if kind is dict else leaves)
    return new


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """A tree like `tree`, with `function` applied to every tensor; other leaves are passed on as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree like `tree`, with `function` applied to every leaf."""
    children = _children(tree)
    if children is None:
        return function(tree)
    return rebuilt(tree, [map_leaves(function, child) for child in children])


def rebuilt(container: Tree, children: list[Any]) -> Tree:
    """A container like this one, with as many other children; mappings keep their keys."""
    kind = type(container)
    if isinstance(container, Mapping):
        return _rebuilt_mapping(container, dict(zip(container, children, strict=True)))
    return kind._make(children) if hasattr(kind, "_make") else kind(children)


def paths(tree: Tree, name: str = "") -> list[str]:
    """The path of each leaf, as typed in code: `batch['labels'][0]` for `name="batch"`."""
    if isinstance(tree, Mapping):
        return [path for key, child in tree.items() for path in paths(child, f"{name}[{key!r}]")]
    if not _is_container(tree):
        return [name]
    fields = getattr(tree, "_fields", None)
    steps = [f".{field}" for field in fields] if fields else [f"[{index}]" for index in range(len(tree))]
    return [path for step, child in zip(steps, tree, strict=True) for path in paths(child, name + step)]


def outline(tree: Tree) -> str:
    """The containers and keys of a tree, without its leaves: `dict('logits': *, 'extra': list(*, *))`."""
    children = _children(tree)
    if children is None:
        return "*"
    texts = [outline(child) for child in children]
    if isinstance(tree, Mapping):
        texts = [f"{key!r}: {text}" for key, text in zip(tree, texts, strict=True)]
    return f"{type(tree).__name__}({', '.join(texts)})"


def to_device(tree: Tree, device: torch.device, non_blocking: bool = False) -> Tree:
    """Puts every tensor of a tree on a device; the same object comes back if all of them are there already.

    Args:
        tree: leaves that are not tensors, but have a `to` method, are moved by it; others stay.
        device: the target, with its index (`cuda:0`): only then is "there already" cheap to see.
        non_blocking: do not wait for copies out of pinned memory.
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
        return tree if tree.device == device else tree.to(device, non_blocking=non_blocking)
    return _moved(tree, device, non_blocking)


def _moved(tree: Tree, device: torch.device, non_blocking: bool) -> Tree:
    children = _children(tree)
    if children is not None:
        moved = [_moved(child, device, non_blocking) for child in children]
        same = all(new is old for new, old in zip(moved, children, strict=True))
        return tree if same else rebuilt(tree, moved)
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=non_blocking)
    if callable(getattr(tree, "to", None)) and not isinstance(tree, type):
        return tree.to(device)
    return tree


def _flat_tensors(tree: Tree) -> list[torch.Tensor] | None:
    """The leaves of one tensor, or of one flat tuple, list or dict of tensors; None for everything else. Hot."""
    kind = type(tree)
    if kind is torch.Tensor:
        return [tree]
    if kind is dict:
        leaves = list(tree.values())
    elif kind is tuple or kind is list:
        leaves = list(tree)
    else:
        return None
    for leaf in leaves:
        if type(leaf) is not torch.Tensor:
            return None
    return leaves


def _is_container(node: Any) -> bool:
    if isinstance(node, tuple):
        return not hasattr(node, "to")
    return isinstance(node, (list, Mapping))


def _children(node: Any) -> list[Any] | None:
    """The direct children of a container; None for a leaf."""
    if not _is_container(node):
        return None
    return list(node.values() if isinstance(node, Mapping) else node)


def _collect(node: Any, leaves: list[Any]) -> Any:
    """Appends the leaves of a node and returns its shape: None for a leaf, else type, keys and children's shapes."""
    children = _children(node)
    if children is None:
        leaves.append(node)
        return None
    shapes = tuple([_collect(child, leaves) for child in children])
    return type(node), tuple(node) if isinstance(node, Mapping) else len(children), shapes


def _replace(node: Any, leaves: Iterator[Any]) -> Any:
    children = _children(node)
    if children is None:
        return next(leaves)
    return rebuilt(node, [_replace(child, leaves) for child in children])


def _rebuilt_mapping(node: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type, with the same attributes where the type allows to find that out.

    A dataclass is made anew, for its attributes mirror its items. Dicts and `UserDict`s are copied
    and filled, which keeps the factory of a `defaultdict`; other mappings, whose copies may share
    their storage, are constructed from a dict.
    """
    kind = type(node)
    if kind is dict:
        return items
    if dataclasses.is_dataclass(kind):
        return dataclasses.replace(node, **items)
    if isinstance(node, (dict, UserDict)):
        twin = copy.copy(node)
        for key, child in items.items():
            twin[key] = child
        return twin
    try:
        return kind(items)
    except TypeError as error:
        raise TypeError(
            f"A {kind.__module__}.{kind.__qualname__} cannot be rebuilt with other values: "
            f"{kind.__name__}(dict) raised {error}. Give its constructor a mapping as its one argument, or pass "
            f"dict(value)."
        ) from error
