"""What `accel estimate-memory` and `accel plan` ask alike: a model, its batch, and its optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from accel_big_model.estimate.inputs import batch_of, read_input
from accel_big_model.estimate.optimizers import OPTIMIZERS
from accel_big_model.estimate.shapes import ModelShape
from accel_big_model.estimate.sources import open_model, working_directory
from accel_core import CheckpointError, NotInstalledError

if TYPE_CHECKING:
    import argparse

    from torch import nn

REFUSALS = (ValueError, NotInstalledError, OSError, CheckpointError)
"""The errors whose text is the answer."""


def add_model_arguments(page: argparse.ArgumentParser) -> None:
    """Adds the arguments that `opened_model` reads."""
    add = page.add_argument
    about = "a folder, a config.json, a name on the Hugging Face Hub, or module:function in your code"
    add("model", metavar="MODEL", help=about)
    about = f"one of {', '.join(OPTIMIZERS)}, or module:Class in your code (default: adamw)"
    add("--optimizer", default="adamw", help=about)
    add("--batch", type=int, default=1, metavar="ROWS", help="number of rows in the batch of one process (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens in a row (default: 2048, or the most that the model takes)")
    add("--input", metavar="SHAPE", help="shape of one row, such as 3x224x224; or module:function that returns a batch")
    add("--arguments", default="{}", metavar="JSON", help="arguments of module:function, such as '{\"layers\": 4}'")
    about = "run code that comes with a model on the Hugging Face Hub"
    add("--trust-remote-code", "--trust_remote_code", action="store_true", help=about)


@contextmanager
def opened_model(given: argparse.Namespace) -> Iterator[tuple[nn.Module | ModelShape, Any]]:
    """The model and its batch, None if unknown. Inside, code of the working directory can be imported if some was named."""
    for name in ("batch", "sequence"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} {getattr(given, name)}: expected a number of at least 1.")
    names_code = any(":" in text for text in (given.model, given.input or "", given.optimizer))
    with working_directory() if names_code else nullcontext():  # a model's folder may have files of any names
        model = open_model(given.model, _read_arguments(given.arguments), given.trust_remote_code)
        if given.input:
            yield model, read_input(given.input, given.batch)
        else:
            yield model, None if isinstance(model, ModelShape) else batch_of(model, given.batch, given.sequence)


def _read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a callable. Raises `ValueError` for what is no object of JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--arguments {text!r} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"--arguments {text!r}: expected an object of JSON, such as '{{\"layers\": 4}}'.")
    return found
