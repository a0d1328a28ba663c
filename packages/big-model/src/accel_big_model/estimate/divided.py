"""A tensor-parallel rank's part of a model: the layers that a plan divides are as small as they are there."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from accel_big_model.module_tensors import find_tied_parameters

COLWISE, ROWWISE = "colwise", "rowwise"


def divided(model: nn.Module, plan: Mapping[str, str], ranks: int) -> nn.Module:
    """A copy without memory for what a plan divides, as one of several ranks has it; the rest is shared.

    `plan`: names of modules, in which "*" stands for a part, to "colwise" or "rowwise". Raises
    `ValueError` for a name that fits no layer, another word, a weight that is tied, and a size that
    `ranks` do not divide.
    """
    tensors = [*model.parameters(), *model.buffers()]
    tied = {name for names in find_tied_parameters(model) for name in names}
    copied = copy.deepcopy(model, {id(each): each for each in tensors})
    for pattern, word in plan.items():
        found = [*_fitting(copied, pattern)]
        if not found or word not in (COLWISE, ROWWISE):
            raise ValueError(
                f"parallelize_plan={{{pattern!r}: {word!r}}} was given, and it "
                f"{'names no module of the model' if not found else 'is neither colwise nor rowwise: leave it out, and it counts whole'}."
            )
        for name, layer in found:
            if not tied.isdisjoint(f"{name}.{own}" for own, _ in layer.named_parameters(recurse=False)):
                raise ValueError(
                    f"parallelize_plan divides {name}, whose weight is tied: leave it out, and it counts whole."
                )
            parent, _, own = name.rpartition(".")
            setattr(copied.get_submodule(parent), own, _part(name, layer, word, ranks))
    return copied


def _fitting(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    wanted = pattern.split(".")
    for name, module in [*model.named_modules()]:
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module


def _part(name: str, layer: nn.Module, word: str, ranks: int) -> nn.Module:
    """A rank's part of a linear layer, or of the vocabulary of an embedding."""
    made: nn.Module
    if isinstance(layer, nn.Linear):
        inputs, outputs = layer.in_features, layer.out_features
        if word == COLWISE:
            outputs = _share(name, outputs, ranks)
        else:
            inputs = _share(name, inputs, ranks)
        made = nn.Linear(inputs, outputs, layer.bias is not None, device="meta", dtype=layer.weight.dtype)
    elif isinstance(layer, nn.Embedding) and word == ROWWISE:
        share = _share(name, layer.num_embeddings, ranks)
        made = nn.Embedding(share, layer.embedding_dim, device="meta", dtype=layer.weight.dtype)
    else:
        raise ValueError(
            f"parallelize_plan gives {name} the word {word!r}, and it is a {type(layer).__name__}: leave it out."
        )
    for own, parameter in layer.named_parameters(recurse=False):
        made.get_parameter(own).requires_grad_(parameter.requires_grad)
    return made


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"parallelize_plan divides {name}, and {ranks} ranks do not divide its size {size}.")
    return size // ranks
