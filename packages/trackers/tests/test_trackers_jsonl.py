"""JSONL: what its files are, what a kill leaves behind, and what is read where a run was resumed. The contract is the suite's."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pngs import decoded

from accel_core import Accelerator, Bins, Histogram, Table, TrackedRun
from accel_trackers.jsonl import JSONL, read, safe_path
from accel_trackers.png import encode


def started(directory, config=None, **how):
    tracker = JSONL()
    tracker.start(TrackedRun("project", "run", config or {}, Path(directory), **how))
    return tracker


def lines(directory):
    """As a strict reader of JSON has them: NaN and Infinity are no JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    text = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.split("\n")[:-1]]


def without_time(records):
    return [{name: value for name, value in record.items() if name not in {"time", "attempt"}} for record in records]


def test_a_record_is_a_line_with_its_step_and_time_and_numbers_apart_from_texts(tmp_path):
    tracker = started(tmp_path)
    tracker.log({"loss": 0.5, "samples": 2**70, "note": "NaN"}, 3)
    tracker.log({"note": "größe\n"}, 4)
    tracker.log({}, 5)
    tracker.finish(failed=False)
    found = lines(tmp_path)
    assert without_time(found) == [
        {"step": 3, "values": {"loss": 0.5, "samples": 2**70}, "texts": {"note": "NaN"}},
        {"step": 4, "texts": {"note": "größe\n"}},
        {"step": 5, "values": {}},
    ]
    assert all(1.7e9 < record["time"] < 1e10 for record in found)
    assert [record["values"] for record in read(tmp_path)] == [
        {"loss": 0.5, "samples": 2**70, "note": "NaN"},
        {"note": "größe\n"},
        {},
    ]


def test_what_is_not_finite_has_a_name_everywhere_and_is_a_number_again_when_read(tmp_path):
    tracker = started(tmp_path, {"clip": math.inf, "each": [math.nan]})
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 0)
    tracker.log_table("cells", Table(("number", "text"), ((math.inf, "Infinity"), (math.nan, "NaN"))), 0)
    tracker.log_histograms({"bins": Bins((1,), (0.0, 1.0), math.inf, math.nan, nonfinite=2)}, 0)
    tracker.finish(failed=False)
    assert lines(tmp_path)[0]["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {"clip": "Infinity", "each": ["NaN"]}
    values, table, bins = read(tmp_path)
    assert math.isnan(values["values"].pop("a"))
    assert values["values"] == {"b": math.inf, "c": -math.inf}
    (first, second) = table["tables"]["cells"].rows
    assert first == (math.inf, "Infinity")
    assert math.isnan(second[0])
    assert second[1] == "NaN"
    assert bins["histograms"]["bins"].total == math.inf
    assert math.isnan(bins["histograms"]["bins"].total_of_squares)
    assert bins["histograms"]["bins"].nonfinite == 2


def test_texts_that_utf8_cannot_hold_are_kept(tmp_path):
    tracker = started(tmp_path, {"half": "\udc80"})
    tracker.log({"half \ud83d": "\udc80\u2028end"}, 0)
    tracker.finish(failed=False)
    assert read(tmp_path)[0]["values"] == {"half \ud83d": "\udc80\u2028end"}
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"half": "\udc80"}


def test_the_configuration_is_indented_and_readable(tmp_path):
    started(tmp_path, {"dataset": "größe", "layers": [1, None]}).finish(failed=False)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert text == '{\n  "dataset": "größe",\n  "layers": [\n    1,\n    null\n  ]\n}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.jsonl"]


def test_a_resumed_run_is_appended_and_what_it_supersedes_is_not_read(tmp_path):
    first = started(tmp_path)
    for step in (0, 1, 2, 3):
        first.log({"loss": float(step)}, step)
    first.finish(failed=True)
    second = started(tmp_path, resumed=first.state(), step=2)
    second.log({"loss": 20.0}, 2)
    second.finish(failed=False)
    third = started(tmp_path, resumed=second.state(), step=3)
    third.log({"loss": 1.5}, 1)  # back, because the user says so: nothing of it is superseded
    third.log({"loss": 30.0}, 3)
    third.finish(failed=False)
    assert [(record["step"], record["values"]["loss"]) for record in read(tmp_path)] == [
        (0, 0.0), (1, 1.0), (2, 20.0), (1, 1.5), (3, 30.0),
    ]  # fmt: skip
    assert [line["resumed"] for line in lines(tmp_path) if "resumed" in line] == [{"step": 2}, {"step": 3}]
    assert len(lines(tmp_path)) == 4 + 2 + 3


