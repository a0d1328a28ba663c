"""Names: what a service takes instead of those that it does not take."""

from __future__ import annotations

from accel_trackers.name_limits import Names, flat, spelled


def test_a_name_that_fits_stays():
    assert Names("Service", str.strip, longest=5).of("lr/é ü") != "lr/é ü"
    assert Names("Service", str.strip, longest=6).of("lr/é ü") == "lr/é ü"


def test_different_names_stay_different():
    names = Names("Service", str.strip, longest=20)
    given = ["lr", " lr", "lr ", "x" * 21, "x" * 20 + "y", "\udcff "]
    found = [names.of(name) for name in given]
    assert found[0] == "lr"
    assert len(set(found)) == len(given)
    assert all(len(name) <= 20 and name == name.strip() for name in found)
    assert [names.of(name) for name in given] == found


def test_a_name_that_changes_is_told_once(caplog):
    names = Names("Service", str.strip)
    for name in (" lr", "lr", " lr"):
        names.of(name)
    assert caplog.messages == [f"Service takes no name like ' lr': it is recorded as {spelled(' lr', 'lr', 99)!r}."]


def test_a_configuration_is_fitted_to_its_depths():
    names = Names("Service", lambda name: name or "_")
    config = {"a": {"": 1, "b": [{"": 2}, 3]}, "c": None}
    assert names.of_all(config) == {"a": {"__00000000": 1, "b": [{"__00000000": 2}, 3]}, "c": None}


def test_a_configuration_is_flattened_with_lists_as_json():
    config = {"a": {"b": 1, "c": {}}, "d": [1, None, "ü"], "e": None, "": {"": True}}
    assert dict(flat(config)) == {"a/b": 1, "a/c": "{}", "d": '[1, null, "ü"]', "e": None, "/": True}
