"""`accel`: one program, with the commands of the entry-point group `accel.commands`.

An entry point names a callable, `main(arguments: Sequence[str] | None = None) -> int | None`: it
takes what stands behind the command's name, and returns the exit status, None for 0. The first line
of its docstring is what `accel -h` says of it. Only the command that is asked for is imported.
A function `parser` beside it, without arguments, returns its `argparse.ArgumentParser`: shells
complete by that.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence

from accel_core import CheckpointError, CollectiveMismatchError, PluginError, WorldError
from accel_core.api.component import nearest
from accel_core.api.launcher import KNOWN_PROVIDERS, Offer, find, how_to_install, list_offers
from accel_launch.output import BAD, say, table, warn

WRONG, INTERRUPTED, UNREAD = 2, 130, 141
"""Exit statuses: what was asked cannot be done; Ctrl-C; nobody reads the output any more."""

_OWN = "accel-launch"
_USAGE = "usage: accel [-h] [--version] [--traceback] COMMAND ..."
_TOLD = (ValueError, OSError, PluginError, WorldError, CollectiveMismatchError, CheckpointError)
"""Errors that speak to the user: their message is enough. Any other is a mistake of the program, and shows where it happened."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments (None: this process's); returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = given[:1] == ["--traceback"]
    return report_errors("accel", lambda: run(given[shows_traceback:]), shows_traceback)


def report_errors(name: str, command: Callable[[], int | None], shows_traceback: bool = False) -> int:
    """Runs the command line program `name`, and returns its exit status, None being 0.

    Of an error that speaks to the user the message is printed, with status 2; others are raised.
    """
    try:
        status = int(command() or 0)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would say that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except _TOLD as error:
        if shows_traceback:
            raise
        warn(f"{name}: {error}", BAD)
        return WRONG
    return status


def run(given: Sequence[str]) -> int:
    """Runs the command that these words name; raises what it raises."""
    name, rest = given[0] if given else "", given[1:]
    if name in {"", "-h", "--help"}:
        _help()
        return 0 if name else WRONG
    if name == "--version":
        say(_version())
        return 0
    return int(_command(name)(rest) or 0)


def _command(name: str) -> Callable[..., int | None]:
    offers = list_offers("accel.commands")
    names = list(dict.fromkeys(offer.name for offer in offers))
    if name.rpartition(":")[2] not in names:
        meant = nearest(name, names)
        hint = f"Type `accel {meant}` if that was meant" if meant else "`accel -h` says what each does"
        if name in KNOWN_PROVIDERS["accel.commands"]:
            hint = how_to_install(KNOWN_PROVIDERS["accel.commands"][name])
        raise ValueError(f"there is no command {name!r}. Installed: {', '.join(names)}. {hint}.")
    return find("accel.commands", name, offers).load()


def _help() -> None:
    offers = list_offers("accel.commands")
    say(f"{_USAGE}\n\nConfigures, starts and checks training runs on any number of processes and machines.\n")
    table(("command", "what it does", "from"), [_row(offer, offers) for offer in offers])
    say("\n`accel COMMAND -h` describes one command. --traceback shows the line of code that failed.")
    say("`accel completion -h` says how to set up Tab completion in bash, zsh and fish.")


def _row(offer: Offer, offers: Sequence[Offer]) -> tuple[str, str, str]:
    provider = "" if offer.distribution == _OWN else offer.provider
    rivals = [other for other in offers if other.name == offer.name]
    name = offer.name if len(rivals) == 1 else f"{offer.distribution}:{offer.name}"
    try:
        about = (inspect.getdoc(offer.load()) or "").partition("\n")[0]
    except PluginError as error:
        about = f"broken: {error.__cause__ or offer.misfit()}"
    return name, about, provider


def _version() -> str:
    from importlib import metadata

    names = (_OWN, "accel-core", "torch")
    return f"{', '.join(f'{name} {metadata.version(name)}' for name in names)}, Python {sys.version.split()[0]}"
