"""Which scenarios are launched together, in which worlds; and the figures that the other distribution gave for them.

    python scenario_launches.py PYTHON    writes peer_figures.json from an environment that has the other `accelerate`

Every launch is run twice there: a figure that is not the same both times is left out, and named.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scenario_report import MARK

HERE = Path(__file__).parent
FIXTURE = HERE / "peer_figures.json"
VERSIONS = ("accelerate", "datasets", "deepspeed", "diffusers", "peft", "torch", "transformers", "trl")
ATTEMPTS = 8
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GRID = [f"{accumulation}/{precision}" for accumulation in ("plain", "window") for precision in ("fp32", "bf16")]


class Launch(NamedTuple):
    """Scenarios that one launch runs, one after the other, in a world."""

    world: int
    script: str
    scenarios: tuple[str, ...]


def engine(name: str) -> tuple[str, ...]:
    return tuple(f"{name}/{each}" for each in GRID)


PEER = [
    *(Launch(world, "trainer", (*engine("ddp"), "unbroken/ddp")) for world in (1, 2)),
    *(Launch(world, "trainer", (*engine("zero2"), "zero2/unclipped/bf16")) for world in (1, 2)),
    *(Launch(world, "libraries", ("lora", "sft", "dpo")) for world in (1, 2)),
    *(Launch(world, "diffusion", (shape,)) for world in (1, 2) for shape in ("unconditional", "text_to_image")),
    Launch(1, "device_map", ("device_map",)),
]
"""What the other distribution is asked."""
RESUMED = [(1, 1, "ddp"), (2, 2, "ddp"), (2, 1, "ddp"), (1, 2, "ddp")]
"""World of the run that is killed, world in which it goes on, engine."""


def launched(launch: Launch, folder: Path, *, python: str = sys.executable, killed: bool = False) -> dict[str, Any]:
    """Scenario → figures, as rank 0 prints them. Fails with what was printed if the launch does, or if one that is to be killed does not."""
    grouped = launch.world > 1 or launch.scenarios[0].startswith(
        "zero2"
    )  # DeepSpeed wants a process group in a world of one too
    ranks = [*TORCHRUN, str(launch.world)] if grouped else []
    script = [str(HERE / f"scenario_{launch.script}.py"), str(folder), *launch.scenarios]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(
        [python, *ranks, *script], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert (ended.returncode != 0) == killed, f"{launch} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    lines = [json.loads(line[len(MARK) :]) for line in ended.stdout.splitlines() if line.startswith(MARK)]
    assert killed or [line["scenario"] for line in lines] == list(launch.scenarios), f"{ended.stdout}\n{ended.stderr}"
    return {line["scenario"]: line["figures"] for line in lines}


def interrupted(before: int, after: int, kind: str, folder: Path, *, python: str = sys.executable) -> dict[str, Any]:
    """The figures of a run that was killed in one world and went on in another, from what it had saved."""
    launched(Launch(before, "trainer", (f"killed/{kind}",)), folder, python=python, killed=True)
    return launched(Launch(after, "trainer", (f"resumed/{kind}",)), folder, python=python)[f"resumed/{kind}"]


def patiently(run: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What a run in a folder of its own gives; again if it fails, for processes of the other distribution abort at exit now and then."""
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            try:
                return run(Path(folder))
            except AssertionError:
                if attempt == ATTEMPTS - 1:
                    raise
    raise AssertionError("the last attempt returns or raises")


def asked(python: str) -> dict[str, Any]:
    """World/scenario → figures, from one round of everything."""
    found: dict[str, Any] = {}
    for launch in PEER:
        figures = patiently(partial(launched, launch, python=python))
        found |= {f"{launch.world}/{name}": value for name, value in figures.items()}
    for before, after, kind in RESUMED:
        found[f"{before}-{after}/resumed/{kind}"] = patiently(partial(interrupted, before, after, kind, python=python))
    return found


def expected() -> dict[str, Any]:
    """The fixture's figures."""
    found: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))["figures"]
    return found


def processor() -> str:
    """What sums and products are rounded by: the processor, and its instructions for long vectors and bfloat16."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except FileNotFoundError:
        return platform.platform()
    lines = dict(re.findall(r"^(.*?)\s*: (.*)$", described, re.MULTILINE))
    vectors = set(lines.get("flags", "").split()) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    return " ".join([lines.get("model name", platform.machine()), *sorted(vectors)])


def on_processor_of_the_peer() -> bool:
    """Whether this is the kind of processor that the fixture's figures are of."""
    recorded: str = json.loads(FIXTURE.read_text(encoding="utf-8"))["processor"]
    return recorded == processor()


def record(python: str) -> None:
    """Writes the fixture, without what differs between two rounds."""
    first, second = asked(python), asked(python)
    figures = {
        scenario: {name: value for name, value in found.items() if second[scenario][name] == value}
        for scenario, found in first.items()
    }
    for scenario, found in first.items():
        if lost := sorted(found.keys() - figures[scenario].keys()):
            print(f"{scenario}: not the same in two rounds, and left out: {', '.join(lost)}")
    ask = f"from importlib.metadata import version; print(*map(version, {VERSIONS!r}))"
    printed = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    versions = dict(zip(VERSIONS, printed, strict=True))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in figures.items())
    told = f'"versions": {json.dumps(versions)},\n "processor": {json.dumps(processor())}'
    FIXTURE.write_text(f'{{{told},\n "figures": {{\n{lines}\n }}}}\n', encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
