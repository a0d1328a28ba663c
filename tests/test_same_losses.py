"""One script, any strategy: the same model, data and seed give the same losses, however they are computed."""

from __future__ import annotations

from functools import cache

import pytest
from losses_job import STEPS, train_all

from accel_testing import run_ranks

WORLDS = {1: ["single", "fsdp"], 2: ["ddp", "fsdp"], 4: ["fsdp", "hybrid", "tensor"]}
CASES = [
    pytest.param(world, strategy, marks=pytest.mark.full if world > 2 else ())
    for world, strategies in WORLDS.items()
    for strategy in strategies
]
TOLERANCE = {"no": 1e-6, "bf16": 5e-3, "fp16": 1e-3}  # of a loss; in full precision that is six digits


@cache
def trained(world):
    """What rank 0 saw in a world, by strategy and precision; all ranks saw the same losses."""
    first, *others = run_ranks(train_all, world, WORLDS[world], timeout=110)
    for other in others:
        assert {case: seen.losses for case, seen in other.items()} == {
            case: seen.losses for case, seen in first.items()
        }
    return first


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_losses_are_those_of_one_process(world, strategy, precision):
    expected, found = trained(1)["single", precision], trained(world)[strategy, precision]
    assert len(found.losses) == STEPS
    assert found.losses[-1] < found.losses[0] - 0.2
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE[precision])
    assert found.norms == pytest.approx(expected.norms, rel=10 * TOLERANCE[precision])
    assert found.rate == expected.rate


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_close_to_full_precision_and_not_the_same(precision):
    full, low = trained(1)["single", "no"].losses, trained(1)["single", precision].losses
    assert low != full
    assert low == pytest.approx(full, rel=2e-2)


@pytest.mark.full
def test_explain_shows_policy_scaler_units_and_mesh():
    told = trained(4)["hybrid", "fp16"].told
    assert {"policy", "scaler", "mesh", "units"} <= told.keys()
    assert "float16" in told["policy"]
    assert "replicate 2" in told["mesh"]
    assert "2 × Block" in told["units"]
    assert "tensor 2" in trained(4)["tensor", "no"].told["mesh"]
