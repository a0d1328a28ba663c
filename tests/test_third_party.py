"""A strategy and an observer of third parties work from their wheels, and the core knows neither.

The wheels of examples/accel-hello and examples/accel-stopwatch are installed into a folder of their own, which subprocesses
find by PYTHONPATH: what runs here is what an installation runs, entry points and metadata included.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]
THIRD_PARTIES = ("accel-hello", "accel-nearby", "accel-pipeline", "accel-sqlite", "accel-stopwatch")
COMPILED = ("accel-toydevice",)  # takes a compiler and half a minute: built and tested by `nox -s toydevice`
GUIDES = sorted(ROOT.glob("docs/how-to/write-*.md"))
LAUNCH = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ACCEL.*|TORCHELASTIC.*)")

SCRIPT = """
import sys

import torch
from accel_core import Accelerator
from accel_stopwatch import Stopwatch

accelerator = Accelerator(cpu=True, strategy="hello", plugins=[Stopwatch(sys.argv[1])])
torch.manual_seed(accelerator.process_index)  # so that the ranks' weights differ until they are prepared
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.full((4, 2), 1.0 + accelerator.process_index)).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
assert (weights == weights[0]).all(), weights
accelerator.print(accelerator.explain())
accelerator.end_training()
"""


def run(*command, site, folder, timeout=110):
    """Runs a program of this interpreter that finds the third parties' packages; gives what it printed."""
    ended = start(*command, site=site, folder=folder, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def start(*command, site, folder, timeout):
    """Runs such a program, however it ends."""
    environment = {name: value for name, value in os.environ.items() if not LAUNCH.fullmatch(name)}
    paths = [str(site), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which both wheels are installed, without an index."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    folders = [str(ROOT / "examples" / name) for name in THIRD_PARTIES]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels), *folders]
    subprocess.run(build, check=True, capture_output=True, timeout=110)
    found = sorted(map(str, wheels.glob("*.whl")))
    assert len(found) == len(THIRD_PARTIES)
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), *found]
    subprocess.run(install, check=True, capture_output=True, timeout=110)
    return site


def test_the_strategy_is_listed_with_its_distribution_and_version(site, tmp_path):
    listed = run("-m", "accel_core", "plugins", site=site, folder=tmp_path)
    assert re.search(r"^accel\.strategies +hello +accel-hello +0\.1\.0 +ok$", listed, re.MULTILINE), listed


def test_the_command_is_one_of_accel_with_its_arguments(site, tmp_path):
    assert run("-m", "accel_launch", "hello", "Ada", site=site, folder=tmp_path) == "Hello, Ada!\n"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_strategy_and_observer_take_part_in_a_run(world, site, tmp_path):
    script, times = tmp_path / "train.py", tmp_path / "times.jsonl"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world] if world > 1 else []
    explained = run(*launch, script, times, site=site, folder=tmp_path)
    assert re.search(r"^strategy +hello +accel-hello 0\.1\.0 ", explained, re.MULTILINE), explained
    assert re.search(r"^plugin +Stopwatch +accel-stopwatch 0\.1\.0 ", explained, re.MULTILINE), explained
    assert re.search(r"^backward +strategy 'hello'$", explained, re.MULTILINE), explained
    lines = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    assert sorted(line["rank"] for line in lines) == list(range(world))


@pytest.fixture(scope="module")
def tested(site, tmp_path_factory):
    """How the tests of all of them ended, by folder, and what pytest said: in one process, without any configuration of ours."""
    folder, examples = tmp_path_factory.mktemp("tested"), ROOT / "examples"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={examples}",
        "--junitxml",
        folder / "ended.xml",
    ]
    tests = [examples / name / "tests" for name in THIRD_PARTIES]
    ended = start("-m", "pytest", *options, *tests, site=site, folder=folder, timeout=400)
    said = ended.stdout + ended.stderr
    assert (folder / "ended.xml").exists(), said
    found = {name: [] for name in THIRD_PARTIES}
    for case in ET.parse(folder / "ended.xml").iter("testcase"):
        outcome = {part.tag for part in case} & {"failure", "error", "skipped"}
        found[case.get("classname").partition(".")[0]].append(*outcome or ["passed"])
    return found, said


@pytest.mark.full
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", THIRD_PARTIES)
def test_a_third_party_passes_its_own_tests_from_its_wheel(name, tested):
    """The tests of accel-hello are the conformance suite."""
    found, said = tested
    assert "passed" in found[name], said
    assert not {"failure", "error"} & {*found[name]}, said


def test_every_third_party_is_known_here():
    folders = [path.parent.name for path in ROOT.glob("examples/*/pyproject.toml")]
    assert sorted(folders) == sorted(THIRD_PARTIES + COMPILED)


def test_the_core_knows_no_third_party():
    named = [
        path.name
        for path in ROOT.glob("packages/core/src/**/*.py")
        if re.search("hello|nearby|stopwatch|toydevice|toyccl", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert not named


@pytest.mark.parametrize("name", THIRD_PARTIES + COMPILED)
def test_a_third_party_uses_only_public_names_of_the_core(name):
    for path in ROOT.glob(f"examples/{name}/**/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"accel_core[\w.]*\._|import _", text), path
        assert not re.search(r"accelerator\._", text), path


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_what_a_guide_quotes_stands_in_the_file(guide):
    """A block after `<!-- from path -->` is part of that file, up to its indentation."""
    quotes = re.findall(
        r"^<!-- from (\S+) -->\n(?:<!-- not run -->\n)?```\w+\n(.*?)^```$",
        guide.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert quotes
    for path, quoted in quotes:
        text = (guide.parent / path).read_text(encoding="utf-8")
        assert any(textwrap.indent(quoted, " " * width) in text for width in (0, 4, 8)), f"{path} lacks:\n{quoted}"
