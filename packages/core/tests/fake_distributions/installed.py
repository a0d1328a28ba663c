"""Puts folders of this directory in the place of what is installed: entry points are tested without pip."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDERS = Path(__file__).parent


def install(monkeypatch, *names):
    """Until the end of the test, exactly these distributions are installed, beside an accel-core 1.4.0."""
    folders = [FOLDERS / name for name in (*names, "core")]
    others = [entry for entry in sys.path if not any(Path(entry or ".").glob("*.dist-info"))]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *others])
    for module in (path.stem for folder in folders for path in folder.glob("*.py")):
        monkeypatch.delitem(sys.modules, module, raising=False)
