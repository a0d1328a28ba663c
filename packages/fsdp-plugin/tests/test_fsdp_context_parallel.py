"""Context parallelism: attention over parts is attention over the sequence, and so is all that is trained with it."""

from __future__ import annotations

import re

import parallel_models as models
import pytest
import torch
from torch.nn import functional as F

from accel_core import Accelerator, World
from accel_fsdp import FSDP
from accel_fsdp.context_parallel import split_sequence
from accel_testing import run_ranks

STEPS, ROWS, PEERS = 3, 4, 4
MIXED = {"causal": (True, False)}

KERNELS = {  # heads of queries, heads of keys, features of values, and options
    "causal": ((4, 4, 3), {"is_causal": True}),
    "causal, fewer heads of keys": ((4, 2, 3), {"is_causal": True, "enable_gqa": True, "scale": 0.5}),
    "not causal": ((4, 4, 5), {}),
    "not causal, fewer heads of keys": ((4, 2, 5), {"enable_gqa": True}),
}


def tensors(kernel):
    """Query, key, value and what the output is multiplied with, whole; positions."""
    (heads, key_heads, features), _ = KERNELS[kernel]
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, 16, 6), (2, key_heads, 16, 6), (2, key_heads, 16, features), (2, heads, 16, features)]
    return [torch.randn(shape, generator=generator) for shape in shapes], torch.arange(20)


def attend(query, key, value, factor, options):
    """The output, and the gradients of query, key and value."""
    inputs = [each.clone().requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*inputs, **options)
    (output * factor).sum().backward()
    return [output.detach(), *(each.grad for each in inputs)]


def attention(group):
    """For each kernel: the positions of this rank, and what its part is."""
    found = {}
    for kernel, (_, options) in KERNELS.items():
        whole, positions = tensors(kernel)
        with split_sequence(group, [*whole, positions], [-2, -2, 2, 2, 0]):
            found[kernel] = positions.tolist(), attend(*whole, options)
    whole, positions = tensors("causal")
    with split_sequence(group, [*whole, positions], [-2, -2, 2, 2, 0]), torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = positions.tolist(), attend(*whole, {"is_causal": True})
    return found


def failure(group, inside, buffers, dims, kept=()):
    before = [(buffer.shape, buffer.data_ptr()) for buffer in buffers]
    with (
        pytest.raises((ValueError, RuntimeError)) as raised,
        split_sequence(group, buffers, dims, kept),
    ):
        inside()
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert [(buffer.shape, buffer.data_ptr()) for buffer in buffers] == before
    return str(raised.value)


def refusals(group):
    x, longer = torch.zeros(1, 2, 16, 4), torch.zeros(1, 2, 16, 4)
    nothing = lambda: None
    cut = [x], [2]

    def backward_outside():
        embedding, indices = torch.nn.Embedding(16, 4), torch.arange(16).view(1, 16)
        with split_sequence(group, [indices], [1]):
            y = embedding(indices)
            loss = F.scaled_dot_product_attention(y, y, y).sum()
        loss.backward()

    with pytest.raises(RuntimeError) as outside:
        backward_outside()
    return {
        "no buffers": failure(group, nothing, [], []),
        "uneven": failure(group, nothing, [torch.zeros(1, 12)], [1]),
        "short": failure(group, nothing, [x, torch.zeros(8)], [2, 0]),
        "gradients": failure(group, nothing, [x, torch.zeros(16, requires_grad=True)], [2, 0]),
        "named twice": failure(group, nothing, [x, x], [2, 2]),
        "kept": failure(group, nothing, *cut, kept=[longer]),
        "nested": failure(group, lambda: failure_inside(group, longer), *cut),
        "no attention": failure(group, nothing, *cut),
        "mask": failure(group, lambda: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4)), *cut),
        "whole": failure(group, lambda: F.scaled_dot_product_attention(longer, longer, longer, is_causal=True), *cut),
        "outside": str(outside.value),
    }


def failure_inside(group, x):
    with split_sequence(group, [x], [2]):
        raise AssertionError


