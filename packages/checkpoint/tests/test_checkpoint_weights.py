"""Plain weights: files that other libraries load, published so that a full disk or a kill costs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import stat
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from sharded_strategies import Flat, Rows, Uneven
from torch import nn
from weight_reader import read_weights

from accel_checkpoint import WeightGather, flat_range, write_weights
from accel_checkpoint.assembling import BUFFER, Weights
from accel_checkpoint.weights import tensor_files
from accel_checkpoint.weights.saving import parse_size, save, save_weights
from accel_checkpoint.weights.tensor_files import SAFETENSORS_DTYPES
from accel_core import Accelerator, CheckpointError, World
from accel_core.api.layouts import Alias, Box, Elementwise, Opaque, Piece, Replicated
from accel_testing import run_ranks

KB = 1000


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))


def filled(value, tensors=4, elements=250):
    """`tensors` tensors of 1 kB each."""
    return {f"layer{i}.weight": torch.full((elements,), float(value)) for i in range(tensors)}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def parts_of(count, stem="model", suffix=".safetensors"):
    return [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]


def load_bin(folder):
    files = sorted(folder.glob("pytorch_model*.bin"))
    return {name: tensor for file in files for name, tensor in torch.load(file, weights_only=True).items()}


def assert_same(loaded, expected):
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(loaded[name].contiguous().flatten().view(torch.uint8), raw(tensor)), name


def raw(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


# What the files are


def test_small_weights_are_one_file_that_safetensors_loads(tmp_path):
    """Save_model."""
    model = nn.Linear(3, 2)
    write_weights(model.state_dict(), tmp_path / "new" / "folder")
    assert names_in(tmp_path / "new" / "folder") == ["model.safetensors"]
    assert_same(safetensors.torch.load_file(tmp_path / "new" / "folder" / "model.safetensors"), model.state_dict())
    other = nn.Linear(3, 2)
    assert safetensors.torch.load_model(other, tmp_path / "new" / "folder" / "model.safetensors") == (set(), [])


def test_large_weights_are_parts_with_an_index(tmp_path):
    """Sharded safetensors; a reader needs nothing but the index."""
    weights = filled(1, tensors=5)
    write_weights(weights, tmp_path, max_shard_size="2KB")
    assert names_in(tmp_path) == [*parts_of(3), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * KB
    assert list(index["weight_map"]) == list(weights)
    loaded = {}
    for name, part in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / part, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            loaded[name] = file.get_tensor(name)
    assert_same(loaded, weights)


@pytest.mark.parametrize("limit, files", [(4 * KB, 1), (4 * KB - 1, 2), (2 * KB, 2), (KB, 4), (1, 4)])
def test_no_part_is_larger_than_asked_but_for_a_tensor_that_is(tmp_path, limit, files):
    write_weights(filled(1), tmp_path, max_shard_size=limit)
    assert len(list(tmp_path.glob("model*.safetensors"))) == files
    for path in tmp_path.glob("model*.safetensors"):
        held = safetensors.torch.load_file(path)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit


def test_a_tensor_larger_than_the_limit_has_a_file_to_itself(tmp_path):
    weights = {"a": torch.zeros(10), "big": torch.zeros(1000), "b": torch.zeros(10), "empty": torch.zeros(0)}
    write_weights(weights, tmp_path, max_shard_size=100)
    held = [sorted(safetensors.torch.load_file(tmp_path / name)) for name in parts_of(3)]
    assert held == [["a"], ["big"], ["b", "empty"]]


@pytest.mark.parametrize(
    "limit, names", [("10GB", ["pytorch_model.bin"]), ("2KB", parts_of(2, "pytorch_model", ".bin"))]
)
def test_without_safetensors_torch_loads_the_files_as_weights_only(tmp_path, limit, names):
    write_weights(filled(1), tmp_path, max_shard_size=limit, safe_serialization=False)
    index = ["pytorch_model.bin.index.json"] if len(names) > 1 else []
    assert names_in(tmp_path) == sorted([*names, *index])
    assert_same(load_bin(tmp_path), filled(1))


@pytest.mark.parametrize("size, expected", [
    (1, 1), (12345, 12345), ("7B", 7), ("10GB", 10 * 10**9), ("10 GB", 10 * 10**9), (" 1KB ", 1000), ("5MB", 5 * 10**6),
    ("2TB", 2 * 10**12), ("1KiB", 1024), ("1MiB", 2**20), ("3GiB", 3 * 2**30), ("1TiB", 2**40), ("0.5GB", 5 * 10**8),
    ("0.1GB", 10**8),
])  # fmt: skip
def test_sizes_count_as_their_units_say(size, expected):
    """GB = 10⁹ bytes, GiB = 2³⁰, an int is bytes."""
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size", [0, -1, True, 1.5, None, "", "10", "GB", "10Gb", "10gb", "10G", "-1GB", "0GB", "1e3MB", "5PB"]
)
def test_what_is_no_size_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match=r'max_shard_size=.* is not the size of a file\. Pass a positive .* "5GB"'):
        write_weights(filled(1), tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_files_have_the_rights_that_the_user_s_umask_gives(tmp_path):
    before = os.umask(0o022)
    try:
        write_weights(filled(1), tmp_path, max_shard_size="2KB")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}


def test_numpy_is_not_needed(tmp_path):
    script = """
        import sys
        sys.modules["numpy"] = None
        import torch
        from accel_checkpoint import load_checkpoint_in_model, write_weights
        write_weights({"a": torch.ones(2, dtype=torch.bfloat16)}, sys.argv[1])
        model = torch.nn.ParameterDict({"a": torch.zeros(2, dtype=torch.bfloat16)})
        load_checkpoint_in_model(model, sys.argv[1])
        print(model["a"].sum().item())
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "2.0\n"


