"""The documentation holds: its examples run, its links lead somewhere, and what it lists is what the source has."""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import generate
import pytest
from reference_pages import accelerator_class

from accel_testing import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("examples/**/*.md")]
)
NOT_RUN = "<!-- not run -->"
IN_TWO_PROCESSES = [  # pages that say so
    "README.md",
    "docs/tutorial/your-loop.md",
    "docs/how-to/save-and-resume.md",
    "docs/how-to/shard-a-model.md",
    "docs/how-to/train-on-long-sequences.md",
    "docs/how-to/weigh-by-token.md",
    "docs/how-to/save-in-your-own-format.md",
    "docs/how-to/come-from-a-plain-loop.md",
    "docs/how-to/evaluate-exactly.md",
    "docs/how-to/export-a-model.md",
    "docs/how-to/keep-an-average.md",
]
SECONDS = 90
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
    run_ranks(
        run_page,
        1,
        page,
        tmp_path,
        env=dict.fromkeys([*TORCHRUN, *filter(LAUNCH.fullmatch, os.environ)]),
        timeout=SECONDS,
    )


@pytest.mark.parametrize("page", IN_TWO_PROCESSES)
def test_the_loops_run_in_two_processes(page, tmp_path):
    run_ranks(run_page, 2, page, tmp_path, timeout=SECONDS)


def run_page(page, folder):
    """Runs the examples of a page in this rank as a script; line numbers of a traceback are those of the page."""
    program = folder / f"{os.environ.get('RANK', 0)}.py"
    program.write_text(EXAMPLES[page], encoding="utf-8")
    folder = folder / "empty"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.argv = [str(program)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # DeepSpeed calls collectives of torch by their older names.
        warnings.filterwarnings("ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor`", FutureWarning)
        runpy.run_path(str(program), run_name="__main__")


def reference(name):
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_the_reference_says_what_the_source_says():
    folder = ROOT / "docs" / "reference"
    written = generate.pages()
    stale = [name for name, text in written.items() if not (folder / name).exists() or reference(name) != text]
    kept = [path.relative_to(folder).as_posix() for each in generate.FOLDERS for path in (folder / each).glob("*")]
    stale += [name for name in kept if name not in written]
    assert not stale, f"out of date, type `nox -s docs`: {stale}"


def test_every_public_name_of_the_accelerator_stands_on_the_page():
    from accel_core import Accelerator

    members = {name for name in dir(Accelerator) if not name.startswith("_")}
    pages = (ROOT / "docs" / "reference" / "accelerator").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert members == set(re.findall(r"^### (\w+)$", text, re.MULTILINE))


def test_a_public_name_without_a_heading_is_refused(monkeypatch):
    monkeypatch.setitem(accelerator_class.GROUPS, "The loop", ("step", "gone"))
    with pytest.raises(ValueError, match=r"Not in it: \[.*'backward'.*no members: \['gone'\]"):
        accelerator_class.accelerator_pages()


def test_every_hook_of_the_core_stands_on_the_page():
    from accel_core.contract.hook_specs import HookSpecs

    hooks = [name for name in vars(HookSpecs) if not name.startswith("_")]
    told = [
        name
        for page in ("hooks.md", "hooks/checkpoints.md")
        for name in re.findall(r"^## (\w+)$", reference(page), re.MULTILINE)
    ]
    assert hooks == told


def literals(pattern, files):
    """Every string of these files that consists of nothing but a name of this form."""
    nodes = (node for file in files for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(pattern, node.value)
    }


def test_every_option_that_is_read_from_the_environment_stands_on_the_page():
    from accel_core.options.conversion import fields_of
    from accel_core.options.option_sources import LOADER_OPTIONS, OPTIONS, variable_of
    from accel_launch.options import LaunchOptions

    # accel-compat reads and sets the variables of another library; they are listed where that is done.
    files = (path for path in ROOT.glob("packages/*/src/**/*.py") if "compat" not in path.parts)
    found = literals(r"ACCELERATE_\w+", files)
    found |= {variable_of(name) for name in (*OPTIONS, *LOADER_OPTIONS)}
    told = set(re.findall(r"ACCELERATE_\w+", reference("environment.md")))
    launchers = {
        variable_of(name) for name in ("config_file", *fields_of(LaunchOptions))
    }  # each has its row in options.md
    assert {name for name in found - told if "__" not in name} <= launchers
    assert {name for name in told - found if "__" not in name} <= launchers


def test_every_variable_of_a_launcher_stands_on_the_page():
    found = literals(r"[A-Z]{2}[A-Za-z0-9_]+", ["packages/core/src/accel_core/processes/launch_environment.py"])
    launch = reference("environment.md").partition("## Launch")[2]
    assert found == set(re.findall(r"`([A-Z]{2}[A-Za-z0-9_]+)`", launch))


WORDS = 2000


def test_no_page_is_longer_than_a_reader_takes():
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
    lengths = {relative(page): len(page.read_text(encoding="utf-8").split()) for page in pages}
    long = {page: words for page, words in lengths.items() if words > WORDS}
    assert not long, f"cut these pages below {WORDS} words: {long}"


def test_the_menu_of_the_site_lists_pages_that_exist():
    listed = re.findall(r"^([\w./-]+)$", (ROOT / "docs" / "menu.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 30
    assert not [page for page in listed if "*" not in page and not (ROOT / "docs" / f"{page}.md").exists()]


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
