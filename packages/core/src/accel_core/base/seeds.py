"""Seeds that are derived from the seed of the run."""

from __future__ import annotations

import hashlib
import operator


def derive_seed(*parts: int) -> int:
    """A seed, 0 to 2**63 - 1, that depends on the parts alone in every process, version and machine: data orders rest on it."""
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def loader_seed(seed: int, number: int) -> int:
    """The seed of a loader's order, so that two do not pair every sample with itself: of the run's seed and its number from 0."""
    return derive_seed(seed, number) if number else seed


def was_chosen(seed: int) -> bool:
    """Whether the seed of a run looks like somebody's choice: below 2**32, where one that nobody set has 53 to 64 bits."""
    return 0 <= seed < 2**32
