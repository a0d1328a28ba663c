"""Whether a tag may be released: prints the folder of its package, and fails with every reason why not.

python release/check_tag.py accel-data-v0.1.0
python release/check_tag.py accel-data-v0.1.0 --notes      prints what the CHANGELOG says of that version
"""

from __future__ import annotations

import re
import sys

from projects import FOLDER_OF, NOT_SET, PROJECTS, PUBLIC, ROOT, notes_of, repository

ADVICE = "packages/core/src/accel_core/base/vocabulary.py"


def split(tag: str) -> tuple[str, str]:
    """The folder and the version of `<package>-vX.Y.Z`."""
    found = re.fullmatch(r"([a-z-]+)-v(\d+\.\d+\.\d+)", tag)
    if found is None or found[1] not in FOLDER_OF:
        known = ", ".join(PROJECTS[each]["name"] for each in PUBLIC)
        raise SystemExit(f"{tag!r} is no tag of a release; type <package>-vX.Y.Z with one of {known}.")
    return FOLDER_OF[found[1]], found[2]


def unpublished() -> set[str]:
    """The distributions of which messages say that no index has them."""
    text = (ROOT / ADVICE).read_text(encoding="utf-8")
    return {f"accel-{name}" for name in re.search(r'^_PACKAGES = "(.*)"$', text, re.MULTILINE)[1].split()}


def problems(folder: str, version: str) -> list[str]:
    """Every reason why this version of this package may not be released."""
    project, found = PROJECTS[folder], []
    name = project["name"]
    if NOT_SET in repository():
        found.append(
            "the repository has no address yet: type `python release/projects.py repository https://github.com/owner/name`"
        )
    if folder not in PUBLIC:
        found.append(f"{name} is not for an index: its classifiers say so")
    if project["version"] != version:
        found.append(f"packages/{folder}/pyproject.toml has version {project['version']}")
    notes = notes_of(folder, version)
    if notes is None:
        found.append(f"packages/{folder}/CHANGELOG.md has no heading for {version}")
    elif not re.fullmatch(r"\(\d{4}-\d\d-\d\d\)", notes[0]):
        found.append(
            f"packages/{folder}/CHANGELOG.md has {notes[0] or 'nothing'} behind {version}, and not the date of the release"
        )
    elif not notes[1]:
        found.append(f"packages/{folder}/CHANGELOG.md says nothing of {version}")
    if name in unpublished():
        found.append(f"messages say that no index has {name}: take it out of _PACKAGES in {ADVICE}")
    return found


def main() -> None:
    tag, *options = sys.argv[1:]
    folder, version = split(tag)
    if found := problems(folder, version):
        raise SystemExit("\n".join([f"{tag} may not be released:", *(f"- {each}" for each in found)]))
    print(notes_of(folder, version)[1] if options == ["--notes"] else folder)


if __name__ == "__main__":
    main()
