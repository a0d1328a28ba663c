"""The conformance suite of trackers: one with a service in memory passes it, and wrong ones are caught by exactly the tests that should."""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import wrong_trackers as wrong

from accel_testing import TrackerSuite
from accel_testing.tracker_jobs import imports

pytest_plugins = ["pytester"]


class TestRight(TrackerSuite):
    tracker = wrong.Right

    def read(self, written):
        return wrong.read(written)


def made_with_an_address():
    return wrong.WantsAnArgument("http://localhost")


TESTS = {name for name in dir(TrackerSuite) if name.startswith("test_")}

DECLARED = "test_the_declarations_hold"
NAME = "test_it_has_a_name_and_flags"
ARGUMENTS = "test_it_is_made_without_arguments"
IMPORTS = "test_making_one_imports_no_service"
USABLE = "test_it_can_be_used"
NUMBERS = "test_numbers_come_back"
NONFINITE = "test_numbers_that_are_not_finite_come_back"
TEXTS = "test_texts_come_back"
NAMES = "test_names_come_back"
ODD_NAMES = "test_odd_names_are_kept_or_told"
LARGE = "test_large_numbers_come_back"
ODD_CONFIG = "test_an_odd_configuration_comes_back"
STEPS = "test_no_step_is_lost"
MANY = "test_a_thousand_records_come_back"
ELSE = "test_nothing_else_comes_back"
CONFIG = "test_the_configuration_comes_back"
IMAGES = "test_images_come_back"
TABLES = "test_tables_come_back"
HISTOGRAMS = "test_histograms_come_back"
FLUSHED = "test_what_was_flushed_can_be_read"
LATE = "test_what_is_logged_after_a_flush_comes_back"
END = "test_the_end_is_told"
STATE = "test_the_state_is_json"
RESUMED = "test_a_resumed_run_goes_on"
TWO = "test_two_runs_do_not_mix"
STREAMS = "test_random_streams_stay"
PROCESS = "test_the_process_stays_as_it_was"
PRINTED = "test_nothing_is_printed"
FILES = "test_files_are_in_the_folder_of_the_run"
OPTION = "test_an_unknown_option_of_a_run_is_refused"
RECORD_OPTION = "test_an_unknown_option_of_a_record_is_refused"
SERVICE = "test_the_services_own_object_is_given"
OBJECTS = "test_objects_of_others_are_refused"

