"""Seeds that are derived from the seed of the run."""

from __future__ import annotations

import hashlib
import operator

_CHOSEN_SEEDS = 2**32


def derive_seed(*parts: int) -> int:
    """A seed, 0 to 2**63 - 1, that is a function of the parts alone: `derive_seed(run_seed, epoch)`.

    The leading 63 bits of BLAKE2b over the decimal parts: the same in every process, version and
    machine, for data orders are restored by computing them anew.
    """
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def loader_seed(seed: int, number: int) -> int:
    """The seed of the order of one loader. Two that are zipped must not pair every sample with itself.

    Args:
        seed: the run's, from `agree_seed`.
        number: how many loaders were prepared before this one; the first has the run's seed itself.
    """
    return derive_seed(seed, number) if number else seed


def was_chosen(seed: int) -> bool:
    """Whether the seed of a run looks like somebody's choice: whether it is below 2**32.

    A process that sets none has a random one of 53 to 64 bits. A loader refuses the state of
    another run only where both seeds were chosen, and differ.
    """
    return 0 <= seed < _CHOSEN_SEEDS
