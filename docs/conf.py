"""How Sphinx builds the docs site: `nox -s docs`. The sources are Markdown files of the whole repository, where they are.

A new page of docs/ needs no line here: docs/menu.md lists pages in the order of the menu, and takes the others in by folder.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
SHELVES = [HERE / name for name in ("tutorial", "how-to", "reference", "explanation")]

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
linkcheck_ignore = [r".*OWNER_NOT_SET.*"]  # the repository has no address yet
myst_links_external_new_tab = True
suppress_warnings = ["myst.header"]  # a page may begin below a comment, and its headings may skip a level
html_theme = "furo"  # brings its styles, and takes the reader's own fonts: nothing is fetched from elsewhere
html_theme_options = {"navigation_with_keys": True}
html_static_path = [str(HERE / "site.css")]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search_order.js")
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

    Behind the start page stands docs/menu.md, with the pages that it leaves out; behind a README what is in its folder, and behind
    any other page what is in the folder of its name.
    """
    page = HERE.parent / name
    if name == root_doc:
        source[0] += "\n" + (HERE / "menu.md").read_text(encoding="utf-8") + toctree("More pages", unlisted())
    elif page.parent != HERE.parent:
        below = pages_below(page)
        source[0] += toctree("", [path.relative_to(page.parent).with_suffix("").as_posix() for path in below])


def unlisted():
    """The pages that docs/menu.md does not list and that belong to no other page, such as a how-to that is new."""
    listed = (HERE / "menu.md").read_text(encoding="utf-8").split()
    found = [path for folder in (HERE, *SHELVES) for path in sorted(folder.glob("*.md"))]
    pages = [path.relative_to(HERE).with_suffix("").as_posix() for path in found]
    return [page for page in pages if page not in {*listed, "index", "menu"}] + [
        f"../{path.stem}" for path in sorted(HERE.parent.glob("*.md")) if f"../{path.stem}" not in listed
    ]


def pages_below(page):
    """The pages that are listed behind this one."""
    if page.name != "README":
        return sorted(page.glob("*.md"))
    others = [path for path in sorted(page.parent.glob("*.md")) if path.stem != "README"]
    return [*others, *sorted(page.parent.glob("*/README.md"))]


def toctree(caption, pages):
    """A menu that no reader of the page sees; nothing for no pages."""
    listed = "\n".join(pages)
    named = f":caption: {caption}\n" if caption else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{named}\n{listed}\n```\n" if pages else ""


def write_entrance(app, error):
    """Has the top of the site lead to the start page."""
    if error is None and app.builder.format == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>accel</title>'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")
