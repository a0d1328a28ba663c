"""Accumulation by token: sentences of unequal length, each token of which weighs the same.

The mean of the means of four batches is not the mean over their tokens: a batch of short sentences would weigh as much as one of
long ones. `forward_backward` runs a whole window; its gradient is that of (sum of losses) / (number of tokens), over all batches
and processes. Runs with the same --batch-size × --accumulation × processes end with the same loss.

    python examples/by_feature/token_weighted_accumulation.py --batch-size 32 --accumulation 1
    python examples/by_feature/token_weighted_accumulation.py --batch-size 8 --accumulation 4
    accel launch --num-processes 2 examples/by_feature/token_weighted_accumulation.py --batch-size 8 --accumulation 2
    accel launch --num-processes 8 examples/by_feature/token_weighted_accumulation.py --batch-size 4 --accumulation 1
    accel launch --num-processes 2 --fsdp examples/by_feature/token_weighted_accumulation.py --batch-size 8 --accumulation 2
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_core import Accelerator, set_seed

PADDING = -100  # a target that counts for nothing


def collate(sentences):
    """Bytes (batch, longest), and the byte that follows each: PADDING behind the end of a sentence."""
    tokens = pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True)
    return tokens, pad_sequence([sentence[1:] for sentence in sentences], batch_first=True, padding_value=PADDING)


def summed_loss(logits, batch):
    """The loss, summed over the tokens of this batch, and how many tokens these are."""
    _, targets = batch
    loss = cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING, reduction="sum")
    return loss, (targets != PADDING).sum()


def main():
    parser = argparse.ArgumentParser(description="Weighs every token alike, in whatever batch it is.")
    parser.add_argument("--batch-size", type=int, default=8, help="sentences in a batch of one process")
    parser.add_argument("--accumulation", type=int, default=4, help="batches in an optimizer step")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    set_seed(1)
    lines = Path(argparse.__file__).read_bytes().splitlines()  # a text that every Python has: its own source
    sentences = [torch.tensor(list(line)) for line in lines if len(line) > 1][:512]
    loader = DataLoader(sentences, options.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        batches = iter(loader)
        while window := list(islice(batches, options.accumulation)):
            loss = accelerator.forward_backward(model, window, summed_loss)  # the mean over all tokens of the window
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            accelerator.print(f"first epoch {loss:.4f}")
    accelerator.print(f"last epoch {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
