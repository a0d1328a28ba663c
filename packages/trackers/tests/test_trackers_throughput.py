"""`Throughput`: what is measured in a loop, by whose clock, and what of it reaches the trackers."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_testing import run_ranks
from accel_trackers import Throughput, jsonl, peak_flops, throughput


class Logging(Accelerator):
    """Keeps what it is to log."""

    def __init__(self, **options):
        super().__init__(cpu=True, **options)
        self.logged = []

    def log(self, values, step=None, log_kwargs=None):
        self.logged.append((step, dict(values)))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved: `clock[0] += seconds`."""
    now = [100.0]
    monkeypatch.setattr(throughput, "perf_counter", lambda: now[0])
    return now


def steps(meter, clock, count, *, seconds=0.5, **counted):
    for _ in range(count):
        clock[0] += seconds
        meter.update(**{"samples": 4, **counted})


def test_every_few_optimizer_steps_it_logs_how_fast_they_were(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=5, memory=False)
    steps(meter, clock, 1, seconds=60)
    steps(meter, clock, 9)
    steps(meter, clock, 5, seconds=0.25)
    rates = {"throughput/samples_per_second": 8.0, "throughput/step_seconds": 0.5}
    fast = {"throughput/samples_per_second": 16.0, "throughput/step_seconds": 0.25}
    assert accelerator.logged == [(5, rates), (10, rates), (15, fast)]
    assert meter.values == {"samples_per_second": 16.0, "step_seconds": 0.25}
    assert meter.steps == 15


def test_trackers_record_what_it_logs(clock, tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("speed")
    meter = Throughput(accelerator, every=2)
    seen = []
    for norm in (1.0, 0.5, 0.25, 0.125):
        steps(meter, clock, 1, gradient_norm=torch.tensor(norm), tokens=10)
        seen.append(dict(meter.values))
    accelerator.end_training()
    (file,) = tmp_path.rglob("metrics.jsonl")
    recorded = {record["step"]: record["values"] for record in jsonl.read(file.parent)}
    assert recorded == {
        step: {f"throughput/{name}": float(value) for name, value in seen[step - 1].items()} for step in (2, 4)
    }
    assert recorded[4]["throughput/gradient_norm"] == 0.125


def test_without_trackers_it_serves_progress_bars(clock):
    accelerator = Accelerator(cpu=True)
    meter = Throughput(accelerator, every=2, memory=False)
    assert meter.values == {}
    steps(meter, clock, 2)
    assert meter.values["samples_per_second"] == 8.0


def test_tokens_are_told_where_they_are_counted(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, memory=False, prefix="speed.")
    steps(meter, clock, 4, tokens=100)
    assert accelerator.logged[-1][1]["speed.tokens_per_second"] == 200.0


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(0, {2: 2 / 4, 4: 2 / 2, 6: 2 / 2}), (1, {2: 1.0, 4: 1.0, 6: 1.0}), (3, {4: 1.0, 6: 1.0}), (6, {})],
)
def test_steps_of_the_warm_up_are_not_measured(clock, warmup, expected):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, warmup=warmup, memory=False)
    steps(meter, clock, 1, seconds=3, samples=1)
    steps(meter, clock, 5, seconds=1, samples=1)
    assert {step: values["throughput/samples_per_second"] for step, values in accelerator.logged} == expected


def test_single_steps_can_be_reported(clock):
    accelerator = Logging()
    steps(Throughput(accelerator, every=1, memory=False), clock, 3)
    assert [step for step, _ in accelerator.logged] == [2, 3]


def test_steps_are_windows_of_accumulation_and_all_their_batches_count(clock):
    accelerator = Logging(gradient_accumulation_steps=3)
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(torch.ones(16, 2), batch_size=2)
    )
    inside, behind = (Throughput(accelerator, every=1, memory=False) for _ in range(2))
    for batch in loader:  # eight batches: windows of 3, 3 and 2
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            clock[0] += 1
            inside.update(len(batch))
        behind.update(len(batch))
    assert inside.steps == behind.steps == 3
    values = [each for _, each in accelerator.logged]
    assert [each["throughput/step_seconds"] for each in values] == [3, 3, 2, 2]
    assert {each["throughput/samples_per_second"] for each in values} == {2.0}


