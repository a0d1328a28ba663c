"""P5: what a call of a model costs whose matrix products run in bf16, and whose nested output is left alone, or cast."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from worker import alternate, arguments, finish, join

CALLS = 40  # per batch that was asked for
Call = Callable[[torch.Tensor], object]


class Nested(nn.Module):
    """Computes nothing, and returns 14 tensors in dicts, lists and tuples."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c, d, e, f, g, h, i, j, k, m, n, o = torch.ones(14, 8, 4, dtype=torch.bfloat16)
        self.output = {
            "a": a,
            "b": [b, c, (d, e)],
            "c": {"f": f, "g": [g], "h": (h, i, j)},
            "k": k,
            "m": m,
            "n": n,
            "o": o,
        }

    def forward(self, _: torch.Tensor) -> object:
        return self.output


def plain() -> Call:
    """The model under autocast, by hand."""
    model = Nested()

    def call(x: torch.Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return call


def cast() -> Call:
    """The same, and every tensor of this very structure cast by hand."""
    call, to = plain(), torch.Tensor.float

    def called(x: torch.Tensor) -> object:
        out = call(x)
        b, c = out["b"], out["c"]
        return {
            "a": to(out["a"]),
            "b": [to(b[0]), to(b[1]), (to(b[2][0]), to(b[2][1]))],
            "c": {"f": to(c["f"]), "g": [to(c["g"][0])], "h": (to(c["h"][0]), to(c["h"][1]), to(c["h"][2]))},
            "k": to(out["k"]),
            "m": to(out["m"]),
            "n": to(out["n"]),
            "o": to(out["o"]),
        }

    return called


def accel(output: torch.dtype | None = None) -> Call:
    """Ours."""
    from accel_core import Accelerator
    from accel_precision import BF16

    return Accelerator(mixed_precision=BF16(output_dtype=output), cpu=True).prepare(Nested())


def accel_fp32() -> Call:
    """Ours, with outputs in full precision, which is the default."""
    return accel(torch.float32)


def accelerate() -> Call:
    """Hugging Face Accelerate, which casts every output to full precision."""
    from accelerate import Accelerator

    return Accelerator(mixed_precision="bf16", cpu=True).prepare(Nested())


CALLED: dict[str, Callable[[], Call]] = {
    "plain": plain,
    "cast": cast,
    "accel": accel,
    "accel_fp32": accel_fp32,
    "accelerate": accelerate,
}


def timed(call: Call, calls: int) -> Callable[[], dict[str, float]]:
    """Seconds of CPU per call."""
    x = torch.zeros(1)

    def turn() -> dict[str, float]:
        start = time.thread_time()
        for _ in range(calls):
            call(x)
        return {"cpu": (time.thread_time() - start) / calls}

    return turn


def main() -> None:
    options = arguments()
    rank, world = join()
    names = [name for name in options.libraries if name in CALLED]
    calls = {name: CALLED[name]() for name in names}
    turns = {name: timed(call, CALLS * options.batches) for name, call in calls.items()}
    finish(options.out, rank, world, alternate(turns, options.rounds, world))


if __name__ == "__main__":
    main()
