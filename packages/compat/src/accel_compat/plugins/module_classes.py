"""Classes of modules by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class of that name among a module and all modules in it, or None."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)
