"""What ZeRO has saved, Megatron loads, and the other way round; the run goes on as if it had not ended.

Under ZeRO the model is Megatron's too, of which each rank is alone with the whole: so names and shapes are those of the whole model.
"""

from __future__ import annotations

import pytest
from megatron_jobs import MESHES, reference, resume, save

from accel_testing import run_ranks

HALF = 3
ZERO = ("zero1", "zero2", "zero3")
ARRANGED = ("tp2", "dp2+do")
EVERY_RUN = {("zero2", "tp2"), ("dp2+do", "zero3")}
PAIRS = [pair for stage in ZERO for sizes in ARRANGED for pair in ((stage, sizes), (sizes, stage))]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def deepspeed_on_cpu(tmp_path_factory):
    """Of ranks alone: this process does not import DeepSpeed. What it compiles lands in no folder of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("operators")))
        yield


@pytest.fixture(scope="module")
def expected():
    [(losses, _, _)] = run_ranks(reference, 1, 2 * HALF, gated=True)
    return losses


@pytest.mark.parametrize(
    ("first", "second"),
    [pair if pair in EVERY_RUN else pytest.param(*pair, marks=pytest.mark.full(group="megatron")) for pair in PAIRS],
)
def test_a_run_goes_on_between_zero_and_megatron(first, second, expected, tmp_path):
    folder = str(tmp_path / "checkpoint")
    for own in run_ranks(save, world_of(first), first, HALF, folder, timeout=100):
        assert own == pytest.approx(expected[:HALF], rel=1e-5)
    for own in run_ranks(resume, world_of(second), second, HALF, folder, timeout=100):
        assert own == pytest.approx(expected[HALF:], rel=1e-5)


def world_of(place):
    return MESHES[place][0] if place in MESHES else 2
