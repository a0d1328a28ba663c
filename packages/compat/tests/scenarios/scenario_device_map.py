"""`from_pretrained(device_map="auto")` with room for a part of the weights: the rest lies in files, and the logits are the same.

python scenario_device_map.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from scenario_report import report
from scenario_trainer import tiny
from transformers import AutoModelForCausalLM


def offloaded(folder: Path) -> dict[str, Any]:
    tokens = torch.arange(12).reshape(2, 6)
    whole = tiny().eval()
    whole.save_pretrained(folder / "model")
    found = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map="auto", max_memory={"cpu": 60_000}, offload_folder=str(folder / "offload")
    )
    with torch.no_grad():
        difference = float((found(tokens).logits - whole(tokens).logits).abs().max())
    generated = found.generate(tokens, max_new_tokens=4, do_sample=False)
    same = bool((generated == whole.generate(tokens, max_new_tokens=4, do_sample=False)).all())
    return {
        "map": {name: str(place) for name, place in found.hf_device_map.items()},
        "difference": difference,
        "same_text": same,
    }


if __name__ == "__main__":
    report("device_map", offloaded(Path(sys.argv[1])))
