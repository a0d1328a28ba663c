"""What goes where."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from accel_big_model import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    memory,
)
from accel_big_model import device_map as inner


class Small(nn.Module):
    """236 bytes: 64, 72 and 100."""

    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.fixture(autouse=True)
def any_accelerator(monkeypatch):
    """Limits of accelerators that are not here are taken as they are."""
    for module in (inner, memory):
        monkeypatch.setattr(module, "get_max_memory", dict)


def test_sizes_are_those_of_modules_and_their_parts():
    sizes = compute_module_sizes(Small())
    assert (sizes[""], sizes["linear1"], sizes["linear1.weight"], sizes["batchnorm"]) == (236, 64, 48, 72)


def test_a_dtype_counts_where_it_is_smaller():
    sizes = compute_module_sizes(Small(), dtype=torch.float16, special_dtypes={"linear2.weight": torch.float32})
    assert (sizes["linear1"], sizes["batchnorm"], sizes["linear2"]) == (32, 40, 90)
    assert compute_module_sizes(Small(), buffers_only=True)[""] == 40


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 200, 1: 172, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
        ({0: 200, 1: 100, 2: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 2}),
        ({0: 400}, {"": 0}),
        ({0: 200, "cpu": 300}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
        ({0: 170}, {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}),
    ],
)
def test_places_are_filled_in_their_order_with_room_for_the_largest_layer(limits, expected):
    assert infer_auto_device_map(Small(), limits) == expected


def test_classes_are_not_split():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Small())
    found = infer_auto_device_map(model, {0: 390, 1: 400}, no_split_module_classes=["Small"])
    assert found == {"0.0": 0, "0.1": 1, "1": 1}


def test_modules_that_share_a_weight_go_together_and_count_it_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    assert compute_module_sizes(model)[""] == 80 + 160 + 144 + 16
    assert infer_auto_device_map(model, {0: 300, 1: 400}) == {"0": 0, "3": 0, "1": 1, "2": 1}


def test_fallback_finds_a_module_that_fits():
    """Beside it there is room for the largest layer, which computes there too."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(2, 2))
    plain = infer_auto_device_map(model, {0: 470, "cpu": 2000})
    assert plain == {"": "cpu"}
    found = infer_auto_device_map(model, {0: 470, "cpu": 2000}, fallback_allocation=True)
    assert found == {"2": 0, "0": "cpu", "1": "cpu"}
    assert infer_auto_device_map(model, {0: 450, "cpu": 2000}, fallback_allocation=True) == {"": "cpu"}


def test_buffers_without_room_are_told():
    norms = (nn.BatchNorm1d(100) for _ in range(3))
    model = nn.Sequential(nn.Linear(3, 4), *norms, nn.Linear(20, 20))
    with pytest.warns(
        UserWarning,
        match=r"Buffers of offloaded modules \(2424 bytes\) stay on accelerator 0, which has 1736 bytes.*offload_buffers=True",
    ):
        infer_auto_device_map(model, {0: 1800, "cpu": 50000})


def test_balanced_limits_give_each_accelerator_its_share():
    assert get_balanced_memory(Small(), {0: 200, 1: 200}) == {0: 200, 1: 200}
    assert get_balanced_memory(Small(), {0: 300, 1: 300}) == {0: 215, 1: 300}
    assert get_balanced_memory(Small(), {0: 0, 1: 300, 2: 300}) == {0: 0, 1: 215, 2: 300}
    assert get_balanced_memory(Small(), {0: 0, "cpu": 100}) == {0: 0, "cpu": 100}
    assert get_balanced_memory(Small(), {0: 300, 1: 300}, low_zero=True) == {0: 0, 1: 300}


def test_a_map_has_a_place_for_every_tensor_and_names_only_what_there_is():
    check_device_map(Small(), {"linear1": 0, "batchnorm": 0, "linear2": "cpu"})
    with pytest.raises(ValueError, match=r"gives no place to batchnorm.weight, batchnorm.bias"):
        check_device_map(Small(), {"linear1": 0, "linear2": "cpu"})
    with pytest.raises(ValueError, match=r"names 'linear3', and Small has no such part"):
        check_device_map(Small(), {"": 0, "linear3": "cpu"})


def test_entries_of_one_place_are_joined():
    assert clean_device_map({"a": 0, "b.c": 0, "b.d": 1}) == {"a": 0, "b.c": 0, "b.d": 1}
    assert clean_device_map({"a": 0, "b.c": 1, "b.d": 1}) == {"a": 0, "b": 1}
    assert clean_device_map({"a": 0, "b.c": 0}) == {"": 0}


@pytest.mark.parametrize(
    ("text", "expected"), [("10GiB", 10 << 30), ("10GB", 10**10), ("1.5KiB", 1536), (7, 7), ("300 MB", 3 * 10**8)]
)
def test_sizes_in_text(text, expected):
    assert convert_file_size_to_int(text) == expected


def test_what_is_no_size_is_refused():
    with pytest.raises(
        ValueError, match="'10 gallons' is no size in bytes: write a whole number, or text such as '10GiB'"
    ):
        convert_file_size_to_int("10 gallons")


def test_main_memory_is_what_the_system_has(monkeypatch):
    monkeypatch.undo()
    found = get_max_memory()
    assert 1 << 28 < found["cpu"] < 1 << 50
    assert list(get_max_memory({"cpu": "1GiB", "disk": "2GiB"})) == ["cpu", "disk"]


