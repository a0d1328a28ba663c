"""Models compile as under plain torch: as many graphs, and the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from acceptance.registry import ALL, ANY, Run, check
from acceptance.training import Shape, Trainer, assert_near, loss_of, reference

STEPS = 4


def one_graph_a_block(run: Run, **options: Any) -> str:
    """Equal blocks share one graph, which nothing breaks: torch would say so with `fullgraph`."""
    from accel_core import TorchDynamoPlugin

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plugin = TorchDynamoPlugin(backend=backend, fullgraph=True, use_regional_compilation=True)
    shape = Shape(rows=4 * run.size)
    trainer = Trainer(run, STEPS, {"dynamo_plugin": plugin, **options}, shape)
    found = assert_near(trainer.train(), reference(run, STEPS, shape=shape), 1e-3)
    assert len(graphs) == 1, f"{len(graphs)} graphs for {shape.layers} equal blocks"
    return f"one graph for {shape.layers} blocks, {found}"


@check()
def graphs(run: Run) -> str:
    """One graph for all blocks: one device."""
    return one_graph_a_block(run)


@check(devices=ALL)
def graphs_ddp(run: Run) -> str:
    """One graph for all blocks, under DDP."""
    return one_graph_a_block(run)


@check(devices=ANY)
def graphs_fsdp(run: Run) -> str:
    """One graph for all blocks, under FSDP."""
    from accel_fsdp import FSDP

    return one_graph_a_block(run, strategy=FSDP())


@check(long=True, seconds=300)
def inductor(run: Run) -> str:
    """The whole model by torch's own compiler."""
    trainer = Trainer(run, STEPS, {"dynamo_backend": "inductor"})
    return assert_near(trainer.train(), reference(run, STEPS), 2e-3)


@check(long=True, devices=ANY, seconds=300)
def inductor_fsdp_bf16(run: Run) -> str:
    """Its blocks, sharded, in bf16."""
    from accel_core import TorchDynamoPlugin
    from accel_fsdp import FSDP

    shape = Shape(rows=4 * run.size)
    options = {"strategy": FSDP(), "mixed_precision": "bf16"}
    options |= {"dynamo_plugin": TorchDynamoPlugin(use_regional_compilation=True)}
    return assert_near(Trainer(run, STEPS, options, shape).train(), reference(run, STEPS, torch.bfloat16, shape), 3e-2)


@check(on="cuda", long=True, seconds=300)
def reduce_overhead(run: Run) -> str:
    """CUDA graphs by `mode="reduce-overhead"`, with accumulation: outputs of a micro-batch outlive the next replay."""
    from accel_core import TorchDynamoPlugin

    curves = []
    for mode in (None, "reduce-overhead"):
        plugin = TorchDynamoPlugin(mode=mode, disable=mode is None)
        options = {"dynamo_plugin": plugin, "gradient_accumulation_steps": 2}
        trainer, losses = Trainer(run, 12, options), []
        for (tokens,) in trainer.loader:
            with trainer.accelerator.accumulate(trainer.model):
                loss = loss_of(trainer.model, tokens)
                trainer.accelerator.backward(loss)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            losses.append(loss.detach())  # as scripts keep them, and read them later
        curves.append([loss.item() for loss in losses])
    worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
    assert worst < 2e-2, curves
    return f"within {worst:.0e}"
