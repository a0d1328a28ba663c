"""Structures come back from JSON and tensors bit for bit, or saving them says what cannot; a file that lies is found out."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import re
import struct
import subprocess
import sys
import time
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from datetime import date
from enum import Enum, Flag, IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_checkpoint.codec import decode, encode
from accel_core import CheckpointError

NAME = re.compile(r"[A-Za-z0-9_.~/-]+")
SHELLS = [torch.uint4, torch.int3, torch.bits8, torch.float4_e2m1fn_x2, torch.complex32]
FLOAT8 = [dtype for name, dtype in vars(torch).items() if name.startswith("float8_")]
DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *FLOAT8,
]


class Phase(Enum):
    WARM = "warm"
    COLD = 2
    FROZEN = 2  # noqa: PIE796  (another name of COLD)


class Level(IntEnum):
    LOW = 1


class Parts(Flag):
    HEAD = 1
    BODY = 2


class Point(NamedTuple):
    x: Any
    y: Any = None


Old = namedtuple("Old", "b a")


class Picky(Point):
    """Whose constructor must not run when a file asks for one."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Picky:
        raise AssertionError("a file has called the constructor")


@dataclasses.dataclass
class Settings:
    rate: float = 1.0


class Wrapped(torch.Tensor):
    """Codes with a scale, as optimizers of few bits keep them."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        assert tuple(outer_size) == tuple(inner["codes"].shape)
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].context)
        raise NotImplementedError(str(func))


class Odd(torch.Tensor):
    """A subclass that cannot be taken apart."""


def stored(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a file has of a value: the text of the skeleton, and bare tensors under names that it can hold."""
    skeleton, tensors = encode(value, "the state of scheduler 0")
    text = json.dumps(skeleton, allow_nan=False)
    assert json.loads(text) == skeleton
    assert json.loads(text.encode().decode("ascii")) == skeleton
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in tensors.values())
    assert all(NAME.fullmatch(name) and name != "__metadata__" for name in tensors)
    return json.loads(text), {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def round_trip(value: Any) -> Any:
    return decode(*stored(value), "the state of scheduler 0")


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist())


