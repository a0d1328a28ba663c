"""Lists the licences of everything that is installed here, and fails on one that a user of the packages could not accept.

python release/check_licences.py
"""

from __future__ import annotations

import re
from importlib import metadata

REFUSED = re.compile(
    r"\b(AGPL|(?<!L)GPL|SSPL|BUSL|proprietary)\b|Affero|(?<!Lesser )General Public License", re.IGNORECASE
)
"""Licences whose conditions would reach what is built on the packages, and those that forbid uses."""

OF_TORCH = re.compile(r"nvidia-|cuda-", re.IGNORECASE)
"""Libraries under NVIDIA's own terms, which torch's builds for CUDA bring. Whoever installs such a build has chosen them."""

SILENT = {"torchao": "BSD-3-Clause"}
"""Licences by the file in the wheel, where the metadata say none."""


def licence_of(distribution: metadata.Distribution) -> str:
    """What its metadata say: the expression, else the classifiers, else the first line of the old field, else SILENT."""
    about = distribution.metadata
    classified = [
        each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or [] if each.startswith("License ::")
    ]
    told = about["License-Expression"] or ", ".join(classified) or (about["License"] or "").partition("\n")[0]
    return told or SILENT.get(about["Name"], "")


def is_refused(licence: str) -> bool:
    """Whether none of the licences to choose from will do, or none is named."""
    return not licence or all(REFUSED.search(each) for each in re.split(r",| OR ", licence))


def main() -> None:
    found = {each.metadata["Name"]: licence_of(each) for each in metadata.distributions()}
    for name, licence in sorted(found.items(), key=lambda pair: pair[0].lower()):
        print(f"{name:<32}{licence or 'nothing said'}")
    judged = {name: licence for name, licence in found.items() if not OF_TORCH.match(name)}
    if refused := [f"{name}: {licence or 'nothing said'}" for name, licence in judged.items() if is_refused(licence)]:
        raise SystemExit("Not for everybody: " + "; ".join(refused))


if __name__ == "__main__":
    main()
