"""What is compiled of a model under DeepSpeed where parameters are whole: one graph, whole or by blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_core import Accelerator, TorchDynamoPlugin
from accel_deepspeed import DeepSpeed
from accel_testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


def graphs(stage):
    found = []
    for by_blocks in (False, True):
        counted = []

        def backend(graph, inputs, counted=counted):
            counted.append(graph)
            return graph.forward

        plugin = TorchDynamoPlugin(backend=backend, fullgraph=True, use_regional_compilation=by_blocks)
        accelerator = Accelerator(strategy=DeepSpeed(zero_stage=stage), dynamo_plugin=plugin, cpu=True)
        model = nn.Sequential(*(Block() for _ in range(3)))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        # An input with a gradient, so that that of the first block is like those of the others.
        accelerator.backward(model(torch.ones(2, 8, requires_grad=True)).square().mean())
        found.append(len(counted))
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_or_its_equal_blocks_are_one_graph(stage):
    assert run_ranks(graphs, 1, stage, timeout=80) == [[1, 1]]