def picture(value: Any) -> Any:
    """Types and bits, in a form that compares by value."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, (list, tuple, deque)):
        return kind, [picture(item) for item in value], getattr(value, "maxlen", None)
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(picture(item)) for item in value)
    if isinstance(value, dict):
        return (
            kind,
            [(picture(key), picture(item)) for key, item in value.items()],
            getattr(value, "default_factory", 0),
        )
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.requires_grad, bits(value)
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    return kind, value


def assert_comes_back(value: Any) -> None:
    assert picture(round_trip(value)) == picture(value)


def ones(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3), seed: int = 0) -> torch.Tensor:
    """Random bits."""
    count = math.prod(shape) * dtype.itemsize
    content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (content % 2 if dtype is torch.bool else content).view(dtype).view(shape)


tensors = st.builds(
    ones, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 9)
)
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 1).map(lambda shift: 2**53 + shift),
    st.floats(),
    st.complex_numbers(allow_nan=True),
    st.text(st.characters(exclude_categories=())),
    st.sampled_from(["$", "__metadata__", "a/b", "\ud83d\ude00", "\ud83d" + "\ude00"]),
    st.binary(),
    st.sampled_from([*Phase, *Level, Parts.HEAD, Parts.HEAD | Parts.BODY, Parts(0)]),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.device("meta"), torch.Size([2, 0])]),
    st.sampled_from([Path("a/b"), Path("/"), Path("x\udc80")]),
    st.sampled_from([np.float32(0.1), np.float64("nan"), np.int64(-3), np.bool_(True), np.complex64(1j), np.uint8(7)]),
)


@st.composite
def atoms(draw: st.DrawFn) -> Any:
    return draw(ATOMS)


@st.composite
def keys(draw: st.DrawFn) -> Any:
    """What dicts and sets take."""
    return draw(st.one_of(atoms(), st.lists(atoms(), max_size=2).map(tuple), st.frozensets(atoms(), max_size=2)))


structures = st.recursive(
    atoms() | tensors | tensors.filter(lambda tensor: tensor.dtype.is_floating_point).map(nn.Parameter),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 3)),
        st.builds(Point, inner, inner),
        st.sets(keys(), max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(
            lambda kind, items: kind(items),
            st.sampled_from([dict, OrderedDict, Counter]),
            st.dictionaries(keys(), inner, max_size=3),
        ),
    ),
    max_leaves=8,
)


@given(structures)
def test_any_structure_comes_back_bit_for_bit(value: Any) -> None:
    assert_comes_back(value)


PLAIN = {"lr": [0.1, -0.0, 1e-300], "step": 2**53, "name": "ä€", "on": True, "nothing": None, "groups": [{}, []]}


def test_plain_data_stands_for_itself() -> None:
    skeleton, found = encode(PLAIN, "the state")
    assert json.dumps(skeleton) == json.dumps(PLAIN)
    assert not found
    assert_comes_back(PLAIN)


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", True + 1: "b", None: "c", (1, "x"): "d", 1.5: "e", Phase.WARM: "f", frozenset({1}): "g"},
        {"$": "tuple", "items": [1]},
        {"a": {"$": 1}, "b": [{"$": None}]},
        {"\ud800": 1},
        [2**53 + 1, -(2**70), 10**5000, {10**5000: torch.ones(1)}],
        [math.inf, -math.inf, math.nan, -math.nan, *(struct.unpack(">d", bytes.fromhex("7ff0000000000001")))],
        [complex(math.nan, -0.0), complex(-math.inf, 1)],
        [b"", bytes(range(256)) * 9, {bytes(3000): 1}],
        [(), ((),), set(), frozenset({(1, 2)}), deque([1], 5), deque(), Counter("hello"), Counter({"a": 0, "b": -1})],
        [OrderedDict([("b", 1), ("a", 2)])],
        [Point(1, [2]), Old(1, 2), {Point(1, 2): Point(3)}],
        [Phase.FROZEN, Level.LOW, Parts.HEAD | Parts.BODY, Parts(0)],
        [torch.float8_e4m3fn, torch.device("cuda:0"), torch.Size([]), torch.Size([1, 2])],
        [Path(), Path("a b/ü"), Path("//x")],
        random.Random(3).getstate(),
        np.random.RandomState(3).get_state(),
        np.random.RandomState(3).get_state(legacy=False),
        *[np.random.Generator(bits(3)).bit_generator.state for bits in (np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64)],
        [torch.Generator().manual_seed(3).get_state()],
    ],
    ids=lambda value: type(value[0]).__name__ if isinstance(value, list) else None,
)  # fmt: skip
def test_values_of_every_kind_come_back(value: Any) -> None:
    assert_comes_back(value)


def test_the_states_of_generators_go_on_as_they_would_have() -> None:
    python, numpy, ours = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
    python.gauss(0, 1)
    numpy.integers(9, dtype=np.uint32)
    state = round_trip([python.getstate(), numpy.bit_generator.state, ours.get_state()])
    expected = [python.gauss(0, 1), numpy.integers(9, size=5).tolist(), torch.rand(3, generator=ours).tolist()]
    python, numpy, ours = random.Random(), np.random.default_rng(), torch.Generator()
    python.setstate(state[0])
    numpy.bit_generator.state = state[1]
    ours.set_state(state[2])
    assert [python.gauss(0, 1), numpy.integers(9, size=5).tolist(), torch.rand(3, generator=ours).tolist()] == expected


def test_the_order_of_keys_is_kept_and_so_are_the_attributes_of_a_state_dict() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    found = round_trip(state)
    assert list(found) == list(state)
    assert found._metadata == state._metadata


def test_equal_sets_are_encoded_alike_in_every_process() -> None:
    items = [*"hgfedcba", frozenset("yx")]
    skeleton = encode(set(items), "the state").skeleton
    assert skeleton["items"] == [*"abcdefgh", {"$": "frozenset", "items": ["x", "y"]}]


@pytest.mark.parametrize("dtype", [*DTYPES, *SHELLS], ids=str)
def test_tensors_of_every_dtype_and_form_come_back(dtype: torch.dtype) -> None:
    forms = [ones(dtype), ones(dtype, ()), ones(dtype, (0, 3))]
    if dtype not in SHELLS:  # which torch cannot copy
        forms += [ones(dtype, (4, 6))[::2, 1::2], ones(dtype, (2, 3)).T, ones(dtype, (1, 3)).expand(2, 3)]
        assert_comes_back({"forms": forms})
    skeleton, found = encode(forms, "the state")
    back = decode(skeleton, found, "the state")
    assert [(b.dtype, b.shape, b.data_ptr()) for b in back] == [(f.dtype, f.shape, f.data_ptr()) for f in forms]


def test_lazily_conjugated_and_negated_tensors_come_back_by_value() -> None:
    numbers = torch.tensor([1 + 2j, -3j])
    state = [numbers.conj(), numbers.conj().imag, numbers.real]
    assert all(torch.equal(a, b) for a, b in zip(round_trip(state), state, strict=True))
    assert not any(tensor.is_conj() or tensor.is_neg() for tensor in encode(state, "the state").tensors.values())


def test_parameters_and_leaves_keep_whether_they_require_gradients_and_history_is_left_behind() -> None:
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    state = [frozen, trained, torch.ones(1, requires_grad=True)]
    assert_comes_back(state)
    assert not round_trip(trained * 2).requires_grad


def test_what_is_encoded_is_the_live_memory() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    found = encode({"tensor": tensor, "array": array}, "the state").tensors
    assert found["tensor"].data_ptr() == tensor.data_ptr()
    assert found["array"].data_ptr() == array.ctypes.data


def test_the_same_tensor_twice_is_one_tensor() -> None:
    tensor, wrapped = torch.ones(2), Wrapped(torch.ones(3), torch.ones(()))
    state = {"a": tensor, "b": [tensor, wrapped], "c": wrapped, "view": tensor[:]}
    assert list(encode(state, "the state").tensors) == ["a", "b/1/codes", "b/1/scale", "view"]
    found = round_trip(state)
    assert found["a"] is found["b"][0]
    assert found["b"][1] is found["c"]
    assert found["view"] is not found["a"]


def test_tensors_are_named_by_where_they_are() -> None:
    ts = [torch.ones(1) for _ in range(11)]
    state = {
        "exp_avg": ts[0], "groups": [{"lr": ts[1]}], 0: ts[2], "0": ts[3], "a b": ts[4], "a_b": ts[5], "": ts[6],
        "__metadata__": ts[7], (1, 2): ts[8], "deep": Point((ts[9],)), "x" * 500: ts[10],
    }  # fmt: skip
    names = [
        "exp_avg",
        "groups/0/lr",
        "0",
        "0~2",
        "a_b",
        "a_b~2",
        "_",
        "__metadata__~2",
        "_1__2_",
        "deep/x/0",
        "x" * 200,
    ]
    assert list(encode(state, "the state").tensors) == names
    assert list(encode(ts[0], "the state").tensors) == ["value"]


@pytest.mark.parametrize("context", [None, {"block": 32, "dtype": torch.bfloat16}, (Phase.WARM, torch.Size([1]))])
@pytest.mark.parametrize("make", [lambda t: t, nn.Parameter, lambda t: nn.Parameter(t, requires_grad=False)])
def test_tensor_subclasses_come_back_with_their_components(context: Any, make: Any) -> None:
    wrapped = make(Wrapped(torch.arange(6).view(2, 3), Wrapped(torch.ones(1), torch.ones(2)), context))
    found = round_trip({"w": wrapped})["w"]
    assert type(found) is Wrapped
    assert isinstance(found, nn.Parameter) is isinstance(wrapped, nn.Parameter)
    assert found.requires_grad is wrapped.requires_grad
    assert picture([found.codes, found.scale.codes, found.context]) == picture(
        [wrapped.codes, wrapped.scale.codes, wrapped.context]
    )


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_the_states_of_optimizers_of_few_bits_come_back(name: str) -> None:
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(64, 128)
    optimizer = getattr(optim, name)(model.parameters())
    for buffer in ("exp_avg", "exp_avg_sq"):  # its step compiles code; what it keeps is made here as it makes it
        for parameter in model.parameters():
            optimizer.state[parameter][buffer] = optimizer._new_buffer(parameter, buffer == "exp_avg").copy_(
                torch.rand_like(parameter)
            )
    state = optimizer.state_dict()
    kinds = {type(value).__name__ for each in state["state"].values() for value in each.values()}
    found = round_trip(state)
    assert any(kind.startswith("OptimState") for kind in kinds)
    assert found["param_groups"] == state["param_groups"]
    for index, kept in state["state"].items():
        for key, tensor in kept.items():
            back = found["state"][index][key]
            assert (type(back), back.dtype, back.shape) == (type(tensor), tensor.dtype, tensor.shape)
            names, context = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ([], None)
            assert (back.__tensor_flatten__()[1] if names else None) == context
            assert all(torch.equal(getattr(back, part), getattr(tensor, part)) for part in names)
    optimizer.load_state_dict(found)


@pytest.mark.parametrize(
    "array",
    [
        *(ones(dtype, (2, 3)).numpy() for dtype in DTYPES if dtype not in {torch.bfloat16, *FLOAT8}),
        np.array(1.5),
        np.zeros((0, 2)),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6)[::-1],
        np.arange(8).reshape(2, 4)[:, ::2],
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_of_every_dtype_and_form_come_back(array: np.ndarray) -> None:
    assert_comes_back({"array": array})


def test_an_array_that_is_read_only_comes_back() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert_comes_back(array)


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.dtype(name).type(1) for name in ("bool", "int8", "uint16", "uint64", "float16", "complex128")),
        np.float32("nan"),
    ],
    ids=repr,
)  # fmt: skip
def test_numpy_scalars_come_back(scalar: np.generic) -> None:
    assert_comes_back([scalar])


def test_numpy_is_needed_by_those_who_load_arrays_only() -> None:
    code = """if True:
        import sys
        sys.modules["numpy"] = None
        import torch
        from accel_checkpoint.codec import decode, encode
        assert decode(*encode([1, (bytes(3000), torch.ones(2).sum())], "the state"), "the state")[1][0] == bytes(3000)
        decode({"a": {"$": "numpy.scalar", "dtype": "<f4", "bytes": "00000000"}}, {}, "the state")
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert process.stderr.strip().endswith("ModuleNotFoundError: import of numpy halted; None in sys.modules")