GROUPS = {
    "version 2": ("0::/jobs/mine", "sys/fs/cgroup", "max", "current"),
    "version 1": ("4:memory:/jobs/mine\n1:cpu:/", "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("limits", "expected"), [({"jobs": 900, "jobs/mine": 700}, 600), ({"jobs": 500}, 400), ({}, None)]
)
def test_main_memory_is_what_every_control_group_around_this_process_allows(
    group, limits, expected, monkeypatch, tmp_path
):
    """Their files are copies: a test makes no control groups of its own."""
    lines, root, limit, used = GROUPS[group]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{lines}\n\n0:odd\n")
    for name in ("jobs", "jobs/mine"):
        folder = tmp_path / root / name
        folder.mkdir(parents=True)
        (folder / f"memory.{limit}").write_text(f"{limits.get(name, 'max' if limit == 'max' else 1 << 62)}\n")
        (folder / f"memory.{used}").write_text("300\n")
        cache = "total_inactive_file" if limit == "limit_in_bytes" else "inactive_file"
        (folder / "memory.stat").write_text(f"anon 100\n{cache} 200\n")  # which gives way
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    found = memory.available_memory()
    assert found == expected if expected is not None else found > 1 << 20


LIMITED = """
import resource
from accel_big_model.memory import available_memory
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
print(available_memory())
"""


def test_main_memory_is_within_the_limit_of_addresses():
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=100, check=True)
    assert 0 <= int(ran.stdout) < 8 << 30


@pytest.mark.parametrize("place", ["meta", "cpuu"])
def test_places_that_are_none_are_refused(place, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"max_memory has a limit on '{place}', which is no place for weights"):
        get_max_memory({place: "1GiB"})
    with pytest.raises(ValueError, match=f"device_map puts 'a' on '{place}', which is no place for weights"):
        check_device_map(nn.ModuleDict({"a": nn.Linear(1, 1)}), {"a": place})


def test_names_of_dtypes_end_in_their_bits():
    assert [dtype_byte_size(each) for each in ("int4", "fp8", torch.bfloat16, torch.bool)] == [0.5, 1, 2, 0.125]
    with pytest.raises(ValueError, match="'half' is no dtype: write one of torch's, or a name that ends in its bits"):
        dtype_byte_size("half")


def test_limits_of_accelerators_that_are_not_here_are_refused(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"limits for accelerators \[1\], and there are 1: leave them out"):
        get_max_memory({0: "1GiB", 1: "1GiB"})


@pytest.mark.parametrize("verbose", [True, False])
def test_decisions_are_told_where_asked_for(verbose, caplog):
    with caplog.at_level("INFO"):
        infer_auto_device_map(Small(), {0: 200, "cpu": 300}, verbose=verbose)
    words = [
        "['linear1'] go to 0: 64 bytes.",
        (
            "batchnorm (72 bytes) does not fit on 0: 36 bytes free, of 200 bytes with 64 bytes used, 100 bytes kept for "
            "linear2, the largest that waits."
        ),
    ]
    assert all((each in caplog.text) is verbose for each in words)


def test_what_stays_on_disk_is_told_with_the_reasons(caplog):
    infer_auto_device_map(Small(), {0: 170, "cpu": 150})
    assert caplog.messages == [
        (
            "batchnorm, linear2 (172 bytes) will be read from disk for each call.\n"
            "  batchnorm (72 bytes) does not fit on 0: 6 bytes free, of 170 bytes with 64 bytes used, 100 bytes kept for "
            "linear2, the largest that waits.\n"
            "  batchnorm (72 bytes) does not fit on 'cpu': 50 bytes free, of 150 bytes with 0 bytes used, 100 bytes kept for "
            "linear2, the largest that waits.\n"
            "Give max_memory= larger limits, or load the weights in a smaller dtype=."
        )
    ]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {0: 90, "cpu": 90},
            r"linear2 \(Linear\) takes 100 bytes, and 'cpu', .* has 90 bytes .* 0 bytes used. Give max_",
        ),
        (
            {"cpu": 0},
            r"linear2 \(Linear\) takes 100 bytes, and 'cpu', .* has 0 bytes for it: a limit of 0 bytes, 0 bytes",
        ),
    ],
)
def test_memory_that_does_not_suffice_for_the_largest_layer_is_refused(limits, message):
    with pytest.raises(ValueError, match=f"The memory does not suffice for the largest layer: {message}"):
        infer_auto_device_map(Small(), limits)


def test_a_class_that_is_kept_whole_and_fits_nowhere_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Small())
    with pytest.raises(ValueError, match=r"1 \(Small\) takes 236 bytes.*leave 'Small' out of no_split_module_classes="):
        infer_auto_device_map(model, {"cpu": 200}, no_split_module_classes="Small")


def test_room_is_kept_where_what_is_offloaded_computes():
    """The first accelerator has too little for any layer, so that it is the second one."""
    found = infer_auto_device_map(Small(), {0: 10, 1: 180, "cpu": 200})
    assert found == {"linear1": 1, "batchnorm": "cpu", "linear2": "cpu"}
    found = infer_auto_device_map(Small(), {0: 10, 1: 200, 2: 180, "cpu": 200})
    assert found == {"linear1": 1, "batchnorm": 2, "linear2": 2}


def test_main_memory_without_a_limit_is_enough_for_every_layer_that_computes_there():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    assert infer_auto_device_map(model, max_memory={0: 30}) == {"": "disk"}
