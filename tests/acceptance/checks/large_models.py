"""Models that are spread over devices, the host and the disk compute what they compute in one place."""

from __future__ import annotations

import torch
from acceptance.registry import Run, check
from acceptance.training import Shape, make_model

SHAPE = Shape(width=256, layers=6)


def tokens(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.arange(2 * SHAPE.length).view(2, -1) % SHAPE.vocabulary
    positions = torch.arange(SHAPE.length).expand(2, -1)
    return found.to(run.device), positions.to(run.device)


def place_map(run: Run) -> dict[str, int | str]:
    """Blocks on each device there is, two on the host, two on the disk; the ends on the first device."""
    here: int | str = "cpu" if run.device.type == "cpu" else 0
    other = here if run.device.type == "cpu" else torch.accelerator.device_count() - 1
    blocks = [here, other, "cpu", "disk", "cpu", "disk"]
    ends: dict[str, int | str] = dict.fromkeys(("token", "position", "norm", "head"), here)
    return ends | {f"blocks.{number}": place for number, place in enumerate(blocks)}


@check()
def spread(run: Run) -> str:
    """`dispatch_model` over devices, host and disk: bit-equal."""
    from accel_big_model import dispatch_model

    model = make_model(SHAPE).to(run.device).eval()
    with torch.no_grad():
        expected = model(*tokens(run))
        spread_out = dispatch_model(make_model(SHAPE).eval(), place_map(run), offload_dir=run.folder / "offload")
        for _ in range(2):
            found = spread_out(*tokens(run))
            assert torch.equal(found.to(run.device), expected), (found.to(run.device) - expected).abs().max()
    return "equal"


@check()
def loaded(run: Run) -> str:
    """Built without memory, filled from files to where each part belongs: bit-equal."""
    from accel_big_model import init_empty_weights, load_checkpoint_and_dispatch

    accelerator = run.accelerator()
    model = make_model(SHAPE).to(run.device).eval()
    accelerator.save_model(model, run.folder / "weights")
    with init_empty_weights():
        empty = make_model(SHAPE)
    there = load_checkpoint_and_dispatch(
        empty, run.folder / "weights", device_map=place_map(run), offload_folder=run.folder / "disk"
    ).eval()
    with torch.no_grad():
        assert torch.equal(there(*tokens(run)).to(run.device), model(*tokens(run)))
    return "equal"


@check(package="bitsandbytes", on="cuda")
def eight_bits(run: Run) -> str:
    """Layers in 8 bits are so when they are loaded, and not only when they are called."""
    from accel_big_model import BnbQuantizationConfig, init_empty_weights, load_and_quantize_model

    model = make_model(SHAPE)
    run.accelerator().save_model(model, run.folder / "weights")
    with init_empty_weights():
        empty = make_model(SHAPE)
    found = load_and_quantize_model(empty, BnbQuantizationConfig(load_in_8bit=True), run.folder / "weights").eval()
    weight = found.blocks[0].q.weight
    assert weight.dtype == torch.int8, f"a layer has weights of {weight.dtype} before its first call"
    with torch.no_grad():
        logits, expected = (each(*tokens(run)).float().flatten() for each in (found, model.to(run.device).eval()))
    similar = torch.nn.functional.cosine_similarity(logits, expected, dim=0).item()
    assert similar > 0.98, similar
    return f"similarity of logits {similar:.4f}"