def cyclic_list() -> list[Any]:
    value: list[Any] = [[]]
    value[0].append(value)
    return value


def local_class() -> Enum:
    class Here(Enum):
        A = 1

    return Here.A


def nested(depth: int, wrap: Any) -> Any:
    value: Any = []
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("value", "path", "found", "advice"),
    [
        ({"a": [0, 0, 0, Point(1, print)]}, "state['a'][3].y", "is a builtin_function_or_method", "Give plain data in its"),
        (lambda: None, "state", "is a function", "Give plain data"),
        ({"f": (1, lambda: None)}, "state['f'][1]", "is a function", "Give plain data"),
        ({"m": nn.Linear(1, 1)}, "state['m']", "is a torch.nn.modules.linear.Linear", "state_dict() returns"),
        ([torch.Generator()], "state[0]", "is a torch._C.Generator", "get_state method"),
        ([random.Random(0)], "state[0]", "is a random.Random", "getstate method"),
        ([np.random.default_rng(0)], "state[0]", "is a numpy.random._generator.Generator", "bit_generator.state"),
        ([Settings()], "state[0]", "Settings, which a checkpoint cannot hold", "dataclasses.asdict"),
        ([Settings], "state[0]", "is a type", "its name as a string"),
        ([type("Sub", (dict,), {})()], "state[0]", "Sub, which", "a plain dict of the same"),
        ([torch.ones(2, 2).max(0)], "state[0]", "is a torch.return_types.max", "a plain tuple"),
        ([UserDict()], "state[0]", "is a collections.UserDict", "Give plain data"),
        ([defaultdict(list)], "state[0]", "is a collections.defaultdict, which a checkpoint cannot hold", "Give a plain dict of the same content."),
        ([range(3)], "state[0]", "is a range, which a checkpoint cannot hold", "Give plain data in its place"),
        ([date(2024, 1, 1)], "state[0]", "is a datetime.date, which a checkpoint cannot hold", "Give plain data in its place"),
        (np.array(["a"]), "state", "is a numpy.ndarray of dtype <U1, which a checkpoint cannot hold", "Give a list, or an array of numbers"),
        (np.ones(2, ">f4"), "state", "is a numpy.ndarray of dtype >f4, which a checkpoint cannot hold", "Give a list, or an array of numbers"),
        ([local_class()], "state[0]", "module has no such class", "top level of a module"),
        ({"a": {torch.ones(1): 1}}, "state['a']", "is a dict with a tensor as a key", "Give names as keys"),
        ({"a": {(1, torch.ones(1)): 1}}, "state['a']", "is a dict with a tensor as a key", "Give names as keys"),
        ([{torch.ones(1)}], "state[0]", "is a set with a tensor in it", "Give a list"),
        ([{(1, print): 2}], "state[0] (its key (1, <built-in function print>))[1]", "is a builtin_f", "Give plain data"),
        ({"a": cyclic_list()}, "[0]", "is nested deeper than 100 levels, or contains itself", "without circles"),
        (nested(101, lambda value: [value]), "[0]", "is nested deeper than 100 levels", "a flatter structure"),
        ([torch.ones(2, device="meta")], "state[0]", "on the meta device", "Load or initialise"),
        ([torch.ones(2).to_sparse()], "state[0]", "of layout torch.sparse_coo", ".to_dense()"),
        ([torch.ones(2).as_subclass(Odd)], "state[0]", "Odd, a tensor subclass that cannot be taken", "__tensor_flatten__"),
        ([nn.UninitializedParameter()], "state[0]", "UninitializedParameter, a tensor subclass", "a plain tensor"),
        ([Wrapped(torch.ones(1), torch.ones(1), Settings())], "state[0].context", "Settings", "dataclasses.asdict"),
        ([np.array([{}])], "state[0]", "of dtype object", "Give a list"),
        ([np.zeros(2, "i4,f4")], "state[0]", "of dtype [(", "Give a list"),
        ([np.zeros(1, "i4,f4")[0]], "state[0]", "is a numpy.void of dtype", "Give plain data"),
        ([np.ma.zeros(2)], "state[0]", "MaskedArray, and only arrays of NumPy's own", "numpy.asarray"),
        ([np.zeros(2, [("text", "S0"), ("number", "i4")])["text"]], "state[0]", "of dtype |S0", "Give a list"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, path: str, found: str, advice: str) -> None:
    with pytest.raises(CheckpointError) as error:
        encode(value, "the state of scheduler 0")
    text = str(error.value)
    assert text.startswith("The state of scheduler 0 was to be saved, but state")
    assert f"{path} {found}" in text or (f"{path} is " in text and found in text)
    assert advice in text


def test_nested_and_quantised_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives both up
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        quantised = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(CheckpointError, match=r"is a nested tensor, .* Give a list of its parts"):
        encode(ragged, "the state")
    with pytest.raises(CheckpointError, match=r"is a quantised tensor \(torch.qint8\), .* Give its parts"):
        encode(quantised, "the state")


@pytest.mark.parametrize(
    ("wrap", "levels"),
    [(lambda value: [value], 1), (lambda value: {0: value}, 1), (Point, 2), (lambda value: (value,), 2)],
)
def test_what_can_be_saved_is_not_too_deep_to_be_loaded(wrap: Any, levels: int) -> None:
    depth = 100 // levels - (1 if wrap is Point else 0)
    assert_comes_back(nested(depth, wrap))


def test_a_class_of_the_main_module_is_found_from_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Phase, "__module__", "__mp_main__")
    monkeypatch.setattr(sys.modules["__main__"], "Phase", Phase, raising=False)
    assert encode(Phase.WARM, "the state").skeleton["class"] == "__main__:Phase"
    assert round_trip(Phase.WARM) is Phase.WARM


