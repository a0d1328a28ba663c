"""DeepSpeed's C++ operators: those compiled, those that a run would compile, and stale locks.

DeepSpeed compiles an operator when a process first needs it, by torch's `cpp_extension`, in a
minute or several. The operator's folder has a file `lock` meanwhile, without its holder's name: a
killed process leaves it, and later ones would wait for ever. Its holder has it open.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from accel_checkpoint import everywhere
from accel_core.api.component import nearest

if TYPE_CHECKING:
    from accel_core import World

SHARED_MEMORY = "deepspeed_shm_comm"
"""What `deepspeed.init_distributed` compiles on a machine without accelerator: reductions for inference."""

State = Literal["built", "missing", "impossible"]
Say = Callable[[str], None]

_MARKS = re.compile(r"\x1b\[[0-9;]*m|\[WARNING\]")  # colours, and what stands before each line that a builder prints
_ACCELERATOR = "DS_ACCELERATOR"
_PROCESSES = Path("/proc")


class OperatorError(RuntimeError):
    """An operator that cannot be compiled, with the reason."""


class Operator(NamedTuple):
    """An operator of DeepSpeed on this machine.

    Args:
        name: as DeepSpeed has it: "cpu_adam".
        state: "missing" is compiled by the first run that needs it.
        place: where its library is, or would be; or why it is impossible here.
    """

    name: str
    state: State
    place: str


@contextlib.contextmanager
def chosen_accelerator() -> Iterator[None]:
    """Lets DeepSpeed, if it is first imported inside, take the CPU where torch has no accelerator.

    The environment is put back, also as to what DeepSpeed's modules set when they are imported.
    """
    before = dict(os.environ)
    if _ACCELERATOR not in before and not torch.accelerator.is_available():
        os.environ[_ACCELERATOR] = "cpu"
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def operator_names() -> list[str]:
    """All that DeepSpeed has for this machine's accelerator."""
    return sorted(_builders())


def default_names() -> list[str]:
    """The operators that a configuration with Adam needs here, with or without offload."""
    _builders()
    from deepspeed.accelerator import get_accelerator

    wanted = ["fused_adam", "cpu_adam"]
    return [SHARED_MEMORY, *wanted] if get_accelerator().device_name() == "cpu" else wanted


def examine(name: str) -> Operator:
    """The state of one operator. Compiles nothing.

    Raises:
        OperatorError: if there is none of that name.
    """
    builder, folder = _builder(name), folder_of(name)
    if _is_installed(name):
        return Operator(name, "built", "in the installed deepspeed")
    if reason := _obstacle(builder):
        return Operator(name, "impossible", reason)
    return Operator(name, "built" if _library(name).exists() else "missing", str(folder))