# What is in them


def some(dtype, shape):
    numbers = torch.randint(0, 2 if dtype == torch.bool else 100, (*shape, dtype.itemsize), dtype=torch.uint8)
    return numbers.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, safe):
    weights = {
        "scalar": some(dtype, ()),
        "odd": some(dtype, (3, 5)),
        "empty": some(dtype, (0,)),
        "none": some(dtype, (2, 0)),
    }
    weights["transposed"] = weights["odd"].t()
    weights["strided"] = some(dtype, (4, 6))[::2, 1::3]
    weights["expanded"] = some(dtype, (1, 3)).expand(2, 3)
    write_weights(weights, tmp_path, safe_serialization=safe)
    assert_same(read_weights(tmp_path) if safe else load_bin(tmp_path), weights)


def test_tensors_of_mixed_dtypes_lie_aligned(tmp_path):
    weights = {
        "a": torch.ones(3, dtype=torch.bool),
        "b": torch.ones(5, dtype=torch.float64),
        "c": torch.ones(1, dtype=torch.int16),
    }
    write_weights(weights, tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in weights.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    assert_same(read_weights(tmp_path), weights)


@pytest.mark.parametrize("safe", [True, False])
def test_conjugate_and_negative_views_are_written_as_what_they_show(tmp_path, safe):
    z = torch.randn(3, dtype=torch.complex64)
    weights = {"z": z, "conj": z.conj(), "imag": z.conj().imag}
    write_weights(weights, tmp_path, safe_serialization=safe)
    assert_same(read_weights(tmp_path) if safe else load_bin(tmp_path), weights)


@pytest.mark.parametrize("safe", [True, False])
def test_overlapping_views_are_each_written_whole_and_bring_no_more_than_themselves(tmp_path, safe):
    table = torch.arange(100_000.0)
    weights = {"head": table[:6], "tail": table[4:10], "same": table[:6].view(2, 3)}
    write_weights(weights, tmp_path, safe_serialization=safe)
    assert_same(read_weights(tmp_path) if safe else load_bin(tmp_path), weights)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", 100])
def test_ties_survive_a_round_trip_and_a_strict_load(tmp_path, safe, limit):
    """`data_ptr` equal, strict load passes."""
    model, other = Tied(), Tied()
    write_weights(model.state_dict(), tmp_path, limit, safe)
    loaded = read_weights(tmp_path) if safe else load_bin(tmp_path)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    other.load_state_dict(loaded, strict=True)
    assert other.head.weight.data_ptr() == other.embedding.weight.data_ptr()
    assert_same(other.state_dict(), model.state_dict())


def test_tied_weights_are_written_once_and_the_other_names_stand_in_the_metadata(tmp_path):
    write_weights(Tied().state_dict(), tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["body.bias", "body.weight", "embedding.weight", "steps"]
        assert json.loads(file.metadata()["aliases"]) == {"head.weight": "embedding.weight"}
    other = Tied()
    assert safetensors.torch.load_model(other, tmp_path / "model.safetensors") == (set(), [])


def test_the_indexes_name_what_the_parts_hold(tmp_path):
    for safe, suffix in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        folder = tmp_path / suffix
        write_weights(Tied().state_dict(), folder, 100, safe)
        index = json.loads((folder / f"{suffix}.index.json").read_text())
        assert ("head.weight" in index["weight_map"]) is not safe
        assert index["metadata"]["total_size"] == 40 * 4 + 16 * 4 + 4 * 4 + 8


@pytest.mark.parametrize("value, message", [
    (torch.empty(2, device="meta"), "1 of 2 tensors are on the meta device and have none: bad. Load or initialise them"),
    (torch.eye(2).to_sparse(), "'bad' has the layout torch.sparse_coo. Call .to_dense() on it."),
    ({"step": 1}, "'bad' is a dict. Make it a whole, plain tensor first, or take it out"),
    (torch.zeros(2, dtype=torch.complex128), "safetensors cannot hold 'bad', whose dtype is torch.complex128. Convert it, or"),
])  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name_before_anything_is_written(tmp_path, value, message):
    with pytest.raises(ValueError) as error:
        write_weights({"good": torch.ones(2), "bad": value}, tmp_path / "new")
    assert message in str(error.value)
    assert not (tmp_path / "new").exists()


def test_tensors_without_memory_of_their_own_are_refused_by_name(tmp_path):
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"'codes' is a Wrapper\. Make it a whole, plain tensor first"):
        write_weights({"codes": torch.ones(2).as_subclass(Wrapper)}, tmp_path)


def test_what_safetensors_cannot_hold_torch_save_can(tmp_path):
    weights = {"a": torch.ones(2, dtype=torch.complex128)}
    write_weights(weights, tmp_path, safe_serialization=False)
    assert_same(load_bin(tmp_path), weights)


# Saving again


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_saving_again_leaves_exactly_the_new_set(tmp_path, before, after, safe):
    """Stale parts go, whatever was there."""
    write_weights(filled(1), tmp_path, 4 * KB // before, safe)
    write_weights(filled(2), tmp_path, 4 * KB // after, safe)
    assert_same(read_weights(tmp_path) if safe else load_bin(tmp_path), filled(2))
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    expected = [f"{stem}{suffix}"] if after == 1 else [*parts_of(after, stem, suffix), f"{stem}{suffix}.index.json"]
    assert names_in(tmp_path) == expected


USERS_OWN = [
    "config.json", "model-00001-of-00002.safetensors.bak", "model.gguf", "my-model-00001-of-00002.safetensors",
    "model-lora.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors", "notes.tmp", "model.safetensors.tmp",
    "model-00001-of-00002.fp16.safetensors",
]  # fmt: skip


def test_the_user_s_files_beside_ours_are_never_touched(tmp_path):
    for name in USERS_OWN:
        (tmp_path / name).write_text(name)
    (tmp_path / "data-1").mkdir()
    for size in (1000, 2000, 10_000, 1000):
        write_weights(filled(1), tmp_path, size)
    for name in USERS_OWN:
        assert (tmp_path / name).read_text() == name
    assert (tmp_path / "data-1").is_dir()


def test_a_killed_save_s_temporary_files_are_swept_by_the_next(tmp_path):
    left = [
        "model.safetensors.0123abcd.tmp",
        "model-00001-of-00002.safetensors.0123abcd.tmp",
        "model.safetensors.index.json.00000000.tmp",
    ]
    for name in [*left, "model.safetensors.mine.tmp"]:
        (tmp_path / name).write_text("x")
    write_weights(filled(1), tmp_path)
    assert names_in(tmp_path) == ["model.safetensors", "model.safetensors.mine.tmp"]


def test_a_path_that_is_a_file_is_refused_and_stays(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(FileExistsError, match="taken"):
        write_weights(filled(1), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("limit, found", [("10GB", "model.safetensors"), ("2KB", "model.safetensors.index.json")])
def test_a_bin_beside_safetensors_is_refused_because_no_reader_would_see_it(tmp_path, limit, found):
    write_weights(filled(1), tmp_path, limit)
    with pytest.raises(
        ValueError, match=rf"which holds {found}: whoever loads .* Pass another directory, or remove it first"
    ):
        write_weights(filled(2), tmp_path, safe_serialization=False)
    assert_same(read_weights(tmp_path), filled(1))


def test_safetensors_beside_a_bin_leave_it_alone(tmp_path):
    write_weights(filled(1), tmp_path, safe_serialization=False)
    write_weights(filled(2), tmp_path)
    assert_same(load_bin(tmp_path), filled(1))
    assert_same(read_weights(tmp_path), filled(2))


def test_what_an_index_that_is_none_names_is_not_replaced(tmp_path):
    write_weights(filled(1), tmp_path, "2KB")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json should be an index of weights"):
            write_weights(filled(2), tmp_path, "2KB")
        assert names_in(tmp_path) == [*parts_of(2), "model.safetensors.index.json"]


def test_a_file_system_without_hard_links_is_served_by_copies(tmp_path, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write_weights(filled(1), tmp_path, "2KB")
    write_weights(filled(2), tmp_path, "2KB")
    assert_same(read_weights(tmp_path), filled(2))
    assert names_in(tmp_path) == [*parts_of(2), "model.safetensors.index.json"]


def save_and_die(folder, at, size):
    """Saves in a process that ends itself just before its `at`-th operation on the file system."""
    operations = ("open", "os.rename", "os.remove", "os.link", "os.mkdir")
    left = iter(range(at, -1, -1))

    def die(event, args):
        if event in operations and str(folder) in str(args[0]) and next(left) == 0:
            os._exit(9)

    sys.addaudithook(die)
    write_weights(filled(2), folder, size)
    os._exit(0)


def save_killed_at_each_operation(folder, before, after):
    """What is found after each kill: 1 the old weights, 2 the new ones; the last save is not killed."""
    found = []
    exit_code = None
    while exit_code != 0:
        write_weights(filled(1), folder, 4 * KB // before)
        child = os.fork()
        if child == 0:
            save_and_die(folder, len(found), 4 * KB // after)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert exit_code in (0, 9)
        loaded = read_weights(folder)
        value = loaded["layer0.weight"][0].item()
        assert_same(loaded, filled(value))
        for index in folder.glob("*.index.json"):
            assert all((folder / part).exists() for part in json.loads(index.read_text())["weight_map"].values())
        found.append(value)
    return found


@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_a_kill_at_any_operation_leaves_one_whole_set(tmp_path, before, after):
    """Never a mixture of two models, and the next save works."""
    (found,) = run_ranks(save_killed_at_each_operation, 1, tmp_path, before, after)
    assert len(found) > 2
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found)
    assert not list(tmp_path.glob("*.tmp"))


# A disk that is full, or cannot be written to

ON_A_SMALL_DISK = """
    set -e
    mkdir -p "$1"
    mount -t tmpfs -o size=64k tmpfs "$1"
    shift
    exec "$@"
"""

FULL = """
    import os, sys, torch
    from pathlib import Path
    from accel_checkpoint.weights.saving import write_weights
    folder, safe, limit = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
    write_weights({"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 1.0)}, folder, limit, safe)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    try:
        write_weights({"a": torch.full((1000,), 2.0), "b": torch.full((100_000,), 2.0)}, folder, limit, safe)
    except OSError as error:
        print(error)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_weights({"a": torch.full((1000,), 3.0), "b": torch.full((1000,), 3.0)}, folder, limit, safe)
"""

READ_ONLY = """
    import os, subprocess, sys, torch
    from pathlib import Path
    from accel_checkpoint.weights.saving import write_weights
    from safetensors.torch import load_file
    folder = Path(sys.argv[1])
    write_weights({"a": torch.full((1000,), 1.0)}, folder)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        write_weights({"a": torch.full((1000,), 2.0)}, folder)
    except OSError as error:
        print(error)
    assert load_file(folder / "model.safetensors")["a"][0] == 1
"""


def on_a_small_disk(tmp_path, script, *args):
    disk = str(tmp_path / "disk")
    command = [sys.executable, "-c", textwrap.dedent(script), disk, *map(str, args)]
    isolated = ["unshare", "--mount", "sh", "-c", textwrap.dedent(ON_A_SMALL_DISK), "sh", disk]
    if subprocess.run([*isolated, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("mounting a small disk needs root and unshare")
    done = subprocess.run([*isolated, *command], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [10**9, 4000])
def test_a_full_disk_costs_nothing_and_is_said(tmp_path, safe, limit):
    """ENOSPC; the files that were there are bit-equal, ours are swept, and the next save works."""
    output = on_a_small_disk(tmp_path, FULL, safe, limit)
    assert (
        "[Errno 28] cannot be written: No space left on device. What was saved there is untouched. Make room" in output
    )
    assert "disk/" in output


def test_a_read_only_disk_costs_nothing_and_is_said(tmp_path):
    output = on_a_small_disk(tmp_path, READ_ONLY)
    assert "[Errno 30] cannot be written: Read-only file system. What was saved there is untouched. Make room" in output


@pytest.mark.parametrize("safe", [True, False])
def test_a_write_that_fails_half_way_leaves_the_set_that_was_there(tmp_path, monkeypatch, safe):
    write_weights(filled(1), tmp_path, "2KB", safe)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fsync(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tensor_files.os, "fsync", fsync)
    with pytest.raises(
        OSError, match=r"\[Errno 5\] cannot be written: Input/output error\. What was saved .* save elsewhere: "
    ):
        write_weights(filled(2), tmp_path, "2KB", safe)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# On several ranks


def save_on_all_ranks(folder):
    world = World.current()
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0 + world.rank)
    save_weights(model, folder / "model", "10GB", True, world)
    there = (folder / "model" / "model.safetensors").exists()
    save_weights(model.state_dict() if world.is_main else {}, folder / "state", 4, True, world)
    return there, read_weights(folder / "model")["weight"][0, 0].item(), sorted(read_weights(folder / "state"))


def test_the_main_process_writes_and_every_rank_finds_it_written(tmp_path):
    assert run_ranks(save_on_all_ranks, 2, tmp_path) == [(True, 1.0, ["bias", "weight"])] * 2


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Refuses(nn.Module):
    def state_dict(self, *args, **kwargs):
        raise Unpicklable("this", "that")


def errors_on_all_ranks(folder):
    world = World.current()
    (folder / "file").touch()
    meta = nn.Linear(1, 1, device="meta")
    plain = nn.Linear(1, 1)
    cases = [(meta, "new", "10GB"), (plain, "file", "10GB"), (plain, "new", "x"), (Refuses(), "new", "10GB")]
    errors = []
    for model, name, size in cases:
        try:
            save_weights(model, folder / name, size, True, world)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    save_weights(plain, folder / "good", "10GB", True, world)
    return errors


def test_an_error_on_the_main_process_is_raised_on_every_rank(tmp_path):
    """All ranks raise the same error."""
    first, second = run_ranks(errors_on_all_ranks, 2, tmp_path)
    assert [name for name, _ in first] == ["ValueError", "FileExistsError", "ValueError", "CheckpointError"]
    assert second == first
    assert "Unpicklable: this and that" in first[3][1]


# What is cut into shards

WIDE = (2, BUFFER // 2)
"""Twice what travels at once in float32, and a row is more than that."""


def everything():
    """What the ranks have together."""
    torch.manual_seed(0)
    tensors = {
        "rows": torch.rand(5, 3),
        "columns": torch.rand(4, 5, dtype=torch.float64),
        "flat": torch.rand(3, 4),
        "wide": torch.rand(WIDE),
        "wide columns": torch.rand(WIDE),
        "there": torch.rand(3),
        "here": torch.rand(3),
        "both": torch.rand(2, 2),
        "number": torch.rand(()),
        "empty": torch.rand(0, 3),
        "flags": torch.rand(6) > 0.5,
        "eight bits": torch.rand(4, 2).to(torch.float8_e4m3fn),
        "conjugate": torch.rand(4, 2, dtype=torch.complex64).conj(),
    }
    return {**tensors, "tied": tensors["rows"], "steps": torch.tensor(3), "steps too": torch.tensor(4)}


def boxes_of(name, shape, rank):
    if name == "flat":
        return flat_range(shape, *((0, 5) if rank == 0 else (5, 12)))
    if name in ("there", "here", "number", "both"):
        holders = {"there": (1,), "number": (1,), "here": (0,), "both": (0, 1)}[name]
        return [Box.whole(shape)] if rank in holders else []
    dim = 1 if "columns" in name else 0
    cut = shape[dim] // 2
    start, size = (0, cut) if rank == 0 else (cut, shape[dim] - cut)
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, size
    return [Box(tuple(offsets), tuple(sizes))]


def presented(rank):
    """What one rank presents of it."""
    found = {}
    for name, tensor in everything().items():
        if name.startswith("steps"):
            found[name] = Replicated(tensor)
        elif name == "tied":
            found[name] = Alias("rows")
        else:
            boxes = boxes_of(name, tuple(tensor.shape), rank)
            pieces = tuple(Piece(box, tensor[box.slices]) for box in boxes)
            found[name] = Elementwise(tuple(tensor.shape), tensor.dtype, pieces)
    return found


def as_if_inside(state):
    return {f"model.{name}": Alias(f"model.{e.of}") if isinstance(e, Alias) else e for name, e in state.items()}


@contextlib.contextmanager
def file_size_limit(nbytes):
    """No file of this process grows beyond `nbytes`: a disk that is full for it alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def said_by(work):
    """The error, and within how many seconds it came."""
    start = time.monotonic()
    with pytest.raises(Exception) as error:
        work()
    return type(error.value).__name__, str(error.value), time.monotonic() - start


def gathered(gathering):
    return gathering.together("get_state_dict()", gathering.all) or {}


def save_shards(folder):
    world = World.current()
    state = presented(world.rank)
    save_weights(WeightGather(state, world), folder / "one", "10GB", True, world)
    save_weights(WeightGather(as_if_inside(state), world, "model."), folder / "parts", 200, True, world)
    save_weights(WeightGather(state, world), folder / "pickled", 10**7, False, world)
    main = gathered(WeightGather(state, world))
    assert_same(main, everything() if world.is_main else {})
    if main:
        assert main["tied"] is main["rows"]
    hooked = Weights(state, world, replicated=False)
    assert_same({name: hooked[name] for name in hooked}, everything())
    alone = gathered(WeightGather({"loose": Alias("rows"), "rows": state["rows"]}, world, "loose"))
    assert_same(alone, {"": everything()["rows"]} if world.is_main else {})


def refuse_shards(folder):
    world = World.current()
    first, state = world.is_main, {"a": presented(world.rank)["rows"]}
    shape = Elementwise((2 + world.rank,), torch.float32, ())
    more = {} if first else {"b": Replicated(torch.zeros(1))}
    gap = {"a": Elementwise((5, 3), torch.float32, state["a"].pieces if first else ())}
    broken = {"a": Elementwise((5, 3), torch.float32, state["a"].pieces if first else (None,))}
    odd = {**state, "odd": Opaque({"step": 1}, "dict")}
    wide = {"a": Elementwise((5, 3), torch.complex128, tuple(Piece(box, d.cdouble()) for box, d in state["a"].pieces))}
    (folder / "file").touch()

    def saving(state, name="new", size="10GB"):
        return said_by(lambda: save_weights(WeightGather(state, world), folder / name, size, True, world))

    found = {
        "shape": saving({"w": shape}),
        "more": saving({**state, **more}),
        "gap": saving(gap),
        "gap, read everywhere": said_by(lambda: Weights(gap, world, replicated=False)["a"]),
        "broken": saving(broken),
        "odd": saving(odd),
        "wide": saving(wide),
        "file": saving(state, "file"),
        "size": saving(state, size="x"),
    }
    save_weights(WeightGather(state, world), folder / "good", "10GB", True, world)
    return found


def save_shards_on_a_full_disk(folder):
    """What was there stays, bit for bit, and the next save works."""
    world = World.current()
    old, state = {"a": Replicated(torch.ones(9)), "b": Replicated(torch.ones(9))}, presented(world.rank)
    save_weights(WeightGather(old, world), folder, 40, True, world)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = []
    for limit in ("10GB", 200):
        with file_size_limit(1 << 20) if world.is_main else contextlib.nullcontext():
            found.append(
                said_by(lambda limit=limit: save_weights(WeightGather(state, world), folder, limit, True, world))
            )
        world.barrier()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        world.barrier()
    save_weights(WeightGather(state, world), folder, 200, True, world)
    return found


def save_under_strategies(folder):
    for strategy in (Rows, Uneven, Flat):
        torch.manual_seed(0)
        model = Tied()
        accelerator = Accelerator(strategy=strategy(), cpu=True)
        called, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(called.module.head(called.module.embedding(torch.arange(10))).sum())
        optimizer.step()
        accelerator.save_model(called, folder / strategy.__name__, max_shard_size=100)
        state = accelerator.get_state_dict(called)
        assert_same(state, model.state_dict() if state else {})
        assert_same(read_weights(folder / strategy.__name__), model.state_dict())


def with_shards(folder):
    save_shards(folder)
    save_under_strategies(folder / "strategies")
    return refuse_shards(folder), save_shards_on_a_full_disk(folder / "full")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, run_ranks(with_shards, 2, folder)


def test_what_is_cut_into_shards_is_written_whole(sharded):
    """Boxes of every kind, on one rank or the other or on both; also as a part of a model, in several files."""
    folder, _ = sharded
    for name in ("one", "parts", "full"):
        loaded = read_weights(folder / name)
        assert_same(loaded, everything())
        assert loaded["tied"].data_ptr() == loaded["rows"].data_ptr()
    assert_same(load_bin(folder / "pickled"), everything())
    assert len(list((folder / "pickled").glob("*.bin"))) > 1


def test_shards_are_split_into_files_and_tied_as_whole_tensors_are(sharded, tmp_path):
    folder, _ = sharded
    for name, size in (("one", "10GB"), ("parts", 200)):
        write_weights(everything(), tmp_path / name, size)
        assert names_in(folder / name) == names_in(tmp_path / name)
        for path in (tmp_path / name).iterdir():
            assert (folder / name / path.name).read_bytes() == path.read_bytes()


REFUSED = {
    "shape": ("CheckpointError", r"the ranks present different ones.*rank 0 has w: float32\[2\]; rank 1 has w: float32\[3\]\. Prep"),
    "more": ("CheckpointError", r"rank 0 has nothing more; rank 1 has b: replicated\. Prepare the same model on every rank"),
    "gap": ("CheckpointError", r"shape \[5, 3\] was to be put together, but .* \[2:5, 0:3\] is missing\. Correct the model_state"),
    "gap, read everywhere": ("CheckpointError", r"\[2:5, 0:3\] is missing"),
    "broken": ("AttributeError", r"'NoneType' object has no attribute 'box' \(on rank 1\)"),
    "odd": ("ValueError", r"'odd' is a dict\. Make it a whole, plain tensor first"),
    "wide": ("ValueError", r"safetensors cannot hold 'a', whose dtype is torch\.complex128"),
    "file": ("FileExistsError", r"File exists \(on rank 0\)"),
    "size": ("ValueError", r"max_shard_size='x' is not the size of a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_shards_that_cannot_be_written_are_refused_alike_on_every_rank(sharded, case):
    folder, ((first, _), (second, _)) = sharded
    kind, message = REFUSED[case]
    assert first[case][:2] == second[case][:2]
    assert first[case][0] == kind
    assert re.search(message, first[case][1])
    assert not (folder / "new").exists() or not list((folder / "new").iterdir())


def test_a_disk_that_is_full_for_the_main_process_is_said_on_every_rank_and_costs_nothing(sharded):
    """Within seconds; `save_shards_on_a_full_disk` compares what was there."""
    _, ((_, first), (_, second)) = sharded
    for mine, other in zip(first, second, strict=True):
        assert mine[:2] == other[:2]
        assert max(mine[2], other[2]) < 10
        assert mine[0] == "OSError"
        assert "[Errno 27] cannot be written: File too large. What was saved there is untouched. Make room" in mine[1]


def save_objects(folder):
    world = World.current()
    target = folder / f"rank{world.rank}"
    save({"a": [1, 2]}, target, world=world)
    save({"a": torch.ones(2)}, f"{target}.safetensors", safe_serialization=True, world=world)
    return target.exists()


def test_save_writes_on_the_main_process_only_and_nobody_waits(tmp_path):
    assert run_ranks(save_objects, 2, tmp_path) == [True, False]
    assert torch.load(tmp_path / "rank0") == {"a": [1, 2]}
    assert_same(safetensors.torch.load_file(tmp_path / "rank0.safetensors"), {"a": torch.ones(2)})
    assert names_in(tmp_path) == ["rank0", "rank0.safetensors"]


def test_save_on_each_node_writes_on_each_local_main_process(tmp_path):
    for rank, local_rank in [(0, 0), (1, 1), (2, 0), (3, 1)]:
        world = SimpleNamespace(rank=rank, is_main=rank == 0, is_local_main=local_rank == 0)
        save(1, tmp_path / f"each{rank}", world=world, save_on_each_node=True)
        save(1, tmp_path / f"main{rank}", world=world)
    assert names_in(tmp_path) == ["each0", "each2", "main0"]


ALONE = SimpleNamespace(is_main=True, is_local_main=True, size=1)


def test_save_replaces_a_file_only_once_the_new_one_is_complete(tmp_path):
    save({"a": 1}, tmp_path / "f", world=ALONE)
    with pytest.raises(Exception, match="lambda"):
        save({"a": lambda: None}, tmp_path / "f", world=ALONE)
    assert torch.load(tmp_path / "f") == {"a": 1}
    save({"a": 2}, tmp_path / "f", world=ALONE)
    assert torch.load(tmp_path / "f") == {"a": 2}
    assert names_in(tmp_path) == ["f"]


def test_save_onto_a_folder_fails_and_leaves_nothing(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        save({"a": 1}, tmp_path / "folder", world=ALONE)
    assert names_in(tmp_path) == ["folder"]


def test_save_keeps_ties_and_serves_as_a_save_function(tmp_path):
    save(Tied().state_dict(), tmp_path / "model.safetensors", safe_serialization=True, world=ALONE)
    loaded = read_weights(tmp_path)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


@pytest.mark.parametrize("obj, found", [([1, 2], r"list: \[1, 2\]"), ({1: torch.ones(1)}, r"dict: \{1: tensor")])
def test_save_as_safetensors_takes_named_tensors_only(tmp_path, obj, found):
    with pytest.raises(
        TypeError, match=rf"takes a mapping from names to tensors, but got {found}.* torch\.save takes any object"
    ):
        save(obj, tmp_path / "f", safe_serialization=True, world=ALONE)
    with pytest.raises(ValueError, match="'n' is a int"):
        save({"n": 1}, tmp_path / "f", safe_serialization=True, world=ALONE)
    assert names_in(tmp_path) == []