def test_many_numbers_are_encoded_fast() -> None:
    values = {"param_groups": [{"lr": [0.5 + number for number in range(100_000)]}]}
    start = time.process_time()
    assert encode(values, "the state").skeleton == values
    assert time.process_time() - start < 0.5


HERE = __name__
TENSOR = {"$": "tensor", "name": "a", "dtype": "float32", "shape": [2], "requires_grad": False}
WRAPPED = {
    "$": "tensor_subclass", "name": "w", "class": f"{HERE}:Wrapped", "dtype": "float32", "shape": [2], "stride": [1],
    "parameter": False, "requires_grad": False, "tensors": {"codes": TENSOR, "scale": {"$": "same", "name": "a"}},
    "context": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("skeleton", "path", "message"),
    [
        ({"$": "pickle", "data": "gASVAAAA"}, "", "is an entry 'pickle', which this version of accel-core does not know. Upgrade"),
        ({"$": ["tuple"]}, "", "is an entry ['tuple'], which"),
        ({"$": "tuple"}, "", "is a tuple with the fields none instead of items"),
        ({"$": "tuple", "items": [], "more": 1}, "", "with the fields items, more instead of items"),
        ({"$": "tuple", "items": {}}, "", "is a tuple whose items is {} instead of a list"),
        ({"$": "tuple", "items": [{"$": "int", "value": "1e9"}]}, "[0]", "is no int (ValueError: '1e9' is not hexadecimal)"),
        ({"$": "float", "value": "0.5"}, "", "is no float ("),
        ({"$": "float", "value": "00"}, "", "is no float (ValueError: '00' is not 16 hex"),
        (math.inf, "", "is inf, a number that JSON does not have"),
        ((1,), "", "is described by a tuple, which JSON does not have"),
        ({"$": "complex", "real": 1.0, "imag": "x"}, "", "is a complex whose imag is 'x' instead of a float"),
        ({"$": "str", "code_points": [-1]}, "", "is no str (ValueError"),
        ({"$": "bytes", "data": "?"}, "", "is no bytes ("),
        ([TENSOR, {"$": "bytes", "data": {"$": "same", "name": "a"}}], "[1]", "bytes are kept as uint8, not as torch.float32"),
        ({"$": "set", "items": [[]]}, "", "is no set (TypeError: unhashable"),
        ({"$": "deque", "items": [1, 2], "maxlen": 1}, "", "2 items are more than maxlen=1"),
        ({"$": "dict", "items": [[1]]}, "", "item 0 is no list of a key and a value"),
        ({"$": "dict", "items": [[[], 1]]}, "", "is a dict with a list as a key"),
        ({"$": "dict", "items": [[1, 1], [1, 2]]}, "", "is a dict that has a key twice"),
        ({"$": "OrderedDict", "value": {}, "attributes": {"$": "dict", "items": [[1, 2]]}}, "", "name of an attribute is a string"),
        ({"$": "torch.dtype", "name": "ones"}, "", "torch has no dtype 'ones'"),
        ({"$": "torch.device", "name": "abacus"}, "", "is no torch.device (RuntimeError"),
        ({"$": "torch.Size", "items": ["x"]}, "", "is no torch.Size (TypeError"),
        ({"$": "enum", "class": "no.such:Thing", "member": "A"}, "", "no.such:Thing, whose module is not imported. Import no.such before load_state()"),
        ({"$": "enum", "class": "antigravity:Thing", "member": "A"}, "", "whose module is not imported"),
        ({"$": "enum", "class": f"{HERE}:Gone", "member": "A"}, "", f"is of the class {HERE}:Gone, which that module does not have. Import the version"),
        ({"$": "enum", "class": f"{HERE}:Point", "member": "x"}, "", f"{HERE}:Point, which is no enum"),
        ({"$": "enum", "class": f"{HERE}:Phase.WARM", "member": "x"}, "", f"{HERE}:Phase.WARM, which is no enum"),
        ({"$": "enum", "class": f"{HERE}:Phase", "member": "HOT"}, "", "which has no such member. Give the enum its member back: it has WARM, COLD, FROZEN"),
        ({"$": "enum", "class": f"{HERE}:Phase", "member": 2}, "", "which is no enum of flags"),
        ({"$": "enum", "class": f"{HERE}:Parts", "member": 99}, "", "is no enum (ValueError"),
        ({"$": "namedtuple", "class": "subprocess:Popen", "value": {}}, "", "subprocess:Popen, which is no named tuple"),
        ({"$": "namedtuple", "class": f"{HERE}:Old", "value": {"a": 1, "b": 2}}, "", "with the fields ('a', 'b'), and that class has ('b', 'a')"),
        ({"$": "namedtuple", "class": f"{HERE}:Point", "value": {"x": {"$": 1}, "y": 2}}, ".x", "is an entry 1"),
        ({"$": "same", "name": "a"}, "", "is the tensor 'a' once more, and none of that name was before it"),
        ([TENSOR, TENSOR], "[1]", "is the tensor 'a', and there is another one of that name before it"),
        ({**TENSOR, "name": "b"}, "", "is the tensor 'b', which is not there"),
        ({**TENSOR, "name": "number"}, "", "which should be float32 [2] and is a int"),
        ({**TENSOR, "shape": [3]}, "", "is the tensor 'a', which should be float32 [3] and is float32 [2]"),
        ({**TENSOR, "shape": [2.0]}, "", "should be float32 [2.0] and"),
        ({**TENSOR, "dtype": "int32"}, "", "which should be int32 [2] and is float32 [2]"),
        ({**TENSOR, "name": ["a"]}, "", "is a tensor whose name is ['a'] instead of a str"),
        ({**TENSOR, "name": "i", "dtype": "int64", "requires_grad": True}, "", "is a tensor of int64 that requires gradients"),
        ({**WRAPPED, "class": "torch:Tensor"}, "", "torch:Tensor, which is no tensor subclass that can be put together"),
        ({**WRAPPED, "class": f"{HERE}:Odd"}, "", f"{HERE}:Odd, which is no tensor subclass that"),
        ({**WRAPPED, "stride": ["1"]}, "", "is a tensor_subclass whose stride is '1' instead of a int"),
        ({**WRAPPED, "tensors": {"codes": 1}}, "", f"is a {HERE}:Wrapped whose codes is a int instead of a tensor"),
        ({**WRAPPED, "tensors": {"codes": TENSOR}}, "", f"is a {HERE}:Wrapped that cannot be put together: KeyError('scale')"),
        ({**WRAPPED, "shape": [7]}, "", "that cannot be put together: AssertionError"),
        ({**WRAPPED, "dtype": "int8"}, "", "is the tensor 'w', which should be int8 [2] and is float32 [2]"),
        ({"$": "numpy.scalar", "dtype": "O", "bytes": ""}, "", "'O' is no dtype of numbers"),
        ({"$": "numpy.scalar", "dtype": "<f4", "bytes": "00"}, "", "a scalar of <f4 has 4 bytes, and not 1"),
        ({"$": "numpy.ndarray", "dtype": "|O8", "data": TENSOR}, "", "an array of '|O8' is not kept as"),
        ({"$": "numpy.ndarray", "dtype": "float64", "data": TENSOR}, "", "an array of 'float64' is not kept as torch.float32"),
        ({"$": "numpy.ndarray", "dtype": ">f4", "data": TENSOR}, "", "an array of '>f4' is not kept as torch.float32"),
        (nested(101, lambda value: [value]), "", "is nested deeper than 100 levels"),
        (nested(400, lambda value: {"$": "tuple", "items": value}), "", "is nested deeper than 100 levels"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_a_skeleton_that_lies_is_refused_with_the_place(skeleton: Any, path: str, message: str) -> None:
    held: Any = {"a": torch.ones(2), "i": torch.ones(2, dtype=torch.int64), "number": 1}
    with pytest.raises(CheckpointError) as error:
        decode({"x": skeleton}, held, "the state of scheduler 0")
    text = str(error.value)
    assert text.startswith(f"The state of scheduler 0 was to be loaded, but state['x']{path}")
    assert message in text
    assert text.endswith("another one.") or "Upgrade" in text or re.search("(Import|Give) ", text)


RICH = [
    {1: (2**60, math.nan), "$": {Phase.WARM, Parts(3)}, (): "\ud800"},
    [OrderedDict(a=1), Counter("a"), Point(deque([1], 2), (4,)), 1j, b"x", bytes(2000)],
    [torch.int8, torch.device("cpu"), torch.Size([3]), Path("a"), torch.ones(2), nn.Parameter(ones(torch.half))],
    [Wrapped(torch.ones(2), torch.ones(1), (1, torch.int8)), np.ones(3), np.float32(3)],
]  # fmt: skip


def nodes(skeleton: Any) -> list[tuple[Any, Any]]:
    """Every place in a skeleton, as a container and a key."""
    pairs = skeleton.items() if isinstance(skeleton, dict) else enumerate(skeleton)
    below = [node for _, item in pairs if isinstance(item, (dict, list)) for node in nodes(item)]
    return [*((skeleton, key) for key in (skeleton if isinstance(skeleton, dict) else range(len(skeleton)))), *below]


@settings(max_examples=300)
@given(st.data())
def test_whatever_a_skeleton_says_it_is_read_or_refused(data: st.DataObject) -> None:
    skeleton, held = stored(RICH)
    lies = nodes(stored(RICH)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(nodes(skeleton)))
        other, lie = data.draw(st.sampled_from(lies))
        junk = st.sampled_from(
            [None, True, -1, 2**70, 1.5, "", "x", "0x1", "torch", [], {}, [[]], {"$": "same", "name": "a"}]
        )
        container[key] = data.draw(st.just(copy.deepcopy(other[lie])) | junk)
    try:
        decode(skeleton, held, "the state")
    except CheckpointError as error:
        assert str(error).startswith("The state was to be loaded, but state")


def test_a_subclass_that_makes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapped, "__tensor_unflatten__", lambda *_: torch.ones(2))
    with pytest.raises(CheckpointError, match="Wrapped makes a torch.Tensor of it"):
        decode(WRAPPED, {"a": torch.ones(2)}, "the state")


def test_a_named_tuple_is_made_without_its_constructor() -> None:
    skeleton = {"$": "namedtuple", "class": f"{HERE}:Picky", "value": {"x": 1, "y": 2}}
    found = decode(skeleton, {}, "the state")
    assert type(found) is Picky
    assert tuple(found) == (1, 2)


def test_looking_for_a_class_asks_no_module_that_could_answer_by_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    lazy = Lazy("lazy")
    lazy.__dict__["__getattr__"] = asked.append
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    asked.clear()
    with pytest.raises(CheckpointError, match="which that module does not have"):
        decode({"$": "enum", "class": "lazy:Thing", "member": "A"}, {}, "the state")
    assert not asked


def test_decoding_imports_nothing() -> None:
    before = {*sys.modules}
    with pytest.raises(CheckpointError, match="this.is.not:Imported, whose module is not imported"):
        decode({"$": "namedtuple", "class": "this.is.not:Imported", "value": {}}, {}, "the state")
    assert {*sys.modules} == before
