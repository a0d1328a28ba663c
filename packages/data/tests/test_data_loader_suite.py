"""The loader of this package is one, as accel-core understands it, in each of the ways in which it shares data out."""

from __future__ import annotations

from accel_data import Sharded
from accel_testing import LoaderSuite


def dispatching():
    return Sharded(dispatch_batches=True)


def splitting():
    return Sharded(split_batches=True)


class TestSharded(LoaderSuite):
    loader = "sharded"


class TestDispatching(LoaderSuite):
    loader = dispatching
    worlds = (2,)


class TestSplitting(LoaderSuite):
    loader = splitting
    worlds = (2,)
    lacks = {
        "test_batches_of_one_sample_are_divided": "a batch of one sample has no equal pieces for two ranks",
        "test_batches_of_varying_sizes_lose_nothing": "batches of odd sizes have no equal pieces for two ranks",
    }
