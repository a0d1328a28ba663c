"""Nested structures keep their types, their order, and their identity where nothing changes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

from accel_core.base.nested import flatten, flatten_with_shape, map_tensors, outline, paths, to_device, unflatten

CPU = torch.device("cpu")
META = torch.device("meta")

Point = namedtuple("Point", "x y")


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As model libraries have them: fields that are set are items too."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Tokens(UserDict):  # type: ignore[type-arg]
    """As tokenizers have them: attributes beside the items."""

    encodings: Any = None


class Frozen(Mapping):  # type: ignore[type-arg]
    """A mapping whose shallow copy would share its storage."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stubborn(Frozen):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__({"one": one, "two": two})


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=2),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(Frozen),
    ),
    max_leaves=12,
)


def plain(tree: Any) -> Any:
    """Types, keys and leaves in a form that compares by value."""
    if isinstance(tree, Mapping):
        return type(tree), [(key, plain(child)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [plain(child) for child in tree]
    return tree


@given(trees)
def test_flattening_and_rebuilding_gives_an_equal_tree(tree: Any) -> None:
    leaves, rebuild = flatten(tree)
    assert plain(rebuild(leaves)) == plain(tree)
    assert flatten_with_shape(tree) == flatten_with_shape(rebuild(leaves))
    assert len(paths(tree, "batch")) == len(leaves)
    assert outline(tree).count("*") >= len(leaves)


@given(trees)
def test_rebuilding_replaces_every_leaf_and_leaves_the_original_alone(tree: Any) -> None:
    before = plain(tree)
    leaves, rebuild = flatten(tree)
    numbered = rebuild(list(range(len(leaves))))
    assert flatten(numbered)[0] == list(range(len(leaves)))
    assert plain(tree) == before


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: [t, t], lambda t: (t, t), lambda t: {"a": t}, lambda t: Point(t, [t])]
)
def test_trees_of_tensors_are_rebuilt(make: Any) -> None:
    tree = make(torch.zeros(2))
    leaves, _ = flatten_with_shape(tree)
    doubled = unflatten(tree, [leaf + 1 for leaf in leaves])
    assert type(doubled) is type(tree)
    assert all(leaf.sum() == 2 for leaf in flatten(doubled)[0])


def test_only_tensors_are_mapped() -> None:
    assert map_tensors(lambda tensor: tensor.shape[0], {"a": [torch.zeros(3), "text"], "n": None}) == {
        "a": [3, "text"],
        "n": None,
    }


def test_a_dataclass_that_is_a_dict_is_rebuilt_with_its_attributes() -> None:
    output = map_tensors(torch.ones_like, ModelOutput(logits=torch.zeros(2)))
    assert type(output) is ModelOutput
    assert output.logits is output["logits"]
    assert output.logits.sum() == 2
    assert output.loss is None
    assert list(output) == ["logits"]


def test_mappings_keep_what_they_carry_beside_their_items() -> None:
    counts: defaultdict[str, Any] = defaultdict(list, a=torch.zeros(1))
    assert map_tensors(torch.ones_like, counts).default_factory is list
    tokens = Tokens(ids=torch.zeros(1))
    tokens.encodings = ["kept"]
    mapped = map_tensors(torch.ones_like, tokens)
    assert (type(mapped), mapped.encodings, mapped["ids"].item()) == (Tokens, ["kept"], 1)
    assert tokens["ids"].item() == 0
    frozen = Frozen({"a": torch.zeros(1)})
    assert map_tensors(torch.ones_like, frozen)["a"].item() == 1
    assert frozen["a"].item() == 0
    assert type(map_tensors(torch.ones_like, MappingProxyType({"a": torch.zeros(1)}))) is MappingProxyType


def test_a_tree_with_the_same_leaves_has_containers_of_its_own() -> None:
    """Loops take their batches apart."""
    tree = {"labels": [1, 2], "x": {"y": torch.zeros(1)}, "n": (3, [4])}
    leaves, rebuild = flatten(tree)
    for new in (rebuild(leaves), map_tensors(lambda tensor: tensor, tree)):
        assert new["labels"] == [1, 2]
        assert new is not tree
        assert new["labels"] is not tree["labels"]
        assert new["x"] is not tree["x"]
        assert new["n"][1] is not tree["n"][1]


def test_paths_read_as_one_would_type_them() -> None:
    tree = {"labels": [1, 2], "at": Point(3, (4,))}
    assert paths(tree, "batch") == ["batch['labels'][0]", "batch['labels'][1]", "batch['at'].x", "batch['at'].y[0]"]
    assert paths(5, "batch") == ["batch"]
    assert outline(tree) == "dict('labels': list(*, *), 'at': Point(*, tuple(*)))"


def test_the_same_keys_in_another_order_are_another_shape() -> None:
    one, two = torch.zeros(1), torch.zeros(1)
    assert flatten_with_shape({"a": one, "b": two})[1] != flatten_with_shape({"b": one, "a": two})[1]
    assert flatten_with_shape([one])[1] != flatten_with_shape((one,))[1] != flatten_with_shape(one)[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: (t, t),
        lambda t: {"a": t, "b": [t, "text", None]},
        lambda t: Point(t, {"a": t}),
        lambda t: ModelOutput(logits=t),
        lambda t: "text",
    ],
)
def test_what_is_in_place_comes_back_as_the_same_object(make: Any) -> None:
    tree = make(torch.zeros(2))
    assert to_device(tree, CPU) is tree
    if not isinstance(tree, str):
        moved = to_device(tree, META)
        assert type(moved) is type(tree)
        assert all(leaf.device == META for leaf in flatten(moved)[0] if isinstance(leaf, torch.Tensor))


def test_a_partly_placed_tree_is_completed() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device=META)
    moved = to_device({"here": here, "there": there}, META)
    assert moved["there"] is there
    assert moved["here"].device == META


def test_a_packed_sequence_is_one_value() -> None:
    packed = pack_padded_sequence(torch.zeros(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    leaves, _ = flatten([packed])
    assert leaves == [packed]
    assert to_device([packed], CPU)[0] is packed
    moved = to_device([packed], META)[0]
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU  # as torch wants it


def test_classes_are_not_moved() -> None:
    assert to_device([torch.nn.Linear], META) == [torch.nn.Linear]


@pytest.mark.parametrize("make", [lambda leaf: leaf, lambda leaf: {"a": leaf}, lambda leaf: [(leaf,)]])
@pytest.mark.parametrize(
    ("pinned", "given", "expected"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_copies_out_of_pinned_memory_are_not_awaited(
    make: Any, pinned: bool, given: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append(non_blocking)
        return torch.empty_like(tensor, device=device)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(make(torch.ones(2)), torch.device("meta"), given)
    assert asked == [expected]
