"""Trackers with a service that is a dict, and wrong in one place each: the suite has to tell them apart."""

from __future__ import annotations

import builtins
import logging
import math
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel_core import RecordRefusedError, Table, Tracker
from accel_testing import Recorded

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What the service holds of one run."""

    config: dict
    records: list = field(default_factory=list)  # (kind, name, step, value)
    ended: str | None = None


SERVICE: dict[Path, list[Run]] = {}
"""By the folder of a run: those that were made for it."""


def read(written):
    """The service's own reader."""
    runs = SERVICE[written.run.directory]
    found = {kind: {} for kind in ("numbers", "texts", "images", "tables", "histograms")}
    for run in runs:
        for kind, name, step, value in run.records:
            found[kind].setdefault(name, []).append((step, value))
    return Recorded(**found, config=dict(leaves(runs[0].config)), ended=runs[-1].ended, runs=len(runs))


def leaves(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


class Right(Tracker):
    name = "right"
    requires_logging_directory = True

    def __init__(self):
        self.run = None
        self.pending = []

    @property
    def tracker(self):
        return self.run

    def start(self, run):
        self.refuse(run.options)
        runs = SERVICE.setdefault(run.directory, [])
        if run.resumed is None:
            runs.append(Run(run.config))
        self.run = runs[run.resumed["number"] if run.resumed else 0]
        run.directory.mkdir(parents=True, exist_ok=True)
        (run.directory / "started").touch()

    def refuse(self, options):
        if options:
            raise TypeError(f"right takes no {', '.join(options)}")

    def state(self):
        return {"number": 0}

    def log(self, values, step, **options):
        self.refuse(options)
        for name, value in values.items():
            self.record("texts" if isinstance(value, str) else "numbers", name, step, value)

    def log_images(self, values, step, **options):
        for name, images in values.items():
            for image in images:
                self.record("images", name, step, image)

    def log_table(self, name, table, step, **options):
        self.record("tables", name, step, table)

    def log_histograms(self, values, step, **options):
        for name, bins in values.items():
            self.record("histograms", name, step, bins)

    def record(self, kind, name, step, value):
        self.pending.append((kind, name, step, value))

    def flush(self):
        self.run.records += self.pending
        self.pending = []

    def finish(self, failed):
        self.flush()
        self.run.ended = "failed" if failed else "finished"


class HasABlankInItsName(Right):
    name = "my tracker"


class HasATextForAFlag(Right):
    main_process_only = "no"


class WantsAnArgument(Right):
    def __init__(self, url):
        super().__init__()


class ImportsItsServiceWhenItIsMade(Right):
    def __init__(self):
        super().__init__()
        import unwanted_service  # noqa: F401


class ImportsItsServiceToLookForIt(Right):
    @classmethod
    def unusable(cls):
        import other_unwanted_service  # noqa: F401


class SaysThatItCannotBeUsed(Right):
    @classmethod
    def unusable(cls):
        return "it is not installed"


class Rounds(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name, step, round(value, 3) if isinstance(value, float) else value)


class KeepsNumbersAsTexts(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name, step, str(value) if name == "samples" else value)


class LeavesOutWhatIsNotFinite(Right):
    def log(self, values, step, **options):
        finite = {name: value for name, value in values.items() if isinstance(value, str) or abs(value) < float("inf")}
        super().log(finite, step, **options)


class RaisesOnWhatIsNotFinite(Right):
    def log(self, values, step, **options):
        if any(value != value for value in values.values()):
            raise ValueError("nan")
        super().log(values, step, **options)


class KeepsTheFirstLine(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name, step, value.splitlines()[0] if isinstance(value, str) else value)


class DropsNumbersBesideTexts(Right):
    def log(self, values, step, **options):
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        super().log(texts or values, step, **options)


class PutsDashesForBlanks(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name.replace(" ", "_"), step, value)


class DropsWhatHasNoName(Right):
    def record(self, kind, name, step, value):
        if name:
            super().record(kind, name, step, value)


class TrimsNames(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name.strip(), step, value)


class CutsNamesOff(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name[:255], step, value)


class RaisesOnTabs(Right):
    def record(self, kind, name, step, value):
        if "\t" in name:
            raise ValueError(f"{name!r} has a tab")
        super().record(kind, name, step, value)


class LosesWhatStandsBesideARefusal(Right):
    def log(self, values, step, **options):
        if "" in values:
            names = ", ".join(map(repr, values))
            raise RecordRefusedError(f"{names} cannot be recorded")
        super().log(values, step, **options)


class RenamesInSilence(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name or "unnamed", step, value)


class RenamesWithAWarning(Right):
    def record(self, kind, name, step, value):
        if not name:
            log.warning("%r is recorded as %r", name, "unnamed")
        super().record(kind, name or "unnamed", step, value)


class RefusesWhatHasNoName(Right):
    def log(self, values, step, **options):
        super().log({name: value for name, value in values.items() if name}, step, **options)
        if "" in values:
            raise RecordRefusedError("'' is no name")


class CutsNumbersOff(Right):
    def record(self, kind, name, step, value):
        super().record(kind, name, step, 2.0**63 if kind == "numbers" and 2.0**63 < value < math.inf else value)


class ConfiguresWithoutUnderscores(Right):
    def start(self, run):
        super().start(run)
        self.run.config = {name: value for name, value in run.config.items() if not name.startswith("_")}


class RenamesTheConfigurationWithAWarning(Right):
    def start(self, run):
        super().start(run)
        if "_target_" in run.config:
            log.warning("%r is configured as %r", "_target_", "target")
        self.run.config = {"target" if name == "_target_" else name: value for name, value in run.config.items()}


class RefusesAnOddConfiguration(Right):
    def start(self, run):
        if "" in run.config:
            raise ValueError("'' is no name")
        super().start(run)


class KnowsNoWayBack(Right):
    last = 0

    def log(self, values, step, **options):
        if step >= self.last:
            super().log(values, step, **options)
        self.last = max(self.last, step)


class KeepsOneValueForAStep(Right):
    def finish(self, failed):
        super().finish(failed)
        images = [record for record in self.run.records if record[0] == "images"]
        others = {record[:3]: record for record in self.run.records if record[0] != "images"}
        self.run.records[:] = [*others.values(), *images]


class KeepsHundredValuesOfAName(Right):
    def record(self, kind, name, step, value):
        if sum(1 for _, other, _, _ in self.pending if other == name) < 100:
            super().record(kind, name, step, value)


class RecordsTheLoadToo(Right):
    def start(self, run):
        super().start(run)
        self.record("numbers", "system/load", 0, 1.0)


class MakesASecondRun(Right):
    def start(self, run):
        super().start(run)
        SERVICE[run.directory].append(Run({}))


class ConfiguresTheTopLevelAlone(Right):
    def start(self, run):
        super().start(run)
        self.run.config = {name: value for name, value in run.config.items() if not isinstance(value, dict)}


class ConfiguresWithoutNone(Right):
    def start(self, run):
        super().start(run)
        self.run.config = {name: value for name, value in run.config.items() if value is not None}


class SwapsColours(Right):
    def log_images(self, values, step, **options):
        super().log_images({name: [image.flip(2) for image in images] for name, images in values.items()}, step)


class KeepsOneImageOfEach(Right):
    def log_images(self, values, step, **options):
        super().log_images({name: images[:1] for name, images in values.items()}, step)


class DrawsNothing(Right):
    log_images = Tracker.log_images


class TransposesTables(Right):
    def log_table(self, name, table, step, **options):
        super().log_table(name, Table(table.columns, tuple(zip(*table.rows, strict=True))), step)


class NormalisesHistograms(Right):
    def log_histograms(self, values, step, **options):
        scaled = {
            name: replace(bins, counts=tuple(n / sum(bins.counts) for n in bins.counts))
            for name, bins in values.items()
        }
        super().log_histograms(scaled, step)


class MovesBins(Right):
    def log_histograms(self, values, step, **options):
        moved = {name: replace(bins, edges=tuple(e + 1 for e in bins.edges)) for name, bins in values.items()}
        super().log_histograms(moved, step)


class FlushesOnce(Right):
    flushed = False

    def flush(self):
        if not self.flushed:
            super().flush()
        self.flushed = bool(self.run.records)


class FlushesNothing(Right):
    def flush(self):
        pass

    def finish(self, failed):
        Right.flush(self)
        super().finish(failed)


class SaysThatItFinished(Right):
    def finish(self, failed):
        super().finish(False)


class LosesAllWhenItFails(Right):
    def finish(self, failed):
        if failed:
            self.pending.clear()
        super().finish(failed)


class HasAnObjectForItsState(Right):
    def state(self):
        return {"number": 0, "folder": Path("here")}


class HasNoStateAtAll(Right):
    def state(self):
        return None

    def start(self, run):
        super().start(
            replace(run, resumed=None if run.resumed is None and not SERVICE.get(run.directory) else {"number": 0})
        )


class StartsAnew(Right):
    def start(self, run):
        super().start(replace(run, resumed=None))
        self.run = SERVICE[run.directory][-1]


class ForgetsWhatCameBefore(Right):
    def start(self, run):
        super().start(run)
        self.run.records.clear()


class SharesItsConfiguration(Right):
    config: dict = {}

    def start(self, run):
        super().start(run)
        SharesItsConfiguration.config.update(run.config)
        self.run.config = SharesItsConfiguration.config


class RecordsWhereTheLastOneDoes(Right):
    current: list = []

    def start(self, run):
        super().start(run)
        self.current.append(self.run)

    def flush(self):
        self.current[-1].records += self.pending
        self.pending = []


class RefusesASecondRun(Right):
    def start(self, run):
        if run.run_id == "second-run":
            raise RuntimeError("a run is going on")
        super().start(run)


class CannotGoOn(Right):
    def start(self, run):
        if run.resumed is not None:
            raise RuntimeError("the run has ended")
        super().start(run)


class DrawsNames(Right):
    def log(self, values, step, **options):
        random.random()
        super().log(values, step, **options)


class DrawsANameAtItsStart(Right):
    def start(self, run):
        random.random()
        super().start(run)


class SetsAVariable(Right):
    def start(self, run):
        super().start(run)
        os.environ["RIGHT_RUN"] = "1"


class HooksExceptions(Right):
    def start(self, run):
        super().start(run)
        sys.excepthook = lambda *exception: None


class ReplacesExit(Right):
    def start(self, run):
        super().start(run)
        sys.exit = lambda code=None: None


class PatchesImports(Right):
    def start(self, run):
        super().start(run)
        before = builtins.__import__
        builtins.__import__ = lambda *arguments, **options: before(*arguments, **options)


class SettlesHowProcessesStart(Right):
    def start(self, run):
        super().start(run)
        multiprocessing.set_start_method("spawn", force=True)


class SilencesAnotherLogger(Right):
    def start(self, run):
        super().start(run)
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)


