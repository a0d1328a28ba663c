"""The part of a model on one rank, as one module with the names of the whole model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accel_core.api.component import gather_objects
from accel_megatron.layouts import parts_of

if TYPE_CHECKING:
    from accel_core import World


_NUMBERED = re.compile(r"\.(?:layers|local_experts)\.\d+\.")


class Form(NamedTuple):
    """What is known of a value of another stage: the whole shape and dtype, None of what is no tensor."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    is_trained: bool


class Stages(nn.Module):
    """A rank's stages of a model, or its experts, made by `accelerator.build_model`.

    Parameters have their names in the whole model: `decoder.layers.7.…` also where it is the first
    layer of its stage. A stage takes activations from the one before, so it cannot be called:
    `accelerator.forward_backward(model, micro_batches, loss_fn)` runs all of them.

    Args:
        chunks: the stages, in order; several if they are interleaved.
        is_pipeline: False: the one chunk has all layers, and some of the experts. It can be called,
            and has the attributes of the chunk.
    """

    def __init__(self, chunks: list[nn.Module], is_pipeline: bool = True) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self._is_pipeline = is_pipeline
        self._names: dict[str, str] = {}
        self._prefixes: dict[str, str] = {}  # for buffers and what else has no declaration of its own
        for number, chunk in enumerate(chunks):
            for part in parts_of(chunk):
                local = f"chunks.{number}.{part.local}"
                self._names[local] = part.name
                self._prefixes.update(zip(_numbered(local), _numbered(part.name), strict=False))

        self.order: dict[str, Form] = {}

    def exchange(self, world: World) -> None:
        """Learns what all stages have, in `order`. A collective."""
        own: dict[str, Form] = {}
        for number, chunk in enumerate(self.chunks):
            shapes = {part.local: part.extent.shape for part in parts_of(chunk)}
            for local, value in chunk.state_dict(keep_vars=True).items():
                form = Form(None, None, False)
                if isinstance(value, torch.Tensor):
                    form = Form(shapes.get(local, tuple(value.shape)), value.dtype, value.requires_grad)
                own.setdefault(self.named(f"chunks.{number}.{local}"), form)
        self.order = {}
        for stage in gather_objects([own], world):
            self.order |= {name: form for name, form in stage.items() if name not in self.order}

    @property
    def config(self) -> Any:
        """Megatron's configuration of the model."""
        return self.chunks[0].config

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name.startswith("_") or name in own["_modules"] or own.get("_is_pipeline", True):
            return super().__getattr__(name)
        return getattr(self.chunks[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the chunk; `RuntimeError` in a pipeline."""
        if not self._is_pipeline:
            return self.chunks[0](*args, **kwargs)
        raise RuntimeError(
            "model(batch) was called, but this rank has a stage of a pipeline, which takes activations and no batches. Call "
            "accelerator.forward_backward(model, micro_batches, loss_fn), inside torch.no_grad() for an evaluation."
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole model."""
        before = f"{prefix}." if prefix else ""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield before + self.named(name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's part, by the names in the whole model."""
        state = super().state_dict(*args, **kwargs)
        for name in list(state):
            state[self.named(name)] = state.pop(name)
        return state

    def named(self, name: str) -> str:
        """The name in the whole model of `chunks.<number>.<name in the stage>`."""
        if name in self._names:
            return self._names[name]
        known = [prefix for prefix in _numbered(name) if prefix in self._prefixes]
        return self._prefixes[known[-1]] + name[len(known[-1]) :] if known else name.split(".", 2)[2]


def _numbered(name: str) -> list[str]:
    """The name up to the number of its layer, and of its expert, with the dot behind it."""
    return [name[: match.end()] for match in _NUMBERED.finditer(name)]


def build_chunks(
    factory: Callable[..., nn.Module], settings: Mapping[str, Any], rank: int, stages: int, virtual: int | None
) -> list[nn.Module]:
    """Calls the factory for each stage of this rank.

    It is given those of `parallel` (arguments for its `TransformerConfig`), `pre_process`,
    `post_process` and `vp_stage` that it takes; and, if it names it, `read_later`, a list: functions
    that it adds are called when all stages are built.
    """
    count, last = virtual or 1, (virtual or 1) - 1
    read_later: list[Callable[[], None]] = []
    chunks = [
        _call(
            factory,
            parallel=dict(settings),
            pre_process=rank == 0 and number == 0,
            post_process=rank == stages - 1 and number == last,
            vp_stage=None if virtual is None else number,
            **({"read_later": read_later} if "read_later" in inspect.signature(factory).parameters else {}),
        )
        for number in range(count)
    ]
    for read in read_later:
        read()
    return chunks


def _call(factory: Callable[..., nn.Module], **offered: Any) -> nn.Module:
    parameters = inspect.signature(factory).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return factory(**{name: value for name, value in offered.items() if takes_all or name in parameters})
