"""Tiny models of transformers, and ranks that convert them: what the tests of conversions share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import megatron_cpu
import torch
import transformers

VOCABULARY = 61
TOKENS = torch.arange(48).reshape(4, 12) * 7 % VOCABULARY

_SHARED = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SHARED, rms_norm_eps=1e-3),
    "llama_tied": lambda: transformers.LlamaConfig(
        **_SHARED | {"max_position_embeddings": 16384}, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SHARED, rope_parameters=LINEAR),
    "qwen3": lambda: transformers.Qwen3Config(**_SHARED, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**_SHARED, num_local_experts=4),
    "phi3": lambda: transformers.Phi3Config(**_SHARED, pad_token_id=0, eos_token_id=2),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**_SHARED, num_local_experts=4, attention_multiplier=0.5),
}


def load_transformers() -> None:
    """Imports what takes long and changes the environment, and switches off progress bars, whose thread stays."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        load(make("llama", Path(folder)))


def make(name: str, folder: Path) -> Path:
    """A folder as `save_pretrained` writes it, in several parts; no weight has the value that a new model gives it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
    model.save_pretrained(folder / name, max_shard_size="20KB")
    return folder / name


def load(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


class Sizes(NamedTuple):
    """Parallel sizes."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    experts: int = 1


class Converted(NamedTuple):
    """What a rank saw: its part of the logits, the losses, whether what was written is read as it was, numbers of bytes."""

    logits: torch.Tensor | None
    losses: torch.Tensor | None
    read_again: bool
    vocabulary: int
    bytes_read: int
    bytes_held: int


def start(sizes: Sizes) -> None:
    megatron_cpu.use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from accel_core import World

    world = World.current()
    world.subgroup(range(world.size))
    parallel_state.initialize_model_parallel(
        sizes.tensor,
        sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual,
        expert_model_parallel_size=sizes.experts,
    )
    model_parallel_cuda_manual_seed(1)


def end() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def convert(tasks: list[tuple[Path, Path, Sizes]], **settings: object) -> list[Converted]:
    """On each rank: reads a folder, computes, writes another folder and reads that. For each task."""
    found = []
    for folder, target, sizes in tasks:
        start(sizes)
        found.append(_convert(folder, target, sizes, settings))
        end()
    return found


def _convert(folder: Path, target: Path, sizes: Sizes, settings: dict[str, object]) -> Converted:
    from accel_megatron import from_transformers, to_transformers

    stages = [None] if sizes.virtual is None else range(sizes.virtual)

    def built(source: Path) -> list[Any]:
        read_later: list[Callable[[], None]] = []
        made = [from_transformers(source, vp_stage=stage, read_later=read_later, **settings) for stage in stages]
        for read in read_later:
            read()
        return made

    with counted() as bytes_read:
        chunks = [chunk.eval() for chunk in built(folder)]
    logits, losses = (None, None) if sizes.virtual else _computed(chunks[0])
    to_transformers(chunks, target, max_shard_size="20KB")
    again = built(target)
    pairs = [pair for old, new in zip(chunks, again, strict=True) for pair in _pairs(old, new)]
    same = all(torch.equal(old, new) for old, new in pairs)
    held = sum(old.nbytes for old, _ in pairs)
    return Converted(logits, losses, same and len(pairs) > 4, chunks[0].vocab_size, sum(bytes_read), held)


@contextmanager
def counted():
    """The numbers of bytes that are read of tensors in files: what lies behind a length of eight bytes and a header."""
    original, found = os.preadv, []

    def preadv(descriptor, places, offset):
        count = original(descriptor, places, offset)
        if offset > 8:
            found.append(count)
        return count

    os.preadv = preadv
    try:
        yield found
    finally:
        os.preadv = original


def _pairs(old, new):
    return list(zip(old.parameters(), new.parameters(), strict=True))


@torch.no_grad()
def _computed(model) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Logits (batch, sequence, part of the vocabulary) and losses on the last stage, None on others."""
    return _through(model), _through(model, labels=TOKENS)


def _through(model, **labels):
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    rows, length = TOKENS.shape
    if not model.pre_process:
        hidden = torch.empty(length, rows, model.config.hidden_size)
        dist.recv(hidden, groups.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    output = model(TOKENS, torch.arange(length).expand(rows, length), None, **labels)
    if model.post_process:
        return output
    dist.send(output, groups.get_pipeline_model_parallel_next_rank())
    return None
