"""Models, and training steps of them whose peak of memory is measured, for the tests of the estimate."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from accel_core import Accelerator

_MMAP_THRESHOLD = -3  # a parameter of glibc's `mallopt`


def leave_no_gaps():
    """Returns blocks of 64 KiB and more when they are freed: what is in a gap of the heap would not be seen."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)


class Convolutions(nn.Module):
    """Convolutions as in networks for pictures, with norms and residual connections."""

    def __init__(self, width=384, blocks=6):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x):
        x = functional.max_pool2d(self.stem(x), 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def mlp(width=1792, layers=6):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def llama(hidden=640, layers=4):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4000,
        max_position_embeddings=256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def convolutions(width=384, blocks=6):
    return Convolutions(width, blocks)


class WithoutBlocks(nn.Module):
    """Layers that stand in no list, so that they are gathered and reduced at once."""

    def __init__(self, width=1792):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, input):
        return self.third(torch.relu(self.second(torch.relu(self.first(input)))))


def mlp_without_blocks():
    return WithoutBlocks()


class Parts(nn.Module):
    """Frozen layers with small trained ones beside them, in dicts, which nobody can call."""

    def __init__(self, width=1792, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "base": nn.Linear(width, width).requires_grad_(requires_grad=False),
                    "down": nn.Linear(width, 16, bias=False),
                    "up": nn.Linear(16, width, bias=False),
                }
            )
            for _ in range(layers)
        )

    def forward(self, input):
        for layer in self.layers:
            input = torch.relu(layer["base"](input) + layer["up"](layer["down"](input)))
        return input


def parts_in_dicts():
    return Parts()


def mlp_of_many_rows():
    return mlp(1024, 7)


MODELS = {
    "mlp": mlp,  # the step needs most
    "mlp_of_many_rows": mlp_of_many_rows,  # activations do
    "llama": llama,
    "convolutions": convolutions,
    "mlp_without_blocks": mlp_without_blocks,
    "parts_in_dicts": parts_in_dicts,
}


def batch_of(name):
    rows = 4
    if name == "llama":
        ids = torch.randint(0, 4000, (rows, 128))
        return {"input_ids": ids, "labels": ids}
    if name == "mlp_of_many_rows":
        return {"input": torch.randn(1200, 1024)}
    return {"x": torch.randn(rows, 3, 16, 16)} if name == "convolutions" else {"input": torch.randn(rows, 1792)}


def loss_of(output):
    return output.loss if hasattr(output, "loss") else output.square().mean()


def train(accelerator, model, batch, optimizer, steps):
    for _ in range(steps):
        accelerator.backward(loss_of(model(**batch)))
        optimizer.step()
        optimizer.zero_grad()


def status(name):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


ATTENTION = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
ATTENTION["model.layers.*.self_attn.o_proj"] = "rowwise"
PAIRS = {f"{layer}.0": "rowwise" if layer % 2 else "colwise" for layer in range(6)}
PLANS = {
    "mlp": PAIRS,
    "mlp_of_many_rows": PAIRS,
    "llama": ATTENTION
    | {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    | {"model.layers.*.mlp.down_proj": "rowwise"},
}


def strategy_of(name, model):
    if name == "tensor":
        from accel_fsdp import FSDP

        return FSDP(tensor_parallel=2, parallelize_plan=PLANS[model])
    if name == "fsdp, checkpointing":
        from accel_fsdp import FSDP

        return FSDP(activation_checkpointing=True)
    if not name.startswith("zero"):
        return name
    from accel_deepspeed import DeepSpeed

    return DeepSpeed(zero_stage=int(name[-1]))


def prepared(accelerator, name):
    model = MODELS[name]()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def peak_of_steps(name, strategy, precision=None):
    """Bytes that training takes at most in a step that is not the first, beside what libraries keep from a run before."""
    torch.set_num_threads(1)
    leave_no_gaps()
    accelerator = Accelerator(strategy=strategy_of(strategy, name), cpu=True, mixed_precision=precision)
    batch = batch_of(name)
    model, optimizer = prepared(accelerator, name)
    train(accelerator, model, batch, optimizer, 2)
    model, optimizer = accelerator.free_memory(model, optimizer)
    for _ in range(3):  # what autograd holds is let go of in the pass after that which has found it
        gc.collect()
    before = status("VmRSS")
    model, optimizer = prepared(accelerator, name)
    train(accelerator, model, batch, optimizer, 2)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # what it had at most is what it has now
    train(accelerator, model, batch, optimizer, 2)
    peak = status("VmHWM") - before
    accelerator.end_training()
    return peak
