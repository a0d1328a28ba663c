"""The page of convergence: its figures are those of the runs, and a tiny round of these trains, is killed and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pip install -r examples/requirements.txt")
pytest.importorskip("sklearn", reason="pip install -r benchmarks/requirements.txt")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def convergence(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import convergence

    yield convergence
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == BENCHMARKS:
            del sys.modules[name]


def run(*losses: float, resumed: tuple[float, ...] = ()):
    whole = {"begun": 0, "losses": list(losses), "accuracy": 0.75}
    return {"whole": whole, "resumed": {**whole, "begun": 1, "losses": list(resumed or losses)}}


RUNS = {"single fp32": run(2.0, 1.0), "ddp fp32": run(2.0, 1.5, resumed=(2.0, 1.25)), "single bf16": run(2.0, 1.0625)}
FACTS = {
    "date": "2031-05-06",
    "cpu": "a processor",
    "cores": 2,
    "system": "a system",
    "python": "3.9",
    "torch": "9.9",
    "load": 1.0,
}


def test_the_figures_are_the_largest_differences(convergence):
    single, ddp, low = (list(row.values())[1:] for row in convergence.rows_of(RUNS))
    assert single == ["1.0000", "75.0%", "–", "–", "0", "0"]
    assert ddp == ["1.5000", "75.0%", "5.0e-01", "5.0e-01", "2.5e-01", "2.5e-01"]
    assert low == ["1.0625", "75.0%", "–", "6.2e-02", "0", "0"]


def test_the_page_says_what_was_measured_and_equal_runs_give_equal_files(convergence, tmp_path):
    files = [(tmp_path / name / "pages" / "page.md", tmp_path / name / "images" / "plot.png") for name in "ab"]
    for page, image in files:
        convergence.write(FACTS, RUNS, page, image)
    text = files[0][0].read_text(encoding="utf-8")
    for expected in (
        "2031-05-06",
        "a processor",
        "torch 9.9",
        "../images/plot.png",
        "| ddp, 2 processes, fp32 | 1.5000 |",
    ):
        assert expected in text
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_a_comparison_without_its_measure_is_refused(convergence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--ways", "ddp"])
    with pytest.raises(SystemExit):
        convergence.arguments()
    assert "all is compared with single in fp32" in capsys.readouterr().err


@pytest.mark.full(group="benchmarks")
@pytest.mark.timeout(240)
def test_a_tiny_round_is_killed_and_goes_on_exactly(convergence, tmp_path):
    single = convergence.both("single", "fp32", 8, tmp_path / "single")
    ddp = convergence.both("ddp", "fp32", 8, tmp_path / "ddp")
    assert single["resumed"]["begun"] == 4
    assert convergence.apart(single["resumed"], single["whole"]) == 0
    assert convergence.apart(ddp["resumed"], ddp["whole"]) == 0
    assert convergence.apart(ddp["whole"], single["whole"]) < 1e-5