def train():
    """Steps on 2 shards of 2 context-parallel peers."""
    accelerator = Accelerator(strategy=FSDP(context_parallel=2))
    model = models.make_model(seed=accelerator.process_index, **MIXED)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = []
    for batch in models.make_batches(STEPS, ROWS):
        tokens, labels, positions = (part.chunk(2)[accelerator.process_index // 2] for part in batch)
        before = tokens.clone(), labels.clone(), tokens.data_ptr()
        positions = positions.clone()
        with accelerator.maybe_context_parallel([tokens, labels, positions], [1, 1, 1], {positions}):
            loss = models.mean_loss(model(tokens, positions), labels)
            accelerator.backward(loss)
        restored = torch.equal(tokens, before[0]) and torch.equal(labels, before[1]) and tokens.data_ptr() == before[2]
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        mean = accelerator.reduce(loss.detach(), "mean")
        steps.append((restored, positions[0].tolist(), mean.item(), norm.item(), models.gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def window():
    """A window whose parts count different numbers of labels."""
    accelerator = Accelerator(strategy=FSDP(context_parallel=2, activation_checkpointing=True))
    model = accelerator.prepare(models.make_model(seed=accelerator.process_index, **MIXED))
    shard = accelerator.process_index // 2
    batches = [[part.chunk(2)[shard].clone() for part in batch] for batch in models.make_batches(2, ROWS)]
    buffers = [part for batch in batches for part in batch]
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers)):
        loss = accelerator.forward_backward(
            model, batches, models.counted_loss, lambda batch: ((batch[0], batch[2]), {})
        )
    return loss.item(), models.gradients_of(model)


def on_four_ranks():
    group = World.current().group
    return attention(group), refusals(group), train(), window()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_four_ranks, PEERS)


def test_each_peer_has_a_piece_from_the_front_and_one_from_the_back(ranks):
    assert [found["causal"][0] for found, *_ in ranks] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_over_parts_is_attention_over_the_whole(ranks, kernel):
    whole, _ = tensors(kernel)
    expected = attend(*whole, KERNELS[kernel][1])
    for found, *_ in ranks:
        positions, parts = found[kernel]
        for part, of in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, of[..., positions, :], atol=1e-6, rtol=1e-5)


def test_autocast_computes_in_its_dtype(ranks):
    whole, _ = tensors("causal")
    expected = attend(*whole, {"is_causal": True})
    for found, *_ in ranks:
        positions, parts = found["autocast"]
        assert parts[0].dtype is torch.bfloat16
        for part, of in zip(parts, expected, strict=True):
            torch.testing.assert_close(part.float(), of[..., positions, :], atol=0.05, rtol=0.05)


def test_two_by_two_trains_what_one_process_trains(ranks):
    expected = models.reference(models.make_model(**MIXED), models.make_batches(STEPS, ROWS))
    for rank, (_, _, steps, _) in enumerate(ranks):
        for (restored, kept, loss, norm, gradients), (whole_loss, whole_norm, whole) in zip(
            steps, expected, strict=True
        ):
            assert restored
            assert kept == ([0, 1, 6, 7], [2, 3, 4, 5])[rank % 2]
            assert loss == pytest.approx(whole_loss, abs=1e-6)
            assert norm == pytest.approx(whole_norm, rel=1e-6)
            assert models.largest_difference(gradients, whole) < 1e-6


def test_a_window_with_different_weights_per_part_is_exact(ranks):
    _, expected_loss, expected = models.reference_window(models.make_model(**MIXED), models.make_batches(2, ROWS))
    for *_, (loss, gradients) in ranks:
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        assert models.largest_difference(gradients, expected) < 1e-6


@pytest.mark.parametrize(
    ("case", "distinctive"),
    [
        ("no buffers", r"entered without buffers.*buffers=\[tokens, labels, positions\]"),
        ("uneven", r"sequence of 12, which cannot be cut .*: 12 % \(2 \* 4\) = 4\. Pad it to 16"),
        ("short", r"buffers\[1\] has 8 positions in dimension 0, but buffers\[0\] has 16"),
        ("gradients", r"buffers\[1\] requires gradients"),
        ("named twice", r"buffers\[1\] is among the buffers twice"),
        ("kept", "no_restore_buffers holds a tensor that is not among the buffers"),
        ("nested", "entered inside another block"),
        ("no attention", "No F.scaled_dot_product_attention ran inside"),
        ("mask", r"given an attn_mask of shape \(4, 4\) inside"),
        ("whole", "Causal attention over 16 queries and 16 keys .* has 4 positions"),
        ("outside", "modified by an inplace operation"),
    ],
)
def test_what_cannot_be_split_is_refused_and_everything_is_put_back(ranks, case, distinctive):
    for _, refused, *_ in ranks:
        assert re.search(distinctive, refused[case]), refused[case]


def test_without_context_parallelism_the_block_does_nothing():
    tokens = torch.arange(6)
    with Accelerator(strategy="single", cpu=True).maybe_context_parallel([tokens], [0]):
        assert tokens.tolist() == [0, 1, 2, 3, 4, 5]
