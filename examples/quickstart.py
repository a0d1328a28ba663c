"""Trains a small GPT on the source of Python's standard library: the same file in one process or in many.

    python examples/quickstart.py
    torchrun --nproc-per-node 2 examples/quickstart.py

The loop is PyTorch's. The five lines that any script needs are marked 1 to 5: every process then reads its own part of
each batch, gradients are averaged, and each sequence of the validation set is counted exactly once.

    python examples/quickstart.py --save run                                       # saves as it goes, and on SIGTERM
    torchrun --nproc-per-node 2 examples/quickstart.py --save run --resume         # goes on, in as many processes as you like
    torchrun --nproc-per-node 2 examples/quickstart.py --strategy fsdp --mixed-precision bf16
    python examples/quickstart.py --log-with tensorboard && tensorboard --logdir out           # curves; or any other tracker
"""

import argparse
import json
import math
import sysconfig
import time
from itertools import chain, repeat
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm

from accel_core import Accelerator, ProjectConfiguration  # 1

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 5  # about a million parameters
BATCH, ACCUMULATION = 4, 2  # sequences in a batch of one process, and batches in an optimizer step
LEARNING_RATE, WARM_UP = 3e-3, 0.1  # the peak, and the part of the budget until it is reached
EVALUATIONS = 5  # while training; one more before it
VALIDATED = 201  # sequences; odd, so that the last batch of one process has to be filled up


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """From bytes (batch, length) to the logits of each next byte (batch, length, 256)."""

    def __init__(self):
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.byte(tokens) + self.position.weight)))


def sequences(files):
    """The bytes of the files one after another, cut into rows of LENGTH + 1. A tensor is a dataset of its rows."""
    data = torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)
    return data[: len(data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1).long()


def losses(model, tokens):
    """The loss of each sequence, in nats per byte: (batch,)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Bits per byte over the whole validation set, and how many sequences were counted."""
    model.eval()
    every = torch.cat([accelerator.gather_for_metrics(losses(model, tokens)) for tokens in loader])  # 5
    model.train()
    return every.mean().item() / math.log(2), len(every)


def learning_rate(used):
    """A factor for the peak, when this part of the budget is used: a linear warm-up, then a cosine."""
    if used < WARM_UP:
        return (used + 0.01) / (WARM_UP + 0.01)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (used - WARM_UP) / (1 - WARM_UP)))


class Progress:
    """What the run has done so far, the same in all processes: a checkpoint holds it beside what is prepared."""

    def __init__(self, options):
        self.options = options
        self.seconds, self.train, self.valid = 0.0, [], []  # two curves: the loss of each step, and (step, loss) pairs

    @property
    def used(self):
        """The part of the budget that is used up."""
        return min(1.0, max(self.seconds / self.options.seconds, len(self.train) / self.options.steps))

    def state_dict(self):
        return {"seconds": self.seconds, "train": self.train, "valid": self.valid}

    def load_state_dict(self, state):
        self.seconds, self.train, self.valid = state["seconds"], state["train"], state["valid"]


