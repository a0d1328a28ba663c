"""Writes what can be derived from the source: all of docs/reference/ but environment.md and the pages on checkpoints.

    nox -s docs          (or `python docs/generate.py` where all packages are installed)

tests/test_docs.py compares each file with what `pages` gives, so that nothing public changes without its
page.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from reference_pages import accelerator_class, doors, hooks, names, options

REFERENCE = Path(__file__).parent / "reference"

FOLDERS = (
    "accelerator",
    "options",
    "doors",
    "classes",
    "functions",
    "hooks",
    "names",
)  # of pages that are all written here


def pages() -> dict[str, str]:
    """The text of every page of docs/reference that is written from the source."""
    return {
        **hooks.hooks_pages(),
        **names.names_pages(),
        **accelerator_class.accelerator_pages(),
        **options.options_pages(),
        **doors.doors_pages(),
    }


def write() -> None:
    """Writes them, and takes away what is no longer derived."""
    for folder in FOLDERS:
        shutil.rmtree(REFERENCE / folder, ignore_errors=True)
    for name, page in pages().items():
        (REFERENCE / name).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / name).write_text(page, encoding="utf-8")
    print(f"wrote {len(pages())} pages of docs/reference")


if __name__ == "__main__":
    write()
