"""Bytes between memory and files, fast: writes that start at once, reads into existing memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from accel_core import CheckpointError

CHUNK = 256 << 10  # bytes a write: small enough that what was just hashed is still in the cache of the processor
BEHIND = 8 << 20  # after so many bytes the kernel is asked to begin writing them; else it would all be left to `fsync`
READ = 1 << 20  # bytes a read, which are then hashed while they are in the cache of the processor
_SYNC_FILE_RANGE_WRITE = 2

# Texts for `failing_with`.
WRITING = "cannot be written: {}. What was saved there is untouched. Make room, or save elsewhere"
_READING = "cannot be read: {}. Repair what is named there, or load another checkpoint"


@contextlib.contextmanager
def failing_with(text: str, path: Path) -> Iterator[None]:
    """Gives an OSError a text, in which {} is the reason, and `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, text.format(error.strerror or error), str(path)) from error


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor: its own memory, which the caller keeps alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements' bytes, in row-major order, are the tensor's own CPU memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Output:
    """A new file, written from beginning to end; `position` is the number of bytes so far."""

    def __init__(self, descriptor: int) -> None:
        self.position = 0
        self.descriptor = descriptor
        self._begun = 0

    def write(self, data: memoryview) -> None:
        """Writes all of `data`, best at most `CHUNK` bytes of it."""
        while data:
            written = os.write(self.descriptor, data)
            self.position += written
            data = data[written:]
        if self.position - self._begun >= BEHIND:
            self._begin_writing()

    def _begin_writing(self) -> None:
        # Advice: it waits for nothing and clears no error, so a disk that fails is reported by fsync.
        if call := _sync_file_range():
            call(self.descriptor, self._begun, self.position - self._begun, _SYNC_FILE_RANGE_WRITE)
        self._begun = self.position


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call of that name; None where there is none."""
    with contextlib.suppress(AttributeError):
        call = ctypes.CDLL(None).sync_file_range
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        return call
    return None


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Removes a file if the body fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts; what is left is swept by the next save
            os.unlink(path)
        raise


@contextlib.contextmanager
def new_file(path: Path, text: str = WRITING, named: Path | None = None) -> Iterator[Output]:
    """A new file: on the disk when the body ends, gone if the body fails; with OSErrors named."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with failing_with(text, named or path):
        descriptor = os.open(path, flags, 0o666)
        with removed_on_failure(path):
            try:
                yield Output(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_new(path: Path, content: bytes) -> None:
    """Writes a small new file, all of it on the disk. Raises OSError, naming the path."""
    with new_file(path) as output:
        output.write(memoryview(content))


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk: a rename is durable only after this."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no such call, and opens no folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path) -> int:
    """The descriptor of a regular file to read, for the caller to close; raises for a pipe."""
    with failing_with(_READING, path):
        # Not blocking, for opening a pipe waits for who writes to it; of a regular file it changes nothing.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise CheckpointError(f"{path} was to be read, but it is no regular file. Load another checkpoint.")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The same, closed when the body ends."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(path: Path, most: int) -> bytes:
    """All of a regular file; CheckpointError if it is none, or has over `most` bytes (not read)."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise CheckpointError(
                f"{path} was to be read, but it has {size} bytes, and such a file has at most {most}. Load another checkpoint."
            )
        content = bytearray(size)
        return bytes(content[: read_into(descriptor, memoryview(content), 0, path)])


def hash_of(descriptor: int, length: int, path: Path) -> str:
    """The hash of the first `length` bytes of a file, or of all, with at most `READ` in memory."""
    hasher = xxhash.xxh3_128()
    place = memoryview(bytearray(min(READ, length)))
    for begin in range(0, length, READ):
        part = place[: length - begin]
        count = read_into(descriptor, part, begin, path)
        hasher.update(part[:count])
        if count < len(part):
            break
    return hasher.hexdigest()


def read_into(descriptor: int, place: memoryview, offset: int, path: Path) -> int:
    """Fills `place` from `offset` of a file; returns the number of bytes: fewer only at its end."""
    begin = 0
    with failing_with(_READING, path):
        while begin < len(place):
            count = os.preadv(descriptor, [place[begin:]], offset + begin)
            if not count:
                break
            begin += count
    return begin


def read_all(jobs: Iterable[Callable[[], None]], threads: int = 2) -> None:
    """Runs reading jobs without gradients in threads; after an error, which is raised, none begins."""
    failed = threading.Event()

    @torch.no_grad()
    def run(job: Callable[[], None]) -> None:
        if failed.is_set():
            return
        try:
            job()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, "accel-read") as pool:
        for _ in pool.map(run, jobs):
            pass
