"""A GPT whose layers are shared out by Megatron-core: tensor, pipeline and data parallelism, under the usual loop.

    pip install -r requirements/accel-megatron.txt      # in a clone of the repository
    accel launch --num-processes 8 --mixed-precision bf16 examples/megatron_gpt.py --tensor 2 --pipeline 2    # 8 GPUs: two models

It reads a file as bytes, each of which is a token. `--tensor * --pipeline` processes hold one model, and those read the same data; what is left
over is data parallelism. The loss is the same in every arrangement, but for the last digits. Interrupted, it goes on: give the same `--folder`.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, set_seed
from accel_megatron import Megatron

BYTES = 256


def read(path, length):
    """Tokens, and for each the one that follows: (rows, length)."""
    tokens = torch.tensor(list(path.read_bytes()))
    rows = (len(tokens) - 1) // length
    return TensorDataset(tokens[: rows * length].view(rows, length), tokens[1 : rows * length + 1].view(rows, length))


def inputs(batch):
    """Arguments of the model: tokens, positions, no mask, for attention is causal; with labels it gives losses."""
    tokens, following = batch
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return (tokens, positions, None), {"labels": following}


def loss_fn(losses, batch):  # called on the last stage
    return losses.sum(), losses.numel()


class Progress:
    """How many steps were taken, in checkpoints too."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Trains a GPT under Megatron-core.")
    parser.add_argument("--tensor", type=int, default=1, help="processes that share each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="processes that share the layers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=32, help="rows in a step, over all processes")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a step's rows in each process")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--folder", type=Path, help="where the run is saved, and goes on from")
    options = parser.parse_args(arguments)

    set_seed(1)
    strategy = Megatron(tensor_parallel=options.tensor, pipeline_parallel=options.pipeline, distributed_optimizer=True)
    accelerator = Accelerator(strategy=strategy, split_batches=True)

    def factory(parallel, pre_process, post_process, vp_stage):
        """One stage. With Transformer Engine take its layers: get_gpt_layer_with_transformer_engine_spec()."""
        config = TransformerConfig(
            num_layers=options.layers,
            hidden_size=options.width,
            num_attention_heads=options.heads,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,  # a kernel of Apex
            masked_softmax_fusion=False,  # another one
            **parallel,
        )
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=BYTES,
            max_sequence_length=options.length,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    model = accelerator.build_model(factory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(
        read(options.text, options.length),
        batch_size=options.rows // options.micro_batches,
        shuffle=True,
        drop_last=True,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    progress, losses = Progress(), []
    accelerator.register_for_checkpointing(progress)
    if options.folder is not None:
        accelerator.load_state(options.folder, missing_ok=True)

    while progress.step < options.steps:
        rows = iter(loader)
        while progress.step < options.steps and (window := list(islice(rows, options.micro_batches))):
            loss = accelerator.forward_backward(model, window, loss_fn, inputs)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.step += 1
            if progress.step % 10 == 0:
                accelerator.print(f"step {progress.step}: loss {losses[-1]:.4f}")
    if options.folder is not None:
        accelerator.save_state(options.folder)
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
