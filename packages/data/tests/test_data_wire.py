"""Batches as flat bytes: what arrives equals what was sent."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from accel_data import batch_codec
from accel_data.batch_codec import KEPT_STRUCTURES, Decoder, Encoder, Frame, aligned, nbytes

Pair = namedtuple("Pair", ["x", "y"])
DTYPES = sorted(batch_codec._RAW - {torch.complex32}, key=str)  # which warns that it is experimental


class Wire:
    """An encoder and its decoder."""

    def __init__(self):
        self.encoder, self.decoder = Encoder(), Decoder()
        self.frame = Frame(1 << 20)
        self.frame.bytes.fill_(255)
        self.words = 0

    def __call__(self, *batches):
        words, bodies = self.encoder.encode([(batch, [i]) for i, batch in enumerate(batches)])
        self.words = len(words)
        start = aligned(8 * len(words))
        self.frame.write_words(words)
        self.frame.write(start, bodies)
        items = self.decoder.decode(self.frame, iter(self.frame.words(0, len(words))), start)
        self.pickles = [body for body in bodies if isinstance(body, bytes)]
        self.size = start + sum(map(nbytes, bodies))
        self.frame.bytes.fill_(255)  # nothing that has arrived may look into it
        assert [numbers for _, numbers in items] == [[i] for i in range(len(batches))]
        return [batch for batch, _ in items]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, type(one)) == (other.dtype, other.shape, type(other)) and (
            pickled_values(one) == pickled_values(other)
        )
    if isinstance(one, Mapping):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def pickled_values(tensor):
    """The bytes of the values, so that NaNs are equal."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


