"""Each extra brings all that its tracker needs: it records with nothing else installed, as far as Python can see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from services import needs, offline  # noqa: F401 - a fixture of every test in this module

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = {  # of a tracker: the extra that installs its client, and how it is made to stay on this machine
    "aim": ("aim", {}),
    "clearml": ("clearml", {"offline": True}),
    "comet_ml": ("comet", {"online": False, "offline_directory": "."}),
    "dvclive": ("dvclive", {}),
    "jsonl": (None, {}),
    "mlflow": ("mlflow", {}),
    "swanlab": ("swanlab", {"mode": "offline", "log_dir": "."}),
    "tensorboard": ("tensorboard", {}),
    "trackio": ("trackio", {"dir": "."}),
    "wandb": ("wandb", {"mode": "offline", "dir": "."}),
}
EVERY_KIND = """
import sys
from importlib.machinery import PathFinder

hidden = set({hidden!r})


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
import json, warnings
warnings.simplefilter("ignore")
import torch
from importlib.metadata import entry_points
from accel_core import Accelerator, Histogram

tracker = entry_points(group="accel.trackers")[{name!r}].load()
accelerator = Accelerator(cpu=True, log_with=tracker(**{options!r}), project_dir="out")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always", RuntimeWarning)
    accelerator.init_trackers("project", {{"lr": 0.1}})
    accelerator.log({{"loss": 1.0, "note": "a text"}}, step=0)
    accelerator.log_images({{"image": torch.rand(3, 4, 4), "grey": torch.rand(4, 4)}}, step=1)
    accelerator.log_table("table", ["a", "b"], [[1, "x"]], step=2)
    accelerator.log({{"weights": Histogram(torch.arange(10.0))}}, step=3)
    accelerator.end_training()
print("\\n" + json.dumps([str(one.message) for one in said if one.category is RuntimeWarning]))
"""


def extra(name):
    """The requirements of an extra, as pyproject.toml has them."""
    [found] = re.findall(rf"^{name} = (\[.*\])$", PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    return json.loads(found)


def closure(requirements):
    """What pip installs for these: the distributions that are found here, by canonical names."""
    found, waiting = set(), [Requirement(each) for each in requirements]
    seen = set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if (name, frozenset(one.extras)) in seen:
            continue
        seen.add((name, frozenset(one.extras)))
        try:
            needed = [Requirement(each) for each in requires(name) or []]
        except PackageNotFoundError:
            continue
        found.add(name)
        extras = one.extras or {""}
        waiting += [
            each for each in needed if not each.marker or any(each.marker.evaluate({"extra": x}) for x in extras)
        ]
    return found


def hidden(installed):
    """The modules of all distributions here but those, and ours, which are plugins of the core and bring nothing for trackers."""
    modules = [each for each in packages_distributions().items() if not each[0].startswith("accel_")]
    return sorted(name for name, owners in modules if not installed & set(map(canonicalize_name, owners)))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) if of else name for name, (of, _) in EXTRAS.items()]
)
def test_an_extra_brings_what_its_tracker_needs(name, tmp_path):
    of, options = EXTRAS[name]
    installed = closure(["accel-core", "accel-trackers", "torch", *(extra(of) if of else [])])
    script = EVERY_KIND.format(hidden=hidden(installed), name=name, options=options)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = [
        one for one in json.loads(done.stdout.splitlines()[-1]) if "leaves out histograms: it has none" not in one
    ]
    assert refused == []


def test_every_extra_is_tried():
    section = PYPROJECT.read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) == {of for of, _ in EXTRAS.values() if of}
