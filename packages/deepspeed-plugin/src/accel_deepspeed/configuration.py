"""DeepSpeed's configuration: a dictionary or JSON file, checked at once, completed by a run.

What the Accelerator decides (accumulation, clipping, precision, schedulers) DeepSpeed is not told
twice: it is compared, remembered, or refused with what to write instead.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_deepspeed.configuration_completion import complete
from accel_deepspeed.configuration_file import load
from accel_deepspeed.configuration_keys import check_keys, without_refused
from accel_deepspeed.configuration_offload import settle_offload
from accel_deepspeed.configured_names import check_optimizer, check_scheduler

STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 2


@dataclass(frozen=True)
class Configuration:
    """A checked configuration. Make one with `read`.

    Args:
        values: the keys that DeepSpeed may get, "auto" among them.
        source: how messages call it: the file, or "The DeepSpeed configuration".
        stage: of ZeRO, 0 to 3.
        clipping: the norm to which gradients are to be clipped before each step; 0: not at all; None: nothing is said, so not at all.
        offload_optimizer: where optimizer state is kept: "none" (with the parameters), "cpu" or
            "nvme".
        offload_param: where parameters are kept that are not in use; as above.
        optimizer: the section of that name; None: there is none.
        scheduler: the section of that name; None: there is none.
        arguments: those of `read` but the first.
    """

    values: Mapping[str, Any]
    source: str
    stage: int
    clipping: float | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def read(
        cls,
        config: object = None,
        *,
        zero_stage: int | None = None,
        offload_optimizer: str | None = None,
        offload_param: str | None = None,
        offload_folder: str | Path | None = None,
        gradient_clipping: float | None = None,
    ) -> Configuration:
        """Reads and checks a configuration, without DeepSpeed, and without changing what is given.

        Args:
            config: a dictionary, the path of a JSON file, an `HfDeepSpeedConfig`; None: there is
                none. The other arguments are those of `DeepSpeed`; None: not given.

        Raises:
            ValueError, TypeError, FileNotFoundError: with what was found, and what to write.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("cls", "config")}
        given, source = ({}, "The DeepSpeed configuration") if config is None else load(config)
        check_keys(given, source)
        values = without_refused(given)
        _join_bf16(values, source)
        optimizer, scheduler = values.pop("optimizer", None), values.pop("scheduler", None)
        check_optimizer(optimizer, source)
        check_scheduler(scheduler, source)
        zero = values.setdefault("zero_optimization", {})
        stage = zero["stage"] = _stage(zero, zero_stage, config is not None, source)
        asked = {"offload_optimizer": offload_optimizer, "offload_param": offload_param}
        devices = settle_offload(zero, stage, asked, offload_folder, source)
        clipping = _clipping(values.pop("gradient_clipping", "auto"), gradient_clipping, source)
        return cls(
            values,
            source,
            stage,
            clipping,
            devices["offload_optimizer"],
            devices["offload_param"],
            optimizer,
            scheduler,
            arguments,
        )

    @property
    def state_folder(self) -> str | None:
        """The folder for masters and optimizer state; None: they are kept in memory."""
        section = self.values["zero_optimization"].get("offload_optimizer", {})
        return str(section["nvme_path"]) if self.offload_optimizer == "nvme" else None

    def reread(self, config: object) -> Configuration:
        """The configuration with another dictionary or file, and the same arguments beside it."""
        return type(self).read(config, **self.arguments)

    def resolved(self, **facts: Any) -> dict[str, Any]:
        """A dictionary for `deepspeed.initialize(config=...)`, without any "auto". See `complete`."""
        return complete(copy.deepcopy(dict(self.values)), self.source, self.stage, **facts)


def hidden_size_of(model: object) -> int | None:
    """The width of a model of transformers by its `config`, the largest of several; or None."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "hidden_size", None)
        sizes = getattr(holder, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if sizes:
            return int(max(sizes))
    return None


def _join_bf16(values: dict[str, Any], source: str) -> None:
    older = values.pop("bfloat16", None)
    if older is not None and "bf16" in values:
        raise ValueError(f"{source} has 'bf16' and its older name 'bfloat16'. Keep 'bf16'.")
    if older is not None:
        values["bf16"] = older


def _stage(zero: Mapping[str, Any], asked: int | None, configured: bool, source: str) -> int:
    if asked is not None and (asked not in STAGES or isinstance(asked, bool)):
        raise ValueError(f"zero_stage={asked!r} was given; known are 0, 1, 2 and 3.")
    found = zero.get("stage")
    if found is None and asked is None and configured:
        raise ValueError(
            f'{source} does not say which stage of ZeRO is meant. Write "zero_optimization": {{"stage": 2}} in it, or '
            f"DeepSpeed(zero_stage=2, config=...); 0 shares nothing out."
        )
    if found is None or found == "auto":
        return DEFAULT_STAGE if asked is None else int(asked)
    if found not in STAGES or isinstance(found, bool):
        raise ValueError(f"{source} has 'zero_optimization.stage' with {found!r}; known are 0, 1, 2 and 3.")
    if asked is not None and asked != found:
        raise ValueError(
            f"zero_stage={asked} was given, but {source} has 'zero_optimization.stage' with {found}. Keep one of them."
        )
    return int(found)


def _clipping(found: Any, asked: float | None, source: str) -> float | None:
    for name, norm in (
        ("gradient_clipping", asked),
        (f"{source}: 'gradient_clipping'", None if found == "auto" else found),
    ):
        if norm is not None and (isinstance(norm, bool) or norm < 0):
            raise ValueError(f"{name} is {norm!r}: expected the largest norm, above 0; or 0 to leave gradients alone.")
    if found is None or found == "auto":
        return None if asked is None else float(asked)
    if asked is not None and asked != found:
        raise ValueError(
            f"gradient_clipping={asked} was given, but {source} has 'gradient_clipping' with {found}. Keep one of them."
        )
    return float(found)
