"""The linear layers of a model that are converted, and the reasons why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import nn

from accel_core import get_logger
from accel_core.api.component import as_sequence, listed

Filter = Callable[[nn.Module, str], bool]
Misfit = Callable[[nn.Linear], str | None]
"""Says why a layer cannot be converted; None if it can."""


@dataclass(frozen=True)
class Rule:
    """The user's rule about layers. `accepts`, where given, replaces the rule about the ends."""

    skip: tuple[str, ...] = ()
    convert_ends: bool = False
    accepts: Filter | None = None

    @classmethod
    def of(cls, skip: Sequence[str], convert_ends: bool, accepts: Filter | None) -> Rule:
        """Raises `TypeError` or `ValueError` for what cannot be meant."""
        patterns = tuple(as_sequence("skip", skip))
        if accepts is not None and not callable(accepts):
            raise TypeError(
                f"module_filter_func is a {type(accepts).__name__}, expected a function of a module and its name that says whether "
                f"it is converted, e.g. lambda module, name: 'head' not in name."
            )
        if accepts is not None and convert_ends:
            raise ValueError(
                "convert_ends=True and module_filter_func were both given, and the function decides about the first and the last "
                "layer too. Leave convert_ends out."
            )
        return cls(patterns, convert_ends, accepts)


@dataclass(frozen=True)
class Choice:
    """The layers that are converted, and for each of the others the reason; both by name."""

    model: str
    taken: Mapping[str, nn.Linear]
    left: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The outcome for a model's linear layers: the converted ones, and reasons for the others."""

    converted: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        count = len(self.converted)
        head = f"{count} of {count + len(self.left)} nn.Linear"
        return f"{head}; left: {_listed(self.left)}" if self.left else head


@dataclass
class Conversions:
    """Chooses the layers of models, and remembers what became of them. It holds no model.

    Args:
        precision: the name in messages.
        rule: what the user says about layers.
    """

    precision: str
    rule: Rule
    reports: dict[str, Report] = field(default_factory=dict)
    _matched: set[str] = field(default_factory=set)

    def choose(self, model: nn.Module, misfit: Misfit) -> Choice:
        """Goes by the rule, then by what can be converted. Changes nothing.

        Raises:
            ValueError: if a layer that `accepts` named cannot be converted, if a pattern of `skip`
                has matched nothing so far, or if nothing is left to convert.
        """
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        taken, left, refused = _sorted(layers, self.rule, misfit)
        if refused:
            raise ValueError(
                f"module_filter_func chose {len(refused)} layers of {type(model).__name__} that {self.precision} cannot compute: "
                f"{_listed(refused)}. Let it return False for them, or change their sizes."
            )
        self._check_patterns(model, layers)
        if not taken:
            raise ValueError(
                f"{self.precision} was asked for, but no layer of {type(model).__name__} can be converted: "
                f"{_listed(left) if left else 'it has no nn.Linear'}. Give it layers that can (options: skip, convert_ends, "
                f"module_filter_func), leave it out of prepare(), or use mixed_precision='bf16'."
            )
        return Choice(type(model).__name__, MappingProxyType(taken), MappingProxyType(left))

    def record(self, choice: Choice) -> None:
        """Remembers that a choice was carried out, and logs it."""
        report = Report(tuple(choice.taken), choice.left)
        name, number = choice.model, 2
        while name in self.reports:
            name, number = f"{choice.model} ({number})", number + 1
        self.reports[name] = report
        get_logger(__name__).info("%s, model %s: converted %s", self.precision, name, report)

    def details(self) -> dict[str, str]:
        """A line for each model."""
        return {f"converted of {name}": str(report) for name, report in self.reports.items()}

    @property
    def converted(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the converted layers, by the name of the model's class."""
        return MappingProxyType({name: report.converted for name, report in self.reports.items()})

    def _check_patterns(self, model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
        found = {pattern for pattern in self.rule.skip if any(_matches(name, pattern) for name in layers)}
        idle = [pattern for pattern in self.rule.skip if pattern not in self._matched | found]
        if idle:
            raise ValueError(
                f"skip={list(self.rule.skip)} has {', '.join(map(repr, idle))}, which no linear layer of {type(model).__name__} matches: "
                f"{_listed(dict.fromkeys(layers, ''))}. Correct it, leave it out, or prepare the model that has such a layer first."
            )
        self._matched |= found


def size_misfit(layer: nn.Linear, multiple: int) -> str | None:
    """Why kernels for sizes divisible by `multiple` cannot compute a layer; None if they can."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, which computes in its own way"
    if "forward" in vars(layer):
        return "its forward was replaced on the object, and the conversion would not be reached"
    odd = [size for size in layer.weight.shape if size % multiple]
    if odd:
        shape = " x ".join(map(str, layer.weight.shape))
        return f"{shape}: {' and '.join(map(str, odd))} not divisible by {multiple}"
    return None


def _sorted(
    layers: Mapping[str, nn.Linear], rule: Rule, misfit: Misfit
) -> tuple[dict[str, nn.Linear], dict[str, str], dict[str, str]]:
    """The layers that are taken, that are left, and that were chosen and cannot be taken."""
    names = list(layers)
    taken: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, layer in layers.items():
        why = _unwanted(name, layer, names, rule)
        cannot = misfit(layer) if why is None else None
        if why is None and cannot is None:
            taken[name] = layer
        elif cannot is not None and rule.accepts is not None:
            refused[name] = cannot
        else:
            left[name] = why or cannot or ""
    return taken, left, refused


def _unwanted(name: str, layer: nn.Linear, names: Sequence[str], rule: Rule) -> str | None:
    for pattern in rule.skip:
        if _matches(name, pattern):
            return f"skip {pattern!r}"
    if rule.accepts is not None:
        return None if rule.accepts(layer, name) else "module_filter_func"
    if rule.convert_ends or name not in (names[0], names[-1]):
        return None
    return "the first linear layer" if name == names[0] else "the last linear layer"


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    """The name, and those of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _listed(names: Mapping[str, str]) -> str:
    return listed([f"{name or 'the model itself'} ({why})" if why else name for name, why in names.items()])
