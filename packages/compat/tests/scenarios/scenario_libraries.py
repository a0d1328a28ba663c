"""peft and trl over the module `accelerate`: LoRA, supervised fine-tuning and preferences, with a tokenizer that is made here.

python scenario_libraries.py OUT lora sft dpo
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset as Table
from peft import LoraConfig
from scenario_report import losses_of, norm, quiet, report
from scenario_trainer import Sentences, arguments, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from accelerate import PartialState

WORDS = ["[PAD]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(61))]
SHARED: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "save_strategy": "no",
    "seed": 7,
    "bf16": False,
    "gradient_checkpointing": False,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, nothing read from anywhere."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )
    found.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return found


def sentence(start: int, length: int, step: int) -> str:
    return " ".join(f"w{(start + step * place) % 61}" for place in range(length))


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def lora(folder: Path) -> dict[str, Any]:
    from peft import get_peft_model

    set_seed(11)
    trainer = Trainer(
        get_peft_model(tiny(), adapters()),
        arguments(folder, "ddp/window/fp32"),
        train_dataset=Sentences(44, 1),
        eval_dataset=Sentences(13, 2),
    )
    quiet(trainer)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    files = sorted(path.name for path in (folder / "saved").iterdir())
    return losses_of(trainer.state.log_history) | {"norm": norm(trained), "files": files}


def sft(folder: Path) -> dict[str, Any]:
    rows = Table.from_list([{"text": sentence(start, 6 + start % 5, 3)} for start in range(24)])
    given = SFTConfig(output_dir=str(folder), max_length=16, eval_strategy="steps", eval_steps=2, **SHARED)
    trainer = SFTTrainer(
        tiny(), given, train_dataset=rows, eval_dataset=rows.select(range(7)), processing_class=tokenizer()
    )
    quiet(trainer)
    trainer.train()
    return losses_of(trainer.state.log_history) | {"norm": norm(trainer.model.parameters())}


def dpo(folder: Path) -> dict[str, Any]:
    rows = Table.from_list(
        [
            {
                "prompt": sentence(start, 4, 3),
                "chosen": " " + sentence(start + 12, 4, 3),
                "rejected": " " + sentence(start + 12, 3, 7),
            }
            for start in range(24)
        ]
    )
    model = folder / "model"
    with PartialState().main_process_first():  # transformers lets it alone write
        tiny().save_pretrained(model)
        tokenizer().save_pretrained(model)
    given = DPOConfig(output_dir=str(folder), max_length=16, beta=0.5, **SHARED)
    trainer = DPOTrainer(
        str(model), args=given, train_dataset=rows, processing_class=tokenizer(), peft_config=adapters()
    )
    quiet(trainer)
    trainer.train()
    return losses_of(trainer.state.log_history)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        report(name, {"lora": lora, "sft": sft, "dpo": dpo}[name](Path(sys.argv[1]) / name))
