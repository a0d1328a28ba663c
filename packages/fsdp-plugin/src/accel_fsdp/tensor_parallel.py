"""Tensor parallelism: peers hold parts of a layer's weight, and compute parts of its output.

A *plan* says which layers are cut, and how:

    FSDP(tensor_parallel=2, parallelize_plan={
        "blocks.*.attention.query": "colwise",    # each peer computes some of the heads
        "blocks.*.attention.output": "rowwise",   # and their contributions are summed here
    })

It names modules by patterns, one per part of the dotted name, and gives each a word of `WORDS`, a
`ParallelStyle` of `torch.distributed.tensor.parallel`, or a list of these that is applied in order.
A plan may also be a function of the model and the device mesh, which then does everything itself.

What a plan cannot do is the model's own business:

- Behind "colwise" a peer sees its part of the features. Attributes that count heads or features are
  not changed, so a model lets torch count (`view(batch, length, -1, head_size)`), or divides them
  itself.
- "colwise" gives each peer consecutive rows of the weight. Of queries, keys and values in *one*
  weight these are not the same heads of all three: keep three layers, or lay the weight out head by
  head.
- A parameter of a layer without an entry is whole on every peer. That is right where the layer's
  input is the same on all of them. Where it is a part of the features or heads (a norm over each
  head), its gradient is a part too, and the peers would drift apart: give such a norm the word
  "replicated_with_grad_allreduce".
- All peers compute on the same batch, which the loader sees to, and draw the same dropout, which a
  common seed sees to.
- torch 2.13 compiles a model with a plan, but not an embedding that is cut (it raises).

Megatron-LM cuts pairs of layers in this way: https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accel_core.api.component import listed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Plan = Mapping[str, Any] | Callable[[nn.Module, Any], object]

WORDS = {
    "colwise": "a part of the output features per peer",
    "rowwise": "a part of the input features per peer, outputs summed; of an embedding, a part of the vocabulary",
    "colwise_rep": "colwise, and every peer gets the whole output",
    "rowwise_rep": "rowwise, and the input is whole on every peer",
    "sequence": "whole weights; each peer computes a part of the sequence (dimension 1), and gets the whole output",
    "replicated_with_grad_allreduce": "whole weights; each peer computes on its heads, and gradients are summed",
}
"""The words of a plan, and what they do to a layer."""

OTHER_SPELLINGS = {
    "sequence_parallel": "sequence",
    "embedding_rowwise": "rowwise",
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
}
"""How plans that come with models spell some of the words."""

_SHOWN = 40  # layers in a message


def check_plan(plan: Plan | None, tensor_parallel: int) -> None:
    """Checks what can be known of a plan without a model. Imports nothing.

    Raises:
        ValueError: for a plan without `tensor_parallel`, `tensor_parallel` without a plan, and an
            unknown word.
        TypeError: for a plan that is neither a mapping nor a function.
    """
    if tensor_parallel > 1 and not plan:
        raise ValueError(
            f"FSDP(tensor_parallel={tensor_parallel}) was asked for without a plan, and which layers can be cut, and how, depends on "
            f"the model. Add parallelize_plan={{'blocks.*.mlp.up': 'colwise', 'blocks.*.mlp.down': 'rowwise', …}}."
        )
    if plan is None:
        return
    if tensor_parallel == 1:
        raise ValueError(
            "FSDP(parallelize_plan=…) was given, but tensor_parallel is 1, so there are no peers to cut layers between. Add "
            "tensor_parallel=2, or leave the plan out."
        )
    if not isinstance(plan, Mapping):
        if not callable(plan):
            raise TypeError(
                f"FSDP(parallelize_plan=…) is {type(plan).__name__}, expected a mapping from names of layers to styles, such as "
                f"{{'blocks.*.mlp.up': 'colwise'}}, or a function of the model and the device mesh."
            )
        return
    for pattern, entry in plan.items():
        for style in _listed(entry):
            if isinstance(style, str):
                _word(pattern, style)


def apply_plan(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shards the layers of a model as a plan says, in place: parameters become `DTensor`s.

    A collective where the model has dropout. Nothing is sent but for that: each peer keeps its part
    of what it has, so weights have to be equal on all peers before. Tied parameters stay tied, and
    what is frozen stays frozen. Parameters are replaced.

    Args:
        model: on its device, or on the meta device.
        plan: see the top of this module.
        mesh: one-dimensional, the peers.

    Raises:
        ValueError: for a name that fits no layer, two names that fit one, a layer that a word
            cannot cut, sizes that the number of peers does not divide, ties that would be cut in
            different ways, and peers that would draw different dropout. The model is not to be used
            after the last two.
        TypeError: for an entry that is no style.
    """
    flags, ties = _requires_grad(model), _ties(model)
    _check_dropout(model, mesh)
    if not isinstance(plan, Mapping):
        plan(model, mesh)
    else:
        steps = [step for pattern, entry in plan.items() for step in _steps(model, pattern, entry)]
        _check_steps(steps, mesh.size())
        _apply(steps, mesh)
    _tie(model, ties)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))


