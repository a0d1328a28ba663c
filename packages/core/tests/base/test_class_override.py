"""Dressing an object in place: identity, names, copies and pickles stay what they were."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from accel_core.base.class_override import ClassOverride, override_class, restore_class


class Louder(ClassOverride):
    def __call__(self, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs) * 10  # type: ignore[misc]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_the_class_keeps_its_name_and_the_object_its_identity() -> None:
    net = Net()
    assert override_class(net, Louder) is net
    assert (type(net).__name__, type(net).__qualname__, type(net).__module__) == ("Net", "Net", Net.__module__)
    assert isinstance(net, Net)
    assert net(torch.tensor(2.0)) == 20


def test_one_class_is_made_per_class_and_dies_with_its_last_object() -> None:
    first, second = override_class(Net(), Louder), override_class(Net(), Louder)
    assert type(first) is type(second)
    made = weakref.ref(type(first))
    del first, second
    gc.collect()
    assert made() is None


def test_dressing_twice_is_once_and_undressing_gives_the_class_back() -> None:
    net = override_class(override_class(Net(), Louder), Louder)
    assert net(torch.tensor(1.0)) == 10
    assert type(restore_class(net, Louder)) is Net
    assert net(torch.tensor(1.0)) == 1


def test_a_deep_copy_is_dressed_and_runs_its_own_weights() -> None:
    """A wrapper on `forward` makes a copy run the original's weights."""
    net = override_class(Net(), Louder)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.weight.fill_(3.0)
    assert twin(torch.tensor(1.0)) == 30
    assert net(torch.tensor(1.0)) == 10


def test_a_pickle_is_dressed_when_it_is_read() -> None:
    net = pickle.loads(pickle.dumps(override_class(Net(), Louder)))
    assert net(torch.tensor(2.0)) == 20


def test_what_an_object_makes_of_its_own_class_is_not_dressed() -> None:
    whole = override_class(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), Louder)
    part = whole[:2]
    assert type(part) is nn.Sequential
    assert list(part) == list(whole)[:2]


class Outer(ClassOverride):
    def greet(self):
        return "outer " + super().greet()


class Inner(ClassOverride):
    def greet(self):
        return "inner " + super().greet()


class Plain:
    def greet(self):
        return "plain"


def test_a_dress_is_taken_off_from_under_another():
    obj = override_class(override_class(Plain(), Inner), Outer)
    assert obj.greet() == "outer inner plain"
    restore_class(obj, Inner)
    assert obj.greet() == "outer plain"
    assert type(obj).__bases__ == (Outer, Plain)
    restore_class(obj, Outer)
    assert type(obj) is Plain


def test_a_dress_under_a_class_of_somebody_else_stays_and_says_so():
    obj = override_class(Plain(), Inner)
    made = type("Theirs", (type("Mixin", (), {}), type(obj)), {})
    obj.__class__ = made
    with pytest.raises(
        TypeError, match="Inner was to be taken off an object of the class Theirs, which was made around it"
    ):
        restore_class(obj, Inner)
    assert obj.greet() == "inner plain"
