"""The file of one rank: a valid safetensors file, written from memory as it is, and verified to its last byte."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from accel_checkpoint.files import part_file, stored
from accel_checkpoint.files.disk import read_all
from accel_checkpoint.files.part_file import PartReader, write_part
from accel_checkpoint.files.stored import BLOCK, DTYPES, StoredFile, StoredTensor
from accel_checkpoint.weights.tensor_files import SAFETENSORS_DTYPES
from accel_core import CheckpointError
from accel_core.api.layouts import Box
from accel_testing import run_ranks

NAME = "rank-00000.safetensors"
PROPERTY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors have several of them."""
    monkeypatch.setattr(part_file, "BLOCK", 64)
    monkeypatch.setattr(stored, "BLOCK", 64)
    monkeypatch.setattr(part_file, "CHUNK", 24)
    monkeypatch.setattr(part_file, "READ", 40)


def read(reader, key, out, cast=False):
    reader.read_box(key, Box.whole(reader.stored.tensors[key].shape), out, cast)


def written(folder, tensors):
    """The path and the description, which has been through JSON, of a new file; the one that was there is removed."""
    path = folder / NAME
    path.unlink(missing_ok=True)
    description = write_part(path, tensors).to_json()
    return path, StoredFile.from_json(NAME, json.loads(json.dumps(description)))


def raw(tensor):
    """The bytes of the elements in row-major order, of any dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    bits = tensor.view(carrier[tensor.itemsize]).clone(memory_format=torch.contiguous_format)
    return bits.view(-1).view(torch.uint8)


def assert_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(raw(found), raw(expected))


def blank(shape, dtype):
    """Zeros, of dtypes of which torch makes none as well."""
    return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


def strided(shape, dtype, order, step):
    """Zeros whose dims lie in memory in another order, `step` elements apart."""
    memory = blank([shape[dim] for dim in order] + [step], dtype).select(-1, 0)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


@st.composite
def placed(draw, shape, dtype):
    """Zeros of a shape and dtype, with any strides."""
    return strided(shape, dtype, draw(st.permutations(range(len(shape)))), draw(st.sampled_from([1, 1, 2])))


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """A tensor of any dtype, shape and strides, with any bits."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    tensor = draw(placed(draw(SHAPES), dtype))
    size = tensor.numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    part_file._copy(bits.to(torch.uint8).view(dtype).view(tensor.shape), tensor)
    return tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor


@PROPERTY
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, once a process
@given(data=st.data(), given=st.dictionaries(st.text(st.characters(codec="utf-8")), tensors(), max_size=8))
def test_what_was_written_is_read(small_blocks, tmp_path, data, given):
    given.pop("__metadata__", None)
    path, description = written(tmp_path, given)
    assert description.tensors.keys() == given.keys()
    with PartReader(path, description) as reader:
        for key, tensor in given.items():
            assert_same(reader.tensor(key), tensor)
            out = data.draw(placed(tuple(tensor.shape), tensor.dtype))
            read(reader, key, out)
            assert_same(out, tensor)


@st.composite
def boxes(draw, shape):
    offsets = tuple(draw(st.integers(0, length)) for length in shape)
    return Box(
        offsets, tuple(draw(st.integers(0, length - begin)) for length, begin in zip(shape, offsets, strict=True))
    )


@PROPERTY
@given(data=st.data(), shape=st.lists(st.integers(1, 9), max_size=4).map(tuple), cast=st.booleans())
def test_a_box_is_what_slicing_gives(small_blocks, tmp_path, data, shape, cast):
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    path, description = written(tmp_path, {"before": torch.ones(5), "x": whole})
    with PartReader(path, description) as reader:
        for box in data.draw(st.lists(boxes(shape), min_size=1, max_size=8)):
            out = data.draw(placed(box.sizes, torch.float32 if cast else torch.float64))
            reader.read_box("x", box, out, cast=cast)
            assert_same(out, whole[box.slices].to(out.dtype))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.t()[:3]])
