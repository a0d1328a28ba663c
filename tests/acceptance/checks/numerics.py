"""Training in every way is training by plain torch on one device: losses, norms of gradients, and what follows from them."""

from __future__ import annotations

from typing import Any

import torch
from acceptance.registry import ALL, ANY, EVEN, Run, check, skip
from acceptance.training import PLAN, Shape, Trainer, assert_near, reference

STEPS = 6
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"no": 2e-4, "bf16": 3e-2, "fp16": 3e-2, "fp8": 0.1}


def compared(run: Run, precision: str = "no", split: bool = False, shape: Shape | None = None, **options: Any) -> str:
    """Six steps, against the reference in the same dtype. In fp8, against bf16."""
    shape = shape or Shape(rows=run.size * max(2, 8 // run.size))
    dtype = LOW.get(precision, torch.bfloat16 if precision == "fp8" else None)
    found = Trainer(run, STEPS, {"mixed_precision": precision, **options}, shape, split).train()
    return assert_near(found, reference(run, STEPS, dtype, shape), TOLERANCES[precision])


def fsdp(**options: Any) -> Any:
    from accel_fsdp import FSDP

    return FSDP(**options)


@check()
def alone(run: Run) -> str:
    """One device, in full precision."""
    return compared(run)


@check()
def alone_bf16(run: Run) -> str:
    """One device, bf16 by autocast."""
    return compared(run, "bf16")


@check()
def alone_fp16(run: Run) -> str:
    """One device, fp16 with a scaled loss; a step that overflows is left out and said so."""
    from accel_precision import GradScalerKwargs

    found = compared(run, "fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    trainer = Trainer(run, 1, {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=2.0**40)]})
    before = trainer.model.head.weight.detach().clone()
    trainer.train()
    assert trainer.accelerator.optimizer_step_was_skipped, "gradients that overflow were not seen"
    assert torch.equal(before, trainer.model.head.weight), "a step that overflowed has changed the weights"
    return found


@check(devices=ALL)
def ddp(run: Run) -> str:
    """Replicas, whose gradients are averaged."""
    return compared(run, strategy="ddp")


@check(devices=ALL, long=True)
def ddp_bf16(run: Run) -> str:
    """Replicas in bf16, with gradients that travel in bf16."""
    from accel_core import DDP

    return compared(run, "bf16", strategy=DDP(comm_hook="bf16"))


@check(devices=ANY)
def fsdp_full(run: Run) -> str:
    """Sharded parameters, gradients and moments."""
    return compared(run, strategy=fsdp())


@check(devices=ANY)
def fsdp_bf16(run: Run) -> str:
    """Sharded, gathered in bf16, blocks computed again in the backward."""
    return compared(run, "bf16", strategy=fsdp(activation_checkpointing=True))


@check(devices=ANY, long=True)
def fsdp_fp16(run: Run) -> str:
    """Sharded in fp16: all ranks agree on the scale."""
    from accel_precision import GradScalerKwargs

    return compared(run, "fp16", strategy=fsdp(), kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])


@check(devices=ANY)
def fsdp_offload(run: Run) -> str:
    """Sharded, with parameters and moments in the memory of the host."""
    return compared(run, strategy=fsdp(cpu_offload=True))


@check(devices=EVEN)
def hybrid(run: Run) -> str:
    """Two replicas of shards."""
    if run.size < 4 and run.device.type == "cpu":
        skip("needs four devices")
    return compared(run, strategy=fsdp(replicate=2))


@check(devices=EVEN)
def tensor_parallel(run: Run) -> str:
    """Two peers share each layer."""
    return compared(run, strategy=fsdp(tensor_parallel=2, parallelize_plan=PLAN))


@check(devices=EVEN)
def context_parallel(run: Run) -> str:
    """Two peers share each sequence, in full precision: the memory-efficient kernel of attention."""
    return compared(run, split=True, strategy=fsdp(context_parallel=2))


@check(devices=EVEN, long=True)
def context_parallel_bf16(run: Run) -> str:
    """Two peers share each sequence, in bf16: the flash kernel of attention."""
    return compared(run, "bf16", split=True, strategy=fsdp(context_parallel=2))


@check(devices=EVEN)
def attention_over_parts(run: Run) -> str:
    """Causal attention over parts of a sequence, by each kernel that the device has: outputs and gradients."""
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    accelerator = run.accelerator(strategy=fsdp(context_parallel=2))
    told = []
    for kernel, dtype, allowed in (
        (SDPBackend.MATH, torch.float32, 1e-4),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 1e-3),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 2e-2),
    ):
        if not run.is_cuda and kernel is not SDPBackend.MATH:
            continue
        generator = torch.Generator().manual_seed(3)
        whole = [torch.randn(2, 4, 256, 64, generator=generator).to(run.device, dtype) for _ in range(4)]
        exact = [each.float().clone().requires_grad_() for each in whole[:3]]
        expected = F.scaled_dot_product_attention(*exact, is_causal=True)
        (expected * whole[3].float()).sum().backward()
        places = torch.arange(256, device=run.device)
        parts = [each.clone() for each in whole]
        with sdpa_kernel(kernel), accelerator.maybe_context_parallel([*parts, places], [2, 2, 2, 2, 0]):
            assert len(places) == 128, f"{len(places)} of 256 places are here"
            own = [each.detach().clone().requires_grad_() for each in parts[:3]]
            found = F.scaled_dot_product_attention(*own, is_causal=True)
            (found * parts[3]).sum().backward()
            pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]
            worst = max((a.float() - b[:, :, places]).abs().max().item() for a, b in pairs)
        assert worst <= allowed * 10, f"{kernel.name}: {worst:.1e} off"
        told.append(f"{kernel.name.lower()} {worst:.0e}")
    return ", ".join(told)


