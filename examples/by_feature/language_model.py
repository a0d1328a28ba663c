"""A language model of transformers: trained from nothing, then fine-tuned on another text.

The text is what every machine has, Python's own source, read as bytes, so there is no tokenizer and nothing to download. A model
of the hub is as good: `AutoModelForCausalLM.from_pretrained` takes its name, and its tokenizer takes the place of the bytes.

    python examples/by_feature/language_model.py --text json --out base
    python examples/by_feature/language_model.py --text email --model base --out tuned     # begins with what it has learnt
    accel launch --num-processes 2 examples/by_feature/language_model.py
    accel launch --num-processes 8 --bf16 examples/by_feature/language_model.py --text asyncio
    accel launch --num-processes 2 --fsdp examples/by_feature/language_model.py
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from accel_core import Accelerator, set_seed

LENGTH = 64  # bytes of a sequence
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="Trains a small language model, or fine-tunes one.")
    parser.add_argument("--text", default="json", metavar="PACKAGE", help="a package of Python's standard library")
    parser.add_argument("--model", metavar="DIR", help="a folder that --out wrote; none: a new model")
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the model, as transformers reads it")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    set_seed(1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"], options.text).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    data = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    else:
        model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = Accelerator(split_batches=True)
    loader = DataLoader(data, 16, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    bits, step = [], 0
    while step < options.steps:
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels by itself
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bits.append(accelerator.reduce(loss.detach(), "mean").item() / math.log(2))
            step += 1
            if step == options.steps:
                break

    # get_state_dict is a collective: whole weights, on the main process. Sharded or not, it is what save_pretrained writes.
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        options.out, state_dict=state, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.print(f"bits per byte {bits[0]:.3f} in the first step, {bits[-1]:.3f} in step {step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
