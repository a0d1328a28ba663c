"""The page on the format is enough to write a reader: this one was written from it, and uses nothing of accel_core.

It reads what real runs save, and finds what they had.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, Flag, auto
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from sharded_strategies import Flat, Rows
from torch import nn

from accel_core import Accelerator, set_seed
from accel_testing import run_ranks

REFERENCE = Path(__file__).parents[3] / "docs/reference"
PAGE = "\n".join((REFERENCE / f"checkpoint-{name}.md").read_text(encoding="utf-8") for name in ("format", "values"))


class Damaged(Exception):
    """What is read is not what was written."""


Named = namedtuple("Named", ["name", "content"])  # a value of a class that the reader does not have


class Reader:
    """Reads a checkpoint by docs/reference/checkpoint-format.md alone."""

    def __init__(self, folder):
        text = (folder / "manifest.json").read_bytes()
        self.manifest = read_manifest(text)
        self.data = folder / f"data-{self.manifest['id']}"
        sizes = {"index.json": self.manifest["index"]["nbytes"], **self.manifest["files"]}
        for name, size in sizes.items():
            check(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name), "a name")
            check((self.data / name).stat().st_size == size, f"the size of {name}")
        index = (self.data / "index.json").read_bytes()
        check(digest(index) == self.manifest["index"]["hash"], "the index")
        self.index = json.loads(index)
        self.bytes = {name: (self.data / name).read_bytes() for name in self.manifest["files"]}
        for name, file in self.index["files"].items():
            check(file["nbytes"] == self.manifest["files"][name], "the sizes")
            check(digest(self.bytes[name][: file["header_bytes"]]) == file["header_hash"], f"the header of {name}")

    def stored(self, place):
        """A tensor as it is in a file."""
        known = self.index["files"][place["file"]]["tensors"][place["key"]]
        start, size = known["offset"], known["nbytes"]
        content = self.bytes[place["file"]][start : start + size]
        blocks = [digest(content[begin : begin + 4194304]) for begin in range(0, size, 4194304)]
        check(blocks == known["hashes"], f"{place['key']} of {place['file']}")
        dtype = getattr(torch, known["dtype"])
        return (torch.frombuffer(bytearray(content), dtype=dtype) if size else torch.empty(0, dtype=dtype)).view(
            known["shape"]
        )

    def tensor(self, name):
        """A whole tensor; of an opaque one its values by part."""
        record = self.index["tensors"][self.index["aliases"].get(name, name)]
        parts = record["parts"]
        if record["kind"] == "opaque":
            return {part["part"]: self.value(part) for part in parts}
        if record["kind"] == "replicated":
            return self.stored(parts[0])
        if record["kind"] == "partial":
            return torch.stack([self.stored(part) for part in parts]).mean(dim=0)
        check(record["kind"] == "elementwise", "the kind")
        whole = torch.empty(record["shape"], dtype=getattr(torch, record["dtype"]))
        covered = torch.zeros(record["shape"], dtype=torch.int)
        for part in parts:
            box = tuple(slice(o, o + s) for o, s in zip(part["offsets"], part["sizes"], strict=True))
            whole[box] = self.stored(part)
            covered[box] += 1
        check(bool((covered == 1).all()), f"the boxes of {name}")
        return whole

    def unit(self, unit):
        """All tensors of a unit, by the rest of their names; aliases too."""
        names = [name for name in (*self.index["tensors"], *self.index["aliases"]) if name.startswith(f"{unit}/")]
        return {name.removeprefix(f"{unit}/"): self.tensor(name) for name in names}

    def object(self, unit, rank=0):
        """The object of a unit, as a rank had it."""
        (entry,) = (e for e in self.index["objects"][unit] if e["ranks"] == "all" or rank in e["ranks"])
        return self.value(entry)

    def optimizer(self, number):
        """Groups, and the state of each parameter."""
        unit = f"optimizer.{number}"
        about = self.object(unit)
        state = defaultdict(dict)
        for entry in self.index["objects"][f"{unit}.values"]:
            for parameter, values in self.value(entry).items():
                state[parameter].update(values)
        names = {name for group in about["groups"] for name in group["names"]}
        for name, value in self.unit(unit).items():
            parameter, _, key = (name, "", "") if name in names else name.rpartition("/")
            opaque = self.index["tensors"][f"{unit}/{name}"]["kind"] == "opaque"
            if name != "(shared)":
                state[parameter].update(value["whole"]["state"] if opaque else {key: value})
        return about, dict(state)

    def value(self, entry):
        """A Python object."""
        return Decoder({name: self.stored(place) for name, place in entry["tensors"].items()}).value(entry["skeleton"])


class Decoder:
    """Skeletons to values."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.seen = {}

    def value(self, skeleton):
        if isinstance(skeleton, list):
            return [self.value(item) for item in skeleton]
        if not isinstance(skeleton, dict):
            return skeleton
        if "$" not in skeleton:
            return self.members(skeleton)
        tag, fields = skeleton["$"], {name: field for name, field in skeleton.items() if name != "$"}
        if tag == "dict":
            return {self.value(key): self.value(item) for key, item in fields["items"]}
        if tag == "same":
            return self.seen[fields["name"]]
        if tag in {"tensor", "parameter"}:
            return self.tensor(tag, fields)
        if tag == "namedtuple":
            return Named(fields["class"], self.members(fields["value"]))
        if tag == "tensor_subclass":
            self.seen[fields["name"]] = Named(fields["class"], self.members(fields["tensors"]))
            return self.seen[fields["name"]]
        return JOIN[tag](**{TRANSLATED.get(name, name): self.value(field) for name, field in fields.items()})

    def members(self, members):
        return {name: self.value(item) for name, item in members.items()}

    def tensor(self, tag, fields):
        found = self.tensors[fields["name"]]
        check(list(found.shape) == fields["shape"], fields["name"])
        check(found.dtype == getattr(torch, fields["dtype"]), fields["name"])
        if tag == "parameter":
            found = nn.Parameter(found, requires_grad=fields["requires_grad"])
        elif fields["requires_grad"]:
            found.requires_grad_()
        self.seen[fields["name"]] = found
        return found