CAUGHT_BY = {
    wrong.Right: set(),
    wrong.DrawsANameAtItsStart: set(),  # the core restores the streams there
    wrong.HasABlankInItsName: {NAME},
    wrong.HasATextForAFlag: {NAME},
    wrong.WantsAnArgument: {ARGUMENTS},
    wrong.ImportsItsServiceWhenItIsMade: {IMPORTS},
    wrong.ImportsItsServiceToLookForIt: {IMPORTS},
    wrong.SaysThatItCannotBeUsed: {USABLE},
    wrong.Rounds: {NUMBERS},
    wrong.KeepsNumbersAsTexts: {NUMBERS},
    wrong.LeavesOutWhatIsNotFinite: {NONFINITE},
    wrong.RaisesOnWhatIsNotFinite: {NONFINITE},
    wrong.KeepsTheFirstLine: {TEXTS},
    wrong.DropsNumbersBesideTexts: {TEXTS},
    wrong.PutsDashesForBlanks: {NAMES, ODD_NAMES},
    wrong.DropsWhatHasNoName: {ODD_NAMES},
    wrong.TrimsNames: {ODD_NAMES},
    wrong.CutsNamesOff: {ODD_NAMES},
    wrong.RaisesOnTabs: {ODD_NAMES},
    wrong.LosesWhatStandsBesideARefusal: {ODD_NAMES},
    wrong.RenamesInSilence: {ODD_NAMES},
    wrong.RenamesWithAWarning: set(),
    wrong.RefusesWhatHasNoName: set(),
    wrong.CutsNumbersOff: {LARGE},
    wrong.ConfiguresWithoutUnderscores: {ODD_CONFIG},
    wrong.RenamesTheConfigurationWithAWarning: set(),
    wrong.RefusesAnOddConfiguration: {ODD_NAMES, LARGE, ODD_CONFIG},
    wrong.KnowsNoWayBack: {STEPS},
    wrong.KeepsOneValueForAStep: {STEPS, FLUSHED},  # a value that was flushed is gone in the end
    wrong.KeepsHundredValuesOfAName: {MANY},
    wrong.RecordsTheLoadToo: {ELSE},
    wrong.MakesASecondRun: {ELSE, RESUMED},
    wrong.ConfiguresTheTopLevelAlone: {CONFIG, ODD_CONFIG},
    wrong.ConfiguresWithoutNone: {CONFIG},
    wrong.SwapsColours: {IMAGES},
    wrong.KeepsOneImageOfEach: {IMAGES},
    wrong.DrawsNothing: {IMAGES},
    wrong.TransposesTables: {TABLES},
    wrong.NormalisesHistograms: {HISTOGRAMS},
    wrong.MovesBins: {HISTOGRAMS},
    wrong.FlushesOnce: {LATE},
    wrong.FlushesNothing: {FLUSHED},
    wrong.SaysThatItFinished: {END},
    wrong.LosesAllWhenItFails: {END, RESUMED},
    wrong.HasAnObjectForItsState: {STATE},
    wrong.HasNoStateAtAll: {STATE},
    wrong.StartsAnew: {RESUMED},
    wrong.ForgetsWhatCameBefore: {RESUMED},
    wrong.SharesItsConfiguration: {TWO},
    wrong.RecordsWhereTheLastOneDoes: {END, RESUMED, TWO},
    wrong.RefusesASecondRun: {TWO},
    wrong.CannotGoOn: {END, RESUMED, TWO},  # a second run is to be beside the resumed one
    wrong.DrawsNames: {STREAMS},
    wrong.SetsAVariable: {PROCESS},
    wrong.HooksExceptions: {PROCESS},
    wrong.ReplacesExit: {PROCESS},
    wrong.PatchesImports: {PROCESS},
    wrong.SettlesHowProcessesStart: {PROCESS},
    wrong.SilencesAnotherLogger: {PROCESS},
    wrong.LeavesAThread: {PROCESS},
    wrong.LeavesAProcess: {PROCESS},
    wrong.HasAThreadOfItsOwn: set(),
    wrong.Prints: {PRINTED},
    wrong.WritesIntoTheWorkingDirectory: {FILES},
    wrong.TakesAnyOptionOfARun: {OPTION},
    wrong.RefusesWithoutAName: {OPTION, RECORD_OPTION},
    wrong.TakesAnyOptionOfARecord: {RECORD_OPTION},
    wrong.HidesItsService: {SERVICE},
    wrong.TakesEverything: {OBJECTS},
    wrong.RaisesInStart: TESTS - {DECLARED, NAME, ARGUMENTS, IMPORTS, USABLE, OBJECTS},
    wrong.RaisesInFinish: {END, TWO},
}


@pytest.fixture(scope="module")
def imported():
    """What each class imports, from one process for all: it takes seconds."""
    return dict(zip(CAUGHT_BY, imports(*CAUGHT_BY), strict=True))


@pytest.fixture(scope="module")
def suites(imported):
    """For each class a suite, which keeps what it has seen."""
    return {kind: suite_of(kind, imported) for kind in CAUGHT_BY}


@pytest.fixture
def process_put_back():
    environment, hooks = dict(os.environ), (sys.excepthook, sys.exit, builtins.__import__)
    yield
    os.environ.clear()
    os.environ.update(environment)
    sys.excepthook, sys.exit, builtins.__import__ = hooks
    logging.getLogger("asyncio").setLevel(logging.NOTSET)
    multiprocessing.set_start_method(None, force=True)
    while wrong.LeavesAThread.left:
        wrong.LeavesAThread.left.pop().set()
    while wrong.LeavesAProcess.left:
        wrong.LeavesAProcess.left.pop().communicate(b"\n")