def test_the_user_may_say_under_which_step_values_are_logged(clock):
    accelerator = Logging()
    steps(Throughput(accelerator, every=2, memory=False), clock, 4, step=77)
    assert [step for step, _ in accelerator.logged] == [77, 77]


def test_pauses_do_not_count_nor_what_happens_in_them(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, memory=False)
    steps(meter, clock, 3)
    with meter.paused():
        steps(meter, clock, 5, seconds=10)
        with pytest.raises(KeyError), meter.paused():
            clock[0] += 20
            raise KeyError
        clock[0] += 30
    steps(meter, clock, 1)
    assert accelerator.logged[-1] == (4, {"throughput/samples_per_second": 8.0, "throughput/step_seconds": 0.5})


def test_the_gradient_norm_is_passed_on_unread(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, memory=False)
    norm = torch.empty((), device="meta")  # reading it would raise, as it would make the host wait on an accelerator
    steps(meter, clock, 2, gradient_norm=norm)
    assert accelerator.logged[-1][1]["throughput/gradient_norm"] is norm
    steps(meter, clock, 2)
    assert "gradient_norm" not in meter.values


def test_on_the_cpu_memory_is_that_of_the_process(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2)
    steps(meter, clock, 2)
    before = meter.values["memory_gib"]
    assert before * 2**30 == pytest.approx(resident(), rel=0.05)
    held = torch.ones(1 << 26)  # 256 MiB
    steps(meter, clock, 2)
    assert meter.values["memory_gib"] - before == pytest.approx(0.25, abs=0.05)
    assert held.numel()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_left_out_where_nobody_tells_it(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "_PAGES", tmp_path / "none")
    accelerator = Logging()
    meter = Throughput(accelerator, every=2)
    steps(meter, clock, 2)
    assert set(meter.values) == {"samples_per_second", "step_seconds"}


def refuse(*_):
    raise RuntimeError("Allocator for npu is not a DeviceAllocator.")


@pytest.mark.parametrize("own", [False, True], ids=["torch knows its allocator", "its own module counts"])
def test_on_an_accelerator_memory_is_the_peak_since_the_last_report(clock, monkeypatch, own):
    class Elsewhere(Logging):
        device = torch.device("cuda", 1)

    peak = {}

    def reset(device):
        peak[device] = 1 << 30

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: Elsewhere.device)
    if own:
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", refuse)
        module = SimpleNamespace(reset_peak_memory_stats=reset, max_memory_allocated=peak.__getitem__)
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    else:
        monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", reset)
        monkeypatch.setattr(torch.accelerator.memory, "max_memory_allocated", peak.__getitem__)
    accelerator = Elsewhere()
    meter = Throughput(accelerator, every=2)
    steps(meter, clock, 1)
    peak[accelerator.device] = 5 << 30
    steps(meter, clock, 3)
    assert [values["throughput/memory_gib"] for _, values in accelerator.logged] == [5.0, 1.0]


def test_utilisation_is_what_the_model_needs_of_what_the_devices_can_do(clock):
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, flops_per_sample=3e9, peak_flops=96e9, memory=False)
    steps(meter, clock, 2)
    assert meter.values["model_flops_per_second"] == 24e9
    assert meter.values["mfu"] == 0.25


