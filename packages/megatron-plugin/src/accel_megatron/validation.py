"""What does not fit Megatron's arrangement of processes, refused before a model is built, trained or called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from accel_core import PrepareRequest
    from accel_megatron.options import Options
    from accel_megatron.parallel_groups import Sizes


def check_models(chunks: Iterable[nn.Module], sizes: Sizes, options: Options) -> None:
    """Raises `ValueError` for stages that are not Megatron's, or were built for other sizes."""
    for chunk in chunks:
        _check_model(chunk, sizes, options)


def _check_model(chunk: nn.Module, sizes: Sizes, options: Options) -> None:
    from megatron.core.transformer import TransformerConfig

    config: Any = getattr(chunk, "config", None)
    if not (isinstance(config, TransformerConfig) and hasattr(chunk, "sharded_state_dict")):
        if sizes.tensor == sizes.pipeline == sizes.context == sizes.expert == 1:
            return
        raise ValueError(
            f"{type(chunk).__name__} was prepared under Megatron with {sizes.describe()}, but it is none of Megatron-core's models, whose "
            f"layers can be shared out. Build one, a GPTModel say, in accelerator.build_model(factory); or use FSDP(tensor_parallel=n)."
        )
    if sizes.pipeline > 1 and getattr(chunk, "xattn_needed", False):
        raise ValueError(
            f"{type(chunk).__name__} has an encoder and a decoder, and stages of Megatron-core send each other one tensor: the decoder of a "
            f"later stage would not see what the encoder found. Leave pipeline_parallel out, and give tensor_parallel more."
        )
    wanted = {**sizes.settings(), "sequence_parallel": options.sequence_parallel}
    other = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    if other:
        raise ValueError(
            f"The TransformerConfig of {type(chunk).__name__} says {', '.join(other)}, and the strategy "
            f"{', '.join(f'{name}={wanted[name]!r}' for name in (each.partition('=')[0] for each in other))}. Build the model in "
            f"accelerator.build_model(factory), and give its config what factory(parallel) is given: TransformerConfig(..., **parallel)."
        )
    if config.calculate_per_token_loss:
        raise ValueError(
            "TransformerConfig(calculate_per_token_loss=True) was given, but accelerator.forward_backward weighs tokens over all ranks by "
            "itself, and a plain loop takes the mean. Leave it out."
        )
    if config.fp8 is not None or config.fp4 is not None:
        raise ValueError(
            "TransformerConfig(fp8=…) was given, whose scaling history no checkpoint here would keep. Leave it out."
        )


def check_trained(model: nn.Module, trained: Sequence[bool]) -> None:
    """Raises `ValueError` if some ranks have stages with parameters that are trained, and others have none."""
    if len(set(trained)) > 1:
        raise ValueError(
            f"{type(model).__name__} was prepared of which the stages on ranks {[rank for rank, each in enumerate(trained) if not each]} have "
            f"no parameter that is trained, and in a pipeline every stage has to. Train one there; or leave pipeline_parallel out."
        )


def check_config(model: nn.Module, request: PrepareRequest, options: Options) -> None:
    """Raises `ValueError` for dtypes that gradients or steps would not keep."""
    if request.policy.reduce not in (None, torch.float32):
        raise ValueError(
            f"The precision asks for gradients that are reduced in {request.policy.reduce}, but Megatron's buffers here are float32. Use one "
            f"without a reduce dtype, mixed_precision='bf16' say."
        )
    narrow = {each.dtype for each in model.parameters() if each.requires_grad} - {torch.float32}
    if narrow and not options.distributed_optimizer:
        raise ValueError(
            f"{type(model).__name__} has trained parameters of {', '.join(sorted(map(str, narrow)))}, whose gradients Megatron keeps in float32: "
            f"an optimizer needs masters in float32 for them. Use Megatron(distributed_optimizer=True), which has them; or float32 parameters "
            f"and mixed_precision='bf16'."
        )
    if narrow - {torch.bfloat16}:
        raise ValueError(
            f"{type(model).__name__} has trained parameters of {narrow}. Megatron trains float32 and bfloat16 here."
        )


def check_parts(args: Iterable[Any], kwargs: Mapping[str, Any], device: torch.device) -> None:
    """Raises `ValueError` if all processes that share sequences were given equal inputs. A collective of these.

    One number is compared, of all tensors among the inputs. Attention would see undivided sequences several times.
    """
    from megatron.core import parallel_state

    found = torch.zeros((), dtype=torch.float64)
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            values = each.detach().cpu().contiguous().flatten().view(torch.uint8).double()
            found += (values * torch.arange(1, len(values) + 1)).sum()
    found %= 2**23 - 15  # a prime; the rest is exact in float32, the widest type of some devices
    extremes = torch.stack([found, -found]).to(device, torch.float32)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=parallel_state.get_context_parallel_group())
    if extremes[0] == -extremes[1]:
        raise ValueError(
            f"The model was given the same inputs on all {parallel_state.get_context_parallel_world_size()} processes that share a sequence "
            f"(context_parallel), and each has to have its own part. Divide tokens, positions, labels and masks by "
            f"megatron.core.utils.get_batch_on_this_cp_rank(batch)."
        )
