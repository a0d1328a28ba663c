"""A shuffling sampler whose order is a function of seed and epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import RandomSampler

from accel_data.configuration import SEEDS, check_options


class SeedableRandomSampler(RandomSampler):
    """Shuffles by `torch.randperm`, seeded with `data_seed + epoch` at the start of each pass.

    The order is the same on every rank that has the same seed, and in another run. The global
    streams of torch, Python and NumPy are neither read nor moved.

    Args:
        data_source, replacement, num_samples: as of torch's `RandomSampler`.
        generator: is seeded and drawn from; None: one for each pass, so that several may be read.
        data_seed: the seed of epoch 0, 0 to 2**64 - 1; None: `torch.initial_seed()`, which is not
            the same on all ranks where they were seeded apart or not at all.

    Raises:
        TypeError, ValueError: if `data_seed` is no whole number; if out of range.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement=replacement, num_samples=num_samples, generator=generator)
        check_options(type(self).__name__, {"data_seed": data_seed})
        self.data_seed = data_seed
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass has the order of `epoch`, counted from 0."""
        self.epoch = epoch

    @classmethod
    def like(cls, sampler: RandomSampler) -> SeedableRandomSampler:
        """One that draws as many indices as another sampler, from its generator."""
        twin = cls(sampler.data_source, sampler.replacement, generator=sampler.generator)
        twin.__dict__.update(sampler.__dict__)  # whether a number was given, or the data has it, torch keeps in private
        return twin

    def with_seed(self, seed: int) -> SeedableRandomSampler:
        """A copy that has this seed instead of the process's; itself if it was given one."""
        if self.data_seed is not None:
            return self
        twin = copy.copy(self)
        twin.initial_seed = seed
        return twin

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        generator = torch.Generator() if self.generator is None else self.generator
        generator.manual_seed((self.initial_seed + epoch) % SEEDS)
        yield from RandomSampler(self.data_source, self.replacement, self.num_samples, generator)
        if self.epoch == epoch:  # otherwise it was set meanwhile, or another pass over the same epoch has ended
            self.epoch = epoch + 1
