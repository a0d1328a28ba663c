"""The strategy "dispatch" passes the suites that define what a strategy is, in the one process that it has."""

from accel_big_model import Dispatch
from accel_testing import CheckpointSuite, StrategySuite


def hooked():
    return Dispatch(force_hooks=True)


class TestDispatch(StrategySuite):
    strategy = Dispatch
    worlds = (1,)


class TestHooked(StrategySuite):
    strategy = hooked
    worlds = (1,)


class TestDispatchCheckpoints(CheckpointSuite):
    strategy = Dispatch
    worlds = (1,)


class TestHookedCheckpoints(CheckpointSuite):
    strategy = hooked
    worlds = (1,)
