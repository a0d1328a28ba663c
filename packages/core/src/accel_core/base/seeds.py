"""Seeds that are derived from the seed of the run."""

from __future__ import annotations

import hashlib
import operator


def derive_seed(*parts: int) -> int:
    """A seed, 0 to 2**63 - 1, of the parts alone, in every process, version and machine."""
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def loader_seed(seed: int, number: int) -> int:
    """The seed of a loader's order, of the run's seed and the loader's number from 0."""
    return derive_seed(seed, number) if number else seed


def was_chosen(seed: int) -> bool:
    """Whether a run's seed looks chosen, as one below 2**32; unset ones have 53 to 64 bits."""
    return 0 <= seed < 2**32
