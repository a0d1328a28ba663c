"""What the scenarios share: the lines they print, and which figures of a run these have."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

MARK = "SCENARIO "
FIGURES = ("loss", "grad_norm", "eval_loss", "learning_rate", "mean_token_accuracy", "rewards/margins")


def report(name: str, figures: dict[str, Any]) -> None:
    """Prints what one scenario found, on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(MARK + json.dumps({"scenario": name, "figures": figures}), flush=True)


def losses_of(history: list[dict[str, float]]) -> dict[str, list[float]]:
    """The figures of a Trainer's log, each as a list over its steps."""
    return {name: found for name in FIGURES if (found := [float(line[name]) for line in history if name in line])}


def quiet(trainer: Any) -> None:
    """No lines of progress: only what this script prints."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def norm(parameters: Any) -> float:
    """The norm of all parameters, by which two models are compared."""
    return float(torch.stack([parameter.detach().double().norm() for parameter in parameters]).norm())
