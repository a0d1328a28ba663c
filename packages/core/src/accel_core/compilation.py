"""Compiling a model in place, so that names, checkpoints and identity stay what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def compile_calls(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Makes calls of `model` run compiled; there is no wrapper, so nothing is named `_orig_mod`.

    `nn.Module.compile` does the same for classes of the user's own. Modules of torch's own classes (an `nn.Sequential`
    as the whole model) it leaves uncompiled without a word, because the compiler skips every frame of theirs that it is
    entered through. A function that is not torch's, around the call, is not skipped.

    Args:
        model: is called through the compiled function from now on.
        options: of `torch.compile`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = torch.compile(call, **options)


def forget_compiled(model: nn.Module) -> None:
    """Makes calls of `model` run uncompiled again."""
    model._compiled_call_impl = None
