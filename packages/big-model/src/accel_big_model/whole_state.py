"""The weights of a model that is offloaded, all of them at once: for writing them."""

from __future__ import annotations

import torch
from torch import nn

from accel_big_model.align_hook import aligned, has_offloaded_params
from accel_big_model.module_tensors import find_tied_parameters, joined, module_names


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a model with offloaded weights, which are read; main memory has to hold it.

    What is not offloaded is live. Names of tied weights have one tensor.

        write_weights(get_state_dict_offloaded_model(model), "weights/")
    """
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    live = {value.data_ptr(): value for value in state.values() if value.numel() and not value.is_meta}
    for module, names in module_names(model).items():
        if has_offloaded_params(module):
            with aligned(module, "cpu", looks_for_writes=False):
                for own, value in module.state_dict().items():
                    first, *others = (joined(path, own) for path in names)
                    if state[first].is_meta and not value.is_meta:
                        tied = live.get(value.data_ptr())  # to one that is in memory
                        state[first] = value.clone() if tied is None else tied  # what was brought goes again
                        state.update(dict.fromkeys(others, state[first]))
    for first, *others in find_tied_parameters(model):
        state.update(dict.fromkeys(others, state[first]))
    return state
