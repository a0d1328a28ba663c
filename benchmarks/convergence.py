"""Whether training comes to the same under every strategy and precision, interrupted or not: writes a page with curves.

python benchmarks/convergence.py

Each run is one of digits.py in new processes. `killed` ends by SIGKILL in the middle of a step, in all processes, a few steps behind a
checkpoint; `resumed` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import digits
import matplotlib as mpl
from PIL import Image
from run import machine

from accel_testing import RanksFailed, preload, run_ranks

WAYS = {"single": 1, "ddp": 2, "fsdp": 2, "deepspeed": 2}
PRECISIONS = {"fp32": "no", "bf16": "bf16"}
REPEATED = 3  # steps between the checkpoint and the kill: the resumed run makes them again
STEPS = 220
SECONDS = 300.0  # for one run
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance" / "convergence.md"
IMAGE = ROOT / "docs" / "images" / "convergence.png"

Runs = Mapping[str, Mapping[str, Any]]


def train_in_rank(arguments: list[str]) -> None:
    """What a process runs."""
    sys.argv = ["digits.py", *arguments]
    digits.main()


def train(way: str, precision: str, steps: int, out: Path, *more: str) -> dict[str, Any]:
    """One run to its end; what it wrote."""
    common = ["--strategy", way, "--precision", PRECISIONS[precision], "--steps", str(steps), "--out", str(out)]
    run_ranks(train_in_rank, WAYS[way], [*common, *more], timeout=SECONDS)
    return json.loads(out.read_text(encoding="utf-8"))


def both(way: str, precision: str, steps: int, folder: Path) -> dict[str, Any]:
    """A run that nothing interrupts, and one that is killed and resumed. SystemExit if the kill or the resuming did not happen."""
    name, half = f"{way} {precision}", steps // 2
    folder.mkdir(parents=True)
    whole = train(way, precision, steps, folder / "whole.json")
    saving = ["--checkpoint", str(folder / "checkpoint"), "--save", str(half)]
    try:
        train(way, precision, steps, folder / "killed.json", *saving, "--kill", str(half + REPEATED))
    except RanksFailed as failed:
        if any("SIGKILL" not in report.state for report in failed.reports):
            raise
    else:
        raise SystemExit(f"{name} was to be killed in step {half + REPEATED + 1}, and ran to its end.")
    resumed = train(way, precision, steps, folder / "resumed.json", *saving[:2], "--resume")
    if resumed["begun"] != half or whole["world"] != WAYS[way]:
        raise SystemExit(
            f"{name} resumed behind step {resumed['begun']} instead of {half}, in {whole['world']} processes."
        )
    return {"whole": whole, "resumed": resumed}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The largest difference between the losses of one step."""
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """The figures of each run: the last loss, the accuracy, and how far its curves are from others."""
    rows = []
    for name, found in runs.items():
        way, precision = name.split()
        whole, resumed = found["whole"], found["resumed"]
        rows.append(
            {
                "run": f"{way}, {WAYS[way]} process{'es' if WAYS[way] > 1 else ''}, {precision}",
                "last loss": f"{whole['losses'][-1]:.4f}",
                "accuracy": f"{whole['accuracy']:.1%}",
                "from single": _difference(apart(whole, runs[f"single {precision}"]["whole"]), way == "single"),
                "from single in fp32": _difference(apart(whole, runs["single fp32"]["whole"]), name == "single fp32"),
                "resumed, from uninterrupted": _difference(apart(resumed, whole)),
                "resumed, from single": _difference(apart(resumed, runs[f"single {precision}"]["whole"])),
            }
        )
    return rows


def _difference(value: float, itself: bool = False) -> str:
    return "–" if itself else "0" if value == 0 else f"{value:.1e}"