def test_of_programs_that_resumed_one_run_at_once_the_one_that_began_last_is_read_and_all_lines_can_be_told_apart(
    tmp_path, caplog
):
    first = started(tmp_path)
    first.log({"loss": 1.0}, 0)
    second, third = (started(tmp_path, resumed=first.state(), step=1) for _ in range(2))
    for step in (1, 2):
        for loss, tracker in ((10.0, first), (20.0, second), (30.0, third)):
            tracker.log({"loss": loss}, step)
    with caplog.at_level(logging.WARNING, "accel_trackers.jsonl"):
        found = read(tmp_path)
    assert [(record["step"], record["values"]["loss"]) for record in found] == [(0, 1.0), (1, 30.0), (2, 30.0)]
    assert "metrics.jsonl: 4 lines are left out, of a program that recorded this run when another" in caplog.text
    assert "With init_trackers(..., resume=False) the second is a run of its own." in caplog.text
    by_attempt: dict[str | None, set[float]] = {}
    for line in lines(tmp_path)[1:]:
        by_attempt.setdefault(line.get("attempt"), set()).update(line.get("values", {}).values())
    assert sorted(by_attempt.values(), key=min) == [{10.0}, {20.0}, {30.0}]
    for tracker in (first, second, third):
        tracker.finish(failed=False)


def test_a_line_that_a_kill_left_unfinished_is_not_read_and_is_cut_off_when_the_run_goes_on(tmp_path, caplog):
    first = started(tmp_path)
    first.log({"loss": 1.0}, 0)
    first.finish(failed=False)
    with first.tracker.open("ab") as file:
        file.write(b'{"step": 1, "va')
    assert [record["step"] for record in read(tmp_path)] == [0]
    with caplog.at_level(logging.WARNING, "accel_trackers.jsonl"):
        second = started(tmp_path, resumed={}, step=1)
    assert "metrics.jsonl ends in the middle of a line, 15 bytes of which are cut off." in caplog.text
    second.log({"loss": 2.0}, 1)
    second.finish(failed=False)
    assert [record["step"] for record in read(tmp_path)] == [0, 1]
    assert without_time(lines(tmp_path))[1] == {"resumed": {"step": 1}}


@pytest.mark.parametrize("content", [b"", b'{"step"'])
def test_a_file_without_one_whole_line_is_no_record(content, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert read(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from accel_core import TrackedRun
from accel_trackers.jsonl import JSONL

tracker = JSONL()
tracker.start(TrackedRun("project", "run", {}, Path(sys.argv[1])))
for step in range(50):
    tracker.log({"loss": float(step)}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_logged_before_a_kill_is_there(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [record["values"] for record in read(tmp_path)] == [{"loss": float(step)} for step in range(50)]


def test_a_new_run_in_the_folder_of_another_one_is_refused_and_changes_nothing(tmp_path):
    first = started(tmp_path, {"layers": 1})
    first.log({"loss": 1.0}, 0)
    first.finish(failed=False)
    with pytest.raises(FileExistsError, match="metrics.jsonl of another run is there: give this one another folder"):
        started(tmp_path, {"layers": 2})
    assert len(read(tmp_path)) == 1
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"layers": 1}


def test_a_run_whose_file_has_gone_is_gone_on_with_and_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "accel_trackers.jsonl"):
        tracker = started(tmp_path / "moved", resumed={}, step=7)
    assert "metrics.jsonl is not there: what was recorded of it before lies elsewhere." in caplog.text
    tracker.log({"loss": 1.0}, 7)
    tracker.finish(failed=False)
    assert [record["step"] for record in read(tmp_path / "moved")] == [7]


@pytest.mark.parametrize(
    "line",
    ["{", "3", '"resumed"', "null", '{"time": 1}', '{"resumed": 3}', '{"step": 1, "time": 1, "tables": {"a": {}}}', ""],
)
def test_a_line_that_is_no_record_is_refused_with_its_number(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "time": 1.0, "values": {{}}}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"metrics.jsonl, line 2 is no record: {line.encode()!r}")):
        read(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path)


def image(*shape):
    return (torch.arange(math.prod(shape)) % 251).to(torch.uint8).reshape(shape)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1), (4, 7, 3), (3, 2, 4), (300, 200, 3)])
def test_a_png_has_the_pixels_of_the_tensor(shape):
    assert torch.equal(decoded(encode(image(*shape))), image(*shape))
    assert torch.equal(decoded(encode(image(*shape).transpose(0, 1))), image(*shape).transpose(0, 1))