class LeavesAThread(Right):
    left: list = []

    def finish(self, failed):
        super().finish(failed)
        self.left.append(threading.Event())
        threading.Thread(target=self.left[-1].wait, args=(60,), daemon=True, name="left").start()


class LeavesAProcess(Right):
    left: list = []

    def finish(self, failed):
        super().finish(failed)
        self.left.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


class HasAThreadOfItsOwn(Right):
    def start(self, run):
        super().start(run)
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, args=(60,)).start()

    def finish(self, failed):
        super().finish(failed)
        self.ended.set()


class Prints(Right):
    def finish(self, failed):
        super().finish(failed)
        print("View the run here")


class WritesIntoTheWorkingDirectory(Right):
    def start(self, run):
        super().start(run)
        Path("right.log").touch()


class TakesAnyOptionOfARun(Right):
    def start(self, run):
        super().start(replace(run, options={}))


class RefusesWithoutAName(Right):
    def refuse(self, options):
        if options:
            raise ValueError("unknown option")


class TakesAnyOptionOfARecord(Right):
    def log(self, values, step, **options):
        super().log(values, step)


class HidesItsService(Right):
    tracker = None


class TakesEverything(Right):
    def records(self, value):
        return True


class RaisesInStart(Right):
    def start(self, run):
        raise OSError("no server")


class RaisesInFinish(Right):
    def finish(self, failed):
        super().finish(failed)
        raise OSError("no server")
