"""The parameters of a model by shape, from the model or from the headers of its files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from accel_checkpoint import stored_in

ROOT = ""
"""The unit of what belongs to no other."""

_NUMBERED = re.compile(r"(.*?\.?)(\d+)\.")


@dataclass(frozen=True)
class ParameterShape:
    """A parameter without its values.

    Args:
        name: its first one, if it is tied.
        shape: of the whole.
        trained: whether it gets a gradient.
        unit: the repeated block in which it lies; `ROOT` if in none.
        autocast: whether matrix products cast it: neither norm nor embedding.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    unit: str = ROOT
    autocast: bool = False

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def shard(self, ranks: int) -> tuple[int, ...]:
        """The largest part when rows are shared out; a scalar is whole."""
        return (math.ceil(self.shape[0] / ranks), *self.shape[1:]) if self.shape else ()

    def cut(self, ranks: int) -> ParameterShape:
        """The part of one of several tensor-parallel ranks: of matrices, not of vectors."""
        return replace(self, shape=self.shard(ranks)) if len(self.shape) > 1 else self


@dataclass(frozen=True)
class ModelShape:
    """All parameters of a model, each once, and the bytes of its buffers and integer parameters."""

    parameters: tuple[ParameterShape, ...]
    buffers: int = 0

    @property
    def trained(self) -> tuple[ParameterShape, ...]:
        """Those that get gradients."""
        return tuple(each for each in self.parameters if each.trained)

    @property
    def numel(self) -> int:
        """The elements of all parameters."""
        return sum(each.numel for each in self.parameters)

    @property
    def trained_numel(self) -> int:
        """The elements of those that get gradients."""
        return sum(each.numel for each in self.trained)

    def cut(self, ranks: int) -> ModelShape:
        """The part of one of several tensor-parallel ranks."""
        return replace(self, parameters=tuple(each.cut(ranks) for each in self.parameters))


def shape_of_model(model: nn.Module) -> ModelShape:
    """The shapes of a model, of any device; meta too."""
    units = frozenset(_units(model))
    found, whole = list[ParameterShape](), sum(each.nbytes for each in model.buffers())
    for prefix, module in model.named_modules():
        for name, each in module.named_parameters(prefix=prefix, recurse=False):
            unit = next((above for above in _above(name) if above in units), ROOT)
            casts = each.dim() > 1 and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if each.is_floating_point():
                found.append(ParameterShape(name, tuple(each.shape), each.requires_grad, unit, casts))
            else:
                whole += each.nbytes
    return ModelShape(_first_of_tied(found, model), whole)


def _above(name: str) -> Iterator[str]:
    """The names of the modules around a parameter, outermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _first_of_tied(found: Sequence[ParameterShape], model: nn.Module) -> tuple[ParameterShape, ...]:
    first = {name for name, _ in model.named_parameters()}
    return tuple(each for each in found if each.name in first)


def _units(module: nn.Module, prefix: str = "") -> list[str]:
    """Members of a list whose class occurs in it more than once; else those further inside.

    That is how strategy "fsdp" chooses what it gathers at a time, unless it is told. Lists and dicts
    of modules are no members: nobody calls them, so nothing could be gathered before they run.
    """
    kinds: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        kinds.update(type(each) for each in module if _has_forward(each))
    found = list[str]()
    for name, child in module.named_children():
        found += [f"{prefix}{name}"] if kinds[type(child)] > 1 else _units(child, f"{prefix}{name}.")
    return found


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is not nn.Module.forward


def shape_of_files(folder: Path) -> ModelShape:
    """The shapes that the headers of safetensors files tell; blocks are found by their numbers.

    The files are those that loading the folder would read: model.safetensors, or those of its index;
    if there is neither, all. Raises `CheckpointError` for a damaged file or index, `FileNotFoundError` for one that is missing.
    """
    named = [folder / "model.safetensors", folder / "model.safetensors.index.json"]
    sources = [path for path in named if path.is_file()][:1] or sorted(folder.glob("*.safetensors"))
    found, whole = dict[str, ParameterShape](), 0
    with ExitStack() as files:
        stored = {name: each for path in sources for name, each in stored_in(path, files).items()}
    for name, each in stored.items():
        if each.key != name:  # a further name of what is tied
            continue
        if each.dtype is not None and not each.dtype.is_floating_point:
            whole += math.prod(each.shape) * each.dtype.itemsize
        else:
            unit = _NUMBERED.match(name)
            casts = len(each.shape) > 1 and "embed" not in name
            found[name] = ParameterShape(name, each.shape, True, unit[0][:-1] if unit else ROOT, casts)
    return ModelShape(tuple(found.values()), whole)


def bytes_of(parameters: Sequence[ParameterShape], dtype: torch.dtype, ranks: int = 1) -> int:
    """Bytes of the parameters in a dtype, or of the largest parts if shared out by rows."""
    return sum(math.prod(each.shard(ranks)) for each in parameters) * dtype.itemsize
