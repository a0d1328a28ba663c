"""Functions of a script that ask which process they are in."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from accel_compat.availability import is_tqdm_available
from accel_compat.small_helpers import clean_state_dict_for_safetensors
from accel_core import DistributedType, NotInstalledError, PartialState

if TYPE_CHECKING:
    from collections.abc import Callable

    File = str | os.PathLike[str] | IO[bytes]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of tqdm, on the main process of each machine unless `main_process_only=False`."""
    if not is_tqdm_available():
        raise NotInstalledError("tqdm() shows a bar of tqdm, which is not installed. Type: pip install tqdm")
    from tqdm.auto import tqdm as bar  # type: ignore[import-untyped,unused-ignore]

    if args and isinstance(args[0], bool):
        raise ValueError("tqdm(True, ...) does not say what is iterated. Write main_process_only=True behind it.")
    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = PartialState().local_process_index != 0
    return bar(*args, **kwargs)


def wait_for_everyone() -> None:
    """Waits until all processes are here. Collective."""
    PartialState().wait_for_everyone()


def save(obj: Any, f: File, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Writes an object on the main process, or on that of each machine; a state dictionary by safetensors if asked."""
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    from safetensors.torch import save_file

    save_file(clean_state_dict_for_safetensors(obj), cast("str", f), metadata={"format": "pt"})


def list_safe_globals() -> list[Any]:
    """What files of a run may name beside tensors: arrays of NumPy."""
    import codecs
    from importlib import import_module

    import numpy as np

    kinds: list[Any] = [np.ndarray, np.dtype, codecs.encode]
    kinds += [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    multiarray: Any = import_module("numpy._core.multiarray")
    return [multiarray._reconstruct, *kinds]  # as pickles of NumPy name it


def load(f: File, map_location: Any = None, *, weights_only: bool = True, **kwargs: Any) -> Any:
    """`torch.load` of tensors, plain values and arrays of NumPy. `weights_only=False` is refused, for it executes what the file says."""
    if not weights_only:
        raise ValueError(
            "load(weights_only=False) executes what the file says. For a file that you trust call torch.load yourself."
        )
    with torch.serialization.safe_globals(list_safe_globals()):
        return torch.load(f, map_location=map_location, weights_only=True, **kwargs)


class PrepareForLaunch:
    """A function for `torch.multiprocessing`, which calls it with the index of a process on this machine.

    It sets `RANK` and `LOCAL_RANK` from that, `NPROC` and `NODE_RANK`, and calls `launcher` with the other arguments; the other
    variables of a group are the caller's, as by `patch_environment(world_size=..., master_addr=..., master_port=...)`.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher, self.distributed_type = launcher, DistributedType(str(distributed_type).upper())
        self.debug = debug  # about a store in a file, which is not needed here

    def __call__(self, index: int, *args: Any) -> None:
        """Runs the function as this process."""
        machine, processes = int(os.environ.get("NODE_RANK", "0")), int(os.environ.get("NPROC", "1"))
        os.environ.update({"LOCAL_RANK": str(index), "RANK": str(processes * machine + index), "FORK_LAUNCHED": "1"})
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(processes))
        self.launcher(*args)
