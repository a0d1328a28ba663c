"""The page of benchmarks has the figures, machine and date of the results, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pip install -r examples/requirements.txt")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import page

    yield page
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == BENCHMARKS:
            del sys.modules[name]


def results(writer, **peers: float):
    """Two rounds of the row P2, in seconds."""
    figures = {"plain": 1e-4, "lean": 9e-5, "accel": 1.01e-4, **peers}
    rounds = [{name: {"cpu": value * factor} for name, value in figures.items()} for factor in (1.0, 1.1)]
    machine = {"date": "2031-05-06", "cpu": "a processor", "torch": "9.9", "accelerate": "8.8"}
    return {"machine": machine, "table": [line.row(rounds) for line in writer.ROWS["P2"]], "rounds": {"P2": rounds}}


def test_the_page_says_what_was_measured_and_on_what(writer, tmp_path):
    found = results(writer, accelerate=3e-4)
    files = writer.write(found, tmp_path / "benchmarks.md")
    text = files[0].read_text()
    assert [file.name for file in files] == ["benchmarks.md", "benchmark-overhead.svg"]
    for expected in (
        "2031-05-06",
        "a processor",
        "| accelerate | 8.8 |",
        "images/benchmark-overhead.svg",
        "+1.1 µs",
        "+210.0 µs",
    ):
        assert expected in text
    assert "## Saving" not in text
    assert files[1].read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("against", "limit", "factor", "figure", "verdict"),
    [
        ("/", 1.0, 1.00002, "× 1.00002", "MISSED"),
        ("/", 1.0, 1.0, "× 1.000", "met"),
        ("/", 1.0, 1.25, "× 1.250", "MISSED"),
        ("", 1.0, 1.00002, "1.00002 s", "MISSED"),
        ("", 1.0, 0.99998, "0.99998 s", "met"),
        ("-", 0.0, 1.01, "+0.01 s", "MISSED"),
    ],
)
def test_a_figure_has_the_digits_that_tell_it_from_its_gate(writer, against, limit, factor, figure, verdict):
    rounds = [{"plain": {"cpu": 1.0}, "accel": {"cpu": factor}}]
    measure = writer.Measure("a row", "cpu", limit, against=against, unit="s", scale=1)
    row = measure.row(rounds)
    assert (row["figure"], row["verdict"]) == (figure, verdict)
    assert row["interval"] == f"{figure.removesuffix(' s')} … {figure.removeprefix('× ')}"


def test_the_raw_loop_is_shown_without_powers_of_ten(writer):
    rounds = [{"plain": {"cpu": 23.041}, "accel": {"cpu": 23.0}}]
    assert writer.Measure("a row", "cpu", against="/", unit="ms", scale=1e3).row(rounds)["raw"] == "23041 ms"
    assert writer.Measure("a row", "cpu", against="/", unit="s", scale=1).row(rounds)["raw"] == "23.04 s"


def test_equal_results_give_equal_files(writer, tmp_path):
    one = writer.write(results(writer), tmp_path / "a" / "benchmarks.md")
    other = writer.write(results(writer), tmp_path / "b" / "benchmarks.md")
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in other]


def test_every_plot_has_lines_in_the_rows_that_are_measured(writer):
    names = [line.name for lines in writer.ROWS.values() for line in lines]
    for topic, beginnings in writer.TOPICS.items():
        assert all(any(name.startswith(each) for name in names) for each in beginnings), topic


def test_results_without_a_plotted_row_are_refused(writer, tmp_path):
    with pytest.raises(SystemExit, match="no row that is plotted"):
        writer.write({"machine": {}, "table": [], "rounds": {}}, tmp_path / "benchmarks.md")