def test_other_programs_read_a_png(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
        path = tmp_path / f"{mode}.png"
        path.write_bytes(encode(image(5, 6, channels)))
        with pillow.open(path) as opened:
            assert (opened.mode, opened.size) == (mode, (6, 5))
            assert opened.tobytes() == bytes(image(5, 6, channels).flatten().tolist())


@pytest.mark.parametrize(
    "wrong", [image(2, 2, 2), image(2, 2), image(2, 2, 3).float(), image(0, 2, 3), image(2, 0, 1)], ids=str
)
def test_what_is_no_image_is_refused_with_its_shape(wrong):
    message = f"to be made of a tensor of shape {tuple(wrong.shape)} and {wrong.dtype}. Give (height, width, channels) of torch.uint8"
    with pytest.raises(ValueError, match=re.escape(message)):
        encode(wrong)


def test_no_image_takes_the_place_of_another(tmp_path):
    tracker = started(tmp_path)
    tracker.log_images({"a:b": [image(1, 1, 1)], "a?b": [image(1, 2, 1)]}, 0)
    tracker.log_images({"a:b": [image(1, 3, 1)]}, 0)
    tracker.finish(failed=False)
    tracker = started(tmp_path, resumed={}, step=0)
    tracker.log_images({"a:b": [image(1, 4, 1)]}, 0)
    tracker.finish(failed=False)
    widths = {path.name: decoded(path.read_bytes()).shape[1] for path in (tmp_path / "images" / "a_b").iterdir()}
    assert widths == {"0_0.png": 1, "0_0_again1.png": 2, "0_0_again2.png": 3, "0_0_again3.png": 4}
    assert [record["images"] for record in read(tmp_path)] == [{"a:b": [tmp_path / "images/a_b/0_0_again3.png"]}]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("samples", "samples"),
        ("validation/first/grid", "validation/first/grid"),
        ("größe, 精度", "größe_ 精度"),
        ("../../etc/passwd", "etc/passwd"),
        ("/absolute//twice/", "absolute/twice"),
        ("..", "_"),
        ("", "_"),
        (".hidden/...", "hidden"),
        ("C:\\windows\0\n", "C__windows__"),
        ("x" * 300, "x" * 100),
        ("精" * 100, "精" * 33),
        ("/".join("abcdefghijkl"), "a/b/c/d/e/f/g/h"),
    ],
)
def test_the_name_of_an_image_leads_to_a_place_inside_its_folder(name, path, tmp_path):
    assert safe_path(name).as_posix() == path
    folder = tmp_path / safe_path(name)
    folder.mkdir(parents=True)
    assert tmp_path in folder.resolve().parents


def test_options_are_refused_with_what_holds(tmp_path):
    with pytest.raises(TypeError, match=r"init_kwargs=\{'jsonl': \.\.\.\} has 'mode', which jsonl does not have"):
        started(tmp_path, options={"mode": "w"})
    tracker = started(tmp_path / "other")
    for call in (
        lambda: tracker.log({}, 0, commit=True),
        lambda: tracker.log_images({}, 0, commit=True),
        lambda: tracker.log_table("a", Table((), ()), 0, commit=True),
        lambda: tracker.log_histograms({}, 0, commit=True),
    ):
        with pytest.raises(TypeError, match=r"log_kwargs=\{'jsonl': \.\.\.\} has 'commit', which jsonl does not"):
            call()
    tracker.finish(failed=False)
    assert lines(tmp_path / "other") == []


def test_a_run_that_did_not_start_is_told_once(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"mode": "w"}})
    with pytest.warns(RuntimeWarning) as warned:
        accelerator.end_training()
    (warning,) = warned
    assert "is switched off: start() raised TypeError" in str(warning.message)


def test_an_accelerator_records_with_it_and_goes_on_from_a_checkpoint(tmp_path):
    def accelerator():
        made = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path / "out")
        made.init_trackers("digits", {"layers": [2, None]})
        made.prepare(torch.nn.Linear(1, 1))
        return made

    first = accelerator()
    first.log({"train": {"loss": torch.tensor(0.5)}, "weights": Histogram(torch.arange(8.0), bins=4)}, step=0)
    first.save_state(tmp_path / "checkpoint")
    first.log({"train": {"loss": 0.25}})
    first.log_images({"seen/first": torch.full((2, 1, 3, 5), 128, dtype=torch.uint8)})
    first.log_table("answers", columns=["input", "score"], data=[["a", math.nan], ["b", 1]])
    first.end_training()
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert [sorted(record) for record in read(folder)] == [
        ["step", "time", "values"],
        ["histograms", "step", "time"],
        ["step", "time", "values"],
        ["images", "step", "time"],
        ["step", "tables", "time"],
    ]
    assert [decoded(path.read_bytes()).unique().tolist() for path in read(folder)[3]["images"]["seen/first"]] == [
        [128]
    ] * 2

    second = accelerator()
    second.load_state(tmp_path / "checkpoint")
    second.log({"train": {"loss": 0.125}})
    second.end_training()
    assert [path.parent for path in tmp_path.rglob("metrics.jsonl")] == [folder]
    values = [(record["step"], record["values"]) for record in read(folder) if "values" in record]
    assert values == [(0, {"train/loss": 0.5}), (1, {"train/loss": 0.125})]
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == {"layers": [2, None]}