@pytest.mark.parametrize(
    ("precision", "tf32", "peak"),
    [("no", False, 19.5e12), ("no", True, 156e12), ("bf16", False, 312e12), ("fp16-true", True, 312e12)],
)
def test_the_peak_is_that_of_the_device_in_the_precision(clock, monkeypatch, precision, tf32, peak):
    class Here(Logging):
        mixed_precision = precision

    monkeypatch.setattr(peak_flops, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    accelerator, products = Here(), torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32" if tf32 else "ieee"
    try:
        meter = Throughput(accelerator, every=2, flops_per_sample=peak / 16, memory=False)
    finally:
        products.fp32_precision = before
    steps(meter, clock, 2)
    assert meter.values["mfu"] == pytest.approx(0.5)


def test_an_unknown_peak_is_told_where_it_is_needed_and_the_rest_is_measured(clock, monkeypatch):
    accelerator = Logging()
    Throughput(accelerator)
    with pytest.warns(UserWarning, match=r"peak of 'cpu' is not known, so that mfu is left out\..*peak_flops=312e12"):
        meter = Throughput(accelerator, every=2, flops_per_sample=3e9, memory=False)
    steps(meter, clock, 2)
    assert meter.values["model_flops_per_second"] > 0
    assert "mfu" not in meter.values
    monkeypatch.setattr(peak_flops, "device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(Logging, "mixed_precision", "fp8")
    with pytest.warns(
        UserWarning, match="of 'Tesla T4' in the precision 'fp8' is not known; known is float16, float32"
    ):
        Throughput(accelerator, flops_per_sample=1e9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-PCIE-16GB", "v100 pcie"),
        ("NVIDIA A100 80GB PCIe", "a100 pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"),
        ("AMD Instinct MI300A", "mi300a"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_are_known_by_what_torch_calls_them(name, words):
    assert peak_flops.telling_words(name) == words
    assert peak_flops.PEAKS[words]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA RTX 6000 Blackwell",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "AMD Instinct MI250X / MI250",
        "cpu",
    ],
)
def test_parts_and_relatives_of_a_device_are_not_taken_for_it(name):
    assert peak_flops.telling_words(name) not in peak_flops.PEAKS


def test_no_device_is_slower_in_a_narrower_dtype():
    order = ("float32", "tf32", "bfloat16", "float8")
    for device, known in peak_flops.PEAKS.items():
        given = [known[dtype] for dtype in order if dtype in known]
        assert given == sorted(given), device
        assert known["float16"] >= known.get("bfloat16", 0), device
        assert all(1e12 < value < 1e16 for value in known.values()), device


def test_steps_are_counted_on_in_a_run_that_is_resumed(clock, tmp_path):
    first = Logging()
    meter = Throughput(first, every=2, memory=False)
    first.register_for_checkpointing(meter)
    steps(meter, clock, 5)
    first.save_state(tmp_path)

    second = Logging()
    again = Throughput(second, every=2, memory=False)
    second.register_for_checkpointing(again)
    clock[0] += 1000
    second.load_state(tmp_path)
    steps(again, clock, 3, seconds=1)
    assert [(step, values["throughput/step_seconds"]) for step, values in second.logged] == [(8, 1.0)]
    for accelerator in (first, second):
        accelerator.end_training()


def test_it_keeps_no_accelerator_alive():
    accelerator = Logging()
    meter = Throughput(accelerator)
    accelerator.register_for_checkpointing(meter)
    reference = weakref.ref(accelerator)
    gc.collect()
    gc.disable()
    try:
        del accelerator
        assert reference() is None
    finally:
        gc.enable()


def two_ranks():
    accelerator = Logging()
    meter = Throughput(accelerator, every=2, flops_per_sample=1.0, peak_flops=1.0, memory=False)
    for _ in range(4):
        meter.update(samples=8, tokens=80)
    accelerator.end_training()
    return meter.values


@pytest.mark.timeout(60)
def test_totals_are_those_of_all_ranks():
    for values in run_ranks(two_ranks):
        rate = 2 * 8 / values["step_seconds"]
        assert values["samples_per_second"] == pytest.approx(rate)
        assert values["tokens_per_second"] == pytest.approx(10 * rate)
        assert values["mfu"] == pytest.approx(rate / 2)