def test_tensors_of_several_blocks_are_read_whole_and_in_parts(tmp_path, view):
    tensor = view(torch.rand(1500, 1001))
    path, description = written(tmp_path, {"x": tensor, "y": torch.ones(3, dtype=torch.bool)})
    assert len(description.tensors["x"].hashes) == -(-tensor.nbytes // BLOCK)
    rows, columns = tensor.shape
    with PartReader(path, description) as reader:
        assert torch.equal(reader.tensor("x"), tensor)
        for box in (Box((1, 0), (rows - 2, columns)), Box((0, columns // 2), (rows, 1)), Box((1, 2), (2, columns - 5))):
            out = torch.empty(box.sizes)
            reader.read_box("x", box, out)
            assert torch.equal(out, tensor[box.slices])


def test_it_is_a_safetensors_file_for_every_reader(tmp_path):
    given = {f"a {name} tensor": blank((2, 3), dtype) for name, dtype in DTYPES.items()}
    given["0-d"] = torch.tensor(7)
    given["empty"] = torch.empty(0, 4)
    path, description = written(tmp_path, given)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(given)
        for key, tensor in given.items():
            found = file.get_tensor(key)
            if tensor.dtype not in SAFETENSORS_DTYPES:
                assert found.dtype == torch.uint8
                assert found.shape == (*tensor.shape, tensor.itemsize)
                found = (
                    found.view(tensor.dtype).squeeze(-1) if tensor.itemsize == 1 else found.view(tensor.dtype)[..., 0]
                )
            assert_same(found, tensor)
            assert DTYPES[description.tensors[key].dtype] == tensor.dtype
            assert description.tensors[key].offset % tensor.itemsize == 0


def test_nothing_to_write_is_a_file_too(tmp_path):
    path, description = written(tmp_path, {})
    with PartReader(path, description) as reader:
        assert reader.stored.tensors == {}
    with safetensors.safe_open(path, "pt") as file:
        assert list(file.keys()) == []


def test_the_description_says_where_everything_lies(tmp_path):
    path, description = written(tmp_path, {"b": torch.tensor([1, 2], dtype=torch.int16), "a": torch.ones(2, 0)})
    assert description.name == path.name
    assert description.nbytes == path.stat().st_size
    assert description.header_bytes % 64 == 0
    end = description.header_bytes
    assert description.tensors["a"] == StoredTensor("float32", (2, 0), end, 0, ())
    assert description.tensors["b"].offset == end
    assert path.read_bytes()[end:] == b"\x01\x00\x02\x00"


# What cannot be written


class Subclass(torch.Tensor):
    pass


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make, found",
    [
        (lambda: torch.empty(2, device="meta"), r"'x' is on the meta device\. Give it its data first"),
        (freed, r"'x' is freed memory\. Give it its data"),
        (lambda: torch.eye(2).to_sparse(), r"'x' is of the layout torch\.sparse_coo\. Take its components"),
        (lambda: torch.ones(2).as_subclass(Subclass), r"'x' is a Subclass\. .* save it as an Opaque entry"),
        (lambda: nn.Parameter(torch.ones(2).as_subclass(Subclass)), r"'x' is a Subclass"),
        (lambda: torch._nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)]), r"'x' is nested"),
        (
            lambda: torch._empty_affine_quantized((2,), scale=1.0, zero_point=0, dtype=torch.qint8),
            r"'x' is of the dtype torch\.qint8, whose scales lie elsewhere",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_plain_memory_is_refused_before_anything_is_written(tmp_path, make, found):
    with pytest.raises(CheckpointError, match=rf"plain, dense tensors with their data, but {found}"):
        write_part(tmp_path / NAME, {"good": torch.ones(1), "x": make()})
    assert list(tmp_path.iterdir()) == []


def test_the_name_that_the_format_keeps_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'__metadata__' is a name that the format keeps .* another name"):
        write_part(tmp_path / NAME, {"__metadata__": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_refused_and_stays(tmp_path):
    path = tmp_path / NAME
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"cannot be written: File exists.*rank-00000"):
        write_part(path, {"x": torch.ones(1)})
    assert path.read_text() == "mine"


def test_writes_that_the_system_cuts_short_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 3 + 1]))
    path, description = written(tmp_path, {"x": torch.arange(1000)})
    with PartReader(path, description) as reader:
        assert torch.equal(reader.tensor("x"), torch.arange(1000))


@pytest.mark.parametrize("function", ["write", "fsync"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_leaves_no_file(tmp_path, monkeypatch, function, error):
    def fail(*args):
        assert list(tmp_path.iterdir()) == [tmp_path / NAME]
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(type(error)) as caught:
        write_part(tmp_path / NAME, {"x": torch.ones(1000)})
    if isinstance(error, OSError):
        assert caught.value.errno == 5
        assert "cannot be written: Input/output error. What was saved there is untouched. Make room" in str(
            caught.value
        )
        assert str(tmp_path / NAME) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


FULL = """
    import os, resource, sys, torch
    from pathlib import Path
    from accel_checkpoint.files.part_file import write_part
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_003, 1_000_003))
    try:
        write_part(Path(sys.argv[1]), {"x": torch.ones(1_000_000)})
    except OSError as error:
        print(error)
"""


def test_a_full_disk_leaves_no_file_and_is_said(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(tmp_path / NAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "[Errno 27] cannot be written: File too large. What was saved there is untouched. Make room" in done.stdout
    assert NAME in done.stdout
    assert list(tmp_path.iterdir()) == []


# Damage


def read_everything(path, description):
    """The keys of tensors that are damaged."""
    damaged = []
    with PartReader(path, description) as reader:
        for key, tensor in description.tensors.items():
            try:
                read(reader, key, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]))
            except CheckpointError as error:
                damaged.append((key, str(error)))
    return damaged


def test_every_flipped_byte_is_found_and_named(tmp_path):
    given = {"a": torch.arange(5.0), "b": torch.tensor(3, dtype=torch.int16), "c": torch.rand(3, 3).bfloat16()}
    path, description = written(tmp_path, given)
    content = path.read_bytes()
    assert read_everything(path, description) == []
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        if position < description.header_bytes:
            with pytest.raises(CheckpointError, match=rf"{NAME}: the header has the hash .* {description.header_hash}"):
                PartReader(path, description)
            continue
        ((key, message),) = read_everything(path, description)
        tensor = description.tensors[key]
        assert tensor.offset <= position < tensor.offset + tensor.nbytes
        assert f"{NAME}: the bytes of {key!r} from 0 to {tensor.nbytes - 1} have the hash" in message
        assert f"the checkpoint says {tensor.hashes[0]}: the file is damaged. Load another checkpoint." in message


@pytest.mark.parametrize("out", [torch.zeros(3, 8), torch.zeros(8, 3).t(), torch.zeros(3, 8).double()])
def test_only_blocks_that_are_read_are_verified_and_no_others_are_read(small_blocks, tmp_path, out):
    path, description = written(tmp_path, {"x": torch.arange(64.0).view(8, 8)})  # two rows a block
    with path.open("r+b") as file:
        file.seek(description.tensors["x"].offset + 5 * 32)
        file.write(b"?")  # in the sixth row
    with PartReader(path, description) as reader:
        reader.read_box("x", Box((0, 0), (3, 8)), out, cast=True)
        assert torch.equal(out.float(), torch.arange(24.0).view(3, 8))
        for begin in (2, 3, 4, 5):
            with pytest.raises(CheckpointError, match=r"the bytes of 'x' from 128 to 191 have the hash"):
                reader.read_box("x", Box((begin, 0), (3, 8)), out, cast=True)
        reader.read_box("x", Box((2, 0), (2, 8)), out[:2], cast=True)
        assert torch.equal(out[:2].float(), torch.arange(16.0, 32.0).view(2, 8))


def test_a_file_of_another_size_is_refused(tmp_path):
    path, description = written(tmp_path, {"x": torch.ones(3)})
    content = path.read_bytes()
    for changed in (content[:-1], content + b"\0", b""):
        path.write_bytes(changed)
        with pytest.raises(
            CheckpointError, match=f"{NAME}: the file has {len(changed)} bytes, and the checkpoint says {len(content)}"
        ):
            PartReader(path, description)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    path, description = written(tmp_path, {"x": torch.ones(3)})
    with PartReader(path, description) as reader:
        os.truncate(path, description.nbytes - 1)
        with pytest.raises(CheckpointError, match="the file became shorter while it was read. Load another"):
            reader.tensor("x")


def test_a_missing_file_is_named(tmp_path):
    path, description = written(tmp_path, {"x": torch.ones(3)})
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"cannot be read: No such file .* load another .*{NAME}"):
        PartReader(path, description)


def test_what_the_disk_does_not_give_is_an_error_of_the_system(tmp_path):
    path, description = written(tmp_path, {"x": torch.ones(3)})
    with pytest.raises(
        NotADirectoryError, match=r"cannot be read: Not a directory\. Repair .* or load another.*inside"
    ):
        PartReader(path / "inside", description)
    (tmp_path / "folder").mkdir()
    size = (tmp_path / "folder").stat().st_size
    with pytest.raises(CheckpointError, match="folder was to be read, but it is no regular file. Load another"):
        PartReader(tmp_path / "folder", StoredFile("folder", size, size, "0" * 32, {}))


# What does not fit


def test_what_does_not_fit_is_refused_and_stays(tmp_path):
    path, description = written(tmp_path, {"x": torch.ones(3, 2)})
    with PartReader(path, description) as reader:
        out = torch.zeros(2, 3)
        with pytest.raises(CheckpointError, match=r"\[0:3, 0:2\] of 'x', float32 \(3, 2\), .* into .*float32 \(2, 3\)"):
            read(reader, "x", out)
        with pytest.raises(
            CheckpointError, match=r"\[2:4, 0:3\] of 'x', .* is to be read into torch\.float32 \(2, 3\)"
        ):
            reader.read_box("x", Box((2, 0), (2, 3)), out)
        half = torch.zeros(3, 2, dtype=torch.float16)
        with pytest.raises(CheckpointError, match=r"'x', float32 \(3, 2\), is to be read into torch\.float16"):
            read(reader, "x", half)
        with pytest.raises(CheckpointError, match="'x' is on the meta device"):
            read(reader, "x", torch.empty(3, 2, device="meta"))
        assert not out.any()
        assert not half.any()
        read(reader, "x", half, cast=True)
        assert half.all()


def test_parameters_are_read_in_place_whatever_the_mode(tmp_path):
    given = {"x": torch.rand(4, 4), "y": torch.rand(4, 4), "z": torch.rand(4, 4)}
    path, description = written(tmp_path, {**given, "x": nn.Parameter(given["x"])})
    model = nn.ParameterDict({"x": torch.zeros(4, 4), "y": torch.zeros(4, 4).t(), "z": torch.zeros(4, 4).double()})
    places = {name: parameter.data_ptr() for name, parameter in model.items()}
    with PartReader(path, description) as reader:
        jobs = [lambda key=key: read(reader, key, model[key], cast=True) for key in model]
        read_all(jobs, threads=2)
        for name, parameter in model.items():
            assert torch.equal(parameter.float(), given[name])
            assert parameter.data_ptr() == places[name]
            assert parameter.is_leaf
            assert parameter.requires_grad
        with torch.inference_mode():
            assert not reader.tensor("x").is_inference()


# Descriptions that lie


def changed(description, path, value):
    """A description as JSON in which the member at `path` is `value`."""
    description = json.loads(json.dumps(description.to_json()))
    *outer, last = path
    place = description
    for key in outer:
        place = place[key]
    place[last] = value
    return description


LIES = [
    (["nbytes"], 99, r"ValueError: 'rank-00000\.safetensors' has 99 bytes, and its last tensor ends at \d+"),
    (["header_bytes"], 0, r"'\w' begins at byte \d+ of .*, and what is before it ends at 0"),
    (["header_bytes"], 1.5, r"has a header of 1\.5 bytes"),
    (["header_bytes"], 1 << 30, r"has a header of 1073741824 bytes"),
    (["header_hash"], "00", r"with the hash '00'"),
    (["tensors"], [], r"AttributeError: .*items"),
    (["more"], 1, r"TypeError: .*unexpected keyword argument 'more'"),
    (["tensors", "a"], {}, r"KeyError: 'shape'"),
    (["tensors", "a", "dtype"], "qint8", r"'a' is of the dtype 'qint8', which torch 2.* does not have"),
    (["tensors", "a", "dtype"], ["float32"], r"TypeError: .*unhashable"),
    (["tensors", "a", "dtype"], "float64", r"'a' has 24 bytes, and 48 by its shape and dtype"),
    (["tensors", "a", "shape"], [3, 3], r"'a' has 24 bytes, and 36"),
    (["tensors", "a", "shape"], [-2, -3], r"'a' has the shape \[-2, -3\]"),
    (["tensors", "a", "shape"], 6, r"TypeError: .*not iterable"),
    (["tensors", "a", "offset"], 0, r"'a' begins at byte 0 of .*, and what is before it ends at \d+"),
    (["tensors", "a", "offset"], -1, r"from byte -1 on"),
    (["tensors", "b", "offset"], 10**6, r"'b' begins at byte 1000000"),
    (["tensors", "a", "hashes"], [], r"'a' has not one hash for each of 1 blocks: \(\)"),
    (["tensors", "a", "hashes"], ["0" * 32] * 2, r"'a' has not one hash for each of 1 blocks"),
    (["tensors", "a", "hashes"], ["../"], r"'a' has not one hash .*: \('\.\./',\)"),
]  # fmt: skip


def refused(name, value):
    """How `Index.read` words what it catches of a description."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)) as caught:
        StoredFile.from_json(name, value)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("path, value, found", LIES)
def test_a_description_that_cannot_be_true_is_refused(tmp_path, path, value, found):
    _, description = written(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(3)})
    assert re.search(found, refused(NAME, changed(description, path, value)))


def test_tensors_that_overlap_are_refused(tmp_path):
    _, description = written(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(2, 3)})
    first = description.tensors["a"].offset
    said = refused(NAME, changed(description, ["tensors", "b", "offset"], first))
    assert f"'b' begins at byte {first} of" in said
    assert said.endswith(f"ends at {first + 24}")


@pytest.mark.parametrize("value", [None, [], "text", {}])
def test_what_is_no_description_is_refused(value):
    assert refused(NAME, value)


@pytest.mark.parametrize("name", ["", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "x\n"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    _, description = written(tmp_path, {"a": torch.ones(1)})
    assert refused(name, description.to_json()) == f"ValueError: {name!r} is no name of a file, without a folder"


# Jobs


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_jobs_run_once_each_and_no_thread_is_left(threads):
    done = []
    before = threading.active_count()
    read_all([lambda number=number: done.append(number) for number in range(50)], threads)
    assert sorted(done) == list(range(50))
    assert threading.active_count() == before
    read_all([], threads)


def test_jobs_run_at_the_same_time():
    both = threading.Barrier(2, timeout=10)
    read_all([both.wait, both.wait])


def test_the_error_of_a_job_is_raised_and_no_other_begins_while_an_earlier_one_goes_on():
    begun = []

    def job(number):
        begun.append(number)
        if number == 0:
            time.sleep(0.5)
        if number == 1:
            raise CheckpointError("the second")

    with pytest.raises(CheckpointError, match="the second"):
        read_all([lambda number=number: job(number) for number in range(500)])
    assert begun == [0, 1]


# Memory


def growth(action):
    """By how many MiB the peak of the process grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    action()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


def extra_memory(folder):
    rows, columns = torch.ones(6000, 4000), torch.ones(4000, 6000).t()  # 92 MiB each
    found = {}
    for name, tensor in {"rows": rows, "columns": columns}.items():
        path = folder / name
        found[f"write {name}"] = growth(lambda path=path, tensor=tensor: write_part(path, {"x": tensor}))
    with PartReader(path, write_part(folder / "again", {"x": rows})) as reader:
        found["read rows"] = growth(lambda: read(reader, "x", rows))
        found["read columns"] = growth(lambda: read(reader, "x", columns))
        found["read half"] = growth(lambda: reader.read_box("x", Box((0, 2000), (6000, 2000)), rows[:, :2000]))
    for path in folder.iterdir():
        path.unlink()
    return found


def test_no_tensor_is_copied_whole(tmp_path):
    (found,) = run_ranks(extra_memory, 1, tmp_path)
    assert all(mib <= 16 for mib in found.values()), found
