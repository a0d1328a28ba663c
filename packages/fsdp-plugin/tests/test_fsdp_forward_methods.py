"""Methods beside `forward` of a sharded model: `generate` by itself, others when they are marked."""

from __future__ import annotations

import torch
from torch import nn

from accel_core import Accelerator
from accel_testing import run_ranks


class Translator(nn.Module):
    """An encoder and a decoder with a shared embedding; `generate` calls the encoder before the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(7, 4)
        self.encoder = nn.Sequential(self.shared, nn.Linear(4, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7)
        self.temperature = nn.Parameter(torch.tensor(1.5))  # which cannot be cut

    def forward(self, x, encoded=None):
        hidden = self.encoder(x) if encoded is None else encoded
        for block in self.blocks:
            hidden = torch.tanh(block(hidden)) + self.shared(x)
        return self.head(hidden) * self.temperature

    @torch.no_grad()
    def generate(self, x, steps=3):
        for _ in range(steps):
            encoded = self.encoder(x)
            x = torch.cat([x, self(x, encoded)[:, -1:].argmax(-1)], 1)
        return x

    def loss(self, x):
        return {"loss": nn.functional.cross_entropy(self(x).flatten(0, 1), x.flatten())}


def tokens():
    return torch.arange(8).remainder(7).view(4, 2)


def trained(prepare, steps=3):
    model = Translator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, backward, own = prepare(model, optimizer)
    found = []
    for _ in range(steps):
        found.append(model.generate(tokens()))
        backward(model.loss(own(tokens()))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return model, found


def sharded():
    accelerator = Accelerator(strategy="fsdp", cpu=True)

    def prepare(model, optimizer):
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.mark_forward_method(model, "loss")
        return model, optimizer, accelerator.backward, lambda x: x.chunk(2)[accelerator.process_index]

    model, found = trained(prepare)
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return found, state


def test_a_sharded_model_generates_and_trains_by_a_marked_method_as_a_whole_one():
    (first, state), (second, _) = run_ranks(sharded, 2)
    model, found = trained(lambda model, optimizer: (model, optimizer, torch.Tensor.backward, lambda x: x))
    for ours in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(ours, found, strict=True))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value)
