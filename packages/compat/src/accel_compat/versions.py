"""Comparisons of versions, by torch's own rules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import metadata
from types import MappingProxyType
from typing import Any

from torch.torch_version import TorchVersion

STR_OPERATION_TO_FUNC = MappingProxyType(
    {
        ">": operator.gt,
        ">=": operator.ge,
        "==": operator.eq,
        "!=": operator.ne,
        "<=": operator.le,
        "<": operator.lt,
    }
)

torch_version = TorchVersion(metadata.version("torch"))


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether the version of an installed library, or a version as an object, compares so.

    Raises:
        ValueError: for an operation that is none of `STR_OPERATION_TO_FUNC`.
        importlib.metadata.PackageNotFoundError: for a library that is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"`operation` must be one of {', '.join(STR_OPERATION_TO_FUNC)}, not {operation!r}.")
    version = library_or_version
    if not isinstance(version, TorchVersion):
        version = TorchVersion(metadata.version(version) if type(version) is str else str(version))
    compare: Callable[[Any, Any], bool] = STR_OPERATION_TO_FUNC[operation]
    return bool(compare(version, requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the version of torch compares so: `is_torch_version(">=", "2.13")`."""
    return compare_versions(torch_version, operation, version)
