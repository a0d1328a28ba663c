"""options.md, and a page for the components of each kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from accel_core.options.conversion import expected, to_data
from accel_core.plugins import list_offers
from accel_launch.settings import catalog
from reference_pages.markdown import WRITTEN
from reference_pages.packages import OURS

OPTIONS_HEAD = """\
<!-- Written by docs/generate.py from the constructors: change an option there, then run `nox -s docs`. -->
# Options

These options may be given outside of the code: in a file, on the command line, or by a variable. An option has one name in all three places.
In a file it is a key under its component; on the command line it is `--component.option`, where `_` and `-` are the same; as
[a variable](environment.md) it is in capitals, `ACCELERATE_COMPONENT__OPTION`. [Configure and start](../how-to/configure-and-start.md) says which
of them counts if several are given. "Python" marks an option that only code can give.

This page has the options of every run. Components have pages of their own:

"""

COMMON = "Common options"


def options_pages() -> dict[str, str]:
    """options.md, with the options without a section, and a page for the components of each kind."""
    offers = [offer for offer in list_offers() if offer.distribution.removeprefix("accel-") in OURS]
    known = catalog.Catalog(offers)
    kinds = {offer.name: f"{offer.noun.capitalize()} options" for offer in offers}
    pages: dict[str, list[str]] = {}
    for name in known.sections:
        if found := list(known.section(name).values()):
            told = inspect.cleandoc(found[0].owner.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            pages.setdefault(kinds.get(name, COMMON), []).append(f"## `{name}`\n\n{told}\n\n{options_table(found)}")
    files = {title: f"options/{title.lower().replace(' ', '-')}.md" for title in pages}
    links = [
        f"- [{title}]({files[title]}): {', '.join(re.findall('^## (.*)$', ''.join(blocks), re.MULTILINE))}\n"
        for title, blocks in pages.items()
    ]
    own = [
        f"\n## {group.capitalize()}\n\n{options_table([each for each in known.own.values() if each.group == group])}"
        for group in dict.fromkeys(option.group for option in known.own.values())
    ]
    head = f"{WRITTEN}\n# {{}}\n\n[Options](../options.md) explains the columns.\n\n"
    components = {files[title]: head.format(title) + "\n".join(blocks) for title, blocks in pages.items()}
    return {"options.md": "".join([OPTIONS_HEAD, *links, *own]), **components}


def options_table(found: Iterable[catalog.Option]) -> str:
    """Key, variable, type, default and meaning of each."""
    rows = ["| Key | Variable | Value | Default | What it does |", "|---|---|---|---|---|"]
    for option in found:
        field = option.field
        value = "Python" if field.python_only else expected(field.type).replace("|", "\\|")
        default = "" if field.default is None or field.python_only else f"`{to_data(field.default)}`"
        variable = "" if field.python_only else f"`{option.variable}`"
        rows.append(
            f"| `{option.key}` | {variable} | {value} | {default} | {option.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(rows) + "\n"