def suite_of(kind, imported, **attributes):
    tracker = made_with_an_address if kind is wrong.WantsAnArgument else kind
    suite = type("TestIt", (TrackerSuite,), {"tracker": tracker, "read": lambda _, run: wrong.read(run), **attributes})
    suite._seen["imports"] = imported[kind]
    return suite


def failures(suite, tests=TESTS):
    found = {}
    for name in sorted(tests):
        try:
            getattr(suite(), name)()
        except (AssertionError, RuntimeError) as error:
            found[name] = str(error)
    return found


@pytest.mark.usefixtures("process_put_back")
@pytest.mark.parametrize("tracker", CAUGHT_BY, ids=lambda tracker: tracker.__name__)
def test_a_wrong_tracker_is_caught_by_exactly_the_tests_that_should(tracker, suites):
    found = failures(suites[tracker])
    assert found.keys() == CAUGHT_BY[tracker], found


def test_every_wrong_tracker_stands_in_the_table_and_every_test_catches_somebody():
    defined = {kind for kind in vars(wrong).values() if isinstance(kind, type) and issubclass(kind, wrong.Right)}
    assert defined == CAUGHT_BY.keys()
    narrow = [tests for kind, tests in CAUGHT_BY.items() if kind is not wrong.RaisesInStart]
    assert set().union(*narrow) == TESTS - {DECLARED}


