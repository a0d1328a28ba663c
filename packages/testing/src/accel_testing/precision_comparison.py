"""Whether dtypes, losses and states are what a policy says. See `accel_testing.precision_suite`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_testing.suite import require

if TYPE_CHECKING:
    from accel_testing.precision_observations import Observed, Trained


def compare_dtypes(fact: Observed, what: str) -> None:
    """Fails unless the dtypes that were met are those of the policy."""
    for leaf, found, expected in _dtypes(fact):
        require(
            found == expected,
            f"{what} {leaf}: {found}, expected {expected} by the policy ({fact.policy}).",
        )


def _dtypes(fact: Observed) -> Iterator[tuple[str, object, object]]:
    """Triples of a description, the dtype that was met, and the dtype by the policy."""
    policy = fact.policy
    param = policy.param or torch.float32
    yield "parameters are stored in", fact.parameters, {param}
    for leaf, given in fact.given.items():
        yield f"the first layer receives {leaf} in", fact.seen[leaf], _cast(given, policy.input)
    yield "linear layers compute in", fact.seen["compute"], policy.compute or param
    for leaf, made in fact.made.items():
        yield f"the model returns {leaf} in", fact.returned[leaf], _cast(made, policy.output)
    if fact.gradients:
        yield "gradients are stored in", fact.gradients, {param}


def check_travel(fact: Observed, what: str) -> None:
    """Gradients that were reduced in a narrow dtype fit it; the mean of unlike ones would not."""
    stored, travelled = fact.policy.param or torch.float32, fact.policy.reduce or fact.policy.param or torch.float32
    if fact.count == 1 or stored is not torch.float32:
        return  # nothing travels, or nothing can be seen of it
    holds = travelled in fact.travelled if travelled is not torch.float32 else not fact.travelled
    require(
        holds,
        f"{what} gradients travelled in {fact.travelled or 'float32'}, expected {travelled} by the policy ({fact.policy}).",
    )


def _cast(given: torch.dtype, declared: torch.dtype | None) -> torch.dtype:
    return declared if declared is not None and given.is_floating_point else given


def names_of(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """The names of its parameters, and those of its state."""
    return [name for name, _ in model.named_parameters()], list(model.state_dict())


def means(facts: Sequence[Trained]) -> list[float]:
    """The loss of each step, as the mean over the shards."""
    return by_shard([(fact.index, fact.losses) for fact in facts])


def by_shard(losses: Sequence[tuple[int, Sequence[float]]]) -> list[float]:
    """The mean over the shards; ranks of one shard have the same."""
    of_shard = dict(losses)
    return [sum(step) / len(of_shard) for step in zip(*of_shard.values(), strict=True)]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Euclidean norm of the difference, relative to that of what is expected."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-12))


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[name], value) for name, value in expected.items())
        )
    return bool(found == expected)


def shown(losses: Sequence[float]) -> str:
    """Losses in a message."""
    return "[" + ", ".join(f"{loss:.5f}" for loss in losses) + "]"
