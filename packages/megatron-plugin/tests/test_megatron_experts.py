"""Experts that processes share have the gradients, losses and norms of one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from megatron_jobs import assemble, reference, train

from accel_testing import run_ranks

EXPERTS, STEPS, CLIP = 4, 6, 0.5


@cache
def expected():
    [found] = run_ranks(reference, 1, STEPS, CLIP, experts=EXPERTS)
    return found


@pytest.mark.parametrize("options", [{}, {"distributed_optimizer": True}], ids=["whole", "distributed"])
def test_two_processes_that_share_experts_train_as_one(options):
    losses, gradients, norms = expected()
    found = run_ranks(train, 2, {"expert_parallel": 2, **options}, STEPS, CLIP, experts=EXPERTS)
    whole = assemble([parts for _, parts, _ in found])
    assert whole.keys() == gradients.keys()
    for name, each in whole.items():
        torch.testing.assert_close(
            each, gradients[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for own, _, own_norms in found:
        assert own == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-5)
    assert losses[-1] < losses[0]