class _Step(NamedTuple):
    """One style for one module."""

    pattern: str
    name: str
    module: nn.Module
    style: Any


def _steps(model: nn.Module, pattern: str, entry: Any) -> list[_Step]:
    found = [(name, module) for name, module in model.named_modules() if _fits(name, pattern)]
    if not found:
        raise ValueError(
            f"parallelize_plan names {pattern!r}, which fits no module of {type(model).__name__}. Layers with parameters are: "
            f"{_layers(model)}. A pattern fits name by name: * stands for one of the names between two dots."
        )
    return [
        _Step(pattern, name, module, _resolved(pattern, style, name, module))
        for name, module in found
        for style in _listed(entry)
    ]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _layers(model: nn.Module) -> str:
    """The layers that hold parameters, numbers replaced by a star."""
    named = (name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False)))
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "''" for name in named))
    return listed(patterns, most=_SHOWN)


def _listed(entry: Any) -> Iterable[Any]:
    return entry if isinstance(entry, (list, tuple)) else (entry,)


def _word(pattern: str, style: str) -> str:
    word = OTHER_SPELLINGS.get(style, style)
    if word not in WORDS:
        meanings = "; ".join(f"{known!r}: {meaning}" for known, meaning in WORDS.items())
        raise ValueError(
            f"parallelize_plan gives {pattern!r} the style {style!r}, which is none of the words: {meanings}. For any other, pass a "
            f"ParallelStyle of torch.distributed.tensor.parallel."
        )
    return word


def _resolved(pattern: str, style: Any, name: str, module: nn.Module) -> Any:
    """A style for a word, or what was given."""
    from torch.distributed.tensor.parallel import ParallelStyle

    if isinstance(style, ParallelStyle):
        return style
    if not isinstance(style, str):
        raise TypeError(
            f"parallelize_plan gives {pattern!r} a {type(style).__name__}, expected a word ({', '.join(WORDS)}), a ParallelStyle of "
            f"torch.distributed.tensor.parallel, or a list of these."
        )
    word = _word(pattern, style)
    if word.startswith(("colwise", "rowwise")) and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"parallelize_plan gives {name!r} the style {style!r}, but it is a {type(module).__name__}, and torch cuts nn.Linear and "
            f"nn.Embedding in this way. Name such layers, or write a ParallelStyle for this one."
        )
    return _styles(word, isinstance(module, nn.Embedding))