def draw(runs: Runs, file: Path) -> None:
    """The curves of each precision, and below how far each is from that of `single` in fp32."""
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (curves, differences) = plt.subplots(2, figsize=(8, 6.5), layout="constrained", sharex=True)
    for name, found in runs.items():
        way, precision = name.split()
        color, line = f"C{list(WAYS).index(way)}", "-" if precision == "fp32" else "--"
        losses = found["whole"]["losses"]
        steps = range(1, len(losses) + 1)
        curves.plot(steps, losses, line, color=color, linewidth=0.8, label=name)
        begun = found["resumed"]["begun"]
        curves.plot(steps[begun:], found["resumed"]["losses"][begun:], ":", color=color, linewidth=1.6)
        if name != "single fp32":
            against = runs["single fp32"]["whole"]["losses"]
            distance = [abs(a - b) or None for a, b in zip(losses, against, strict=True)]
            differences.plot(steps, distance, line, color=color, linewidth=0.8)
    curves.axvline(begun, color="grey", linewidth=0.8)
    curves.set(
        ylabel="loss", yscale="log", title="loss of each step (dotted: resumed from the checkpoint at the grey line)"
    )
    curves.legend(fontsize=7, ncols=2)
    differences.set(
        xlabel="step",
        ylabel="difference",
        yscale="log",
        title="difference from single in fp32 (none drawn where it is 0)",
    )
    figure.savefig(file, dpi=90)
    with Image.open(file) as picture:
        picture.quantize(32).save(file, optimize=True)  # a fifth of the bytes
    plt.close(figure)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """In Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(facts: Mapping[str, Any], runs: Runs, image: str) -> str:
    """The page in Markdown."""
    steps = len(next(iter(runs.values()))["whole"]["losses"])
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "deepspeed") if name in facts)
    return f"""<!-- Written by benchmarks/convergence.py: run `python benchmarks/convergence.py`. -->
# Convergence

Does training come to the same under every strategy and precision, and after a kill? One script, [digits.py](../../benchmarks/digits.py), trains a small
network to read scikit-learn's handwritten digits: {steps} steps of {digits.BATCH} rows, the same rows in the same order in every world, AdamW, a cosine schedule.
The accuracy is that on the digits that it did not train on.

{facts["date"]}, {facts["cores"]} cores of {facts["cpu"]}, no accelerator, {facts["system"].partition("-")[0]}, {versions}; load {facts["load"]:.0f}.

![Losses of all runs, and their differences](../{image})

The largest difference between the losses of one step:

{table(rows_of(runs))}

- **From single** compares with one process in the same precision. Where it is not 0, gradients were summed in another order, and steps carry that difference on.
- **Resumed** was killed by SIGKILL in all processes, in the middle of step {steps // 2 + REPEATED + 1}, and went on from its checkpoint of step {steps // 2}, inside
  an epoch. 0 means bit by bit.
- **bf16** is autocast over weights in fp32, under DeepSpeed too.

These are figures of a small network on a CPU; a GPU's kernels round otherwise, and may not repeat themselves.
"""


def main() -> None:
    options = arguments()
    preload("sklearn.datasets", "torch.distributed.fsdp", *(["deepspeed"] if "deepspeed" in options.ways else []))
    facts, began = machine(), time.monotonic()  # the load before it adds its own
    if "deepspeed" in options.ways:
        facts["deepspeed"] = metadata.version("deepspeed")
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precisions:
            for way in options.ways:
                name = f"{way} {precision}"
                runs[name] = both(way, precision, options.steps, Path(folder) / name.replace(" ", "-"))
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    write(facts, runs, options.page, options.image)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({"machine": facts, "runs": runs}), encoding="utf-8")
    print(f"Every loss stands in {options.results}.")


def write(facts: Mapping[str, Any], runs: Runs, target: Path, image: Path) -> None:
    """Writes the page and its plot; the image lies in a folder beside the page's folder."""
    for file in (target, image):
        file.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, image)
    target.write_text(page(facts, runs, f"{image.parent.name}/{image.name}"), encoding="utf-8")
    print(table(rows_of(runs)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains under every strategy and precision, killed and not, and compares."
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=Path("out/convergence.json"))
    parser.add_argument("--image", type=Path, default=IMAGE)
    options = parser.parse_args()
    if "single" not in options.ways or "fp32" not in options.precisions:
        parser.error("all is compared with single in fp32: leave them among --ways and --precisions")
    return options


if __name__ == "__main__":
    main()
