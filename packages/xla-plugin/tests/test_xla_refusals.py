"""What is asked for and cannot be is an error that says what to type. None of this needs torch_xla."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import Accelerator, NotInstalledError, PrecisionPolicy, Rows, World, WorldError
from accel_testing import run_ranks
from accel_xla import XLA, engine, strategy
from accel_xla.batches import Batches
from accel_xla.engine import warn_of_fallbacks


def test_xla_without_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else find_spec(name))
    with pytest.raises(
        NotInstalledError, match=r"torch_xla is not installed.*pip install torch==2\.9\.0 torch_xla==2\.9\.0"
    ):
        Accelerator(strategy="xla")
    assert str(XLA.unusable()).startswith("torch_xla is not installed, beside torch")  # which `accel plugins` shows


def test_xla_with_a_torch_that_does_not_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec, version = importlib.util.find_spec, importlib.metadata.version
    found: Any = lambda name: object() if name == "torch_xla" else find_spec(name)
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.7.1" if name == "torch_xla" else version(name))
    with pytest.raises(
        NotInstalledError, match=r"torch_xla 2\.7\.1 needs torch 2\.7, but this is torch 2\..*torch==2\.9\.0"
    ):
        Accelerator(strategy="xla")


@pytest.mark.parametrize("shard", [0, -2, True, 1.5, "all"])
def test_number_of_devices_that_none_can_be(shard: Any) -> None:
    with pytest.raises(ValueError, match=r"XLA\(shard=.*\): expected how many devices share a parameter"):
        XLA(shard)


def two_processes() -> str:
    strategy.check_installed = lambda: None  # type: ignore[assignment]  # as on a host that has it
    try:
        Accelerator(strategy="xla", cpu=True)
    except WorldError as error:
        return str(error)
    return ""


def test_two_processes_on_one_host() -> None:
    for message in run_ranks(two_processes, 2):
        assert "2 processes run on this host" in message
        assert "python script.py" in message


def test_processes_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "check_installed", lambda: None)
    world: Any = SimpleNamespace(local_size=1, size=2, source="torchrun")
    with pytest.raises(
        WorldError, match=r"2 processes run \(torchrun\), each on a host of its own.*never run.*one host"
    ):
        XLA().layout(world)


def an_engine(devices: int, kind: str = "CPU") -> Any:
    """A stand-in for an engine, which is asked for the number of its devices, and told what to divide."""
    marked: list[Any] = []
    return SimpleNamespace(
        devices=devices,
        kind=kind,
        device=torch.device("cpu"),
        marked=marked,
        mark=lambda tensor, spec: marked.append((tuple(tensor.shape), spec)),
        is_marked=lambda tensor: False,
    )


def test_cpu_that_is_asked_for_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "check_installed", lambda: None)
    monkeypatch.setattr(strategy, "Engine", lambda shard: an_engine(8, "TPU"))
    with pytest.raises(
        WorldError, match=r"cpu=True was asked for, and strategy 'xla' computes on 8 TPU devices.*PJRT_DEVICE=CPU"
    ):
        Accelerator(strategy="xla", cpu=True)


class Loader:
    """Stands for a loader, of which the rows of full batches are noted."""


def test_batch_that_does_not_divide_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"A batch has 6 rows, and the mesh 4 devices.*batch_size that 4 divides"):
        Batches(an_engine(4)).place(torch.zeros(6, 2), Rows(6, 6), 3, Loader())


def test_last_batch_gets_the_shape_of_the_others_and_says_what_is_real() -> None:
    batches, loader = Batches(an_engine(4)), Loader()
    batches.place({"x": torch.zeros(8, 2)}, Rows(8, 8), 1, loader)
    batch, rows = batches.place({"x": torch.arange(3.0)}, Rows(3, 3), 0, loader)
    assert batch["x"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows == Rows(8, 3)


def test_only_batch_is_filled_up_to_the_mesh() -> None:
    batch, rows = Batches(an_engine(4)).place([torch.arange(5), "text", torch.tensor(1.0)], None, 0, Loader())
    assert batch[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows == Rows(8, 5)


def test_one_device_gets_batches_as_they_are() -> None:
    batches, loader = Batches(an_engine(1)), Loader()
    batches.place(torch.zeros(8, 2), Rows(8, 8), 1, loader)
    batch, rows = batches.place(torch.zeros(3, 2), Rows(3, 3), 0, loader)
    assert len(batch) == 3
    assert rows == Rows(3, 3)


def test_batch_without_tensors_is_given_out_as_it_is() -> None:
    assert Batches(an_engine(4)).place(["a", "b"], Rows(2, 2), 1, Loader()) == (["a", "b"], Rows(2, 2))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PrecisionPolicy(compute=torch.float16), "float16 was asked for.*mixed_precision='bf16'"),
        (PrecisionPolicy(reduce=torch.bfloat16), "travel in torch.bfloat16.*Leave reduce out"),
        (PrecisionPolicy(param=torch.bfloat16, reduce=torch.float32), "travel in torch.float32.*Leave reduce out"),
    ],
)
def test_precision_that_does_not_hold(policy: PrecisionPolicy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy._check_policy(policy)


def a_request(**options: Any) -> Any:
    return SimpleNamespace(**{"compile_options": None, "policy": PrecisionPolicy(), "device": None, **options})


def test_model_that_is_to_be_compiled_by_dynamo() -> None:
    with pytest.raises(ValueError, match="dynamo_backend was given, and strategy 'xla' compiles every model by itself"):
        XLA().prepare_model(torch.nn.Linear(2, 2), [], a_request(compile_options={}))


def test_model_that_is_not_on_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "place_model", lambda model, request: None)
    with pytest.raises(ValueError, match=r"Linear was prepared without device placement, and 'weight' is on 'cpu'"):
        XLA().prepare_model(torch.nn.Linear(2, 2), [], a_request())


def test_operations_that_xla_lacks_are_named() -> None:
    with pytest.warns(UserWarning, match=r"operations that XLA lacks: linalg_eig \(2 times\).*Replace them"):
        warn_of_fallbacks({"aten::linalg_eig": 2})


def test_backward_before_the_first_accelerator() -> None:
    class Loss:
        def backward(self) -> None:
            raise RuntimeError("device.index() < device_ready_queues_.size() INTERNAL ASSERT FAILED")

    loss: Any = Loss()
    with pytest.raises(RuntimeError, match="ran a backward before its first Accelerator.*before anything is trained"):
        XLA().backward(loss, 1.0, {})


def test_another_error_of_a_backward_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        XLA().backward(torch.zeros(()), 1.0, {})


def test_world_of_the_cpu_alone_says_so() -> None:
    assert World.current(cpu=True).cpu_only
    assert engine.NEWEST.count(".") == 2
