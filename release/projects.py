"""What the packages say of themselves: names, dependencies, versions, notes; and the one address of the repository.

python release/projects.py requirements       writes requirements/<distribution>.txt
python release/projects.py repository URL     writes that address wherever the present one stands
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
NOT_SET = "OWNER_NOT_SET"
"""Stands for the owner of the repository until there is one. GitHub allows no `_` in a name, so nobody else can take it."""
PRIVATE = "Private :: Do Not Upload"
"""The classifier that indexes refuse: of a distribution whose name is another's, and of what cannot be installed without it."""
REQUIREMENTS_HEAD = """\
# Written by release/projects.py. {name} from a clone, with what it needs of ours; type, in the folder of the clone:
#   pip install -r requirements/{name}.txt
-c ../{constraints}
"""

FITS = {"accel-xla": "constraints-oldest.txt"}
"""Which constraints a package is installed with, where it needs another torch: torch_xla 2.9 fits torch 2.9 alone."""


def load(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


FOLDERS = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PROJECTS: dict[str, dict[str, Any]] = {
    name: load(folder / "pyproject.toml")["project"] for name, folder in FOLDERS.items()
}
FOLDER_OF = {project["name"]: name for name, project in PROJECTS.items()}
PUBLIC = [name for name, project in PROJECTS.items() if PRIVATE not in project["classifiers"]]


def repository() -> str:
    """The address of the repository, which stands in the root's pyproject.toml."""
    return str(load(ROOT / "pyproject.toml")["tool"]["accel"]["repository"])


def needed(folder: str) -> list[str]:
    """The folders of a package and of those of ours that it needs, in which each comes after what it needs."""
    found: list[str] = []
    for requirement in PROJECTS[folder]["dependencies"]:
        if (other := FOLDER_OF.get(re.match(r"[\w.-]+", requirement)[0])) is not None:
            found += [each for each in needed(other) if each not in found]
    return [*found, folder]


def requirements_of(folder: str) -> str:
    """A requirements file that installs this package from a clone: pip never looks for ours on an index."""
    name = PROJECTS[folder]["name"]
    constraints = FITS.get(name, "constraints.txt")
    return REQUIREMENTS_HEAD.format(name=name, constraints=constraints) + "".join(
        f"./packages/{each}\n" for each in needed(folder)
    )


def notes_of(folder: str, version: str) -> tuple[str, str] | None:
    """What stands behind a version in the heading of a CHANGELOG, as "(2026-01-31)", and the text below it."""
    text = (FOLDERS[folder] / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}(?: ([^\n]*))?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return None if found is None else (found[1] or "", found[2].strip())


def write_requirements() -> None:
    (ROOT / "requirements").mkdir(exist_ok=True)
    for folder, project in PROJECTS.items():
        if project["name"] != "accelerate":
            (ROOT / "requirements" / f"{project['name']}.txt").write_text(requirements_of(folder), encoding="utf-8")


def replace_repository(address: str) -> list[str]:
    """Writes the new address into every tracked file that has the old one, and returns their names."""
    if not re.fullmatch(r"https://github\.com/[A-Za-z0-9-]+/[\w.-]+", address):
        raise SystemExit(
            f"{address!r} is no address of a repository; type one of the form https://github.com/owner/name"
        )
    old, changed = repository(), []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        content = (ROOT / name).read_bytes()
        if old.encode() in content:
            (ROOT / name).write_bytes(content.replace(old.encode(), address.encode()))
            changed.append(name)
    return changed


def main() -> None:
    match sys.argv[1:]:
        case ["requirements"]:
            write_requirements()
        case ["repository", address]:
            print("\n".join(replace_repository(address)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
