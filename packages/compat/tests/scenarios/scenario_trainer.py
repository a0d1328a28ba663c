"""transformers' Trainer on a tiny Llama, under whichever distribution `accelerate` is installed.

    python -m torch.distributed.run --standalone --nproc-per-node 2 scenario_trainer.py OUT ddp/plain/fp32 fsdp/window/bf16 …

A scenario is engine/accumulation/precision, or a name of `ENDS`. Rank 0 prints one line of JSON for each.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from scenario_report import losses_of, quiet, report
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

WINDOWS = {"plain": 1, "window": 4, "unclipped": 1}
"""Steps of accumulation: in a world of one or two, an epoch of `ROWS` ends in a shorter window. Gradients are clipped, but in the last."""
ROWS, BATCH = 44, 4
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Sentences(Dataset):
    """Rows of tokens in which each follows from the one before, so that there is something to learn."""

    def __init__(self, rows: int, seed: int) -> None:
        start = torch.randint(0, 64, (rows, 1), generator=torch.Generator().manual_seed(seed))
        self.rows = (start + 5 * torch.arange(12)) % 64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Kill(TrainerCallback):
    """Ends every process of the run without a word, behind a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def tiny() -> LlamaForCausalLM:
    set_seed(11)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def arguments(folder: Path, scenario: str, **changes: Any) -> TrainingArguments:
    engine, accumulation, precision = scenario.split("/")
    engines: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fsdp": {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
        "zero2": {"deepspeed": ZERO},
        "zero3": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}},
    }
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "seed": 7,
        "bf16": precision == "bf16",
        "gradient_accumulation_steps": WINDOWS[accumulation],
        "max_grad_norm": 0.0 if accumulation == "unclipped" else 1.0,
    }
    return TrainingArguments(**given | engines[engine] | changes)


def trained(given: TrainingArguments, *callbacks: TrainerCallback, resume: bool = False) -> dict[str, Any]:
    trainer = Trainer(
        tiny(),
        given,
        train_dataset=Sentences(ROWS, 1),
        eval_dataset=Sentences(13, 2),
        callbacks=list(callbacks),
    )
    quiet(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer.state.log_history) | {"steps": trainer.state.global_step}


def grid(folder: Path, scenario: str) -> dict[str, Any]:
    return trained(arguments(folder / scenario.replace("/", "-"), scenario))


def unbroken(folder: Path, engine: str) -> dict[str, Any]:
    """A run that saves in the middle of its first epoch and of its second, with what it leaves."""
    found = trained(arguments(folder / engine, f"{engine}/plain/fp32", save_strategy="steps", save_steps=3))
    saved = sorted(path.name for path in (folder / engine / "checkpoint-3").iterdir())
    return found | {"files": saved}


def killed(folder: Path, engine: str) -> dict[str, Any]:
    """The same run, killed behind its fifth step."""
    return trained(arguments(folder / engine, f"{engine}/plain/fp32", save_strategy="steps", save_steps=3), Kill(5))


def resumed(folder: Path, engine: str) -> dict[str, Any]:
    """The same run, from what was saved before it was killed."""
    given = arguments(folder / engine, f"{engine}/plain/fp32", save_strategy="steps", save_steps=3)
    return trained(given, resume=True)


ENDS = {"unbroken": unbroken, "killed": killed, "resumed": resumed}

if __name__ == "__main__":
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        first, _, engine = name.partition("/")
        report(name, ENDS[first](out, engine) if first in ENDS else grid(out, name))