@pytest.mark.usefixtures("process_put_back")
@pytest.mark.parametrize(
    ("tracker", "test", "message"),
    [
        (wrong.HasABlankInItsName, NAME, "name is 'my tracker', and it was asked for as "),
        (wrong.HasATextForAFlag, NAME, "main_process_only are (True, 'no'): give True or False"),
        (wrong.WantsAnArgument, ARGUMENTS, "The constructor requires url. Give each option a default."),
        (wrong.ImportsItsServiceWhenItIsMade, IMPORTS, "imports unwanted_service. Import in start()."),
        (wrong.SaysThatItCannotBeUsed, USABLE, "unusable() returned 'it is not installed'. Return None where"),
        (wrong.Rounds, NUMBERS, "numbers: of 'loss' 2 records did not come back, such as [(0, 0.3333333333333333), "),
        (wrong.RaisesOnWhatIsNotFinite, NONFINITE, "nonfinite: the tracker raised\nTraceback"),
        (wrong.RecordsTheLoadToo, ELSE, "system/load came back, and nobody logged it. Switch off"),
        (wrong.MakesASecondRun, ELSE, "One run was recorded, and the service shows 2."),
        (
            wrong.ConfiguresWithoutNone,
            CONFIG,
            "The configuration has 'checkpoint': None, and 'nothing' came back. Store it",
        ),
        (
            wrong.DrawsNothing,
            IMAGES,
            "NotImplementedError\n\nDeclare what it cannot do: lacks = {'test_…': 'the reason'}.",
        ),
        (
            wrong.DropsWhatHasNoName,
            ODD_NAMES,
            "10.0 was logged under the name '' at step 0, and it is nowhere, of which nothing was said. Warn of the other name, with",
        ),
        (
            wrong.TrimsNames,
            ODD_NAMES,
            "under the name ' x' at step 0, and it is recorded as ['x'], of which nothing was",
        ),
        (wrong.RaisesOnTabs, ODD_NAMES, "odd names at step 0: the tracker raised\nTraceback"),
        (wrong.LosesWhatStandsBesideARefusal, ODD_NAMES, "Beside odd names and after them: of 'before' 2 records did"),
        (wrong.CutsNumbersOff, LARGE, "large: of 'beyond' 1 records did not come back"),
        (wrong.ConfiguresWithoutUnderscores, ODD_CONFIG, "The configuration has '_target_': 'package.Class', and {"),
        (wrong.SettlesHowProcessesStart, PROCESS, "the start method of multiprocessing (None → 'spawn')"),
        (wrong.SilencesAnotherLogger, PROCESS, "the level of the logger 'asyncio' (0 → 50)"),
        (wrong.LeavesAThread, PROCESS, "the end of all runs: the tracker changed thread 'left'"),
        (wrong.FlushesNothing, FLUSHED, "there were of 'loss' 0 of 4, 'samples' 0 of 4"),
        (wrong.SaysThatItFinished, END, "after finish(True) the runs are shown as finished and finished"),
        (wrong.HasNoStateAtAll, STATE, "state() returned None. Return a dict of texts"),
        (
            wrong.StartsAnew,
            RESUMED,
            "A run was resumed, and now the service shows 2. start() goes on where state() says.",
        ),
        (wrong.ForgetsWhatCameBefore, RESUMED, "Resuming: of 'continued' 2 records did not come back"),
        (wrong.SharesItsConfiguration, TWO, "and (24, 24) came back. Keep everything on the object"),
        (wrong.RecordsWhereTheLastOneDoes, TWO, "A second run beside the first has ['continued'] of its names"),
        (wrong.RefusesASecondRun, TWO, "start (beside): the tracker raised\nTraceback"),
        (wrong.CannotGoOn, RESUMED, "RuntimeError: the run has ended\n\nDeclare what it cannot do"),
        (wrong.DrawsNames, STREAMS, "numbers: the tracker changed the state of random ("),
        (wrong.HooksExceptions, PROCESS, "start: the tracker changed sys.excepthook ("),
        (wrong.SetsAVariable, PROCESS, "os.environ['RIGHT_RUN'] (absent → '1')"),
        (wrong.Prints, PRINTED, "This was printed: 'View the run here\\nView"),
        (
            wrong.WritesIntoTheWorkingDirectory,
            FILES,
            "Outside of run.directory lie elsewhere/right.log. Write there alone.",
        ),
        (
            wrong.TakesAnyOptionOfARun,
            OPTION,
            "start(run) was given no_such_option=1, and took it. Raise a TypeError or",
        ),
        (wrong.RefusesWithoutAName, OPTION, "ValueError: unknown option"),
        (wrong.TakesAnyOptionOfARecord, RECORD_OPTION, "log() was given no_such_option=1, and took it."),
        (wrong.HidesItsService, SERVICE, "tracker is None after start(). Return the service's own object for the run."),
        (
            wrong.TakesEverything,
            OBJECTS,
            "records(object()) is True. Return True for the service's own types, else False.",
        ),
        (wrong.RaisesInStart, NUMBERS, "The tracker could not be observed:\nTraceback"),
        (wrong.RaisesInFinish, END, "finish (ended): the tracker raised"),
    ],
)
def test_a_failure_says_what_came_and_what_to_do(tracker, test, message, suites):
    (said,) = failures(suites[tracker], {test}).values()
    assert message in said


def raise_in_reading(_, written):
    raise OSError(f"{written.is_open} is locked")


def test_a_reader_that_fails_is_told_with_its_moment(imported):
    suite = suite_of(wrong.Right, imported, read=raise_in_reading)
    (said,) = failures(suite, {FLUSHED}).values()
    assert said.startswith("Reading back failed (ended):")
    assert "OSError: False is locked" in said


def test_what_makes_no_tracker_is_told(imported):
    suite = type("TestIt", (TrackerSuite,), {"tracker": dict, "read": raise_in_reading})
    with pytest.raises(AssertionError, match=r"made a dict\. The suite is about accel_core\.Tracker\."):
        suite().test_it_can_be_used()


def test_a_class_that_cannot_be_imported_anew_is_told():
    class Local(wrong.Right):
        pass

    with pytest.raises(
        RuntimeError, match=r"Local is defined inside a function, .* Define it at the level of a module"
    ):
        imports(Local)


def test_a_fresh_process_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(
        RuntimeError, match=r"A fresh process was to import \[\[\"wrong_trackers\", \"Right\"\]\], and make"
    ):
        imports(wrong.Right)


