"""The contract of a tracker, as a suite of tests to inherit.

    from accel_testing import Recorded, TrackerSuite, Written
    from my_package import MyTracker

    class TestMyTracker(TrackerSuite):
        tracker = MyTracker

        def read(self, written: Written) -> Recorded:
            run = my_service.open(written.run.directory)
            return Recorded(numbers=..., texts=..., config=...)

Each test proves one sentence of the contract in `accel_core.tracking.tracker`. Four runs are
recorded, in threads of their own as the core does it: one with everything in it, the same one
resumed, another beside that, and one of odd names. What was recorded is compared, all of it, with
what `read` finds by means of the service itself. It needs pytest and no plugin of it, and runs in
pytest's own process, so fixtures that keep a service offline hold.

What cannot be done is declared, with the reason, and then has to fail:

    lacks = {"test_histograms_come_back": "the service knows none"}

The suite is about `Tracker`. A `GeneralTracker`, the older spelling, has no such contract.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from accel_core import RecordRefusedError, Tracker
from accel_core.api.launcher import find
from accel_testing import tracker_observations as given
from accel_testing.shared_launch import Raised
from accel_testing.suite import require, require_declared, require_reasons
from accel_testing.tracker_comparison import (
    Same,
    alike,
    compare,
    flat,
    in_precision,
    same_bins,
    same_image,
    same_table,
)
from accel_testing.tracker_jobs import Scene, imports
from accel_testing.tracker_observations import Declarations, Facts, Recorded

TWO_RUNS = "test_two_runs_do_not_mix"


class TrackerSuite(Declarations):
    """The tests of a tracker. Subclass it as `Test…`, set `tracker`, and implement `read`.

    Attributes:
        tracker: the name of an installed tracker, or what makes one without arguments.
        lacks: for the name of an inherited test why it fails.
        precision: in which the service keeps numbers.
        leaves_behind: beginnings of what the service changes in the process for good, such as
            "os.environ['X", → the reason.
    """

    _seen: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._seen = {}
        for name, test in _tests().items():
            if name not in vars(cls) and name != "test_the_declarations_hold":
                setattr(cls, name, _failing(test, cls.lacks[name]) if name in cls.lacks else test)

    def test_the_declarations_hold(self) -> None:
        """Tests are inherited, lacks have reasons, and there are a tracker and a reader."""
        cls = type(self)
        own = [name for name, member in vars(TrackerSuite).items() if inspect.isfunction(member)]
        overridden = [name for name in own if inspect.unwrap(getattr(cls, name)) is not vars(TrackerSuite)[name]]
        require_declared(cls, TrackerSuite, "tracker", overridden, {*_tests()} - {"test_the_declarations_hold"})
        require_reasons(f"{cls.__name__}.leaves_behind", cls.leaves_behind)
        require(
            cls.precision in {"float64", "float32"},
            f"{cls.__name__}.precision is {cls.precision!r}: give 'float64' or 'float32'.",
        )
        require(
            hasattr(cls, "tracker") and cls.read is not Declarations.read,
            f"{cls.__name__} lacks tracker = ..., or the method `read`, which is given a Written and returns a Recorded.",
        )

    def test_it_has_a_name_and_flags(self) -> None:
        """The name is that of its entry point, and can be written in a command."""
        tracker, asked = self._make(), type(self).tracker
        require(
            re.fullmatch(r"[A-Za-z][\w-]*", tracker.name) is not None
            and asked in (tracker.name, asked if callable(asked) else ""),
            f"name is {tracker.name!r}, and it was asked for as {asked!r}. Begin with a letter, go on with letters, digits, _ and -, "
            f"and offer it under that name.",
        )
        flags = tracker.requires_logging_directory, tracker.main_process_only
        require(
            all(isinstance(flag, bool) for flag in flags),
            f"requires_logging_directory and main_process_only are {flags}: give True or False.",
        )

    def test_it_is_made_without_arguments(self) -> None:
        """Every option has a default."""
        variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        parameters = inspect.signature(type(self._make())).parameters.values()
        required = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
        require(not required, f"The constructor requires {', '.join(required)}. Give each option a default.")

    def test_making_one_imports_no_service(self) -> None:
        """Nor does its module, nor `unusable`: `start` does."""
        if "imports" not in type(self)._seen:
            type(self)._seen["imports"] = imports(type(self._make()))[0]
        imported = type(self)._seen["imports"]
        require(not imported, f"Importing and making the tracker imports {', '.join(imported)}. Import in start().")

    def test_it_can_be_used(self) -> None:
        """`unusable` says why not, as a text; here there is no reason."""
        reason = self._make().unusable()
        require(reason is None, f"unusable() returned {reason!r}. Return None where the tracker can be used, as here.")

    def test_numbers_come_back(self) -> None:
        """Each with its step, to the precision of the service."""
        self._compare("numbers", "numbers")

    def test_numbers_that_are_not_finite_come_back(self) -> None:
        """And do not take those beside them along."""
        self._compare("nonfinite", "numbers")

    def test_texts_come_back(self) -> None:
        """With their lines and letters, in one record with numbers."""
        self._compare("texts", "numbers")
        self._compare("texts", "texts")

    def test_names_come_back(self) -> None:
        """With spaces, slashes and letters of all kinds; those that are alike stay two."""
        self._compare("names", "numbers")

    def test_no_step_is_lost(self) -> None:
        """Steps may come again, and may go back."""
        self._compare("steps", "numbers")

    def test_a_thousand_records_come_back(self) -> None:
        """Nothing is thinned out."""
        self._compare("many", "numbers")

    def test_nothing_else_comes_back(self) -> None:
        """The run has no values that the user did not log, and the service no other run."""
        found = self._read("ended")
        logged = {name for records in given.LOGGED.values() for _, values in records for name in values}
        others = sorted({*found.numbers, *found.texts} - logged - {given.UNKNOWN})
        require(
            not others,
            f"{', '.join(others)} came back, and nobody logged it. Switch off what a service records by itself.",
        )
        require(found.runs == 1, f"One run was recorded, and the service shows {found.runs}.")

    def test_the_configuration_comes_back(self) -> None:
        """All of it, readable: nested, with lists, None and long texts."""
        found = self._read("ended").config
        for name, value in flat(given.CONFIG):
            came = found.get(name, "nothing")
            require(
                name in found and alike(value, came),
                f"The configuration has {name!r}: {value!r:.200}, and {came!r:.200} came back. Store it where it is shown.",
            )

    def test_odd_names_are_kept_or_told(self) -> None:
        """Empty, of dots, with tabs or blanks, long: recorded, or renamed by a warning, or refused.

        What is logged beside it and after it is there.
        """
        self._reject("start (odd)", "after")
        for moment in given.ODD_CALLS:
            raised = self._facts().raised.get(moment)
            if raised is not None and raised.kind != RecordRefusedError.__name__:
                self._reject(moment)
        found = self._read("odd").numbers
        for step, values in given.ODD_LOGGED:
            for name in given.ODD_NAMES:
                self._require_told(found, name, step, values[name])
        beside = [(step, {"before": values["before"]}) for step, values in given.ODD_LOGGED]
        compare(found, beside + given.AFTER, self._number, "Beside odd names and after them")

    def test_large_numbers_come_back(self) -> None:
        """Integers of 64 bits, and floats beyond them, as near as the service has them."""
        self._reject("start (odd)")
        self._compare("large", "numbers", "odd")

    def test_an_odd_configuration_comes_back(self) -> None:
        """Names that are empty or begin with "_", at any depth; changed ones are in a warning."""
        self._reject("start (odd)")
        found, said = self._read("odd").config, "\n".join(self._facts().said)
        for name, value in flat(given.ODD_CONFIG):
            there = [other for other, came in found.items() if alike(value, came)]
            told = [other for other in there if other.rpartition("/")[2] and other.rpartition("/")[2] in said]
            require(
                name in there or bool(told),
                f"The configuration has {name!r}: {value!r}, and {found!r:.400} came back. Store it, under a name that a warning tells if "
                f"it is another one.",
            )

    def test_images_come_back(self) -> None:
        """With 1, 3 and 4 channels, and several under one name."""
        self._compare("images", "images")

    def test_tables_come_back(self) -> None:
        """Each cell, and a table without rows."""
        self._compare("tables", "tables")

    def test_histograms_come_back(self) -> None:
        """Their counts and edges."""
        self._compare("histograms", "histograms")

    def test_what_was_flushed_can_be_read(self) -> None:
        """Before the run is finished."""
        self._reject("flush")
        counts = [
            {
                name: len(records)
                for name, records in self._read(moment).numbers.items()
                if name not in (given.UNKNOWN, "late")
            }
            for moment in ("ended", "flushed")
        ]
        late = [
            f"{name!r} {counts[1].get(name, 0)} of {count}"
            for name, count in counts[0].items()
            if counts[1].get(name) != count
        ]
        require(
            bool(counts[0]) and not late,
            f"After flush(), of the numbers that came back in the end, there were of {', '.join(late) or 'none'}.",
        )

    def test_what_is_logged_after_a_flush_comes_back(self) -> None:
        """A run goes on after `save_state`, which flushes."""
        self._compare("late", "numbers")

    def test_the_end_is_told(self) -> None:
        """A run that failed is not shown as one that finished, and keeps its values."""
        self._reject("finish (ended)", "start (resumed)", "finish (resumed)")
        found = self._read("ended"), self._read("resumed")
        ends = found[0].ended, found[1].ended
        require(
            ends[0] in (None, "finished") and ends[1] in (None, "failed"),
            f"After finish(False) and after finish(True) the runs are shown as {ends[0]} and {ends[1]}.",
        )
        compare(found[1].numbers, given.LOGGED_RESUMED, self._number, "finish(True)", given.LOGGED[given.GOES_ON])

    def test_the_state_is_json(self) -> None:
        """So that a checkpoint can hold it."""
        self._reject("state")
        state = self._facts().state
        try:
            same = isinstance(state, dict) and json.loads(json.dumps(state, allow_nan=False)) == state
        except (TypeError, ValueError):
            same = False
        require(
            same, f"state() returned {state!r}. Return a dict of texts, numbers, lists and dicts: it travels as JSON."
        )

    def test_a_resumed_run_goes_on(self) -> None:
        """It is one run: what came before the checkpoint stays; later records may be replaced."""
        self._reject("start (resumed)", "log (resumed or beside)")
        found, at = self._read("resumed"), given.RESUMED_AT
        require(
            found.runs == 1,
            f"A run was resumed, and now the service shows {found.runs}. start() goes on where state() says.",
        )
        before = [(step, values) for step, values in given.LOGGED[given.GOES_ON] if step < at]
        superseded = [(step, values) for step, values in given.LOGGED[given.GOES_ON] if step >= at]
        compare(found.numbers, before + given.LOGGED_RESUMED, self._number, "Resuming", superseded)

    def test_two_runs_do_not_mix(self) -> None:
        """Each has its own values and configuration; two trackers know nothing of each other."""
        require(TWO_RUNS not in self.lacks, "Two runs were not tried at once, because lacks says that they mix.")
        self._reject("start (resumed)", "start (beside)", "log (resumed or beside)", "finish (beside)")
        found, other = self._read("beside"), self._read("resumed")
        compare(found.numbers, given.LOGGED_BESIDE, self._number, "A second run")
        strange = (
            sorted({*found.numbers, *found.texts} & {"samples", "note", given.GOES_ON}),
            [record for record in other.numbers.get("loss", ()) if record[1] > 100],
        )
        layers = found.config.get("layers"), other.config.get("layers")
        require(
            strange == ([], []) and alike(24, layers[0]) and alike(12, layers[1]),
            f"A second run beside the first has {strange[0]} of its names, and the first has {strange[1]} of its values. They have 24 and 12 "
            f"layers, and {layers} came back. Keep everything on the object, and nothing in the service's globals.",
        )

    def test_random_streams_stay(self) -> None:
        """After `start`, behind which the core restores them: training goes on meanwhile."""
        moments = {moment: what for moment, what in self._facts().changed.items() if not moment.startswith("start")}
        self._require_unchanged(
            moments, lambda name: name.startswith("the state of"), "Draw from a generator of your own."
        )

    def test_the_process_stays_as_it_was(self) -> None:
        """Environment, folder, signals, hooks, output, log, warnings, dtype, start method.

        No thread or process is left at the end.
        """
        advice = "Switch it off, or declare what cannot be helped: leaves_behind = {'sys.excepthook': 'the reason'}."
        self._require_unchanged(self._facts().changed, lambda name: not name.startswith("the state of"), advice)

    def test_nothing_is_printed(self) -> None:
        """Standard output is the program's."""
        printed = self._facts().printed
        require(not printed, f"This was printed: {printed[:500]!r}. Use logging.")

    def test_files_are_in_the_folder_of_the_run(self) -> None:
        """A tracker that requires a folder writes nothing outside of it."""
        strays = self._facts().strays if self._make().requires_logging_directory else []
        require(not strays, f"Outside of run.directory lie {', '.join(strays[:5])}. Write there alone.")

    def test_an_unknown_option_of_a_run_is_refused(self) -> None:
        """By `start`, with its name."""
        self._require_refused(self._scene().refusal(), "start(run)", "run.options")

    def test_an_unknown_option_of_a_record_is_refused(self) -> None:
        """By `log`, with its name."""
        self._require_refused(self._facts().raised.get("unknown option"), "log()", "the options")

    def test_the_services_own_object_is_given(self) -> None:
        """By `tracker`, from `start` on."""
        self._reject("tracker")
        require(
            self._facts().service is not None,
            "tracker is None after start(). Return the service's own object for the run.",
        )

    def test_objects_of_others_are_refused(self) -> None:
        """`records` knows the service's own types."""
        found = self._make().records(object())
        require(found is False, f"records(object()) is {found!r}. Return True for the service's own types, else False.")

    def _make(self) -> Tracker:
        tracker = type(self).tracker
        made = (find("accel.trackers", tracker).load() if isinstance(tracker, str) else tracker)()
        require(
            isinstance(made, Tracker),
            f"{tracker!r} made a {type(made).__name__}. The suite is about accel_core.Tracker.",
        )
        assert isinstance(made, Tracker)
        return made

    def _scene(self) -> Scene:
        return Scene(self._make, self.read, self.options, TWO_RUNS not in self.lacks)

    def _facts(self) -> Facts:
        seen = type(self)._seen
        if "facts" not in seen:
            try:
                seen["facts"] = self._scene().observe()
            except Exception as error:  # noqa: BLE001  (of `start`, most often: it is told by each test, and not tried again)
                seen["facts"] = Raised.by(error)
        facts = seen["facts"]
        require(isinstance(facts, Facts), f"The tracker could not be observed:\n{getattr(facts, 'text', '')}")
        assert isinstance(facts, Facts)
        return facts

    def _reject(self, *moments: str) -> None:
        for moment in moments:
            raised = self._facts().raised.get(moment)
            require(
                raised is None,
                f"{moment}: the tracker raised\n{getattr(raised, 'text', '')}\nDeclare what it cannot do: lacks = {{'test_…': 'the reason'}}.",
            )

    def _require_told(self, found: Mapping[str, Sequence[tuple[int, Any]]], name: str, step: int, value: float) -> None:
        places = [other for other, records in found.items() for at, came in records if at == step and came == value]
        said = [text for text in self._facts().said if repr(name) in text]
        if not places and not said:
            problem = "it is nowhere, of which nothing was said"
        elif len(places) > 1 or (places and places != [name] and not any(repr(places[0]) in text for text in said)):
            problem = f"it is recorded as {places!r:.400}, of which nothing was said"
        else:
            return
        raise AssertionError(
            f"{value} was logged under the name {name!r:.400} at step {step}, and {problem}. Warn of the other name, with the repr of both, "
            f"or raise RecordRefusedError with that of the name."
        )

    def _read(self, moment: str) -> Recorded:
        found = self._facts().read[moment]
        require(isinstance(found, Recorded), f"Reading back failed ({moment}):\n{getattr(found, 'text', '')}")
        assert isinstance(found, Recorded)
        return found

    def _compare(self, part: str, kind: str, moment: str = "ended") -> None:
        """Compares a part of what was recorded, all its records of one kind."""
        self._reject(part)
        numbers = self._number
        same: dict[str, Same] = {
            "numbers": numbers,
            "texts": operator.eq,
            "images": same_image,
            "tables": same_table,
            "histograms": same_bins(numbers),
        }
        compare(getattr(self._read(moment), kind), given.expected(part, kind), same[kind], part)

    @property
    def _number(self) -> Same:
        return in_precision(getattr(torch, self.precision))

    def _require_unchanged(
        self, moments: Mapping[str, Sequence[str]], concerns: Callable[[str], bool], advice: str
    ) -> None:
        for moment, changes in moments.items():
            left = [name for name in changes if concerns(name) and not name.startswith(tuple(self.leaves_behind))]
            require(not left, f"{moment}: the tracker changed {'; '.join(left)}. {advice}")

    @staticmethod
    def _require_refused(raised: Raised | None, call: str, where: str) -> None:
        refused = raised is not None and raised.kind in {"TypeError", "ValueError"} and given.UNKNOWN in raised.message
        require(
            refused,
            f"{call} was given {given.UNKNOWN}=1, and {'took it' if raised is None else 'raised ' + raised.text}. Raise a TypeError or "
            f"ValueError that names what is unknown in {where}.",
        )


def _tests() -> dict[str, Any]:
    return {name: member for name, member in vars(TrackerSuite).items() if name.startswith("test_")}


def _failing(test: Callable[[Any], None], reason: str) -> Callable[[Any], None]:
    """The test, which has to fail."""
    import pytest  # here, because ranks import this package too

    @functools.wraps(test)
    def attempt(self: Any) -> None:
        test(self)

    marked: Callable[[Any], None] = pytest.mark.xfail(reason=reason, strict=True)(attempt)
    return marked
