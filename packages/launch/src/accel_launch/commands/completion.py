"""`accel completion`: a script for the shell, made from the parsers of all commands.

The script is complete in itself: a Tab starts no Python, whose import of torch takes seconds. It
knows what was installed when it was made.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import shtab

from accel_core import PluginError
from accel_core.api.launcher import list_offers
from accel_launch.output import warn

SHELLS = {
    "bash": "~/.local/share/bash-completion/completions/accel",
    "zsh": "~/.zfunc/_accel",
    "fish": "~/.config/fish/completions/accel.fish",
}
"""The shells, and where each looks for such a script; of zsh if `fpath=(~/.zfunc $fpath)` stands before `compinit`."""
_PATHS = {"FILE", "FOLDER", "PATH"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a script for bash, zsh or fish that completes commands, options and their values."""
    given = parser().parse_args(arguments)
    print(shtab.complete(whole_parser(), given.shell))  # noqa: T201
    return 0


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    lines = "  mkdir -p {}\n  accel completion {} > {}"
    places = "\n\n".join(lines.format(place.rpartition("/")[0], shell, place) for shell, place in SHELLS.items())
    end = f"{places}\n\nRun it again after you install packages. zsh reads ~/.zfunc if ~/.zshrc has `fpath=(~/.zfunc $fpath)` before `compinit`."
    layout = argparse.RawDescriptionHelpFormatter
    page = argparse.ArgumentParser(
        prog="accel completion", description=main.__doc__, epilog=end, formatter_class=layout
    )
    page.add_argument("shell", choices=list(SHELLS), help="the shell that reads the script")
    return page


def whole_parser() -> argparse.ArgumentParser:
    """`accel` with all its commands. Imports them; says of one that is broken that it is left out."""
    page = argparse.ArgumentParser(prog="accel")
    page.add_argument("--version", action="store_true", help="versions, for a bug report")
    page.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = page.add_subparsers()
    for offer in {each.name: each for each in list_offers("accel.commands")}.values():
        try:
            command = offer.load()
            of = _parser_of(command)
        except PluginError as error:
            warn(f"accel: {offer} is left out: {error}")
            continue
        about = (inspect.getdoc(command) or "").partition("\n")[0].replace("%", "%%")
        parents = [] if of is None else [of]
        commands.add_parser(offer.name, help=about, description=about, parents=parents, conflict_handler="resolve")
    _complete_paths(page)
    return page


def _parser_of(command: object) -> argparse.ArgumentParser | None:
    """What the function `parser` of a command's module returns; None: files are completed."""
    make = getattr(sys.modules.get(getattr(command, "__module__", "")), "parser", None)
    found = make() if callable(make) else None
    return found if isinstance(found, argparse.ArgumentParser) else None


def _complete_paths(page: argparse.ArgumentParser) -> None:
    """Has files completed wherever a path is taken, and where words are that no option names."""
    for action in page._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each)
        elif action.choices is None and action.nargs != 0 and _takes_path(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _takes_path(action: argparse.Action) -> bool:
    return action.type is Path or action.metavar in _PATHS or not action.option_strings
