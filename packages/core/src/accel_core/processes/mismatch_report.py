"""The error of ranks that called a collective with arguments that do not fit together."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_core.base.errors import CollectiveMismatchError
from accel_core.base.suggestions import listed

if TYPE_CHECKING:
    import torch

Description = dict[str, Any]  # what `describe` gives, or only `error`: why a rank could not take part; sent as JSON


def describe(
    call: str, structure: str = "", leaves: Sequence[tuple[str, torch.dtype, Sequence[int | str]]] = ()
) -> Description:
    """The call, with options, that ranks must agree on; `leaves`: path, dtype, sizes (`*`: any)."""
    texts = [[path, str(dtype).removeprefix("torch."), list(sizes)] for path, dtype, sizes in leaves]
    return {"call": call, "structure": structure, "leaves": texts}


def mismatch(descriptions: Sequence[Description]) -> CollectiveMismatchError:
    """The error for what the ranks said, by rank; it has the same text on all of them."""
    if any("error" in description for description in descriptions):
        return CollectiveMismatchError(_refused(descriptions))
    calls = {description["call"] for description in descriptions}
    names = {call.partition("(")[0] for call in calls}  # without their options
    what = "different collectives"
    if len(calls) == 1:
        what = f"{calls.pop()} with arguments that do not fit together"
    elif len(names) == 1:
        what = f"{names.pop()} with different options"
    # Tensors that are alike on all ranks need no mention.
    common = set.intersection(*[{_leaf(leaf) for leaf in description["leaves"]} for description in descriptions])
    outlines = len({description["structure"] for description in descriptions}) > 1
    table = _table([_line(description, common, outlines) for description in descriptions])
    advice = _advice(names, len(calls) > 1, descriptions)
    return CollectiveMismatchError(f"The ranks called {what}.\n{table}\n{advice}")


def _refused(descriptions: Sequence[Description]) -> str:
    table = _table([each.get("error") or f"called {_line(each, set(), False)}" for each in descriptions])
    return f"Not every rank can take part in a collective.\n{table}\nCorrect the call on the ranks that show an error."


_ADVICE = {
    "prepare": "Build the same model on every rank: the same layers, shapes and dtypes, and the same parameters frozen.",
    "pad_across_processes": "Sizes may differ here, but structure, dtypes and numbers of dimensions must be the same on every rank.",
    "broadcast_object_list": "Pass a list of the same length on every rank; where there is nothing to send, of None.",
    "synchronize_rng_states": "Name the same streams on every rank, and pass equally many generators there, or samplers that have one.",
}


def _advice(names: set[str], options_differ: bool, descriptions: Sequence[Description]) -> str:
    if len(names) > 1:
        return (
            "A collective is called by all ranks, in the same order: look for a call that stands under a condition "
            "which is not true on every rank."
        )
    if options_differ:
        return "Give the options of a collective the same values on every rank."
    (name,) = names
    dims = _differing_dims(descriptions) if name == "gather" else []
    if dims:
        first, *others = [f"dim={dim}" for dim in dims]
        then = f", then the same with {' and '.join(others)}" if others else ""
        return (
            f"gather concatenates along the first dimension, and all others must agree: pad the tensors to one shape "
            f"first, with accelerator.pad_across_processes(tensors, {first}){then}."
        )
    general = "Structure, dtypes and shapes must be the same on every rank; for gather, all but the first dimension."
    return _ADVICE.get(name, general)


def _differing_dims(descriptions: Sequence[Description]) -> list[int]:
    """The dimensions in which tensors differ between the ranks, if they differ in nothing else."""
    by_rank = [description["leaves"] for description in descriptions]
    kinds = [[(path, dtype, len(sizes)) for path, dtype, sizes in leaves] for leaves in by_rank]
    if any(kind != kinds[0] for kind in kinds) or len({each["structure"] for each in descriptions}) > 1:
        return []
    by_leaf = [list(zip(*[sizes for _, _, sizes in same], strict=True)) for same in zip(*by_rank, strict=True)]
    return sorted({dim for dims in by_leaf for dim, sizes in enumerate(dims) if len(set(sizes)) > 1})


def _line(description: Description, common: set[str], with_structure: bool) -> str:
    parts = [textwrap.shorten(description["structure"], 200, placeholder=" ...")] if with_structure else []
    parts.append(listed([text for text in map(_leaf, description["leaves"]) if text not in common]))
    if common:
        parts.append(f"{len(common)} alike on all ranks")
    if "line" in description:
        parts.append(f"at {description['line']}")
    return ": ".join([description["call"], *filter(None, ["; ".join(filter(None, parts))])])


def _leaf(leaf: Sequence[Any]) -> str:
    path, dtype, sizes = leaf
    return f"{path}: {dtype}[{', '.join(map(str, sizes))}]"


def _table(lines: Sequence[str]) -> str:
    """One line per distinct text, with the ranks that share it."""
    ranks: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        ranks.setdefault(line, []).append(rank)
    return "\n".join(f"  rank {_span(of)}: {line}" for line, of in ranks.items())


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
