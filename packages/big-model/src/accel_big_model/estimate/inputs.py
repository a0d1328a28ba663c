"""What a command line says: shapes of batches, names of callables, and names that are unknown."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel_core.api.component import nearest

LONGEST = 2048
"""Positions of a sequence, if nothing is said and the model takes as many."""


def batch_of(model: nn.Module, rows: int, sequence: int | None) -> Any | None:
    """A batch on the meta device for a model of transformers; None if nobody knows what it takes."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    if name == "input_ids":
        ids = torch.empty(rows, sequence or _longest(text), dtype=torch.int64, device="meta")
        return {name: ids, "labels": ids} if _is_for_tokens(model) else {name: ids}
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        sides = (size, size) if isinstance(size, int) else tuple(size or ())
        if len(sides) == 2:
            channels = getattr(config, "num_channels", 3)
            return {name: torch.empty(rows, channels, *sides, device="meta")}
    return None


def _longest(config: Any) -> int:
    found = getattr(config, "max_position_embeddings", None)
    return min(found, LONGEST) if isinstance(found, int) and found > 0 else LONGEST


def _is_for_tokens(model: nn.Module) -> bool:
    """Whether it computes a loss for each token, by labels like its inputs."""
    takes = "labels" in inspect.signature(model.forward).parameters
    return takes and re.search(r"LM|ConditionalGeneration", type(model).__name__) is not None


def read_input(text: str, rows: int) -> Any:
    """A batch by its text: "3x224x224" is a floating tensor of so many rows, "module:name" a call.

    Raises `ValueError` for another text, or what cannot be imported.
    """
    if re.fullmatch(r"\d+(x\d+)*", text):
        return torch.empty(rows, *map(int, text.split("x")), device="meta")
    return imported(
        text, "--input", "a shape without rows such as 3x224x224, or module:function that returns a batch"
    )()


def imported(text: str, option: str, expected: str) -> Any:
    """The callable that "module:name" names.

    Raises `ValueError` with what was found, and what is expected.
    """
    module, _, name = text.partition(":")
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise ValueError(f"{option} was given {text!r}: expected {expected}.")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} was given {text!r}, which cannot be imported from here: {error}.") from error
    if not callable(found):
        raise ValueError(f"{option} was given {text!r}, which is of type {type(found).__name__} and cannot be called.")
    return found


def unknown(kind: str, name: str, known: Sequence[str], more: str = "") -> ValueError:
    """The error for a name that is none of those that are known."""
    meant = nearest(name, known)
    hint = f"Did you mean {meant!r}? " if meant else ""
    return ValueError(f"{kind} {name!r} is unknown. {hint}Known are {', '.join(known)}{more}.")
