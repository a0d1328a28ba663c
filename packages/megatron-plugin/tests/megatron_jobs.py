"""A small GPT of Megatron-core that depends on its names alone, its data, and what ranks do with them."""

from __future__ import annotations

import zlib

import megatron_cpu
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator, World
from accel_megatron import Megatron
from accel_megatron.layouts import parts_of

WORDS, WIDTH, HEADS, LENGTH, ROWS, MICRO = 32, 16, 4, 8, 8, 2
SINGLE = {}
MESHES = {
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "dp2+do": (2, {"distributed_optimizer": True}),
    "tp2+sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2+vp2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2pp2+sp": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}),
    "dp2tp2+do": (4, {"tensor_parallel": 2, "distributed_optimizer": True}),
    "dp2tp2+do+sp": (4, {"tensor_parallel": 2, "distributed_optimizer": True, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel": 2}),
    "tp2cp2+sp": (4, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}),
    "pp2cp2": (4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "dp2cp2+do": (4, {"context_parallel": 2, "distributed_optimizer": True}),
    "dp2pp2+do": (4, {"pipeline_parallel": 2, "distributed_optimizer": True}),
    "dp2tp2+overlap": (
        4,
        {
            "tensor_parallel": 2,
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
}


class Norm(nn.LayerNorm):
    """A layer norm that says of its parameters that each rank sees a part of the sequence; Megatron's for torch refuses that."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class _Gather(torch.autograd.Function):
    """The parts of all context peers, one after another; gradients are added up over the peers."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheringAttention(nn.Module):
    """Causal attention over a sequence that is divided as Megatron divides it: a first and a last chunk for each context peer.

    It stands in for Transformer Engine's, which is for CUDA: it gathers keys and values, and computes in plain torch.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        places = [context_places(len(query) * group.size(), rank, group.size()) for rank in range(group.size())]
        key, value = _Gather.apply(key, group), _Gather.apply(value, group)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        allowed = places[group.rank()][:, None] >= torch.cat(places)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return found.permute(2, 0, 1, 3).flatten(2)


def context_places(length, rank, count):
    """The places in a sequence that a context peer has, as `get_batch_on_this_cp_rank` of Megatron-core divides it."""
    chunks = torch.arange(length).chunk(2 * count)
    return torch.cat([chunks[rank], chunks[2 * count - 1 - rank]])


def gpt(
    parallel,
    pre_process=True,
    post_process=True,
    vp_stage=None,
    tied=True,
    gated=False,
    dropout=0.0,
    experts=None,
    dtype=torch.float32,
    **options,
):
    """A GPT of four layers; with experts, two of them for each token."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    gate = {"gated_linear_unit": True, "activation_func": nn.functional.silu} if gated else {}
    mixture = {"num_moe_experts": experts, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
    settings = {
        "num_layers": 4,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 32,
        "use_cpu_initialization": True,
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        **gate,
        **(mixture if experts else {}),
        **parallel,
        **options,
    }
    config = TransformerConfig(**settings)
    layer = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), Norm)
    model = GPTModel(
        config,
        layers,
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    fill(model)
    return model.to(dtype)


@torch.no_grad()
def fill(chunk):
    """Gives parameters values that depend on their names in the whole model, and on nothing else."""
    for part in parts_of(chunk):
        shape = part.extent.shape
        seeded = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
        whole = torch.randn(shape, generator=seeded) * (0.3 if len(shape) > 1 else 0.1) + ("norm.weight" in part.name)
        part.parameter.copy_(
            torch.cat([whole[box.slices].flatten() for box in part.extent.boxes]).view_as(part.parameter)
        )


def batches(step, shard=0, count=1):
    """This data coordinate's micro-batches: tokens, labels, and which of them count."""
    seeded = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=seeded)
    mask = (torch.rand(ROWS, LENGTH, generator=seeded) < torch.linspace(0.2, 1, ROWS)[:, None]).float()
    share = ROWS // count
    own = slice(shard * share, (shard + 1) * share)
    rows = zip(tokens[own].split(MICRO), mask[own].split(MICRO), strict=True)
    positions = torch.arange(LENGTH).expand(MICRO, LENGTH)
    return [
        {"tokens": each[:, :-1], "labels": each[:, 1:], "mask": counts, "positions": positions} for each, counts in rows
    ]


def inputs(batch):
    return (batch["tokens"], batch["positions"], None), {"labels": batch["labels"]}


def loss_fn(losses, batch):
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


class Run:
    """One training under Megatron."""

    def __init__(self, mesh=None, lr=1e-2, mixed_precision=None, **model_options):
        megatron_cpu.use_cpu()
        strategy = by_name(mesh) if isinstance(mesh, str) else Megatron(**(mesh or {}))
        self.accelerator = Accelerator(strategy=strategy, cpu=True, mixed_precision=mixed_precision)
        if isinstance(mesh, str):
            alone(self.accelerator)

        def factory(parallel, **place):
            return gpt(parallel, **place, **model_options)

        model = factory({}) if isinstance(mesh, str) else self.accelerator.build_model(factory)
        optimizer = torch.optim.AdamW(groups_of(model), lr=lr)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, StepLR(optimizer, 2, 0.9)
        )
        layout = (
            self.accelerator._parts.layout if hasattr(self.accelerator._parts, "layout") else self.accelerator._layout
        )
        self.shard = layout.shard

    def micro_batches(self, step):
        """Those of this rank: its rows, and its part of each sequence."""
        from megatron.core.utils import get_batch_on_this_cp_rank

        whole = batches(step, self.shard.index, self.shard.count)
        return [get_batch_on_this_cp_rank({name: each.contiguous() for name, each in batch.items()}) for batch in whole]

    def window(self, step):
        return self.accelerator.forward_backward(self.model, self.micro_batches(step), loss_fn, inputs)

    def step(self, clip=None):
        norm = None if clip is None else self.accelerator.clip_grad_norm_(self.model.parameters(), clip).item()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def gradients(self):
        """What this rank has of the gradients: by name, whole shape, offsets and sizes of boxes, their data."""
        user = self.accelerator.unwrap_model(self.model)
        state = self.accelerator._relay.gradient_state(user, self.model)
        return {
            name: (term.shape, [(piece.box, piece.data.clone()) for piece in term.pieces])
            for name, terms in state.items()
            for term in terms
        }


def by_name(strategy):
    """A strategy of others: its name, or a stage of ZeRO."""
    if not strategy.startswith("zero"):
        return strategy
    from accel_deepspeed import DeepSpeed

    return DeepSpeed(zero_stage=int(strategy[-1]))


def alone(accelerator):
    """Has Megatron run as if each rank were alone, under a strategy that knows nothing of it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    World.current().subgroup(range(accelerator.num_processes))  # a world of one has no group before
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)


def groups_of(model):
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return [
        {"params": [each for _, each in named if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for _, each in named if each.dim() < 2], "weight_decay": 0.0},
    ]


def assemble(by_rank):
    """Whole tensors from the parts of all ranks; those that several have must be equal."""
    found = {}
    for parts in by_rank:
        for name, (shape, pieces) in parts.items():
            whole = found.setdefault(name, torch.full(shape, torch.nan))
            for box, data in pieces:
                there = whole[box.slices]
                assert bool(torch.isnan(there).all()) or torch.equal(there, data), name
                whole[box.slices] = data
    assert not any(bool(torch.isnan(each).any()) for each in found.values())
    return found


def train(mesh, steps=1, clip=None, **options):
    """Losses of so many steps, the gradients of the first, and the norms that clipping found."""
    run = Run(mesh, **options)
    losses, norms, gradients = [], [], None
    for step in range(steps):
        losses.append(run.window(step).item())
        gradients = gradients or run.gradients()
        norms.append(run.step(clip))
    return losses, gradients, norms


def placed(place):
    """The arrangement of a name: sizes of Megatron, or another strategy."""
    if not isinstance(place, str):
        return place
    if place in MESHES:
        return MESHES[place][1]
    return {"alone": "single", "single": {}}.get(place, place)


def save(place, steps, folder, **options):
    """Trains so many steps, and saves."""
    run = Run(placed(place), gated=True, **options)
    losses = []
    for step in range(steps):
        losses.append(run.window(step).item())
        run.step()
    run.accelerator.save_state(folder)
    return losses


def resume(place, steps, folder, **options):
    """Loads into a run with other weights, and trains on."""
    run = Run(placed(place), gated=True, **options)
    with torch.no_grad():
        for each in run.accelerator.unwrap_model(run.model).parameters():
            each.mul_(0.5)
    run.accelerator.load_state(folder)
    losses = []
    for step in range(steps, 2 * steps):
        losses.append(run.window(step).item())
        run.step()
    return losses


def reference(steps=1, clip=None, lr=1e-2, **options):
    """The same in one process, by Megatron's model and torch alone: the mean over all tokens that count."""
    megatron_cpu.use_cpu()
    from megatron.core import parallel_state

    World.current().subgroup([0])
    parallel_state.initialize_model_parallel(1, 1)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    model = gpt({}, **options)
    optimizer = torch.optim.AdamW(groups_of(model), lr=lr)
    scheduler = StepLR(optimizer, 2, 0.9)
    losses, gradients, norms = [], None, []
    for step in range(steps):
        parts = [loss_fn(model(*inputs(batch)[0], **inputs(batch)[1]), batch) for batch in batches(step)]
        loss = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        norms.append(None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    parallel_state.destroy_model_parallel()
    return losses, gradients, norms
