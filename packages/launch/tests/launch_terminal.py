"""A terminal for tests: a program in a pseudo-terminal, and what a person would see of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

UP, DOWN, ENTER, INTERRUPT = "\x1b[A", "\x1b[B", "\r", "\x03"


class Terminal:
    """Runs a program in a pseudo-terminal.

    Args:
        command: the program and its arguments.
        environ: variables that are set, or with None unset, beside those of this process.
        size: lines and columns.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str | None] | None = None,
        size: tuple[int, int] = (40, 80),
        cwd: Path | None = None,
    ) -> None:
        env = self.environ(environ or {})
        self.screen = pyte.HistoryScreen(size[1], size[0], history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self._child = pexpect.spawn(command[0], [*command[1:]], env=env, dimensions=size, timeout=30, cwd=cwd)
        self._child.delaybeforesend = None
        # Programs ask where the cursor is, and a terminal answers.
        self.screen.write_process_input = self._child.send

    @staticmethod
    def environ(changed: Mapping[str, str | None]) -> dict[str, str]:
        """This process's environment, with what a terminal sets, and with `changed`."""
        of_terminal = {"TERM": "xterm-256color", "NO_COLOR": None, "COLUMNS": None, "LINES": None}
        every = {**os.environ, **of_terminal, **changed}
        return {name: value for name, value in every.items() if value is not None}

    @property
    def lines(self) -> list[str]:
        """What is on the screen, from the top, and before that what has left it; lines at the end without anything aside."""
        gone = ["".join(line[column].data for column in range(self.screen.columns)) for line in self.screen.history.top]
        return [line.rstrip() for line in "\n".join([*gone, *self.screen.display]).rstrip().split("\n")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 60) -> None:
        """Waits until a place on the screen matches a pattern."""
        self._wait(re.compile(pattern, re.MULTILINE).search, pattern, timeout)

    def wait_for_text(self, text: str, timeout: float = 60) -> None:
        """Waits until a text is on the screen, wherever its lines are broken."""
        letters = "".join(text.split())
        self._wait(lambda shown: letters in "".join(shown.split()), text, timeout)

    def _wait(self, is_there: Callable[[str], object], what: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not is_there(self.text):
            assert time.monotonic() < end, f"no {what!r} within {timeout} s:\n{self.text}"
            assert self._read(), f"no {what!r}, and the program has ended:\n{self.text}"

    def send(self, keys: str) -> None:
        self._child.send(keys)

    def answer(self, name: str, keys: str = "") -> None:
        """Waits for a question, and answers it; what comes next is not waited for."""
        self._wait(lambda shown: f"\n{shown}".rpartition("\n? ")[2].startswith(name), f"? {name}", 60)
        self.send(keys + ENTER)

    def end(self) -> int:
        """Waits for the end of the program, and returns its exit status."""
        while self._read():
            pass
        self._child.close()
        return self._child.exitstatus if self._child.signalstatus is None else -self._child.signalstatus

    def close(self) -> None:
        self._child.close(force=True)

    def _read(self) -> bool:
        """Takes in what the program has written; False if it has ended."""
        try:
            self._stream.feed(self._child.read_nonblocking(65536, timeout=0.2))
        except pexpect.TIMEOUT:
            return self._child.isalive() or self._child.isalive()
        except pexpect.EOF:
            return False
        return True
