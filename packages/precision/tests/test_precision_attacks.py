"""What a program may do to a model whose layers were converted."""

import torch
from torch import nn

from accel_core import Accelerator
from accel_core.api.component import ClassOverride, override_class
from accel_precision import FP8
from accel_testing.models import built


class Counting(ClassOverride):
    """As a strategy does it: a class around that of a layer."""

    def forward(self, x):
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        return super().forward(x)


class Engine:
    """As an engine does it, which knows nothing of ours."""

    def named(self):
        return "engine"


def pair():
    return built(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))


def test_classes_that_were_made_around_a_converted_layer_stay_when_it_is_reverted():
    accelerator = Accelerator(cpu=True, mixed_precision=FP8(convert_ends=True))
    model = accelerator.prepare(pair())
    override_class(model[0], Counting)
    kind = type(model[1])
    model[1].__class__ = type(f"Engine{kind.__name__}", (Engine, kind), {})
    accelerator.free_memory()
    x = torch.ones(2, 16)
    torch.testing.assert_close(model(x), pair()(x))
    assert vars(model[0])["calls"] == 1
    assert model[1].named() == "engine"
    assert type(model[0]).__mro__[1:4] == (Counting, ClassOverride, nn.Linear)


def test_a_layer_whose_shards_arrive_converted_stays_so_that_it_can_compute():
    class Cut(torch.Tensor):
        """As much of a sharded weight as matters here."""

        def to_local(self):
            local = torch.Tensor.detach(self).as_subclass(torch.Tensor)
            local.fsdp_pre_all_gather = None
            return local

    accelerator = Accelerator(cpu=True, mixed_precision=FP8(convert_ends=True))
    model = accelerator.prepare(pair())
    before = type(model[0])
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Cut))
    accelerator.free_memory()
    assert type(model[0]) is before
    assert type(model[1]) is nn.Linear
