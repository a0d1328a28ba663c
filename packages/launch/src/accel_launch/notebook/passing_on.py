"""The output of ranks, passed on to where the caller's own output goes: a cell of a notebook, or what a test captures."""

from __future__ import annotations

import codecs
import os
import re
import selectors
import sys
import warnings
from pathlib import Path
from string import Template
from typing import TextIO

from accel_launch.notebook.attendant import Attendant
from accel_launch.notebook.rank import STREAMS

IDLE = 0.2
"""Seconds after which a line that has not ended is shown as far as it goes."""

READS = 64
"""How often one pipe is read before it is another's turn. More than a pipe holds, and an end to it where a rank never stops."""


def is_needed(prefix: str | None) -> bool:
    """Whether the ranks' output has to be passed on, because they do not share the caller's or their lines are to be marked."""
    return prefix is not None or sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__


class Output:
    """A block in which what ranks write to their pipes is passed on, line by line, to `sys.stdout` and `sys.stderr`.

    Progress bars begin a line again by a carriage return: that ends a line, too.

    Args:
        folder: where the pipes are made.
        processes: on this machine.
        prefix: what lines begin with; may contain ${rank}, ${local_rank} and ${role_name}. None:
            nothing.
        role: the name of the processes.
    """

    def __init__(self, folder: Path, processes: int, prefix: str | None, role: str) -> None:
        self._template = None if prefix is None else Template(prefix)
        self._role = role
        self._problem: Exception | None = None
        self._lines = {
            (name, local_rank): _Lines(folder / f"{name}{local_rank}", sys.stdout if name == "out" else sys.stderr)
            for name in STREAMS
            for local_rank in range(processes)
        }
        self._attendant = Attendant("output", self._pass_on)

    def begin(self, local_rank: int, rank: int) -> None:
        """Says which rank of the run writes to the pipes of a local rank."""
        if self._template is not None:
            prefix = self._template.safe_substitute(role_name=self._role, rank=rank, local_rank=local_rank)
            for name in STREAMS:
                self._lines[name, local_rank].prefix = prefix

    def __enter__(self) -> Output:
        self._attendant.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._attendant.dismiss()
        for lines in self._lines.values():
            os.close(lines.pipe)
        if self._problem is not None:
            warnings.warn(f"Output of the ranks could not be shown: {self._problem}", stacklevel=5)

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._attendant.bell, selectors.EVENT_READ)
            for lines in self._lines.values():
                selector.register(lines.pipe, selectors.EVENT_READ, lines)
            ended = False
            while not ended:
                ready = [key.data for key, _ in selector.select(IDLE)]
                ended = None in ready
                for lines in self._lines.values():
                    # At the end, all that ranks have left in the pipes.
                    self._show(lines, lines.read() if ended or lines in ready else lines.rest() if not ready else "")
        for lines in self._lines.values():
            self._show(lines, lines.rest())

    def _show(self, lines: _Lines, text: str) -> None:
        if not text:
            return
        try:
            lines.target.write(text)
            lines.target.flush()
        except Exception as error:  # noqa: BLE001  (of the caller's stream; told at the end, for ranks must not block)
            self._problem = error


class _Lines:
    """The output of one rank to one of its streams, as lines."""

    def __init__(self, path: Path, target: TextIO) -> None:
        os.mkfifo(path)
        # Open for both: it never ends when a rank ends, for that may be started again.
        self.pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self.target = target
        self.prefix = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self._begins = True

    def read(self) -> str:
        """Reads the pipe, and returns the whole lines; keeps the rest."""
        for _ in range(READS):
            try:
                self._held += self._decode(os.read(self.pipe, 1 << 16))
            except BlockingIOError:
                break
        end = max(self._held.rfind("\n"), self._held.rfind("\r")) + 1
        whole, self._held = self._held[:end], self._held[end:]
        return self._marked(whole)

    def rest(self) -> str:
        """Returns and clears the text of a line that has not ended."""
        rest, self._held = self._held, ""
        return self._marked(rest)

    def _marked(self, text: str) -> str:
        if not self.prefix or not text:
            return text
        parts = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)
        marked = []
        for part in parts:
            marked.append(self.prefix + part if self._begins and part.strip("\r\n") else part)
            self._begins = part.endswith(("\r", "\n"))
        return "".join(marked)
