"""What is printed by others."""

from __future__ import annotations

import re


def without_gloo(output: str) -> str:
    """Standard output without lines of gloo: that of torch 2.9 says there which ranks it connects."""
    return re.sub(r"^\[Gloo\] .*\n", "", output, flags=re.MULTILINE)
