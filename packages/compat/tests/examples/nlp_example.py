"""Pairs of sentences, same meaning or not: a small encoder, warm-up, an evaluation that gathers every prediction once."""

import argparse

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

from accelerate import Accelerator, DistributedType

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 8


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    def row(index):
        first, second = index % 29, (index * 7) % 29
        length = 4 + index % 5
        tokens = [1, *([first + 4] * length), 2, *([second + 4] * 3), 2]
        return {"input_ids": tokens, "labels": int(first > second)}

    def collate_fn(rows):
        # On some devices every batch has to have the same shape.
        longest = (
            16 if accelerator.distributed_type == DistributedType.XLA else max(len(each["input_ids"]) for each in rows)
        )
        padded = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in rows]
        tokens = torch.tensor(padded)
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "labels": torch.tensor([each["labels"] for each in rows]),
        }

    with accelerator.main_process_first():
        train, evaluation = [row(index) for index in range(160)], [row(index + 500) for index in range(45)]
    return (
        DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True),
        DataLoader(evaluation, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE, drop_last=False),
    )


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed, batch_size = (
        config["lr"],
        int(config["num_epochs"]),
        int(config["seed"]),
        int(config["batch_size"]),
    )
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE

    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=4,
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device) if hasattr(batch, "to") else batch
            outputs = model(**batch)
            loss = outputs.loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = samples = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((predictions == references).sum())
            samples += len(references)
        accelerator.print(f"epoch {epoch}: {samples} samples, accuracy {right / samples:.3f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="A training script with few changes.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
