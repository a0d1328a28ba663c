"""Seeds that are derived from the seed of the run."""

from __future__ import annotations

import hashlib
import operator

_CHOSEN_SEEDS = 2**32


def derive_seed(*parts: int) -> int:
    """A seed that is a function of the parts alone: `derive_seed(run_seed, epoch)`.

    Neighbouring parts give unrelated seeds. The value depends on no hash randomisation, version or
    machine: data orders are restored by computing them anew.

    Returns:
        0 to 2**63 - 1: the leading 63 bits of BLAKE2b over the decimal parts, so that it also fits
        into an int64 tensor.
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

    An estimate. A process that sets no seed has a random one of 53 to 64 bits, and one in two
    million or fewer of these is taken for a choice; a larger number that somebody did choose is
    taken for a random one. What depends on it is only whether a loader refuses the state of another
    run: it does where both seeds were chosen, and differ.
    """
    return 0 <= seed < _CHOSEN_SEEDS
