"""The quickstart's curves, as a browser shows them: recorded by the tracker, served by TensorBoard, drawn by Chromium."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from services import REQUIRED, needs, offline  # noqa: F401 - a fixture of every test in this module

REPOSITORY = Path(__file__).parents[3]
PICTURE = REPOSITORY / "docs" / "images" / "tensorboard.png"  # written anew where ACCEL_WRITE_DOCS=1
TAGS = ["bits per byte/training", "bits per byte/validation", "learning rate"]
STEPS = 80
CHROMIUM = shutil.which("chromium")

if CHROMIUM is None and "playwright" in os.environ.get(REQUIRED, "").replace(" ", "").split(","):
    pytest.fail(f"Chromium is to be tested here ({REQUIRED} names playwright) and is not installed.", pytrace=False)

pytestmark = [needs("tensorboard"), needs("matplotlib"), needs("tqdm"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a short quickstart."""
    out = tmp_path_factory.mktemp("quickstart")
    command = [REPOSITORY / "examples" / "quickstart.py", "--steps", STEPS, "--seconds", 60, "--out", out]
    ended = subprocess.run(
        [sys.executable, *map(str, command), "--log-with", "tensorboard"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.fixture(scope="module")
def address(recorded, tmp_path_factory):
    """Of a TensorBoard that shows the folder."""
    log = tmp_path_factory.mktemp("tensorboard") / "log.txt"
    command = ["-m", "tensorboard.main", "--logdir", str(recorded), "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as output:
        server = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
    try:
        yield within(60, lambda: re.search(r"TensorBoard \S+ at (http://127\.0\.0\.1:\d+)", log.read_text()))[1]
    finally:
        server.terminate()
        server.wait(30)


def within(seconds, look):
    """What is found, once there is something."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{look} found nothing in {seconds} s"
        time.sleep(0.1)
    return found


def get(address, path, **query):
    with urllib.request.urlopen(f"{address}/data/plugin/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)


def test_the_server_has_every_number_of_the_quickstart(address, recorded):
    [(run, tags)] = within(60, lambda: get(address, "scalars/tags")).items()
    result = json.loads((recorded / "quickstart-1.json").read_text())
    expected = {
        "bits per byte/training": list(enumerate(result["train"], start=1)),
        "bits per byte/validation": [tuple(pair) for pair in result["valid"]],
    }
    assert set(tags) == set(TAGS)
    for tag, values in expected.items():
        found = get(address, "scalars/scalars", run=run, tag=tag)
        assert [(step, value) for _, step, value in found] == [(s, pytest.approx(v, rel=1e-6)) for s, v in values]
    assert len(get(address, "scalars/scalars", run=run, tag="learning rate")) == STEPS


@needs("playwright")
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_curves(address, tmp_path):
    from playwright.sync_api import sync_playwright

    within(60, lambda: get(address, "scalars/tags"))
    picture = tmp_path / "tensorboard.png"
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers do not give.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000}, device_scale_factor=0.8)
        page.goto(f"{address}/?smoothing=0#timeseries")
        cards = {tag: page.locator("card-view").filter(has=page.get_by_title(tag, exact=True)) for tag in TAGS}
        for card in cards.values():
            card.locator("line-chart").wait_for()
        page.get_by_role(
            "checkbox", name="Enable step selection"
        ).uncheck()  # tables of values, which leave little room for curves
        page.get_by_role("checkbox", name="Ignore outliers").uncheck()
        page.get_by_label("Close side pane").click()
        drawn = {tag: within(30, lambda card=card: line_in(card)) for tag, card in cards.items()}
        page.mouse.move(800, 600)
        page.mouse.wheel(0, -10_000)  # the pictures of the charts were taken where it had scrolled to
        within(10, lambda: cards[TAGS[0]].bounding_box()["y"] > 0)
        page.screenshot(path=picture)
        browser.close()
    assert drawn.keys() == set(TAGS)
    if os.environ.get("ACCEL_WRITE_DOCS") == "1":
        PICTURE.parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, PICTURE)


def line_in(card):
    """Whether a chart has a line, which is coloured, through half of its columns at least; all else is grey."""
    import numpy as np
    from PIL import Image

    pixels = np.array(Image.open(io.BytesIO(card.locator("line-chart").screenshot())).convert("RGB")).astype(int)
    coloured = pixels.max(axis=-1) - pixels.min(axis=-1) > 20
    return coloured.any(axis=0).mean() > 0.5