def float_of(value):
    return float(value) if value in {"inf", "-inf", "nan"} else struct.unpack(">d", bytes.fromhex(value))[0]


def bytes_of(data):
    return base64.b64decode(data) if isinstance(data, str) else bytes(data.tolist())


def with_attributes(kind):
    def join(value, attributes):
        made = kind(value)
        vars(made).update(attributes)
        return made

    return join


TRANSLATED = {"class": "kind", "bytes": "content"}  # fields that are words of Python
JOIN = {
    "int": lambda value: int(value, 16),
    "float": float_of,
    "complex": lambda real, imag: complex(real, imag),
    "str": lambda code_points: "".join(map(chr, code_points)),
    "bytes": bytes_of,
    **{kind.__name__: lambda items, kind=kind: kind(items) for kind in (tuple, set, frozenset)},
    "torch.Size": lambda items: torch.Size(items),
    "deque": lambda items, maxlen: deque(items, maxlen),
    "OrderedDict": with_attributes(OrderedDict),
    "Counter": with_attributes(Counter),
    "enum": lambda kind, member: Named(kind, member),
    "torch.dtype": lambda name: getattr(torch, name),
    "torch.device": lambda name: torch.device(name),
    "Path": lambda value: Path(value),
    "numpy.ndarray": lambda dtype, data: data.numpy(),
    "numpy.scalar": lambda dtype, content: np.frombuffer(bytearray.fromhex(content), dtype)[0],
}


def read_manifest(text):
    manifest = json.loads(text)
    check(manifest["format"] == "accel-checkpoint", "the format")
    check(manifest["version"] == 1, "the version")
    check(manifest["hash"] == "xxh3_128", "the hash")
    check(text[-36:] == digest(text[:-36]).encode() + b'"\n}\n', "the seal")
    return manifest


def digest(content):
    return xxhash.xxh3_128_hexdigest(content)


def check(holds, what):
    if not holds:
        raise Damaged(what)


# Up to here the reader. From here on, what it reads.


class Colour(Enum):
    RED = "red"


class Access(Flag):
    READ = auto()
    WRITE = auto()


Point = namedtuple("Point", ["x", "y"])


