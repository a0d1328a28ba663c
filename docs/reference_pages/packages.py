"""The packages of this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = {path.parent.name.removesuffix("-plugin") for path in ROOT.glob("packages/*/pyproject.toml")}
