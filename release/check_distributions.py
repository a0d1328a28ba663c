"""Looks into built sdists and wheels: what must be in them, what must not, and under which licence.

python release/check_distributions.py FOLDER
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

from projects import FOLDERS, PROJECTS, ROOT

FOREIGN = re.compile(r"(^|/)(tests?|__pycache__|\.[^/]+|.*\.egg-info)(/|$)|\.pyc$")
"""What no wheel has: tests, hidden files, and what Python has compiled."""


def problems(folder: Path) -> list[str]:
    """Everything that is wrong with the distributions in a folder, which has one sdist and one wheel of each package."""
    return [problem for package in PROJECTS for problem in _problems_of(folder, package)]


def _problems_of(folder: Path, package: str) -> list[str]:
    project = PROJECTS[package]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    wheels, sdists = [*folder.glob(f"{stem}-py3-none-any.whl")], [*folder.glob(f"{stem}.tar.gz")]
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{stem}: {len(wheels)} wheels and {len(sdists)} sdists, and not one of each"]
    return [f"{wheels[0].name}: {each}" for each in _of_wheel(wheels[0], package, stem)] + [
        f"{sdists[0].name}: {each}" for each in _of_sdist(sdists[0], stem)
    ]


def _of_wheel(path: Path, package: str, stem: str) -> list[str]:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        about = Parser().parsestr(wheel.read(f"{stem}.dist-info/METADATA").decode())
        licence = f"{stem}.dist-info/licenses/LICENSE"
        same = licence in names and wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    found = [] if same else ["it has not the LICENSE of the repository"]
    if about["License-Expression"] != "Apache-2.0":
        found.append(f"its licence is {about['License-Expression']}")
    found += [f"it has {name}" for name in names if FOREIGN.search(name)]
    modules = [each.name for each in (FOLDERS[package] / "src").glob("*") if each.is_dir()]
    found += [f"{each}/py.typed is missing" for each in modules if f"{each}/py.typed" not in names]
    expected = {
        path.relative_to(FOLDERS[package] / "src").as_posix() for path in (FOLDERS[package] / "src").rglob("*.py")
    }
    return found + [f"{name} is missing" for name in sorted(expected - set(names))]


def _of_sdist(path: Path, stem: str) -> list[str]:
    with tarfile.open(path) as sdist:
        names = sdist.getnames()
    needed = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
    return [f"{name} is missing" for name in needed if f"{stem}/{name}" not in names]


def main() -> None:
    if found := problems(Path(sys.argv[1])):
        raise SystemExit("\n".join(found))
    print(f"{len(PROJECTS)} sdists and {len(PROJECTS)} wheels are complete")


if __name__ == "__main__":
    main()
