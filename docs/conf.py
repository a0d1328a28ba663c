"""How Sphinx builds the docs site: `nox -s docs`. The sources are Markdown files of the whole repository, where they are.

A new page of docs/ needs no line here: docs/menu.md lists pages in the order of the menu, and takes the others in by folder.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

project = "accel"
html_title = "accel"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "packages/*/README.md",
    "packages/*/CHANGELOG.md",
    "examples/**.md",
    "benchmarks/README.md",
    "*.md",
]
exclude_patterns = ["docs/menu.md", "build", ".nox", "**/.*", "**/node_modules"]
myst_heading_anchors = 4  # links lead to headings, by the names that GitHub gives them
myst_links_external_new_tab = True
suppress_warnings = [
    "myst.header",  # a page may begin below a comment, and its headings may skip a level
    "toc.empty_glob",  # no page is without a line of its own in the menu
]
html_theme = "furo"  # brings its styles, and takes the reader's own fonts: nothing is fetched from elsewhere
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
pygments_style = "friendly"
copybutton_prompt_text = "$ "
templates_path: list[str] = []


def setup(app):
    app.connect("source-read", add_menu)
    app.connect("build-finished", write_entrance)


def add_menu(app, name, source):
    """Lists pages behind the text of a page, where readers of the Markdown file do not see them.

    Behind the start page stands docs/menu.md; behind a README its folder, and behind any other page the folder of its name.
    """
    page = HERE.parent / name
    folder = page.parent if page.name == "README" else page
    if name == root_doc:
        source[0] += "\n" + (HERE / "menu.md").read_text(encoding="utf-8")
    elif folder != HERE.parent:
        below = [path for path in sorted(folder.glob("*.md")) if path.stem != page.name]
        below += [path for path in sorted(folder.glob("*/README.md")) if page.name == "README"]
        listed = "\n".join(path.relative_to(page.parent).with_suffix("").as_posix() for path in below)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n" if listed else ""


def write_entrance(app, error):
    """Has the top of the site lead to the start page."""
    if error is None and app.builder.format == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>accel</title>'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")
