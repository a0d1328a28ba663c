"""names.md, with the names of the Accelerator, and a page with all others."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy

from accel_core import accelerator
from accel_core.facade import older_arguments
from reference_pages.markdown import names_table
from reference_pages.packages import ROOT

NAMES = ROOT / "tests" / "names.py"

NAMES_HEAD = """\
<!-- Written by docs/generate.py from tests/names.py and the docstrings: change them there, then run `nox -s docs`. -->
# Names

The usual names of scripts written for Accelerate, with what they do here. accel_big_model and accel_deepspeed have more. All of them are imported from the package that
stands before the dot: `from accel_core import set_seed`. `*` and `**` stand for any number of positional and of keyword
arguments; our functions may take more than those that are listed. After a colon stand the members of an enumeration.

This page has the constructor, preparing and the loop. [The other names](names/others.md) are about processes, data, strategies, checkpoints
and the rest.
"""

OTHER_NAMES_HEAD = """\
<!-- Written by docs/generate.py from tests/names.py and the docstrings: change them there, then run `nox -s docs`. -->
# Other names

[Names](../names.md) explains how to read the tables, and has the names of the constructor, of preparing and of the loop.
"""

MISSING = "*missing*"


def names_pages() -> dict[str, str]:
    """docs/reference/names.md, with the names of the Accelerator, and a page with all others."""
    data = runpy.run_path(str(NAMES))
    older = {name: described_argument(name) for name in data["OLDER_ARGUMENTS"]}
    described = arguments_of(accelerator.Accelerator.__doc__ or "")
    own, others = [NAMES_HEAD], [OTHER_NAMES_HEAD]
    for (row, heading), texts in data["OLDER_NAMES"].items():
        parts = own if row.startswith("A") else others
        parts.append(names_table(f"## {heading}", (name_row(text, data["COMES_WITH"]) for text in texts)))
        if heading == "The constructor":
            rows = {name: described.get(name, MISSING) for name in given_to(texts[0])} | older
            parts.append(names_table("### Its arguments", (("`" + name + "`", rows[name]) for name in rows)))
    return {"names.md": "\n".join(own), "names/others.md": "\n".join(others)}


def given_to(text: str) -> list[str]:
    """The arguments in a text of tests/names.py."""
    return text.partition("(")[2].removesuffix(")").split(", ")


def name_row(text: str, comes_with: dict[str, str]) -> tuple[str, str]:
    """One name of tests/names.py: how it is called, and the first line of its docstring."""
    path = re.split(r"[(:]", text)[0]
    whole = f"accel_core.{path}" if path.startswith("Accelerator") else path
    shown = f"`{path}`" if path.endswith(".Accelerator") else f"`{text}`"
    if path in comes_with:
        return shown, f"*comes with {comes_with[path]}*"
    package, *members = whole.split(".")
    found: object = importlib.import_module(package)
    for member in members:
        found = getattr(found, member, None)
    summary = (inspect.getdoc(found) or "").partition("\n")[0] if found is not None else MISSING
    return shown, summary.replace("|", "\\|")


def arguments_of(docstring: str) -> dict[str, str]:
    """Each argument under `Args:` with its whole description, in one line."""
    listed = inspect.cleandoc(docstring).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w+:)", listed, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}


def described_argument(name: str) -> str:
    """What an argument that the signature does not have stands for."""
    renamed = {each.old: each.new for each in older_arguments.OLDER_ARGUMENTS}
    if name in renamed:
        return f"an older spelling of `{renamed[name]}`"
    return "`strategy=` under an older name: a configured object, or a dict of such, the first of which is active"
