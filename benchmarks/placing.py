"""B1, B2: loading a model of files onto a device, into main memory and onto disk, and running it. Run by `run.py`.

Each figure is that of a fresh process, for memory that a load leaves behind would be used again. Linux only.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decoder
import torch
from peak import resident

Round = dict[str, dict[str, float]]
Places = dict[str, str | int]
PLACES = ("cpu", "half", "disk")
ON_A_DEVICE = ("device", "device_cpu", "device_disk")
WARM = 1  # MiB of a model that goes the same way first, so that imports are not counted


def measure(
    libraries: Sequence[str], rounds: int, forwards: int, size: int, places: Sequence[str] = PLACES
) -> list[Round]:
    """What each library takes with the same files, in turns; the outputs have to be equal to the bit.

    The first round, which brings the files into the cache of the system, is thrown away.
    """
    names = ["plain", *(name for name in libraries if name in WAYS)]
    with tempfile.TemporaryDirectory() as folder:
        for kind, of in (("warm", WARM), ("full", size)):
            Path(folder, kind).mkdir()
            decoder.write(Path(folder, kind), of)
        return [_round(names, number, folder, size, forwards, places) for number in range(-1, rounds)][1:]


def _round(names: Sequence[str], number: int, folder: str, size: int, forwards: int, places: Sequence[str]) -> Round:
    measured: Round = {name: {} for name in names}
    first, outputs = number % len(names), set()
    for where in places:
        for name in [*names[first:], *names[:first]]:
            if name != "plain" or where == places[0]:  # it offloads nothing
                figures = _figures(name, where, folder, size, forwards)
                outputs.add(figures.pop("output"))
                measured[name] |= {f"{where}_{figure}": value for figure, value in figures.items()}
    if len(outputs) > 1:
        raise SystemExit(f"{', '.join(names)} have {len(outputs)} different outputs in {', '.join(places)}.")
    return measured


def _figures(name: str, where: str, folder: str, size: int, forwards: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, name, where, folder, str(size), str(forwards)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def _load_plain(weights: Path, width: int, places: Places, spare: Path) -> Callable[..., torch.Tensor]:
    """All in memory, mapped, or on the device, by safetensors and torch alone."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = decoder.Decoder(width)
    for part in sorted(weights.glob("*.safetensors")):
        model.load_state_dict(load_file(part, places["embedding"]), strict=False, assign=True)
    return model


def _load_accel(weights: Path, width: int, places: Places, _: Path) -> Callable[..., torch.Tensor]:
    from accel_big_model import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = decoder.Decoder(width)
    return load_checkpoint_and_dispatch(model, weights, places, force_hooks=True)


def _load_accelerate(weights: Path, width: int, places: Places, spare: Path) -> Callable[..., torch.Tensor]:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = decoder.Decoder(width)
    folder = str(spare) if "disk" in places.values() else None
    return load_checkpoint_and_dispatch(model, str(weights), places, offload_folder=folder, force_hooks=True)


WAYS = {"plain": _load_plain, "accel": _load_accel, "accelerate": _load_accelerate}


def _of(name: str, where: str, weights: Path, size: int, forwards: int) -> dict[str, Any]:
    """Seconds of loading and running, and bytes at most beyond the weights that stay where they are."""
    width, places, tokens = decoder.width_of(size), decoder.places(where), decoder.tokens()
    device = torch.device(places["norm"])
    tokens, on_cpu = tokens.to(device), device.type == "cpu"
    kept = decoder.bytes_at("cpu", width, places)
    with tempfile.TemporaryDirectory(dir=weights.parent) as spare, torch.no_grad():
        before, begun = _new_peak(), time.perf_counter()
        if not on_cpu:
            torch.accelerator.memory.reset_peak_memory_stats()
        model = WAYS[name](weights, width, places, Path(spare))
        loaded = _now(device)
        output = model(tokens)
        ran = _now(device)
        loading, running = resident("VmHWM") - before, _new_peak()
        times = [_seconds(lambda: model(tokens), device) for _ in range(forwards)]
        growth = resident("VmHWM") - running
        peak = max(loading, running + growth - before)
        if not torch.equal(output, model(tokens)):
            raise SystemExit(f"{name} has another output in a later forward.")
        there = 0 if on_cpu else torch.accelerator.memory.max_memory_allocated() - decoder.bytes_at(0, width, places)
    figures = {"load": loaded - begun, "run": ran - begun, "forward": statistics.median(times)}
    figures |= {"memory": loading - kept, "peak": peak - kept, "growth": growth, "device": there}
    return {**figures, "output": hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()}


def _new_peak() -> int:
    """Makes what is resident now the peak; returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def _now(device: torch.device) -> float:
    """The time when the device has done all it was told to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    before = _now(device)
    function()
    return _now(device) - before


def main() -> None:
    name, where, folder, size, forwards = sys.argv[1:]
    torch.set_num_threads(1)
    _of(name, where, Path(folder, "warm"), WARM, 1)
    print(json.dumps(_of(name, where, Path(folder, "full"), int(size), int(forwards))))


if __name__ == "__main__":
    main()
