"""Offers: names from installed metadata, and what is said when one cannot be had."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
from fake_distributions.installed import install
from packaging.specifiers import SpecifierSet

from accel_core.api.component import how_to_install
from accel_core.base.errors import NotInstalledError, PluginError
from accel_core.base.vocabulary import KNOWN_PROVIDERS
from accel_core.plugins import build, find, list_offers, passed
from accel_core.plugins.offers import NOUNS, Version, admits, requirement_on


def said(error):
    return str(error.value)


# Listing


def test_listing_gives_names_with_their_distributions_and_imports_nothing(monkeypatch):
    install(monkeypatch, "fsdp", "broken", "future")

    offers = list_offers("accel.strategies")

    assert [(offer.name, offer.distribution, offer.version) for offer in offers] == [
        ("broken", "broken-strategy", "0.1"),
        ("ddp", "accel-core", "1.4.0"),
        ("fsdp", "accel-fsdp", "0.3.0"),
        ("future", "from-the-future", "5.0"),
        ("single", "accel-core", "1.4.0"),
    ]
    assert offers[2].value == "fake_fsdp:FSDP"
    assert not {"fake_fsdp", "fake_broken", "fake_future"} & set(sys.modules)


def test_listing_without_a_group_gives_every_group(monkeypatch):
    install(monkeypatch, "fsdp")
    assert {offer.group for offer in list_offers()} == {"accel.strategies", "accel.precisions"}


def test_entry_points_of_other_programs_are_not_offers(monkeypatch):
    install(monkeypatch, "broken")
    assert "console_scripts" not in {offer.group for offer in list_offers()}


def test_a_distribution_that_stands_on_the_path_twice_is_one(monkeypatch):
    install(monkeypatch, "fsdp", "fsdp_again")
    assert find("accel.strategies", "fsdp").distribution == "accel-fsdp"
    assert len([offer for offer in list_offers() if offer.name == "fsdp"]) == 1


def test_a_listing_can_be_passed_on(monkeypatch):
    install(monkeypatch, "fsdp")
    offers = list_offers()
    install(monkeypatch)

    assert find("accel.strategies", "fsdp", offers).version == "0.3.0"
    assert find("accel.precisions", "half", offers).value == "fake_fsdp:Half"


# Finding


def test_a_known_name_that_is_not_installed_says_what_to_install(monkeypatch):
    install(monkeypatch)
    with pytest.raises(NotInstalledError) as error:
        find("accel.strategies", "fsdp")
    assert said(error) == (
        "The strategy 'fsdp' was asked for, and nothing that is installed offers it. "
        "Installed: 'ddp' (accel-core 1.4.0), 'single' (accel-core 1.4.0).\n"
        f"{how_to_install('accel-fsdp')}"
    )


def test_a_misspelt_name_is_answered_with_the_nearest_installed_one(monkeypatch):
    install(monkeypatch, "fsdp")
    with pytest.raises(PluginError) as error:
        find("accel.strategies", "FDSP")
    assert not isinstance(error.value, NotInstalledError)
    assert "The strategy 'FDSP' was asked for" in said(error)
    assert "'fsdp' (accel-fsdp 0.3.0)" in said(error)
    assert "Type 'fsdp' if that was meant. `python -m accel_core plugins` shows" in said(error)


def test_a_misspelt_name_is_answered_with_the_nearest_known_one_and_how_to_install_it(monkeypatch):
    install(monkeypatch)
    with pytest.raises(PluginError) as error:
        find("accel.trackers", "tensorbord")
    assert "The tracker 'tensorbord' was asked for" in said(error)
    assert "Installed: none." in said(error)
    how = how_to_install("accel-trackers")
    assert f"Type 'tensorboard' if that was meant. It is not installed. {how}." in said(error)


def test_a_name_that_resembles_nothing_is_answered_with_the_choices(monkeypatch):
    install(monkeypatch)
    with pytest.raises(PluginError) as error:
        find("accel.strategies", "zzz")
    assert "The strategy 'zzz' was asked for" in said(error)
    assert "'ddp' (accel-core 1.4.0), 'single' (accel-core 1.4.0)" in said(error)
    assert "Choose one of these, or pass an object." in said(error)


def test_a_name_that_its_installed_provider_no_longer_offers_is_not_answered_with_installing_it(monkeypatch):
    install(monkeypatch, "fsdp")
    with pytest.raises(PluginError, match="Choose one of these") as error:
        find("accel.strategies", "accel-fsdp:zzz")
    assert not isinstance(error.value, NotInstalledError)


def test_two_distributions_that_offer_one_name_are_both_named(monkeypatch):
    install(monkeypatch, "fsdp", "other_fsdp")
    with pytest.raises(PluginError) as error:
        find("accel.strategies", "fsdp")
    assert said(error) == (
        "The strategy 'fsdp' was asked for, and 2 distributions offer it: "
        "accel-fsdp 0.3.0 (fake_fsdp:FSDP), other-fsdp 2.0 (fake_other_fsdp:OtherFSDP).\n"
        "Say which: 'accel-fsdp:fsdp' or 'other-fsdp:fsdp'."
    )


@pytest.mark.parametrize("name", ["other-fsdp:fsdp", "Other_FSDP:fsdp"])
def test_a_qualified_name_settles_which_distribution_is_meant(monkeypatch, name):
    install(monkeypatch, "fsdp", "other_fsdp")
    assert find("accel.strategies", name).value == "fake_other_fsdp:OtherFSDP"


def test_a_qualified_name_of_a_distribution_that_is_not_installed_says_to_install_it(monkeypatch):
    install(monkeypatch, "fsdp")
    with pytest.raises(NotInstalledError) as error:
        find("accel.strategies", "other-fsdp:fsdp")
    assert "The strategy 'other-fsdp:fsdp' was asked for" in said(error)
    assert "'fsdp' (accel-fsdp 0.3.0)" in said(error)
    assert said(error).endswith("Type: pip install other-fsdp")


def test_known_providers_speak_of_groups_that_exist():
    assert set(KNOWN_PROVIDERS) <= set(NOUNS)


# Loading


def test_a_plugin_that_cannot_be_imported_raises_its_reason_when_it_is_chosen(monkeypatch):
    install(monkeypatch, "broken")
    offer = find("accel.strategies", "broken")
    with pytest.raises(PluginError) as error:
        offer.load()
    assert "The strategy 'broken' was asked for" in said(error)
    assert "broken-strategy 0.1 is broken: fake_broken:Broken could not be imported: ModuleNotFoundError" in said(error)
    assert "No module named 'an_engine_that_is_missing'" in said(error)
    assert "Type: pip install --upgrade broken-strategy, or choose another strategy." in said(error)
    assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_an_offer_of_something_that_cannot_be_called_is_broken(monkeypatch):
    install(monkeypatch, "other_fsdp")
    with pytest.raises(PluginError, match="TypeError: fake_other_fsdp:NOTHING is NoneType, which cannot be called"):
        find("accel.strategies", "mute").load()


def test_a_plugin_that_needs_another_core_is_refused_before_it_is_imported(monkeypatch):
    install(monkeypatch, "future")
    with pytest.raises(PluginError) as error:
        build("accel.strategies", "future")
    assert said(error) == (
        "The strategy 'future' was asked for, but from-the-future 5.0 needs accel-core >=99, "
        "and accel-core 1.4.0 is installed.\n"
        "Type: pip install --upgrade from-the-future; or, to keep that one, install accel-core >=99"
    )
    assert "fake_future" not in sys.modules


def test_a_requirement_that_cannot_be_read_is_a_misfit_and_not_a_guess(monkeypatch):
    install(monkeypatch, "fsdp")
    offer = find("accel.strategies", "fsdp")
    object.__setattr__(offer, "core", ">=1!2")
    with pytest.raises(PluginError) as error:
        offer.load()
    assert "accel-fsdp 0.3.0 asks for accel-core >=1!2, which cannot be compared with 1.4.0: '1!2' is no" in said(error)
    assert how_to_install("accel-fsdp", upgrade=True) in said(error)


# Building


def test_a_name_builds_with_defaults_and_options_reach_the_constructor(monkeypatch):
    install(monkeypatch, "fsdp")
    plain = build("accel.strategies", "fsdp")
    configured = build("accel.strategies", "fsdp", {"reshard_after_forward": False})

    assert plain.component.reshard_after_forward is True
    assert configured.component.reshard_after_forward is False
    assert (configured.name, configured.group) == ("fsdp", "accel.strategies")
    assert configured.offer == find("accel.strategies", "fsdp")
    assert configured.provider() == ("accel-fsdp", "0.3.0")


def test_a_qualified_name_builds_under_its_plain_name(monkeypatch):
    install(monkeypatch, "fsdp", "other_fsdp")
    assert build("accel.strategies", "accel-fsdp:fsdp").name == "fsdp"


def test_an_object_is_used_as_it_is():
    class Mine:
        pass

    mine = Mine()
    selected = build("accel.strategies", mine)
    assert selected.component is mine
    assert (selected.name, selected.offer) == ("Mine", None)
    assert "passed as an object" in selected.describe()


def test_an_object_of_a_plugin_is_known_by_its_distribution(monkeypatch):
    install(monkeypatch, "fsdp")
    component = build("accel.strategies", "fsdp").component
    selected = passed(component, "accel.strategies")
    assert selected.describe() == "the strategy 'FSDP' (fake_fsdp.FSDP of accel-fsdp 0.3.0, passed as an object)"


def test_an_object_of_an_installed_library_that_offers_nothing_is_known_by_its_distribution():
    monkey = pytest.MonkeyPatch()
    with monkey.context():
        assert passed(monkey).provider() == ("pytest", pytest.__version__)


def test_an_object_of_the_users_own_has_no_distribution():
    assert passed(type("Mine", (), {"__module__": "my_training_script"})()).provider() is None


def test_a_module_can_be_passed():
    assert passed(sys.modules[__name__]).name == __name__


def test_options_beside_an_object_are_refused():
    with pytest.raises(ValueError) as error:
        build("accel.strategies", object(), {"depth": 3})
    assert said(error) == (
        "Options for the strategy were given (depth) beside an object, object, and it is complete.\n"
        "Give them to its constructor, or choose it by name."
    )


def test_a_class_instead_of_an_object_is_refused():
    class Mine:
        pass

    with pytest.raises(TypeError) as error:
        build("accel.trackers", Mine)
    assert f"The class {__name__}." in said(error)
    assert "Mine was passed as tracker; an object of it is needed.\nWrite Mine(...) with its options." in said(error)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "accel-fsdp:fsdp",
            {"cpu_ofload": True},
            "could not be made with cpu_ofload: .*unexpected keyword argument 'cpu_of",
        ),
        (
            "needy",
            {"anything": 1},
            r"\(other-fsdp 2.0\) could not be made with anything: .*missing 1 required .*'mesh'",
        ),
        ("needy", {}, "could not be made with no options: .*'mesh'.*\nGive what fake_other_fsdp:Needy takes, or build"),
    ],
)
def test_a_component_that_cannot_be_made_of_its_options_says_what_was_given(monkeypatch, name, options, why):
    install(monkeypatch, "fsdp", "other_fsdp")
    with pytest.raises(TypeError, match=why):
        build("accel.strategies", name, options)


def test_a_component_is_made_of_its_options(monkeypatch):
    install(monkeypatch, "other_fsdp")
    assert build("accel.strategies", "needy", {"mesh": 2, "anything": 1}).component.options == {"anything": 1}


# Versions


@pytest.mark.parametrize(
    ("specifier", "version", "fits"),
    [
        ("", "0.1.0", True),
        (">=0.1,<1", "0.1.0", True),
        (">=0.1,<1", "1.0", False),
        (">= 1.4", "1.10", True),
        (">=1.4", "1.4.0+cpu", True),
        (">=1.4", "1.4rc1", False),
        (">=1.4", "1.5rc1", True),
        (">=1.4", "1.4.dev3", False),
        ("<2", "2.0rc1", True),
        ("<2rc2", "2.0rc1", True),
        ("<=2", "2.0.0", True),
        ("<=2", "2.0.post1", False),
        (">1.4", "1.4.post1", True),
        (">1.4", "1.4.1", True),
        (">=1.4.post1", "1.4", False),
        ("==1.4", "1.4.0", True),
        ("!=1.4", "1.4.0", False),
        ("~=1.4.2", "1.4.9", True),
        ("~=1.4.2", "1.5", False),
        ("~=1.4", "1.9", True),
        ("~=1.4", "2.0", False),
    ],
)
def test_version_clauses_hold_as_the_specification_says(specifier, version, fits):
    assert admits(specifier, version) is fits


def test_versions_are_ordered_from_development_to_post_release():
    ordered = ["1.0.dev1", "1.0a1.dev1", "1.0a1", "1.0b2", "1.0rc1", "1.0", "1.0.post1.dev2", "1.0.post1", "1.0.1"]
    keys = [Version.parse(text) for text in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize("operator", [">=", "<=", "==", "!=", "~="])
def test_version_clauses_agree_with_packaging(operator):
    versions = [
        "1.4.dev1",
        "1.4a1",
        "1.4rc1",
        "1.4",
        "1.4.0",
        "1.4.0.1",
        "1.4.post1",
        "1.4.post1.dev1",
        "1.5",
        "2.0",
        "2rc1",
    ]
    for target, version in itertools.product(versions, versions):
        clause = f"{operator}{target}"
        if operator == "~=" and "." not in target:
            continue
        expected = SpecifierSet(clause).contains(version, prereleases=True)
        assert admits(clause, version) is expected, (clause, version)


@pytest.mark.parametrize(
    ("specifier", "version", "message"),
    [
        ("===1.0", "3.0", "'===1.0' is no version clause; type one of the form '>=1.2', with"),
        (
            ">=0.1, 1.0",
            "3.0",
            "'1.0' is no version clause; type one of the form '>=1.2', with >=, <=, ==, !=, >, <, ~=",
        ),
        (">=one", "3.0", "'one' is no version; type one of the form 1.2.3, 1.2rc1, 1.2.post1 or 1.2.dev1"),
        (">=1", "3.0-unknown", "'3.0-unknown' is no version; type one of the form 1.2.3"),
        ("~=2.dev1", "3.0", "'~=2.dev1' is no version clause"),
        ("~=2", "3.0", "'~=2' is no version clause; type one of"),
        ("==1.*", "3.0", "'==1.*' is no version clause; type one of"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_form_that_can(specifier, version, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        admits(specifier, version)


def test_requirements_are_read_in_every_spelling_and_conditional_ones_left_out():
    lines = [
        "torch>=2",
        "accel-core-extras>=8",
        "Accel_Core[testing] >=0.1",
        "accel-core (<1)",
        "accel-core",
        "accel-core @ file:///somewhere",
        "accel-core>=9 ; extra == 'test'",
    ]
    assert requirement_on("accel-core", lines) == ">=0.1,<1"
    assert requirement_on("accel-core", None) == ""
