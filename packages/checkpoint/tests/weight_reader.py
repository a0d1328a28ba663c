"""Reads what `save_model` wrote as safetensors, with their own library: under all names, tied ones with one tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open


def read_weights(directory: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The weights in a directory, on the CPU, as readers find them: the single file first, else the parts of an index."""
    folder = Path(directory)
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = sorted({*index["weight_map"].values()})
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  (it is no mapping)
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        weights.update({alias: weights[kept] for alias, kept in aliases.items()})
    return weights
