"""Writes a page with plots from the results of run.py: no figure on it is copied by hand.

python benchmarks/page.py out/benchmarks.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from run import ROWS
from table import OURS, PEERS, Measure, markdown, quartiles

TOPICS: Mapping[str, tuple[str, ...]] = {
    "Overhead of a step": ("P2 ", "P3 ", "P4 ", "P11 ", "P13 ", "P13c ", "M1 ", "M1t "),
    "Saving": ("P8 save", "P9 "),
    "Loading": ("P8 load", "B1 load"),
    "Resuming": ("P10 ",),
    "Dispatching": ("P6d ",),
    "Starting": ("P1 ", "P12 "),
}
"""Plots, and how the names of their lines begin."""

INTRODUCTION = """\
What accel costs, beside Accelerate and Lightning Fabric. All libraries take turns in each round.
Differences and ratios are within a round; figures without a sign or × depend on the machine. [How each row is measured](../benchmarks/README.md).
[Performance](performance.md) explains figures of this run and earlier ones.

- **figure** is accel's median over {fewest} to {most} rounds a row; **interval** and bars show their middle half.
- A figure with a sign is a difference to the raw loop; one with × is a ratio to it. **raw** is the median of that loop.
- **gate** is our own limit, dotted in the plots. Less is better everywhere.
- Peers have medians only. "–": not measured."""

COLORS = {OURS: "C0", "accelerate": "C1", "fabric": "C2"}
ROOT = Path(__file__).parents[1]

Results = Mapping[str, Any]


def lines_of(topic: str, results: Results) -> list[tuple[Measure, Sequence[Any]]]:
    """The measures of a topic that were taken, each with its rounds."""
    measured = results["rounds"]
    every = [(line, measured[row]) for row, lines in ROWS.items() if row in measured for line in lines]
    chosen = [(line, rounds) for line, rounds in every if line.name.startswith(TOPICS[topic])]
    return [(line, rounds) for line, rounds in chosen if line.values(line.ours, rounds)]


def draw(topic: str, lines: Sequence[tuple[Measure, Sequence[Any]]], file: Path) -> None:
    """A panel for each measure: the median of each library, with the quartiles, and the gate."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = topic  # the same results give the same file
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(lines), figsize=(8, 0.6 + 0.9 * len(lines)), layout="constrained", squeeze=False)
    for (line, rounds), axes in zip(lines, panels[:, 0], strict=True):
        for library in (PEERS[1], PEERS[0], OURS):
            values = line.values(line.ours if library == OURS else library, rounds)
            if values:
                low, middle, high = quartiles(values)
                spread = [[middle - low], [high - middle]]
                axes.barh(library, middle, xerr=spread, color=COLORS[library], height=0.7)
        if line.limit is not None:
            axes.axvline(line.limit, color="black", linestyle=":")
        unit = "times" if line.against == "/" else line.unit
        axes.set_title(f"{line.name} [{unit}]" if unit else line.name, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
    figure.suptitle(f"{topic}: less is better; dotted: the gate", fontsize=9)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def page(results: Results, images: Mapping[str, str]) -> str:
    """The page in Markdown: what measured it, a plot and a table for each topic."""
    facts = "\n".join(f"| {name} | {value} |" for name, value in results["machine"].items())
    cells = {row["row"]: row for row in results["table"]}
    counts = [len(rounds) for rounds in results["rounds"].values()]
    parts = [
        "<!-- Written by benchmarks/page.py from the results of benchmarks/run.py: run `nox -s bench`. -->",
        "# Benchmarks",
        INTRODUCTION.format(fewest=min(counts), most=max(counts)),
        f"| measured on | |\n|---|---|\n{facts}",
    ]
    for topic, image in images.items():
        rows = [cells[line.name] for line, _ in lines_of(topic, results)]
        parts += [f"## {topic}", f"![{topic}]({image})", markdown(rows)]
    return "\n\n".join(parts) + "\n"


def write(results: Results, target: Path) -> list[Path]:
    """Writes the page, and its plots into the folder `images` beside it; returns the files."""
    folder = target.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    images, files = {}, []
    for topic in TOPICS:
        lines = lines_of(topic, results)
        if lines:
            file = folder / f"benchmark-{topic.split()[0].lower()}.svg"
            draw(topic, lines, file)
            images[topic] = f"images/{file.name}"
            files.append(file)
    if not images:
        raise SystemExit("The results have no row that is plotted. Run benchmarks/run.py with more --rows.")
    target.write_text(page(results, images), encoding="utf-8")
    return [target, *files]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the page of benchmarks from the results of run.py.")
    parser.add_argument("results", type=Path, nargs="?", default=Path("out/benchmarks.json"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    if not options.results.exists():
        raise SystemExit(f"There are no results in {options.results}. Type: python benchmarks/run.py")
    for file in write(json.loads(options.results.read_text(encoding="utf-8")), options.page):
        print(file)


if __name__ == "__main__":
    main()