class InSinglePrecision(wrong.Right):
    def record(self, kind, name, step, value):
        super().record(kind, name, step, torch.tensor(value).item() if kind == "numbers" else value)


def test_numbers_are_compared_in_the_precision_that_is_declared(imported):
    imported = imported | {InSinglePrecision: []}
    assert not failures(suite_of(InSinglePrecision, imported, precision="float32"))
    assert failures(suite_of(InSinglePrecision, imported)).keys() == {NUMBERS}


@pytest.mark.usefixtures("process_put_back")
def test_what_a_service_leaves_behind_may_be_declared(imported):
    left = {"os.environ['RIGHT_": "its child processes read it"}
    assert not failures(suite_of(wrong.SetsAVariable, imported, leaves_behind=left))


def test_options_of_a_run_may_name_a_folder(imported):
    given = []

    class Asks(wrong.Right):
        def start(self, run):
            given.append((run.run_id, run.options["place"], run.options["place"].is_dir()))
            super().start(replace(run, options={name: run.options[name] for name in run.options if name != "place"}))

    options = {"options": lambda _, folder: {"place": folder}}
    assert not failures(suite_of(Asks, imported | {Asks: []}, **options))
    (first, first_folder, _), (again, again_folder, _), (other, other_folder, _) = given[:3]
    assert first == again != other
    assert first_folder == again_folder != other_folder
    assert all(exists for *_, exists in given)


def test_a_second_run_is_not_tried_where_two_mix(imported):
    suite = suite_of(wrong.RecordsWhereTheLastOneDoes, imported, lacks={TWO: "the service has one run at a time"})
    assert failures(suite, TESTS - {TWO}) == {}
    assert "beside" not in suite()._facts().read


@pytest.mark.parametrize("name", [NUMBERS, DECLARED, "_facts"])
def test_overriding_what_is_inherited_is_refused(name, imported):
    suite = suite_of(wrong.Right, imported, **{name: lambda self: None})
    with pytest.raises(AssertionError, match=f"TestIt overrides {name} of TrackerSuite, so what it proves is not the"):
        TrackerSuite.test_the_declarations_hold(suite())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"lacks": {"test_sounds_come_back": "why"}},
            "lacks names test_sounds_come_back, which the suite does not have.",
        ),
        ({"lacks": {DECLARED: "why"}}, f"lacks names {DECLARED}, which the suite does not have."),
        ({"lacks": {IMAGES: " "}}, f"gives no reason for {IMAGES}. Say why"),
        ({"leaves_behind": {"sys.excepthook": ""}}, "gives no reason for sys.excepthook."),
        ({"precision": "double"}, "precision is 'double': give 'float64' or 'float32'."),
        ({"read": TrackerSuite.read}, "lacks tracker = ..., or the method `read`, which is given a Written"),
    ],
    ids=["unknown test", "this test", "no reason", "no reason either", "precision", "no reader"],
)
def test_a_declaration_that_does_not_hold_is_refused(attributes, message, imported):
    with pytest.raises(AssertionError, match=re.escape(message)):
        suite_of(wrong.Right, imported, **attributes)().test_the_declarations_hold()


PLUGIN_TESTS = """
import wrong_trackers as wrong
from accel_testing import TrackerSuite

class TestDraws(TrackerSuite):
    tracker = wrong.DrawsNothing
    lacks = {"test_images_come_back": "it draws nothing", "test_tables_come_back": "a lack that has vanished"}

    def read(self, written):
        return wrong.read(written)

class TestMore(TestDraws):
    lacks = {}
"""


def test_a_lack_has_to_fail_and_is_not_inherited_by_those_who_declare_their_own(pytester):
    pytester.makepyfile(PLUGIN_TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "images or tables or texts or declarations")
    result.assert_outcomes(passed=5, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*a lack that has vanished*"])
    result.stdout.fnmatch_lines(["FAILED *TestMore::test_images_come_back*"])
