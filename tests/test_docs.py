"""The documentation holds: its examples run, its links lead somewhere, and the hooks it lists are those of the source."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("examples/**/*.md")]
)
NOT_RUN = "<!-- not run -->"
SECONDS = 90
LAUNCH = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ACCEL.*|TORCHELASTIC.*)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def runnable(text: str) -> str:
    """The page with everything but its python blocks made empty, so that a traceback has the line numbers of the page.

    A block is left out when the last line of text before it is `<!-- not run -->`.
    """
    lines, inside, before = [], None, ""
    for line in text.splitlines():
        if inside is None and line.startswith("```"):
            inside = line.strip() == "```python" and before != NOT_RUN
            lines.append("")
        elif inside is not None and line.startswith("```"):
            inside = None
            lines.append("")
        else:
            lines.append(line if inside else "")
        before = line.strip() or before
    return "\n".join(lines).rstrip()


def test_only_python_blocks_that_are_not_marked_are_run():
    page = (
        "Text\n```python\na = 1\n```\n<!-- not run -->\n\n```python\nb\n```\n```bash\nc\n```\n```python\nd = 2\n```\n"
    )
    assert runnable(page).split("\n") == ["", "", "a = 1", *[""] * 10, "d = 2"]


EXAMPLES = {relative(page): source for page in PAGES if (source := runnable(page.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_examples_of_a_page_run(page, tmp_path):
    """All blocks of a page are one program, run in an empty folder, in a world of one."""
    program = tmp_path / "example.py"
    program.write_text(EXAMPLES[page], encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not LAUNCH.fullmatch(name)}
    command = [sys.executable, "-W", "error", str(program)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, f"{page} (line numbers are those of the page):\n{ended.stdout}{ended.stderr}"


def test_the_readme_has_an_example():
    assert "README.md" in EXAMPLES


def generator():
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_hook_is_documented_as_it_is_declared():
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
    assert page == generator().hooks_page(), "docs/reference/hooks.md is older than hookspecs.py: type `nox -s docs`"


def test_every_hook_of_the_core_stands_on_the_page():
    from accel_core.hookspecs import HookSpecs

    page = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
    hooks = [name for name in vars(HookSpecs) if not name.startswith("_")]
    assert hooks == re.findall(r"^## (\w+)$", page, re.MULTILINE)


LINKS = [
    (relative(page), target)
    for page in PAGES
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    if not re.match(r"[a-z]+:", target)
]


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_a_relative_link_leads_to_a_file_and_its_heading(page, target):
    name, _, anchor = target.partition("#")
    found = (ROOT / page).parent / name if name else ROOT / page
    assert found.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


QUOTE = re.compile(r"^<!-- from (\S+) -->\n(?:<!-- not run -->\n)?```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTES = [(relative(page), *match) for page in PAGES for match in QUOTE.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "source", "quoted"), QUOTES)
def test_a_quotation_stands_in_its_source(page, source, quoted):
    """`<!-- from PATH -->` before a block: its lines stand in that file one after another, however far indented."""
    lines = ((ROOT / page).parent / source).read_text(encoding="utf-8").splitlines()
    assert "\n".join(map(str.strip, quoted.splitlines())) in "\n".join(map(str.strip, lines))
