"""BertModel and T5Model of Megatron-core, from their own specs: gradients and losses are those of one process."""

from __future__ import annotations

import copy

import megatron_cpu
import pytest
import torch
from megatron_jobs import HEADS, LENGTH, MICRO, WIDTH, WORDS, Norm, alone, assemble, fill
from torch import nn

from accel_core import Accelerator
from accel_megatron import Megatron
from accel_testing import run_ranks

STEPS = 5
TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}


def configuration(parallel):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **parallel,
    )


def bert(parallel, pre_process=True, post_process=True):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    layer = copy.deepcopy(bert_layer_local_spec)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    place = {"pre_process": pre_process, "post_process": post_process}
    model = BertModel(
        configuration(parallel), 2, layer, WORDS, LENGTH, share_embeddings_and_output_weights=True, **place
    )
    fill(model)
    return model


def t5(parallel, pre_process=True, post_process=True):
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()]
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers[1].submodules.pre_cross_attn_layernorm = Norm
    encoder, decoder = (TransformerBlockSubmodules([layer] * 2, Norm) for layer in layers)
    configs = configuration(parallel), configuration(parallel)
    model = T5Model(*configs, encoder, decoder, WORDS, LENGTH, pre_process, post_process)
    fill(model)
    return model


def batches():
    """The micro-batches of every step."""
    seeded = torch.Generator().manual_seed(1)
    made = []
    for _ in range(2):
        tokens, labels = torch.randint(WORDS, (2, MICRO, LENGTH), generator=seeded)
        counts = (torch.rand(MICRO, LENGTH, generator=seeded) < 0.5).float()
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (MICRO, 1), generator=seeded)
        made.append({"tokens": tokens, "labels": labels, "mask": counts, "seen": torch.arange(LENGTH) < lengths})
    return made


def bert_inputs(batch):
    types = (torch.arange(LENGTH) > 3).long().expand(MICRO, -1)
    return (batch["tokens"], batch["seen"].long(), types), {"lm_labels": batch["labels"]}


def bert_loss(output, batch):
    losses, pairs = output
    first = nn.functional.cross_entropy(pairs, batch["labels"][:, 0] % 2, reduction="sum")
    return (losses * batch["mask"]).sum() + first, batch["mask"].sum()


def t5_inputs(batch):
    hidden = ~batch["seen"][:, None, None, :].expand(-1, 1, LENGTH, -1)
    causal = torch.ones(LENGTH, LENGTH).triu(1).bool().expand(MICRO, 1, -1, -1)
    return (batch["tokens"], batch["labels"], hidden, causal, hidden), {"lm_labels": batch["labels"].roll(-1, 1)}


def t5_loss(losses, batch):
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


MODELS = {"bert": (bert, bert_inputs, bert_loss), "t5": (t5, t5_inputs, t5_loss)}


def train(name, sizes):
    """Losses under Megatron, and this rank's part of the first gradients."""
    megatron_cpu.use_cpu()
    factory, inputs, loss_fn = MODELS[name]
    accelerator = Accelerator(strategy=Megatron(**sizes), cpu=True)
    user = accelerator.build_model(factory)
    model, optimizer = accelerator.prepare(user, torch.optim.AdamW(user.parameters(), lr=1e-2, eps=1e-4))
    losses, gradients = [], None
    for _ in range(STEPS):
        losses.append(accelerator.forward_backward(model, batches(), loss_fn, inputs).item())
        if gradients is None:
            state = accelerator._relay.gradient_state(user, model)
            gradients = {
                key: (term.shape, [(piece.box, piece.data.clone()) for piece in term.pieces])
                for key, terms in state.items()
                for term in terms
            }
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def in_one_process(name):
    """The same, by Megatron-core's model and torch alone."""
    megatron_cpu.use_cpu()
    factory, inputs, loss_fn = MODELS[name]
    alone(Accelerator(cpu=True))
    model = factory({})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses, gradients = [], None
    for _ in range(STEPS):
        given = [(inputs(batch), batch) for batch in batches()]
        parts = [loss_fn(model(*args, **kwargs), batch) for (args, kwargs), batch in given]
        loss = sum(each for each, _ in parts) / sum(weight for _, weight in parts)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {key: each.grad.clone() for key, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.mark.parametrize(("name", "sizes"), [("bert", TP2), ("t5", TP2), ("bert", PP2)])
def test_other_models_of_megatron_train_as_in_one_process(name, sizes):
    [(losses, gradients)] = run_ranks(in_one_process, 1, name)
    found = run_ranks(train, 2, name, sizes)
    whole = assemble([parts for _, parts in found])
    assert whole.keys() == gradients.keys()
    for key, each in whole.items():
        torch.testing.assert_close(
            each, gradients[key], rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]


def said_in_a_pipeline():
    megatron_cpu.use_cpu()
    accelerator = Accelerator(strategy=Megatron(pipeline_parallel=2), cpu=True)
    try:
        accelerator.build_model(t5)
    except ValueError as error:
        return str(error)
    return ""


def test_an_encoder_with_a_decoder_is_refused_in_a_pipeline_on_every_rank():
    for said in run_ranks(said_in_a_pipeline, 2):
        assert "T5Model has an encoder and a decoder" in said