def main():
    options = arguments()
    torch.manual_seed(1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train_set = sequences(file for index, file in enumerate(files) if index % 10)
    train_loader = DataLoader(train_set, BATCH, shuffle=True)
    valid_set = sequences(files[::10])
    valid_loader = DataLoader(valid_set[:: len(valid_set) // VALIDATED][:VALIDATED], BATCH)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    progress = Progress(options)
    scheduler = LambdaLR(optimizer, lambda _: learning_rate(progress.used))

    project = ProjectConfiguration(logging_dir=options.out)
    if options.save:
        project = ProjectConfiguration(options.save, options.out, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(  # 2
        gradient_accumulation_steps=ACCUMULATION,
        project_config=project,
        strategy=options.strategy,
        mixed_precision=options.mixed_precision,
        log_with=options.log_with,
    )
    accelerator.init_trackers("quickstart", options)
    model, optimizer, scheduler, train_loader, valid_loader = accelerator.prepare(  # 3
        model, optimizer, scheduler, train_loader, valid_loader
    )
    accelerator.register_for_checkpointing(progress)
    if options.save:
        accelerator.stop_on_signal()  # SIGTERM, which schedulers send before they take a machine away
    if options.resume and accelerator.load_state(missing_ok=True):  # the newest; the loader goes on inside its epoch
        say(accelerator, f"resumed at step {len(progress.train)}")

    bar = tqdm(total=100, bar_format="{l_bar}{bar:40}|{postfix}", disable=not accelerator.is_main_process)
    first, before, start, stopped = len(progress.train), progress.seconds, time.perf_counter(), False
    for tokens in chain.from_iterable(repeat(train_loader)):
        if len(progress.valid) <= progress.used * EVALUATIONS:
            bits, counted = evaluate(accelerator, model, valid_loader)
            progress.valid.append((len(progress.train), bits))
            accelerator.log({"bits per byte": {"validation": bits}}, step=len(progress.train))
        if progress.used == 1:
            break
        with accelerator.accumulate(model):
            loss = losses(model, tokens).mean()
            accelerator.backward(loss)  # 4
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # that was a step
            spent = torch.tensor(before + time.perf_counter() - start)
            loss, spent = accelerator.reduce((loss.detach(), spent), "mean")
            progress.train.append(loss.item() / math.log(2))
            progress.seconds = spent.item()
            bar.n = 100 * progress.used
            step = len(progress.train)
            accelerator.log(
                {"bits per byte": {"training": progress.train[-1]}, "learning rate": scheduler.get_last_lr()[0]},
                step=step,
            )
            bar.set_postfix_str(f"step {step}, {progress.train[-1]:.2f} bits per byte", refresh=True)
            stopped = options.save and accelerator.should_stop()
            if stopped or (options.save and step % options.every == 0):
                say(accelerator, f"saved step {step} in {accelerator.save_state()}")
            if stopped:
                break
    bar.close()

    if accelerator.is_main_process and not stopped:
        world = accelerator.num_processes
        effective = BATCH * ACCUMULATION * world
        steps = len(progress.train)
        result = {
            "processes": world,
            "distributed": str(accelerator.distributed_type),
            "precision": accelerator.mixed_precision,
            "effective batch": effective,
            "steps": steps,
            "samples per second": round(effective * (steps - first) / (time.perf_counter() - start), 1),
            "samples validated": counted,
            "bits per byte": round(bits, 3),
        }
        print("\n".join(f"{name:>20}  {value}" for name, value in result.items()))
        report(options.out, result | {"train": progress.train, "valid": progress.valid})
    accelerator.end_training()


def say(accelerator, text):
    """Prints a line once, above the bar."""
    if accelerator.is_main_process:
        tqdm.write(text)


def report(out, result):
    """Writes a run's curves as numbers and as a picture; and one picture of all the runs that are there."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"quickstart-{result['processes']}"
    (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    draw(out / f"{name}.png", [result])
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("quickstart-*.json"))]
    if len(runs) > 1:
        draw(out / "quickstart.png", runs)


def draw(file, runs):
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, run in enumerate(runs):
        axes.plot(range(1, len(run["train"]) + 1), run["train"], color=f"C{color}", alpha=0.3, linewidth=1)
        label = f"{run['processes']} × {BATCH * ACCUMULATION} sequences a step: {run['bits per byte']:.2f}"
        axes.plot(*zip(*run["valid"], strict=True), "o-", color=f"C{color}", label=label)
    axes.set(xlabel="optimizer steps", ylabel="bits per byte", title="validation (faint: training)")
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def arguments():
    parser = argparse.ArgumentParser(description="Trains a small GPT on the source of Python's standard library.")
    parser.add_argument("--seconds", type=float, default=25, help="the budget of time, evaluation included")
    parser.add_argument("--steps", type=float, default=math.inf, help="the budget of steps, if it is used up earlier")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the curves")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder of checkpoints; the newest two are kept")
    parser.add_argument("--every", type=int, default=50, metavar="STEPS", help="how often one is saved")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument(
        "--strategy", help="how training is distributed, such as fsdp; the default is that of Accelerator()"
    )
    parser.add_argument("--mixed-precision", help="such as bf16; the default is that of Accelerator()")
    parser.add_argument(
        "--log-with",
        nargs="+",
        metavar="TRACKER",
        help="what records the run, in --out if it writes files: tensorboard, jsonl, …",
    )
    options = parser.parse_args()
    if options.resume and not options.save:
        parser.error("--resume needs --save DIR, the folder of the run that is to go on")
    return options


if __name__ == "__main__":
    main()
