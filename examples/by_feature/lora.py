"""LoRA with peft: the model is frozen, and small matrices beside its layers are trained and saved.

    python examples/by_feature/lora.py --out adapter
    accel launch --num-processes 2 examples/by_feature/lora.py
    accel launch --num-processes 8 examples/by_feature/lora.py --rank 16
    accel launch --num-processes 2 --fsdp examples/by_feature/lora.py

The model here is a small one of random weights, so that there is nothing to download. Take one that has learnt something:
`AutoModelForCausalLM.from_pretrained(...)`, of the hub, or what language_model.py has written (--model DIR).
"""

import argparse
import math
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel_core import Accelerator, set_seed

LENGTH = 64  # bytes of a sequence
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="Trains adapters of a frozen model.")
    parser.add_argument("--model", metavar="DIR", help="a folder of a model; none: random weights")
    parser.add_argument("--rank", type=int, default=8, help="of the matrices beside each layer")
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the adapters, as peft reads it")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    set_seed(1)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a text that every Python has: its own source
    data = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        model = AutoModelForCausalLM.from_config(CONFIG)
    lora = LoraConfig(r=options.rank, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], lora_alpha=32)
    model = get_peft_model(model, lora)
    frozen = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora_" not in name}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    accelerator = Accelerator(split_batches=True)
    loader = DataLoader(data, 16, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    bits = []
    while len(bits) < options.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            bits.append(accelerator.reduce(loss.detach(), "mean").item() / math.log(2))
            if len(bits) == options.steps:
                break

    state = accelerator.get_state_dict(model)  # a collective: whole weights, on the main process
    if accelerator.is_main_process:
        # peft writes the adapters alone.
        accelerator.unwrap_model(model).save_pretrained(options.out, state_dict=state)
        same = all(torch.equal(state[name].cpu(), value) for name, value in frozen.items())
        print(f"{trained} of {total} parameters trained, the others {'are as they were' if same else 'have changed'}")
    accelerator.print(f"bits per byte {bits[0]:.3f} in the first step, {bits[-1]:.3f} in step {len(bits)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
