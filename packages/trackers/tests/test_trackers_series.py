"""Series: where values go with services that hold one per name and step, and one kind per name."""

from __future__ import annotations

import json
import random

from accel_trackers.step_series import Series


def test_the_first_series_takes_what_increases():
    series = Series()
    assert [series.place("loss", "number", step) for step in (0, 1, 5, 100)] == [()] * 4
    assert series.place("other", "number", 0) == ()


def test_a_step_that_was_passed_goes_to_a_further_series_and_back_as_soon_as_there_is_room():
    series = Series()
    placed = [series.place("loss", "number", step) for step in (3, 3, 3, 1, 4, 4, 2)]
    assert placed == [(), ("2",), ("3",), ("4",), (), ("2",), ("4",)]


def test_whatever_the_order_no_two_values_share_a_place():
    draw = random.Random(0)
    for _ in range(50):
        series = Series()
        steps = [draw.randrange(8) for _ in range(40)]
        places = [(series.place("loss", "number", step), step) for step in steps]
        assert len(set(places)) == len(steps)
        deepest = {marks: [step for mark, step in places if mark == marks] for marks, _ in places}
        assert all(one == sorted(set(one)) for one in deepest.values()), "each series increases"


def test_a_name_belongs_to_its_first_kind():
    series = Series()
    assert series.place("state", "number", 0) == ()
    assert series.place("state", "text", 0) == ("text",)
    assert series.place("state", "text", 0) == ("text", "2")
    assert series.place("state", "number", 1) == ()


def test_it_goes_on_from_its_state():
    first = Series()
    for step in (0, 1, 1, 2):
        first.place("loss", "number", step)
    first.place("loss", "text", 0)
    second = Series(json.loads(json.dumps(first.state())))
    for each in (first, second):
        assert each.place("loss", "number", 2) == ("2",)
        assert each.place("loss", "text", 0) == ("text", "2")
        assert each.place("loss", "number", 3) == ()
