"""Loaders that are wrong in one place each: `accel test` has to find it. They are accel-data's, on other data than was asked for."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler

from accel_core import hookimpl
from accel_data import Sharded


class _OfOtherData(Sharded):
    @hookimpl
    def prepare_loader(self, loader, shard, feed, device, seed, number, group, slice_fn):
        shuffled = isinstance(loader.sampler, RandomSampler)
        other = DataLoader(self.changed(loader.dataset), batch_size=loader.batch_size, shuffle=self.shuffles(shuffled))
        return super().prepare_loader(other, shard, feed, device, seed, number, group, slice_fn)

    def changed(self, data):
        return data

    def shuffles(self, shuffled):
        return shuffled


class Repeating(_OfOtherData):
    """Reads sample 0 again instead of sample 1."""

    def changed(self, data):
        return torch.where(data == 1, 0, data)


class Backwards(_OfOtherData):
    """Begins with the last sample."""

    def changed(self, data):
        return data.flip(0)


class Stubborn(_OfOtherData):
    """Does not shuffle."""

    def shuffles(self, shuffled):
        return False
