"""T5 and BERT of Megatron-core train as GPT does: losses, gradients and a resumed run are those of one process."""

from __future__ import annotations

from functools import cache

import megatron_cpu
import pytest
import torch
from megatron_jobs import LENGTH, MICRO, WIDTH, WORDS, assemble, fill, groups_of

from accel_core import Accelerator, World
from accel_megatron import Megatron
from accel_testing import run_ranks

STEPS, HALF = 4, 2
MESHES = {
    "tp2": (2, {"tensor_parallel": 2}),
    "dp2+do": (2, {"distributed_optimizer": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
}


def config(**options):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )


def t5(parallel, pre_process=True, post_process=True):
    from megatron.core.models.T5 import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    own = config(**parallel)
    encoder, decoder = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    model = T5Model(
        own,
        config(**parallel),
        encoder,
        decoder,
        WORDS,
        LENGTH,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=True,
    )
    fill(model)
    return model


def bert(parallel, pre_process=True, post_process=True):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    model = BertModel(
        config(**parallel),
        0,
        bert_layer_local_spec,
        WORDS,
        LENGTH,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=True,
        add_binary_head=False,
    )
    fill(model)
    return model


def inputs_of_t5(batch):
    nothing_hidden = torch.zeros(len(batch), 1, LENGTH, LENGTH, dtype=torch.bool)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool().expand(len(batch), 1, LENGTH, LENGTH)
    return (batch, batch.flip(1), nothing_hidden, later, nothing_hidden), {"lm_labels": batch}


def inputs_of_bert(batch):
    return (batch, torch.ones_like(batch)), {"lm_labels": batch.flip(1)}


KINDS = {"t5": (t5, inputs_of_t5), "bert": (bert, inputs_of_bert)}


def batches(step, shard=0, count=1):
    tokens = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
    return list(tokens.chunk(count)[shard].split(MICRO))


def loss_fn(output, _):
    losses = output[0] if isinstance(output, tuple) else output  # BERT's has a second part, None without its head
    return losses.sum(), losses.numel()


class Run:
    def __init__(self, kind, sizes):
        megatron_cpu.use_cpu()
        factory, self.inputs = KINDS[kind]
        self.accelerator = Accelerator(strategy=Megatron(**sizes), cpu=True)
        model = self.accelerator.build_model(factory)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(groups_of(model), lr=1e-2))

    def train(self, steps):
        losses, gradients = [], None
        shard = self.accelerator._layout.shard
        for step in steps:
            own = batches(step, shard.index, shard.count)
            losses.append(self.accelerator.forward_backward(self.model, own, loss_fn, self.inputs).item())
            if gradients is None:
                user = self.accelerator.unwrap_model(self.model)
                state = self.accelerator._relay.gradient_state(user, self.model)
                gradients = {
                    name: (term.shape, [(piece.box, piece.data.clone()) for piece in term.pieces])
                    for name, terms in state.items()
                    for term in terms
                }
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses, gradients


def reference(kind):
    """The same by Megatron's model and torch alone, in one process."""
    megatron_cpu.use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    World.current().subgroup([0])
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    factory, inputs = KINDS[kind]
    model = factory({})
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    losses, gradients = [], None
    for step in range(STEPS):
        parts = []
        for batch in batches(step):
            args, kwargs = inputs(batch)
            parts.append(loss_fn(model(*args, **kwargs), batch))
        loss = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@cache
def expected(kind):
    [found] = run_ranks(reference, 1, kind)
    return found


def whole(kind, sizes):
    return Run(kind, sizes).train(range(STEPS))


def began(kind, sizes, folder):
    run = Run(kind, sizes)
    run.train(range(HALF))
    run.accelerator.save_state(folder)


def went_on(kind, sizes, folder):
    run = Run(kind, sizes)
    run.accelerator.load_state(folder)
    return run.train(range(HALF, STEPS))[0]


@pytest.mark.parametrize(
    ("kind", "mesh"), [("t5", "tp2"), ("t5", "dp2+do"), ("bert", "tp2"), ("bert", "dp2+do"), ("bert", "pp2")]
)
def test_losses_and_gradients_are_those_of_one_process(kind, mesh):
    losses, gradients = expected(kind)
    world, sizes = MESHES[mesh]
    found = run_ranks(whole, world, kind, sizes)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-5)
    for name, each in assemble([parts for _, parts in found]).items():
        torch.testing.assert_close(
            each, gradients[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_another_arrangement(kind, tmp_path):
    losses, _ = expected(kind)
    world, sizes = MESHES["tp2"]
    run_ranks(began, world, kind, sizes, str(tmp_path / "saved"))
    world, sizes = MESHES["dp2+do"]
    for own in run_ranks(went_on, world, kind, sizes, str(tmp_path / "saved")):
        assert own == pytest.approx(losses[HALF:], rel=1e-5)


def refused(kind, sizes):
    try:
        Run(kind, sizes)
    except ValueError as error:
        return str(error)
    return None


def test_an_encoder_beside_a_decoder_has_no_pipeline():
    for said in run_ranks(refused, 2, "t5", {"pipeline_parallel": 2}):
        assert "run no stages of an encoder beside a decoder. Use tensor_parallel or data parallelism for it" in said
