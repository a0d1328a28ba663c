"""The layers of a model on one rank, with their names in the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Stage(nn.Module):
    """Consecutive layers of an `nn.Sequential`, under their numbers there: `5.weight` is `5.weight` on whatever rank it is.

    Args:
        model: the whole model. What is cut off is forgotten, but for its names, shapes and dtypes.
        number, stages: which stage this is, of how many.

    Attributes:
        forms: name → shape and dtype, of the whole model's state.

    Raises:
        TypeError: for a model that is no `nn.Sequential`.
        ValueError: for fewer layers with parameters than stages.
    """

    def __init__(self, model: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        if not isinstance(model, nn.Sequential):
            raise TypeError(
                f"build_model(factory): the factory made a {type(model).__name__}, and strategy 'pipeline' cuts an nn.Sequential. Write "
                f"the model as nn.Sequential(*layers)."
            )
        self.forms = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
        bounds = _bounds(list(model), stages)
        for index in range(*bounds[number]):
            self.add_module(str(index), model[index])
        self.is_whole = stages == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers, one after the other."""
        for layer in self.children():
            x = layer(x)
        return x


class PreparedStage(nn.Module):
    """What the loop calls: a whole model answers, a stage raises `RuntimeError`."""

    def __init__(self, module: Stage) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, if all of it is here."""
        if not self.module.is_whole:
            raise RuntimeError(
                "model(batch) was called, but this rank has one stage of a pipeline, which takes activations and no batches. Call "
                "accelerator.forward_backward(model, micro_batches, loss_fn), inside torch.no_grad() for an evaluation."
            )
        return self.module(*args, **kwargs)


def _bounds(layers: list[nn.Module], stages: int) -> list[tuple[int, int]]:
    """First and end of the layers of each stage, which have about as many layers with parameters each."""
    trained = [index for index, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    if len(trained) < stages:
        raise ValueError(
            f"build_model(factory): the model has {len(trained)} layers with parameters, which is less than one for each of {stages} stages. "
            f"Start {len(trained)} processes, or make a deeper model."
        )
    firsts = [trained[len(trained) * number // stages] for number in range(stages)]
    return list(zip([0, *firsts[1:]], [*firsts[1:], len(layers)], strict=True))