def values():
    """Every kind of value that a reader can compare."""
    ordered = OrderedDict(a=1)
    ordered.note = "attribute"
    shared = torch.arange(3)
    return {
        "plain": [None, True, 7, 0.1, 1e300, "ä", {"b": 1, "a": 2}],
        "numbers": [2**80, -(2**60), math.inf, -math.inf, complex(1, -math.inf), 2**53],
        "text": ["\ud800", b"short", bytes(range(256)) * 5],
        "containers": [(1, (2,)), {1, 2}, frozenset({"a"}), deque([1], 3), {1: "a", (2, None): "b", "$": 0}],
        "collections": [ordered, Counter(a=2)],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "paths": [Path("a/b")],
        "tensors": [shared, shared, torch.ones(2, 2).T.bfloat16(), torch.tensor(True), torch.empty(0, 3)],
        "rare": [torch.tensor([1 + 2j], dtype=torch.complex128), torch.ones(2).to(torch.float8_e5m2)],
        "leaves": [torch.ones(1, requires_grad=True), nn.Parameter(torch.ones(1))],
        "large": torch.arange((9 << 20) // 4 + 3, dtype=torch.int32),  # three blocks, the last of them short
        "numpy": [np.arange(3.0), np.arange(2, dtype="int16"), np.float32(0.5)],
    }


class Registered:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Model(nn.Module):
    """Tied weights, buffers, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x):
        return self.norm(self.head(self.embedding(x)))

    def get_extra_state(self):
        return {"seen": (1, 2)}

    def set_extra_state(self, state):
        pass


def live(model, optimizer, scheduler):
    """What a run has, under the names of the page."""
    names = {parameter: f"0.{name}" for name, parameter in model.named_parameters()}
    state = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    return {"model": dict(model.state_dict()), "state": state, "scheduler": scheduler.state_dict()}


def save_in_an_open_window(folder):
    set_seed(5)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    named, rank = Registered({"p": Point(1, (2,)), "c": Colour.RED, "a": Access.READ}), accelerator.process_index
    accelerator.register_for_checkpointing(Registered(values()), named, Registered({"rank": rank}))
    for step in range(6):
        with accelerator.accumulate(trained):
            accelerator.backward(trained((torch.arange(6) + step + rank) % 7).square().sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    found = live(model, optimizer, scheduler)
    found["gradients"] = {f"0.{name}": parameter.grad for name, parameter in model.named_parameters()}
    found["torch"] = torch.get_rng_state()
    accelerator.end_training()
    return found


@pytest.fixture(scope="module", params=[1, 2])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world") / "checkpoint"
    return folder, run_ranks(save_in_an_open_window, request.param, str(folder))


def test_the_reader_finds_the_model_the_optimizer_and_the_schedule(saved):
    folder, ranks = saved
    reader = Reader(folder)
    extra = ranks[0]["model"].pop("_extra_state")
    model = reader.unit("model.0")
    assert model.pop("_extra_state") == {"whole": extra}
    assert_equal(model, dict(ranks[0]["model"]))
    about, state = reader.optimizer(0)
    assert about["kind"] == "torch.optim:AdamW"
    assert about["whole"] is None
    assert about["groups"][0]["betas"] == (0.9, 0.999)
    assert about["groups"][0]["names"] == ["0.embedding.weight", "0.norm.weight", "0.norm.bias"]
    assert_equal(state, ranks[0]["state"])
    assert reader.object("scheduler.0") == ranks[0]["scheduler"]


def test_the_reader_finds_the_gradients_of_the_window_and_where_it_stands(saved):
    folder, ranks = saved
    reader = Reader(folder)
    for name, gradient in reader.unit("gradient").items():
        torch.testing.assert_close(gradient, torch.stack([rank["gradients"][name] for rank in ranks]).mean(dim=0))
    state = {"steps": 4, "open": True, "position": 2, "size": 4, "backwards": 2, "total_backwards": 6}
    assert reader.object("accumulation") == state
    window = {"open": True, "position": 2, "steps": 4}
    assert reader.manifest["record"]["window"] == window
    assert reader.manifest["record"]["world"]["size"] == len(ranks)


def test_the_reader_finds_the_object_of_each_rank(saved):
    folder, ranks = saved
    reader = Reader(folder)
    for rank, here in enumerate(ranks):
        assert reader.object("object.2", rank) == {"rank": rank}
        assert torch.equal(reader.object("random", rank)["torch"], here["torch"])
    module = __name__
    assert reader.object("object.1") == {
        "p": Named(f"{module}:Point", {"x": 1, "y": (2,)}),
        "c": Named(f"{module}:Colour", "RED"),
        "a": Named(f"{module}:Access", "READ"),
    }


def test_the_reader_decodes_every_kind_of_value(saved):
    folder, _ = saved
    found = Reader(folder).object("object.0")
    assert_equal(found, values())
    assert found["tensors"][0] is found["tensors"][1]
    assert found["containers"][3].maxlen == 3
    assert found["collections"][0].note == "attribute"
    assert [leaf.requires_grad for leaf in found["leaves"]] == [True, True]


def assert_equal(found, expected):
    """The same types and values, bit by bit, in nested structures."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        one, other = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (found, expected))
        assert torch.equal(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    elif isinstance(expected, dict):
        assert dict.keys(found) == dict.keys(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def save_sharded(folder, strategy):
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy())
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    trained, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(trained(torch.linspace(-1, 1, 10).view(2, 5)).sum())
    optimizer.step()
    accelerator.save_state(folder)
    weights = accelerator.get_state_dict(trained)
    accelerator.end_training()
    return weights


@pytest.mark.parametrize("strategy", [Rows, Flat])
def test_the_reader_assembles_tensors_that_were_cut_in_any_way(strategy, tmp_path):
    weights = run_ranks(save_sharded, 2, str(tmp_path / "checkpoint"), strategy)[0]
    reader = Reader(tmp_path / "checkpoint")
    assert any(len(record["parts"]) > 1 for record in reader.index["tensors"].values())
    assert_equal(reader.unit("model.0"), dict(weights))
    _, state = reader.optimizer(0)
    assert {name: values["exp_avg"].shape for name, values in state.items()} == {
        f"0.{name}": weight.shape for name, weight in weights.items()
    }


class Extended(torch.optim.SGD):
    """Keeps more than its class: a tensor that is in no table, a text, and something under a key that is no parameter."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(codes=[torch.arange(2), 1], word="a word")
        self.state["all"] = {"count": 1}


class Unknown(torch.optim.Optimizer):
    """Is in no table."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(mean=parameter.grad.clone(), word="a word")


class Alone(torch.optim.SGD):
    """Says itself what its state is."""

    def state_dict(self):
        return {**super().state_dict(), "own": (1, 2)}


def stepped(kind, folder):
    accelerator = Accelerator()
    model = nn.Linear(2, 1, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    trained, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(trained(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(folder)
    return model, optimizer, Reader(folder)


@pytest.mark.parametrize("kind", [Extended, Unknown])
def test_the_reader_finds_state_that_nobody_declared(kind, tmp_path):
    model, optimizer, reader = stepped(kind, tmp_path)
    _, state = reader.optimizer(0)
    assert_equal(state, {"0.weight": dict(optimizer.state[model.weight])})
    if kind is Extended:
        assert reader.tensor("optimizer.0/(shared)")["whole"] == {"state": {"all": {"count": 1}}, "laid_out": []}


def test_the_reader_finds_the_state_of_an_optimizer_that_tells_it_itself(tmp_path):
    _, optimizer, reader = stepped(Alone, tmp_path)
    about, state = reader.optimizer(0)
    assert state == {}
    assert about["groups"] == [{"names": ["0.weight"]}]
    assert_equal(about["whole"], optimizer.state_dict())


def test_one_flipped_bit_in_any_file_is_found(saved, tmp_path):
    folder, _ = saved
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        for position in (0, 9, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            try:
                with pytest.raises((Damaged, ValueError, KeyError)):
                    read_everything(folder)
            finally:
                path.write_bytes(whole)
    read_everything(folder)


def read_everything(folder):
    reader = Reader(folder)
    for file, known in reader.index["files"].items():
        for key in known["tensors"]:
            reader.stored({"file": file, "key": key})


def test_the_seal_covers_every_byte_of_the_manifest(saved):
    folder, _ = saved
    text = (folder / "manifest.json").read_bytes()
    for position in range(len(text)):
        with pytest.raises((Damaged, ValueError, KeyError)):
            read_manifest(text[:position] + bytes([text[position] ^ 1]) + text[position + 1 :])


def members_on_the_page(heading):
    """The first column of the table behind a heading."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return [name for row in rows for name in words(row)]


def words(text):
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def test_the_page_lists_every_member_of_the_files(saved):
    folder, _ = saved
    reader = Reader(folder)
    assert list(reader.manifest) == members_on_the_page("manifest.json")
    assert set(reader.manifest["record"]) == set(members_on_the_page("The record"))
    assert set(reader.index) == {"files", "tensors", "aliases", "objects"}
    for file in reader.index["files"].values():
        assert set(file) == set(members_on_the_page("files"))
        assert all(set(each) == {"dtype", "shape", "offset", "nbytes", "hashes"} for each in file["tensors"].values())
    for record in reader.index["tensors"].values():
        opaque = record["kind"] == "opaque"
        assert set(record) == {"kind", "parts"} | (set() if opaque else {"shape", "dtype"})
        row = re.search(rf"^\| `{record['kind']}` \| ([^|]*) \|", PAGE, re.MULTILINE)
        assert all(set(part) == set(re.findall(r"`(\w+)`", row[1])) for part in record["parts"])


def test_the_page_has_every_tag_with_its_fields():
    from accel_checkpoint.codec import decoder

    section = PAGE.partition("\n## Values\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| ([^|]*) \|", section, re.MULTILINE)
    found = {tag: set(words(fields)) for tags, fields in rows for tag in words(tags)}
    assert found == {tag: set(fields) for tag, fields in decoder._FIELDS.items()}
