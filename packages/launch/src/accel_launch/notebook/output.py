"""The output of ranks, shown where the caller's goes: a notebook's cell, or a test's capture."""

from __future__ import annotations

import codecs
import re
import sys
import threading
from pathlib import Path
from string import Template
from typing import BinaryIO

_INTERVAL = 0.1
"""Seconds between two looks at the files."""


def is_replaced() -> bool:
    """Whether `sys.stdout` or `sys.stderr` is not where ranks write by themselves."""
    return sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__


class Output(threading.Thread):
    """A block that copies files of ranks' output to `sys.stdout` and `sys.stderr`, line by line.

    Kernels that watch their file descriptors stop doing so at the first character that arrives in
    two parts, so that it is not left to them. Files have names such as stdout-RANK-LOCAL_RANK.
    Lines begin with `prefix`; it may have ${rank}, ${local_rank} and ${role_name}, the `role`.
    """

    def __init__(self, folder: Path, prefix: str | None, role: str) -> None:
        super().__init__(name="notebook_launcher: output", daemon=True)
        self._folder, self._done = folder, threading.Event()
        self._prefix, self._role = Template(prefix or ""), role
        self._files: dict[Path, tuple[BinaryIO, codecs.IncrementalDecoder]] = {}
        self._rests: dict[Path, str] = {}

    def __enter__(self) -> Output:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()
        for each in self._files.values():
            each[0].close()

    def run(self) -> None:
        """Copies until the block ends, then what is left."""
        while not self._done.wait(_INTERVAL):
            self._copy()
        self._copy(is_last=True)

    def _copy(self, *, is_last: bool = False) -> None:
        for path in sorted(self._folder.glob("std*")):
            if path not in self._files:
                self._files[path] = path.open("rb"), codecs.getincrementaldecoder("utf-8")("replace")
            file, decoder = self._files[path]
            text = self._rests.get(path, "") + decoder.decode(file.read())
            # Progress bars begin a line again by a carriage return: that ends a line, too.
            end = len(text) if is_last else max(text.rfind("\n"), text.rfind("\r")) + 1
            self._rests[path] = text[end:]
            if end:
                name, rank, local_rank = path.name.split("-")
                prefix = self._prefix.safe_substitute(role_name=self._role, rank=rank, local_rank=local_rank)
                stream = sys.stdout if name == "stdout" else sys.stderr
                stream.write(re.sub(r"(?m)^(?=[^\r\n])|(?<=\r)(?=[^\r\n])", prefix.replace("\\", r"\\"), text[:end]))
                stream.flush()