@check()
def window_by_token(run: Run) -> str:
    """`forward_backward` weighs micro-batches by their tokens: one device."""
    return weighed(run)


@check(devices=ALL)
def window_by_token_ddp(run: Run) -> str:
    """`forward_backward` weighs micro-batches of all ranks by their tokens."""
    return weighed(run)


def weighed(run: Run) -> str:
    torch.manual_seed(0)  # the bias, too, on every rank
    model = torch.nn.Linear(16, 1)
    x = torch.arange(run.size * 4 * 16.0).view(-1, 16).sin()
    parts = [4 * run.rank + 1, 4 * run.rank + 4]  # one row, and three, of four a rank
    reference_model = torch.nn.Linear(16, 1)
    reference_model.load_state_dict(model.state_dict())
    expected = reference_model(x).square().mean()
    expected.backward()
    accelerator = run.accelerator()
    model = accelerator.prepare(model)
    batches = [x[4 * run.rank : parts[0]].to(run.device), x[parts[0] : parts[1]].to(run.device)]
    found = accelerator.forward_backward(
        model, batches, lambda output, batch: (output.square().sum(), len(batch)), lambda batch: ((batch,), {})
    )
    grad = accelerator.unwrap_model(model).weight.grad
    torch.testing.assert_close(grad.cpu(), reference_model.weight.grad, rtol=1e-5, atol=1e-6)
    assert abs(float(found) - expected.item()) < 1e-5, (found, expected)
    return f"loss within {abs(float(found) - expected.item()):.0e}"


@check(package="torchao", seconds=120, long=True)
def fp8(run: Run) -> str:
    """One device, fp8 by torchao: trains as bf16 does, roughly."""
    if run.is_cuda and torch.cuda.get_device_capability() < (8, 9):
        skip("needs compute capability 8.9")
    if run.device.type not in ("cpu", "cuda"):
        skip("needs cuda")
    return compared(run, "fp8")


@check(package="transformer_engine", on="cuda", seconds=180)
def transformer_engine(run: Run) -> str:
    """One device, fp8 by Transformer Engine."""
    from accel_precision import FP8

    return compared(run, "fp8", mixed_precision=FP8(backend="transformer_engine"))


@check(package="transformer_engine", on="cuda", devices=EVEN, seconds=180)
def transformer_engine_fsdp(run: Run) -> str:
    """Sharded, fp8 by Transformer Engine: scales are agreed on without a hang."""
    from accel_precision import FP8

    return compared(run, "fp8", mixed_precision=FP8(backend="transformer_engine"), strategy=fsdp())


@check(package="deepspeed", on="cuda", devices=ANY, seconds=240)
def zero_2(run: Run) -> str:
    """ZeRO, stage 2."""
    from accel_deepspeed import DeepSpeed

    return compared(run, strategy=DeepSpeed(zero_stage=2))


@check(package="deepspeed", on="cuda", devices=ANY, seconds=240)
def zero_2_offloaded(run: Run) -> str:
    """ZeRO, stage 2, stepped on the host: gradients are clipped there when they have arrived in pinned memory."""
    from accel_deepspeed import DeepSpeed

    offload = {"device": "cpu", "pin_memory": True}
    return compared(run, strategy=DeepSpeed(config={"zero_optimization": {"stage": 2, "offload_optimizer": offload}}))


@check(package="deepspeed", on="cuda", devices=ANY, seconds=240)
def zero_3_bf16(run: Run) -> str:
    """ZeRO, stage 3, in bf16."""
    from accel_deepspeed import DeepSpeed

    return compared(run, "bf16", strategy=DeepSpeed(zero_stage=3))


@check(seconds=120)
def deterministic(run: Run) -> str:
    """`set_seed(deterministic=True)`: two trainings are equal bit by bit."""
    from accel_core import set_seed

    curves = []
    for _ in range(2):
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled(), "set_seed has not asked torch for them"
        curves.append(Trainer(run, STEPS, {}, Shape(dropout=0.1)).train())
    torch.use_deterministic_algorithms(mode=False)
    assert curves[0] == curves[1], curves
    return "equal"