def folder_of(name: str) -> Path:
    """The folder in which torch compiles an operator: in TORCH_EXTENSIONS_DIR, or its default."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory("", verbose=False)) / name


def build(name: str, say: Say) -> float:
    """Compiles an operator unless it is compiled, and loads it. Returns the seconds that took.

    Args:
        name: of the operator.
        say: is told of a lock that was removed.

    Raises:
        OperatorError: if it cannot be compiled, with what the compiler says; if another process is
            compiling it.
    """
    builder = _builder(name)
    if not _is_installed(name):
        if reason := _obstacle(builder):
            raise OperatorError(f"DeepSpeed's operator {name!r} was to be compiled, but cannot be here: {reason}")
        clear_lock(name, say)
    begun = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.load(verbose=False)
    except Exception as error:  # whatever a compiler, a linker or a missing tool brings about
        raise OperatorError(
            f"DeepSpeed's operator {name!r} was to be compiled in {folder_of(name)}, but: {error}"
        ) from error
    return time.monotonic() - begun


def clear_lock(name: str, say: Say) -> None:
    """Removes the lock of a killed build, and says so; that of a running one stays.

    Raises:
        OperatorError: for a lock of which it cannot be told whether anybody holds it.
    """
    lock = folder_of(name) / "lock"
    try:
        found = lock.stat()
    except FileNotFoundError:
        return
    if not _PROCESSES.is_dir() or found.st_uid != os.getuid():
        raise OperatorError(
            f"DeepSpeed's operator {name!r} is locked by {lock}, and this process cannot see whether anybody is compiling it. If "
            f"nobody is, remove that file; or set TORCH_EXTENSIONS_DIR to a folder of your own."
        )
    if _is_open(found):
        return
    lock.unlink(missing_ok=True)
    say(f"removed {lock}: the process that was compiling {name!r} has ended without")


def prepare_operators(names: Sequence[str], world: World, say: Say) -> None:
    """Compiles a run's operators, on one rank of each machine; others wait. A collective.

    The main process says it first. What is built costs a look at the disk; what is impossible here
    is left to DeepSpeed, which says so where it is needed.

    Raises:
        OperatorError: on every rank, if a machine cannot compile one.
    """

    def prepare() -> None:
        for name in names:
            found = examine(name)
            if found.state == "missing":
                if world.is_main:
                    say(
                        f"DeepSpeed compiles {name!r} now, which takes a minute or several; `accel deepspeed build` does it ahead of "
                        f"time. It goes to {found.place}"
                    )
                build(name, say)

    everywhere(world, "for DeepSpeed's operators to be compiled", lambda: prepare() if world.is_local_main else None)


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """A context: `deepspeed.init_distributed` does without the operator `deepspeed_shm_comm`.

    Only `inference_all_reduce` uses it, the sum over tensor-parallel ranks, which takes the process
    group's all_reduce where the operator is not there. What asks for it is DeepSpeed's own table of
    operators that this machine can have, as on a system other than Linux.
    """
    with chosen_accelerator():
        import deepspeed.ops

    table: dict[str, bool] = deepspeed.ops.__compatible_ops__
    before = dict(table)
    table[SHARED_MEMORY] = False
    try:
        yield
    finally:
        table.clear()
        table.update(before)


@cache
def _builders() -> Mapping[str, Any]:
    with chosen_accelerator(), contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
    found: dict[str, Any] = {name: each for name, each in ALL_OPS.items() if "not_implemented" not in name}
    return found


def _builder(name: str) -> Any:
    builders = _builders()
    if name not in builders:
        meant = nearest(name, list(builders))
        hint = f" Was {meant!r} meant?" if meant else ""
        raise OperatorError(
            f"DeepSpeed has no operator {name!r} for this machine. It has: {', '.join(sorted(builders))}.{hint}"
        )
    return builders[name]


def _is_installed(name: str) -> bool:
    """Whether it was compiled when deepspeed was installed, for this accelerator."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator().device_name()


def _obstacle(builder: Any) -> str:
    """The reason why an operator cannot be compiled here; empty if it can."""
    told = io.StringIO()
    with contextlib.redirect_stdout(
        told
    ):  # not stderr: for async_io it looks for a library with the descriptor of that
        if builder.is_compatible(verbose=False):
            return "" if _has_ninja() else "ninja is not installed: pip install ninja"
        builder.is_compatible(verbose=True)
    lines = [line.strip() for line in _MARKS.sub("", told.getvalue()).splitlines() if line.strip()]
    return " ".join(dict.fromkeys(lines)) or builder.error_log or f"deepspeed finds it incompatible with {sys.platform}"


def _has_ninja() -> bool:
    from torch.utils.cpp_extension import is_ninja_available

    return bool(is_ninja_available())


def _library(name: str) -> Path:
    return folder_of(name) / f"{name}.so"


def _is_open(found: os.stat_result) -> bool:
    """Whether a process of this machine has a file open."""
    for descriptors in _PROCESSES.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # a process that has ended, or is another user's
            for descriptor in descriptors.iterdir():
                with contextlib.suppress(OSError):
                    other = descriptor.stat()
                    if (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino):
                        return True
    return False
