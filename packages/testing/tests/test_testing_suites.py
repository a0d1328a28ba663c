"""What the subclass of a conformance suite declares: checked alike in the suites of strategies and of loaders."""

from __future__ import annotations

import re

import pytest
import wrong_loaders
import wrong_strategies

from accel_testing import LoaderSuite, StrategySuite

pytest_plugins = ["pytester"]

SUITES = {"strategy": (StrategySuite, wrong_strategies.Right), "loader": (LoaderSuite, wrong_loaders.Right)}
ALIVE = "test_nothing_is_kept_alive"  # a test that both have

kinds = pytest.mark.parametrize("kind", SUITES)


def declared(kind, **attributes):
    suite, right = SUITES[kind]
    type("TestIt", (suite,), {kind: right, "worlds": (2,), **attributes})().test_the_declarations_hold()


@kinds
@pytest.mark.parametrize("name", [ALIVE, "test_the_declarations_hold", "_facts"])
def test_overriding_what_is_inherited_is_refused(kind, name):
    def other(self, world):
        pass

    class Overriding(SUITES[kind][0]):
        pass

    setattr(Overriding, name, other)
    with pytest.raises(AssertionError, match=f"Overriding overrides {name} of {SUITES[kind][0].__name__}, so what"):
        SUITES[kind][0].test_the_declarations_hold(Overriding())


@kinds
def test_tests_of_ones_own_are_welcome(kind):
    declared(kind, test_something_else=lambda self: None)


@kinds
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"lacks": {"test_nothing_is_kept": "why"}}, "lacks names test_nothing_is_kept, which the suite does not have"),
        ({"lacks": {f"{ALIVE}[3]": "why"}}, f"lacks names {ALIVE}[3], which the suite does not have. Give the name of"),
        ({"lacks": {f"{ALIVE}[2]": " "}}, f"lacks gives no reason for {ALIVE}[2]. Say why"),
        ({"worlds": ()}, "worlds is (): give at least one number of ranks"),
    ],
    ids=["unknown test", "unknown world", "no reason", "no world"],
)
def test_a_declaration_that_does_not_hold_is_refused(kind, attributes, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        declared(kind, **attributes)


@kinds
def test_what_cannot_be_sent_to_the_ranks_is_refused(kind):
    with pytest.raises(
        AssertionError, match=f"cannot be sent to the ranks: .* the name of an installed {kind}, its class"
    ):
        declared(kind, **{kind: lambda: SUITES[kind][1]()})


PLUGIN_TESTS = """
from accel_testing import LoaderSuite, StrategySuite
from wrong_loaders import Right

class TestStrategy(StrategySuite):
    strategy = "single"
    worlds = (1,)
    lacks = {"test_buffers_live[1]": "a lack that has vanished", "test_tied_parameters_stay_tied": "so has this one"}

class TestLoader(LoaderSuite):
    loader = Right
    worlds = (1,)
    lacks = {"test_nothing_is_kept_alive[1]": "a third", "test_len_is_the_number_of_batches": "a fourth"}
"""


def test_a_lack_that_has_vanished_is_noticed(pytester):
    pytester.makepyfile(PLUGIN_TESTS)
    chosen = "buffers or tied or (Strategy and twice) or (Loader and (alive or len or again))"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", chosen)
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(["*XPASS(strict)*a lack that has vanished*"])
