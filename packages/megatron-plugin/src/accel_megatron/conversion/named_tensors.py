"""The tensors of a Megatron-core model under the names of transformers, as entries of a state.

The same entries serve both ways: weights are read into their pieces, which are views of parameters,
and put together from them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from accel_checkpoint import everywhere
from accel_core import CheckpointError
from accel_core.api.layouts import Alias, Elementwise, Entry
from accel_megatron.conversion.pieces import Part, Sizes, expanded, padding_of, sources_of

if TYPE_CHECKING:
    from accel_core import World
    from accel_megatron.conversion.table import Family, Row

_Form = tuple[str, tuple[int, ...], torch.dtype]  # of a tensor of transformers: its name, shape and dtype


class Place(NamedTuple):
    """Where this rank is: among tensor-parallel ranks, those of an expert, and ranks of experts.

    `first` says whether it is the first of the ranks that have the same, `expert_first` for experts.
    """

    tensor: Part
    expert_tensor: Part
    experts: Part
    first: bool
    expert_first: bool

    @classmethod
    def current(cls) -> Place:
        """The place by Megatron-core's process groups."""
        from megatron.core import parallel_state as groups

        return cls(
            Part(groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()),
            Part(groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()),
            Part(groups.get_expert_model_parallel_rank(), groups.get_expert_model_parallel_world_size()),
            groups.get_data_parallel_rank(with_context_parallel=True) == 0,
            groups.get_expert_data_parallel_rank() == 0,
        )


class Named(NamedTuple):
    """A parameter on this rank, and its row; numbers are those in the whole model."""

    name: str
    row: Row
    tensor: torch.Tensor
    numbers: dict[str, int]

    @property
    def of_expert(self) -> bool:
        """Whether it belongs to one expert, which other ranks may not have."""
        return "expert" in self.numbers

    def is_first(self, place: Place) -> bool:
        """Whether no rank before this one has a part of the parameter."""
        if self.of_expert:
            return place.expert_first and place.expert_tensor.rank == 0
        return place.first and place.tensor.rank == 0

    def sources(self, place: Place, sizes: Sizes) -> Iterator[tuple[str, Elementwise]]:
        """The tensors of transformers by name, each with its pieces on this rank."""
        part = place.expert_tensor if self.of_expert else place.tensor
        found = sources_of(self.row, self.tensor, part, sizes, self.numbers.get("expert"))
        for pattern, (shape, pieces) in zip(self.row.sources, found, strict=True):
            yield pattern.format(**self.numbers), Elementwise(shape, self.tensor.dtype, pieces)


def named_tensors(family: Family, model: Any, place: Place) -> list[Named]:
    """Every parameter of a GPTModel on this rank, and buffers that have a row.

    `CheckpointError` for a parameter that has none.
    """
    rows = [(_pattern(name), row) for row in family.rows for name in row.megatron_names]
    parameters, buffers = model.named_parameters(), model.named_buffers()
    found, unknown = [], []
    for name, tensor in itertools.chain(parameters, buffers):
        match, row = next(((match, row) for pattern, row in rows if (match := pattern.fullmatch(name))), (None, None))
        if match is not None and row is not None:
            found.append(Named(name, row, tensor, _numbers(model, match, place)))
        elif isinstance(tensor, torch.nn.Parameter):
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"The weights of a {family.model_type} model were to be converted, but its table has no row for {len(unknown)} parameters of "
            f"this {type(model).__name__}: {', '.join(unknown[:8])}. Build the model with from_transformers(), or add the rows "
            f"to the table."
        )
    return found


def shared_state(
    family: Family, models: Sequence[Any], place: Place, sizes: Sizes, world: World, tied: bool
) -> dict[str, Entry]:
    """The entries of all ranks' models by name, with the pieces of this rank. A collective."""
    here: dict[str, Elementwise] = {}

    def collect() -> list[_Form]:
        known = []
        for named in itertools.chain(*(named_tensors(family, model, place) for model in models)):
            for name, entry in named.sources(place, sizes):
                kept = family.tied.get(name, name) if tied else name
                pieces = (*here[kept].pieces, *entry.pieces) if kept in here else entry.pieces
                here[kept] = Elementwise(entry.shape, entry.dtype, pieces)
                if named.is_first(place):
                    known.append((kept, entry.shape, entry.dtype))
        return known

    forms = itertools.chain(*everywhere(world, "for the names of weights", collect))
    state: dict[str, Entry] = {name: here.get(name) or Elementwise(shape, dtype, ()) for name, shape, dtype in forms}
    if tied:
        state |= {alias: Alias(kept) for alias, kept in family.tied.items() if kept in state}
    return state


def clear_padding(family: Family, model: Any, place: Place, vocabulary: int) -> None:
    """Sets rows behind the vocabulary to zero."""
    with torch.no_grad():
        for named in named_tensors(family, model, place):
            if named.row.padded:
                padding_of(named.tensor, place.tensor, vocabulary).zero_()


def all_names(family: Family, layers: int, experts: int) -> set[str]:
    """The names of all tensors that the table knows, in a model of so many layers and experts."""
    return {name for row in family.rows for pattern in row.sources for name in expanded(pattern, layers, experts)}


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    return re.compile(escaped)


def _numbers(model: Any, match: re.Match[str], place: Place) -> dict[str, int]:
    """The numbers in a name, but in the whole model instead of in this rank's part."""
    numbers = {key: int(text) for key, text in match.groupdict().items()}
    if "layer" in numbers:
        numbers["layer"] = model.decoder.layers[numbers["layer"]].layer_number - 1
    if "expert" in numbers:
        numbers["expert"] += place.experts.rank * (model.config.num_moe_experts // place.experts.size)
    return numbers
