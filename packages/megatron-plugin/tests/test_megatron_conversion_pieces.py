"""The arithmetic of rows: what a rank has of a parameter are the boxes of tensors that it should be, and all of them once."""

from __future__ import annotations

import pytest
import torch

from accel_checkpoint import uncovered
from accel_megatron import Row
from accel_megatron.conversion.pieces import Part, Sizes, padded_vocabulary, padding_of, sources_of

HEADS, HEAD, WIDTH, EXPERTS = 8, 2, 5, 3


def check(row, sources, parts, sizes, expert=None):
    """The pieces of all ranks' parts are the boxes of the sources that they say, and cover them once."""
    ranks = [sources_of(row, part, Part(rank, len(parts)), sizes, expert) for rank, part in enumerate(parts)]
    for number, whole in enumerate(sources):
        boxes = set()
        for found in ranks:
            assert found[number].shape == tuple(whole.shape)
            for box, data in found[number].pieces:
                assert torch.equal(data, whole[box.slices])
                boxes.add(box)
        if expert is None:
            assert uncovered(tuple(whole.shape), boxes) is None
        else:
            assert {box.offsets[0] for box in boxes} == {expert}
            assert sum(box.numel for box in boxes) == whole[0].numel()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_queries_keys_and_values_are_interleaved_by_group(groups, ranks, transposed, fused):
    query, key, value = (torch.randn(count * HEAD, WIDTH) for count in (HEADS, groups, groups))
    by_group = zip(*(each.chunk(groups) for each in (query, key, value)), strict=True)
    whole = torch.cat([each for group in by_group for each in group])
    sources = [torch.cat([query, key, value])] if fused else [query, key, value]
    sources = [each.t() for each in sources] if transposed else sources
    if len(whole) % ranks:
        pytest.skip("Megatron-core refuses these numbers")
    row = Row("a", tuple("bcd"[: len(sources)]), combine="qkv", split=0, transposed=transposed)
    check(row, sources, whole.chunk(ranks), Sizes(HEADS, groups, HEAD, 0, 0))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_its_part_of_gate_and_of_up(ranks, fused, stacked):
    gate, up = torch.randn(2, 8, WIDTH)
    parts = [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    sources, expert = [torch.cat([gate, up])] if fused else [gate, up], None
    if stacked:
        expert = 1
        sources = [torch.stack([torch.zeros_like(each), each, torch.zeros_like(each)]) for each in sources]
    name = "a.{expert}" if stacked else "a"
    check(Row(name, tuple("bc"[: len(sources)]), "gate_up", 0), sources, parts, Sizes(1, 1, 1, 0, EXPERTS), expert)


@pytest.mark.parametrize("split", [None, 0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_tensors_are_cut_along_one_dimension_or_not(split, transposed):
    whole = torch.randn(4, 8)
    parts = [whole, whole] if split is None else whole.chunk(2, split)
    row = Row("a", "b", split=split, transposed=transposed)
    check(row, [whole.t() if transposed else whole], parts, Sizes(1, 1, 1, 0, 0))


@pytest.mark.parametrize(("vocabulary", "ranks"), [(61, 1), (61, 2), (61, 4), (5, 4), (64, 4)])
def test_rows_behind_the_vocabulary_are_padding(vocabulary, ranks):
    whole = torch.randn(vocabulary, WIDTH)
    padded = padded_vocabulary(vocabulary, ranks)
    assert 0 <= padded - vocabulary < ranks
    parts = torch.cat([whole, torch.full((padded - vocabulary, WIDTH), 7.0)]).chunk(ranks)
    check(Row("a", "b", split=0, padded=True), [whole], parts, Sizes(1, 1, 1, vocabulary, 0))
    rest = [padding_of(part, Part(rank, ranks), vocabulary) for rank, part in enumerate(parts)]
    assert sum(len(each) for each in rest) == padded - vocabulary
    assert all(bool((each == 7).all()) for each in rest)
