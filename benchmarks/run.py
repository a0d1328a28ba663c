"""Measures what the library costs, against plain torch and against the peers that are installed, and prints the gates.

python benchmarks/run.py
python benchmarks/run.py --rows P2,P3 --rounds 40
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
from functools import partial
from importlib import metadata
from pathlib import Path

import imports
import placing
import starting
import torch
from launch import Round, measure
from table import Measure, markdown

DISTRIBUTIONS = {"accel": "accel-core", "accelerate": "accelerate", "fabric": "lightning-fabric"}

_over_accelerate = partial(Measure, against="/", base="accelerate", unit="ms", scale=1e3)

ROWS = {
    "P1": [
        Measure("P1 import", "import", 0.030, "", unit="s", scale=1),
        Measure("P1 import and first Accelerator()", "first", 0.040, "", unit="s", scale=1),
        Measure("P1 import and first Accelerator(), CPU", "cpu", None, "", unit="s", scale=1),
    ],
    "P2": [
        Measure("P2 step, over plain", "cpu", 0, "-"),
        Measure("P2 step, over lean", "cpu", 3, "-", base="lean"),
    ],
    "P3": [
        Measure("P3 accumulation 4, over plain", "cpu", 0, "-"),
        Measure("P3 accumulation 4, over lean", "cpu", 3, "-", base="lean"),
    ],
    "P4": [
        Measure("P4 DDP on 2 ranks, CPU of the main thread", "cpu", 1, "/"),
        Measure("P4 DDP on 2 ranks, on the wall", "wall", None, "/"),
    ],
    "P5": [
        Measure("P5 bf16 call, output left alone, over autocast", "cpu", 3, "-"),
        Measure("P5 bf16 call, fp32 outputs, over casts by hand", "cpu", 0, "-", base="cast", ours="accel_fp32"),
    ],
    "P6": [
        Measure("P6 loader, a batch", "single", 0, "-"),
        Measure("P6 loader, a batch, by __getitems__", "many", 0, "-"),
    ],
    "P6d": [
        Measure("P6d dispatch, collectives a message", "collectives_per_message", 1, "", unit="", scale=1),
        Measure("P6d dispatch, collectives a batch", "collectives", None, "", unit="", scale=1),
        Measure("P6d dispatch, pickles a batch", "pickles", 0, "", unit="", scale=1),
        Measure("P6d dispatch, over sharded", "cpu", 4, "/", base="sharded"),
        Measure("P6d dispatch, over scatter", "cpu", None, "/", base="scatter"),
        Measure("P6d dispatch, over scatter, busiest rank", "busiest", None, "/", base="scatter"),
        Measure("P6d dispatch, over scatter, on the wall", "wall", None, "/", base="scatter"),
    ],
    "P7": [
        Measure("P7 gather_for_metrics, collectives", "collectives", 1, "", unit="", scale=1),
        Measure("P7 gather_for_metrics, CPU of the main thread", "cpu", 1.3, "/"),
        Measure("P7 gather_for_metrics, on the wall", "wall", None, "/"),
    ],
    "P8": [
        Measure("P8 save, over torch.save and fsync", "save", 0.6, "/", unit="ms", scale=1e3),
        Measure("P8 save, over DCP", "save", None, "/", base="dcp", unit="ms", scale=1e3),
        Measure("P8 load, over torch.load(mmap=True)", "load", 1, "/", base="mapped", unit="ms", scale=1e3),
        Measure("P8 load, over torch.load", "load", None, "/", unit="ms", scale=1e3),
        Measure("P8 load, over DCP", "load", None, "/", base="dcp", unit="ms", scale=1e3),
        Measure(
            "P8 load and first step, over torch.load(mmap=True)", "step", 0.3, "/", base="mapped", unit="ms", scale=1e3
        ),
        Measure("P8 load and first step, over torch.load", "step", None, "/", unit="ms", scale=1e3),
        Measure("P8 extra memory of saving, of the state", "save_memory", 0.05, "", unit="", scale=1),
        Measure("P8 extra memory of loading, of the state", "load_memory", 0.05, "", unit="", scale=1),
        Measure("P8 extra memory of loading into a begun run", "reload_memory", None, "", unit="", scale=1),
    ],
    "P9": [
        Measure("P9 eager, blocked, over memcpy", "blocked", 1.5, "/", unit="ms", scale=1e3),
        Measure("P9 eager, blocked, over DCP", "blocked", None, "/", base="dcp", unit="ms", scale=1e3),
        Measure("P9 eager, the first", "first", None, "", unit="ms", scale=1e3),
        Measure("P9 lazy, blocked", "lazy_blocked", 5, "", unit="ms", scale=1e3),
        Measure(
            "P9 lazy, with the wait of the next step, over memcpy", "lazy_through", None, "/", unit="ms", scale=1e3
        ),
        Measure("P9 lazy, the first", "lazy_first", None, "", unit="ms", scale=1e3),
        Measure("P9 eager, extra memory, of the state", "memory", 1, "", unit="", scale=1),
        Measure("P9 lazy, extra memory, of the state", "lazy_memory", 1, "", unit="", scale=1),
    ],
    "P10": [
        Measure("P10 first batch after 10^6", "first", 5, "", unit="ms", scale=1e3),
        Measure("P10 first batch after 10^4 of a small set", "small", None, "", unit="ms", scale=1e3),
        Measure("P10 first batch after 10^6, 2 workers", "workers", 60, "", unit="ms", scale=1e3),
        Measure("P10 first batch after 10^6, own sampler", "own_sampler", None, "", unit="ms", scale=1e3),
        Measure("P10 memory of it", "memory", 1, "", unit="MiB", scale=1 / 2**20),
        Measure("P10 samples read that are not in it", "other", 0, "", unit="", scale=1),
        Measure("P10 order of 10^9, an index", "order", 0.1, ""),
        Measure("P10 order of 10^9, over randperm(10^7)", "order", None, "/"),
    ],
    "P11": [
        Measure("P11 FSDP2 on 2 ranks, CPU of the main thread", "cpu", 1.02, "/"),
        Measure("P11 FSDP2 on 2 ranks, on the wall", "wall", None, "/"),
    ],
    "P12": [
        Measure("P12 from the command to the first line, 2 processes", "two", 1.05, "/", unit="s", scale=1),
        Measure("P12 from the command to the first line, 1 process", "one", None, "/", unit="s", scale=1),
    ],
    "P13": [
        Measure("P13 ZeRO stage 1 on 2 ranks, CPU of the main thread", "cpu", 1.05, "/"),
        Measure("P13 ZeRO stage 1 on 2 ranks, on the wall", "wall", None, "/"),
    ],
    "P13c": [
        Measure("P13c ZeRO stage 3 on 2 ranks, CPU of the main thread", "cpu", 1.05, "/"),
        Measure("P13c ZeRO stage 3 on 2 ranks, on the wall", "wall", None, "/"),
    ],
    "M1": [
        Measure("M1 Megatron, CPU of the main thread", "cpu", 1.03, "/"),
        Measure("M1 Megatron, on the wall", "wall", None, "/"),
    ],
    "M1t": [
        Measure("M1t Megatron, tensor parallel on 2 ranks, CPU of the main thread", "cpu", 1.03, "/"),
        Measure("M1t Megatron, tensor parallel on 2 ranks, on the wall", "wall", None, "/"),
    ],
    "H1": [
        Measure("H1 World of 1024 ranks", "world", None, "", unit="ms", scale=1e3),
        Measure("H1 World of 1024 ranks, process groups", "world_groups", 2, "", unit="", scale=1),
        Measure("H1 prepare under DDP, over DDP()", "ddp", None, "/", unit="ms", scale=1e3),
        Measure("H1 FSDP and prepare, over fully_shard", "fsdp", None, "/", unit="ms", scale=1e3),
        Measure("H1 FSDP, process groups", "fsdp_groups", None, "", unit="", scale=1),
        Measure("H1 hybrid FSDP and prepare, over fully_shard", "hybrid", None, "/", unit="ms", scale=1e3),
        Measure("H1 hybrid FSDP, process groups", "hybrid_groups", None, "", unit="", scale=1),
        Measure("H1 check_trigger", "trigger", None, ""),
        Measure("H1 check_trigger, over 8 ranks", "trigger", None, "/", base="eight"),
        Measure("H1 gather of a loss", "gather", None, ""),
        Measure("H1 gather of a loss, over 8 ranks", "gather", None, "/", base="eight"),
        Measure("H1 reduce of a loss", "reduce", None, ""),
        Measure("H1 reduce of a loss, over 8 ranks", "reduce", None, "/", base="eight"),
    ],
    "B1": [
        _over_accelerate("B1 load, half on disk", "half_load", 0.8),
        _over_accelerate("B1 load, all on disk", "disk_load", 0.8),
        _over_accelerate("B1 load, in main memory", "cpu_load", 0.8),
        _over_accelerate("B1 load and first forward, half on disk", "half_run"),
        _over_accelerate("B1 load and first forward, in main memory", "cpu_run"),
        _over_accelerate("B1 extra memory, half on disk", "half_memory", 1 / 3, unit="MiB", scale=1 / 2**20),
        Measure("B1 extra memory, in main memory", "cpu_memory", None, "", unit="MiB", scale=1 / 2**20),
    ],
    "B2": [
        _over_accelerate("B2 forward, half on disk", "half_forward", 0.8),
        _over_accelerate("B2 forward, all on disk", "disk_forward", 0.8),
        Measure("B2 forward, in main memory, over no hooks", "cpu_forward", None, "/", unit="ms", scale=1e3),
        _over_accelerate("B2 extra memory, all on disk", "disk_peak", 1 / 3, unit="MiB", scale=1 / 2**20),
        _over_accelerate("B2 growth in later forwards, all on disk", "disk_growth", unit="MiB", scale=1 / 2**20),
    ],
    "B1d": [
        _over_accelerate("B1d load, on a device", "device_load", 0.8),
        _over_accelerate("B1d load, half on a device, half in main memory", "device_cpu_load", 0.8),
        _over_accelerate("B1d load, half on a device, half on disk", "device_disk_load", 0.8),
        Measure("B1d load, on a device, over safetensors alone", "device_load", None, "/", unit="ms", scale=1e3),
        _over_accelerate(
            "B1d extra main memory, half on disk", "device_disk_memory", 1 / 3, unit="MiB", scale=1 / 2**20
        ),
        Measure("B1d extra main memory, on a device", "device_memory", None, "", unit="MiB", scale=1 / 2**20),
    ],
    "B2d": [
        Measure("B2d forward, on a device, over no hooks", "device_forward", None, "/", unit="ms", scale=1e3),
        _over_accelerate("B2d forward, half in main memory", "device_cpu_forward", 0.8),
        _over_accelerate("B2d forward, half on disk", "device_disk_forward", 0.8),
        _over_accelerate(
            "B2d extra memory of the device, half on disk", "device_disk_device", unit="MiB", scale=1 / 2**20
        ),
    ],
}

DEVICE_ROWS = ("B1d", "B2d")
"""Rows that need an accelerator."""


def rounds_of(row: str, libraries: list[str], options: argparse.Namespace) -> list[Round]:
    """Takes the measurements of one row."""
    common = {"repeats": options.repeats, "rounds": options.rounds, "batches": options.batches}
    loops = ["plain", "lean", *libraries]
    if row == "P1":
        return imports.measure(libraries, max(1, options.rounds // 2))
    if row == "P2":
        return measure("steps.py", loops, world=1, **common)
    if row == "P3":
        return measure("steps.py", loops, world=1, accumulation=4, **common)
    if row == "P4":
        return measure("steps.py", loops, world=2, **common)
    if row == "P5":
        return measure("forward.py", ["plain", "cast", "accel_fp32", *libraries], world=1, **common)
    if row == "P12":
        return starting.measure(libraries, max(1, options.rounds // 2))
    if row in {"B1", "B2", *DEVICE_ROWS}:
        places = placing.ON_A_DEVICE if row in DEVICE_ROWS else placing.PLACES
        forwards = 1 if row.startswith("B1") else 9
        return placing.measure(libraries, max(1, options.rounds // 3), forwards, options.size, places)
    if row == "P11":
        return measure("sharding.py", ["plain", *libraries], world=2, **common)
    if row == "H1":
        return measure("many_ranks.py", ["plain", "eight", "accel"], world=1, **common)
    if row in {"P13", "P13c"}:
        return measure("zero.py", ["plain", *libraries], world=2, size=1 if row == "P13" else 3, **common)
    if row in {"M1", "M1t"}:
        return measure("windows.py", ["plain", *libraries], world=1 if row == "M1" else 2, **common)
    if row == "P6":
        return measure("reading.py", loops, world=1, **common)
    if row == "P6d":
        return measure("dispatching.py", ["sharded", "scatter", *libraries], world=2, **common)
    if row == "P7":
        return measure("gathering.py", loops, world=2, **common)
    if row in {"P8", "P9"}:
        script = "saving.py" if row == "P8" else "behind.py"
        common["rounds"] = max(1, options.rounds // 2)  # each takes seconds
        return measure(script, ["plain", "mapped", "dcp", *libraries], world=1, size=options.size, **common)
    return measure("resuming.py", loops, world=1, **common)


def machine() -> dict[str, object]:
    """Where and when this was measured, and how busy the machine is."""
    cpus = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line]
        if cpus.exists()
        else []
    )
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    options = arguments()
    versions = {name: version for name in options.libraries if (version := installed(DISTRIBUTIONS[name]))}
    facts = machine() | versions
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found, cells = {}, []
    for row in options.rows:
        found[row] = rounds_of(row, list(versions), options)
        cells += [line.row(found[row]) for line in ROWS[row]]
        # After each row: all of them take most of an hour, and the page can be written of those that are there.
        options.out.write_text(json.dumps({"machine": facts, "table": cells, "rounds": found}), encoding="utf-8")
        print(f"{row} measured, load {os.getloadavg()[0]:.1f}", flush=True)
    print(markdown(cells))
    print(f"Every round stands in {options.out}.")


def installed(distribution: str) -> str | None:
    """Its version, or None. Ends the program where `accelerate` is accel-compat, which would be measured against itself."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    if distribution == "accelerate" and version.endswith("+accel"):
        raise SystemExit(
            "The module accelerate of this environment is accel-compat, not the peer: measure where "
            "benchmarks/requirements.txt is installed and accel-compat is not, or leave it out: --libraries accel,fabric"
        )
    return version


def arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description="Measures what the library costs, and prints the gates.")
    here = [row for row in ROWS if row not in DEVICE_ROWS or torch.accelerator.is_available()]
    parser.add_argument("--rows", type=names, default=here, help=f"of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=12, help="in each process; every round measures every library")
    parser.add_argument("--repeats", type=int, default=3, help="processes that are started per row")
    parser.add_argument("--batches", type=int, default=160, help="in a round of one library; a multiple of 4")
    parser.add_argument("--size", type=int, default=686, help="MiB that P8 and P9 save, and B1 and B2 load")
    parser.add_argument("--libraries", type=names, default=list(DISTRIBUTIONS), help=f"of {','.join(DISTRIBUTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