def random_tensor(dtype, *sizes):
    count = int(torch.tensor(sizes).prod()) if sizes else 1
    content = torch.randint(2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return content.view(dtype).view(sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_shape_and_stride_arrive_bit_by_bit(dtype):
    full = random_tensor(dtype, 6, 4)
    batch = [full, full.t(), full[::2, 1:3], full[:0], full[0, 0], random_tensor(dtype, 3), full[:1].expand(5, 4)]
    (arrived,) = Wire()(batch)
    assert same(arrived, batch)
    assert all(tensor.is_contiguous() for tensor in arrived)


def test_views_that_are_conjugate_or_negative_are_resolved_and_gradients_dropped():
    z = torch.randn(3, dtype=torch.complex64)
    batch = {"conjugate": z.conj(), "negative": z.conj().imag, "weights": torch.randn(2, requires_grad=True) * 2}
    assert batch["negative"].is_neg()
    (arrived,) = Wire()(batch)
    assert same(arrived, batch)
    assert not any(tensor.is_conj() or tensor.is_neg() or tensor.requires_grad for tensor in arrived.values())


class Sample:
    def __init__(self, tensor):
        self.tensor = tensor

    def __eq__(self, other):
        return torch.equal(self.tensor, other.tensor)

    __hash__ = None

    def __repr__(self):
        return f"Sample({self.tensor})"  # without an address: tests are named by it


OTHERS = [
    "text",
    None,
    7,
    [],
    {},
    ["a", "b"],
    ("a", None, 1.5),
    {"x": torch.arange(3), "names": ["a", "b"], "n": 4, 5: None},
    Pair(torch.arange(2), "y"),
    Pair(torch.arange(2), Pair(torch.zeros(()), torch.zeros(0, 2))),
    OrderedDict(b=torch.ones(1), a=torch.zeros(2)),
    [torch.arange(i) for i in range(4)],
    [(torch.arange(2), "a"), (torch.arange(3), "b")],
    {"deep": [{"deeper": (torch.ones(1), [[]])}]},
    UserDict(x=torch.arange(3)),
    Sample(torch.arange(3)),
    Sample(torch.zeros(0, 3)),
    [Sample(torch.ones(2)), torch.zeros(1)],
    torch.Size([2, 3]),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
]


@pytest.mark.parametrize("batch", OTHERS, ids=str)
def test_anything_that_can_be_pickled_arrives(batch):
    send = Wire()
    for _ in range(2):  # with a new structure, and with a known one
        (arrived,) = send(batch)
        assert same(arrived, batch)


def test_packed_sequences_and_sparse_tensors_arrive():
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    sparse = torch.eye(3).to_sparse()
    ((first, second, _),) = Wire()((packed, sparse, torch.zeros(1)))
    assert isinstance(first, PackedSequence)
    assert torch.equal(first.data, packed.data)
    assert torch.equal(second.to_dense(), torch.eye(3))


def test_a_tensor_inside_an_object_sends_its_own_rows_and_not_all_of_its_storage():
    send = Wire()
    (arrived,) = send(Sample(torch.arange(100_000)[5:7]))
    assert arrived.tensor.tolist() == [5, 6]
    assert send.size < 4096


def test_arrays_arrive_writable_and_in_memory_of_their_own():
    (arrived,) = Wire()({"x": np.arange(5), "turned": np.arange(6).reshape(2, 3).T})
    assert arrived["x"].tolist() == [0, 1, 2, 3, 4]
    assert arrived["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    arrived["x"] += 1


def test_a_known_structure_of_plain_tensors_costs_no_pickle():
    send = Wire()
    batches = [{"x": torch.zeros(rows, 3), "y": [torch.zeros(rows)]} for rows in (4, 4, 1)]
    send(*batches)
    assert len(send.pickles) == 1
    send(*batches)
    assert send.pickles == []
    send({"x": torch.zeros(4, 3), "y": [torch.zeros(4)], "name": "a"})
    assert len(send.pickles) == 2  # the structure, and the string
    send(*[{"x": torch.zeros(4, 3), "y": [torch.zeros(4)], "name": "b"}] * 2)
    assert len(send.pickles) == 2  # one string per batch


def test_lists_of_strings_of_any_length_share_a_structure():
    send = Wire()
    send({"x": torch.zeros(1), "names": ["a"]})
    send({"x": torch.zeros(1), "names": ["a", "b", "c"]})
    assert len(send.pickles) == 1


def test_more_structures_than_are_kept_still_arrive():
    send = Wire()
    for _ in range(2):
        for i in range(0, 3 * KEPT_STRUCTURES, 7):
            batches = [{f"column {j}": torch.tensor([j])} for j in range(i, i + 7)]
            assert same(send(*batches), batches)
            assert len(send.decoder._structures) == len(send.encoder._numbers) < KEPT_STRUCTURES + 7


def test_each_tensor_that_arrives_has_memory_of_its_own():
    (arrived,) = Wire()({"x": torch.randn(64, 64), "label": torch.arange(4.0)})
    assert arrived["label"].untyped_storage().nbytes() == 16
    weight = torch.ones(64, 64, requires_grad=True)
    loss = (weight * arrived["x"]).sum()
    arrived["label"].add_(1)  # with a version counter in common, backward would refuse
    loss.backward()
    assert torch.equal(weight.grad, arrived["x"])


def test_a_default_device_of_the_user_does_not_matter():
    batch = {"x": torch.arange(3), "none": torch.zeros(0, 2), "inside": Sample(torch.ones(2))}
    with torch.device("meta"):
        (arrived,) = Wire()(batch)
    assert same(arrived, batch)


trees = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=3)
    | st.builds(
        random_tensor, st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.int64]), st.integers(0, 3)
    ),
    lambda children: (
        st.lists(children, max_size=3)
        | st.tuples(children, children)
        | st.dictionaries(st.text(max_size=2), children, max_size=3)
        | st.builds(Pair, children, children)
    ),
    max_leaves=8,
)


@given(st.lists(st.lists(trees, max_size=3), max_size=4))
def test_any_sequence_of_messages_arrives(messages):
    send = Wire()
    for batches in messages:
        assert same(send(*batches), batches)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(1), "f": [1, lambda: 1]},
            r"batch\['f'\]\[1\] is a builtins\.function that cannot be pickled: ",
        ),
        (
            {"x": torch.zeros(1), "g": (i for i in range(3))},
            r"batch\['g'\] is a builtins\.generator that cannot be pickled: ",
        ),
        ([torch.zeros(1), Sample(lambda: 1)], r"batch\[1\] is a .*Sample that cannot be pickled: "),
        ({lambda: 1: torch.zeros(1)}, r"batch is a builtins\.dict that cannot be pickled: "),
        ({lambda: 1: 2}, r"batch is a builtins\.dict that cannot be pickled: "),
    ],
)
def test_what_cannot_be_pickled_is_named_with_its_reason(batch, message):
    with pytest.raises(TypeError, match=message) as caught:
        Encoder().encode([(batch, [])])
    assert "dispatch_batches=False" in str(caught.value)
    assert isinstance(caught.value.__cause__, (pickle.PicklingError, TypeError, AttributeError))
