"""What to type for a distribution that is missing: the one place that knows which of ours no index has yet."""

from __future__ import annotations

import re

from accel_core.base.vocabulary import UNPUBLISHED


def how_to_install(requirement: str, *, upgrade: bool = False) -> str:
    """What to type for a distribution, or for an extra of one: `"accel-trackers[mlflow]"`. No full stop.

    Of those that no index has yet (another's distribution may get the name there), a clone is
    what they are installed from.
    """
    name, extra = re.fullmatch(r"([\w.-]+)(\[.*\])?", requirement).groups()  # type: ignore[union-attr]
    if name not in UNPUBLISHED:
        command = "pip install --upgrade" if upgrade else "pip install"
        return f"Type: {command} {f'{requirement!r}' if extra else name}"
    what = f"'./packages/{UNPUBLISHED[name]}{extra}'" if extra else f"-r requirements/{name}.txt"
    where = "an up-to-date clone" if upgrade else "a clone"
    return f"Type, in {where} of the accel repository, because {name} is on no package index yet: pip install {what}"