def _styles(word: str, embedding: bool) -> Any:
    """The torch style for a word; a tuple of styles is applied in order."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    whole, part = Replicate(), Shard(1)
    if word == "colwise":
        return ColwiseParallel()
    if word == "colwise_rep":
        return ColwiseParallel(output_layouts=whole)
    if word == "rowwise" and not embedding:
        return RowwiseParallel()
    if word.startswith("rowwise"):  # indices are whole on every peer
        return RowwiseParallel(input_layouts=whole)
    if word == "sequence":  # torch's own takes for granted that its input is a part already
        enter = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part)
        leave = PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole)
        return enter, SequenceParallel(), leave
    # The heads of all peers, laid end to end in any dimension that is not normalised. It sums the gradients of weights.
    return SequenceParallel(sequence_dim=0, use_local_output=True)


def _check_steps(steps: Sequence[_Step], peers: int) -> None:
    patterns: dict[str, str] = {}
    for step in steps:
        if patterns.setdefault(step.name, step.pattern) != step.pattern:
            raise ValueError(
                f"parallelize_plan fits {step.name!r} twice, with {patterns[step.name]!r} and {step.pattern!r}. Leave one of them "
                f"out; several styles for one module are a list: {{{step.pattern!r}: [first, second]}}."
            )
        for style in _listed(step.style):
            _check_sizes(step, style, peers)


def _check_sizes(step: _Step, style: ParallelStyle, peers: int) -> None:
    """torch cuts unevenly without a word, and fails later, where peers expect parts of one size."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    cut_by_columns = isinstance(style, ColwiseParallel)
    if isinstance(step.module, nn.Linear):
        attribute = "out_features" if cut_by_columns else "in_features"
    elif isinstance(step.module, nn.Embedding):
        attribute = "embedding_dim" if cut_by_columns else "num_embeddings"
    else:
        return
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    size = getattr(step.module, attribute)
    if size % peers:
        padded = size + peers - size % peers
        raise ValueError(
            f"parallelize_plan cuts {step.name!r} along {attribute}={size}, which {peers} peers do not divide: {size} % {peers} = "
            f"{size % peers}. Make it {padded}, take another tensor_parallel, or leave the layer out of the plan."
        )


def _apply(steps: Sequence[_Step], mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    for step in steps:
        for style in _listed(step.style):
            parallelize_module(step.module, mesh, style, src_data_rank=None)


def _requires_grad(model: nn.Module) -> dict[str, bool]:
    """torch's `SequenceParallel` forgets it."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Makes tied parameters one again after styles replaced them module by module."""
    for names in ties:
        parameters = [model.get_parameter(name) for name in names]
        first = parameters[0]
        if all(parameter is first for parameter in parameters):
            continue
        cuts = [str(tuple(getattr(parameter, "placements", ("whole",)))) for parameter in parameters]
        if len(set(cuts)) > 1:
            found = ", ".join(f"{name}: {cut}" for name, cut in zip(names, cuts, strict=True))
            raise ValueError(
                f"parallelize_plan cuts one parameter in different ways ({found}), but {' and '.join(names)} are tied. Give their "
                f"layers styles that cut it alike: an embedding 'rowwise' and the head that shares its weight 'colwise_rep', say."
            )
        for name in names[1:]:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, first)


def _check_dropout(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises unless peers draw alike, for dropout in whole activations. Collective of all ranks."""
    dropping = [name for name, module in model.named_modules() if getattr(module, "p", 0) and _is_dropout(module)]
    if not dropping:
        return
    device = torch.device(mesh.device_type)
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    state = state.to(device)
    first = state.clone()
    dist.broadcast(first, group=mesh.get_group(), group_src=0)
    differs = torch.tensor(int(not torch.equal(state, first)), device=device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)  # all ranks raise, not only the peers that differ
    if differs.item():
        raise ValueError(
            f"Tensor-parallel peers have different random states, and {dropping[0]!r} (of {len(dropping)} dropout layers) would drop "
            f"different elements of what they hold in common. Seed all processes alike before prepare(), set_seed(42) without "
            f"device_specific=True, or take dropout out (p=0)."
        )


def _is_dropout(module: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return isinstance(module, kinds)
