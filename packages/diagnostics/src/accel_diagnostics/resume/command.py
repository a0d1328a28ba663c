"""`accel verify-resume script.py`: proves that a killed run goes on as if it had not been killed."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel_diagnostics.resume.launching import FOLDER, Script
from accel_diagnostics.resume.report import as_json, as_text
from accel_diagnostics.resume.trial import TrialError, run_trial

EXACT, DIFFERS, NO_ANSWER = 0, 1, 2  # exit statuses

_EPILOG = f"""The script runs three times and needs no change: once to its end; once until it is killed; and
once more, to resume from the checkpoints of the killed run. Then the samples of each step, the losses, and
the states of models, optimizers, schedulers and random generators are compared.

  accel verify-resume --resume-arguments=--resume train.py --steps 20 --save {FOLDER} --every 5

{FOLDER} among the script's arguments stands for a folder. The first two runs get a new one each; the
third gets that of the second. The options of verify-resume come before the script; arguments after it
belong to the script.

exit status: 0 the resumed run was exact; 1 it differs; 2 no verdict, with the reason"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify that a killed and resumed script trains exactly as if it had never stopped."""
    given = parser().parse_args(arguments)
    script = Script(
        kind="module" if given.module else "script",
        target=given.script,
        arguments=tuple(given.arguments),
        resuming=tuple(shlex.split(given.resume_arguments)),
        launching=tuple(shlex.split(given.launch_arguments)),
        own_directory=given.own_directory,
    )
    folder = tempfile.mkdtemp(prefix="verify-resume-") if given.keep is None else given.keep
    root = Path(folder).expanduser().resolve()
    try:
        _check(given, root)
        outcome = run_trial(
            script,
            root,
            given.processes,
            given.resume_processes or given.processes,
            given.kill_step,
            given.tolerance,
            lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201
        )
    except TrialError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    finally:
        if given.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(as_json(outcome), indent=2) if given.json else as_text(outcome))  # noqa: T201
    return EXACT if outcome.is_exact else DIFFERS


def _check(given: argparse.Namespace, root: Path) -> None:
    for name in ("processes", "resume_processes", "kill_step"):
        number = getattr(given, name)
        if number is not None and number < 1:
            raise TrialError(f"--{name.replace('_', '-')} {number}: expected a number of at least 1.")
    if not given.module and not Path(given.script).is_file():
        raise TrialError(
            f"{given.script} was to be run, and there is no such file in {Path.cwd()}. Give the path of a script."
        )
    if root.exists() and any(root.iterdir()):
        raise TrialError(f"--keep {root}: the folder is not empty, and its runs would mix with these. Give a new one.")


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    page = argparse.ArgumentParser(
        prog="accel verify-resume",
        description=main.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="accel verify-resume [options] script.py [arguments of the script]",
    )
    add = page.add_argument
    add("script", help="script that trains")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    about = "arguments for the third run only, such as --resume-arguments=--resume"
    add("--resume-arguments", default="", metavar="TEXT", help=about)
    add("--processes", type=int, default=1, metavar="N", help="number of processes of the first two runs (default: 1)")
    about = "number of processes of the third run (default: as the first two)"
    add("--resume-processes", type=int, metavar="N", help=about)
    about = "the step in which the second run is killed (default: one after a save, near the middle)"
    add("--kill-step", type=int, metavar="STEP", help=about)
    about = "options of accel launch, such as '--config-file my.yaml'"
    add("--launch-arguments", default="", metavar="TEXT", help=about)
    add("-m", "--module", action="store_true", help="start a module by its name, as python -m does")
    about = "run in a new working directory, for scripts that save to a fixed place in it"
    add("--own-directory", action="store_true", help=about)
    about = "largest relative difference if the third run has another number of processes (default: 1e-3)"
    add("--tolerance", type=float, default=1e-3, metavar="X", help=about)
    add("--keep", metavar="FOLDER", help="keep what was recorded, printed and saved by all runs in this new folder")
    add("--json", action="store_true", help="print the result as JSON")
    return page
