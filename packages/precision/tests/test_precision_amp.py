"""bf16 and fp16 through the Accelerator: dtypes as declared, and training as in full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from accel_core import Accelerator, AutocastKwargs, CheckpointError
from accel_precision import BF16, FP16, BF16True, FP16True, GradScalerKwargs
from accel_testing import run_ranks
from accel_testing.models import FEATURES, Net, ProbeNet, built, sgd

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-true": torch.bfloat16, "fp16-true": torch.float16}


def batch(step: int = 0, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, FEATURES, generator=generator), torch.randint(3, (size,), generator=generator)


@pytest.mark.parametrize("name", LOW)
def test_the_five_dtypes_are_as_declared(name: str) -> None:
    accelerator = Accelerator(mixed_precision=name)
    model = accelerator.prepare(built(ProbeNet))
    x, index = batch()
    output = model(x, index)
    accelerator.backward(output.mean())
    pure = name.endswith("true")

    assert model.seen == {
        "input": LOW[name] if pure else torch.float32,
        "integers": torch.int64,
        "compute": LOW[name],
    }
    assert output.dtype is torch.float32
    stored = {each.dtype for parameter in model.parameters() for each in (parameter, parameter.grad)}
    assert stored == {LOW[name] if pure else torch.float32}


@pytest.mark.parametrize("kind", [BF16, FP16, BF16True, FP16True])
def test_outputs_are_left_alone_on_request(kind: Any) -> None:
    precision = kind(output_dtype=None, reduce_dtype=torch.bfloat16)
    model = Accelerator(mixed_precision=precision).prepare(built(Net))

    assert model(batch()[0]).dtype in (torch.bfloat16, torch.float16)
    assert precision.policy.reduce is torch.bfloat16


@pytest.mark.parametrize(("name", "inside"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_block_under_autocast_computes_in_the_dtype(name: str, inside: torch.dtype) -> None:
    accelerator = Accelerator(mixed_precision=name)
    layer = nn.Linear(2, 2)

    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype is inside
    with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
        assert layer(torch.ones(1, 2)).dtype is torch.float32
    assert layer(torch.ones(1, 2)).dtype is torch.float32


def test_a_pure_precision_opens_no_autocast() -> None:
    with Accelerator(mixed_precision="bf16-true").autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


class Training:
    """A loop over a fixed stream of batches, from the same weights."""

    def __init__(self, precision: Any, accumulation: int = 1) -> None:
        self.accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation)
        self.model = built(Net)
        self.optimizer = sgd(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 4, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.scheduler
        )
        self.skipped: list[bool] = []
        self.norms: list[float] = []

    def run(self, steps: range, overflow_at: int = -1, clip: float = 1.0) -> Training:
        """`overflow_at`: the step at which the loss of the last rank overflows."""
        for step in steps:
            x, target = (
                part.chunk(self.accelerator.num_processes)[self.accelerator.process_index] for part in batch(step)
            )
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), target)
                if step == overflow_at and self.accelerator.is_last_process:
                    loss = loss * 1e38
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), clip).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.skipped.append(self.accelerator.optimizer_step_was_skipped)
        return self

    def weights(self) -> torch.Tensor:
        model = self.accelerator.unwrap_model(self.model)
        return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", LOW)
def test_training_follows_full_precision(name: str) -> None:
    exact, low = (Training(precision).run(range(8)) for precision in ("no", name))
    tolerance = 0.02 if name.startswith("bf16") else 0.003

    assert low.skipped == [False] * 8
    assert low.norms == pytest.approx(exact.norms, rel=2 * tolerance)
    assert torch.allclose(low.weights(), exact.weights(), atol=tolerance)
    assert not torch.equal(low.weights(), exact.weights())


def test_accumulated_half_batches_train_as_whole_ones_do() -> None:
    class Halves(Training):
        def run(self, steps: range, **_: Any) -> Training:
            for step in steps:
                for x, target in zip(*(part.chunk(2) for part in batch(step)), strict=True):
                    with self.accelerator.accumulate(self.model):
                        self.accelerator.backward(nn.functional.cross_entropy(self.model(x), target))
                        self.optimizer.step()
                        self.optimizer.zero_grad()
            return self

    whole = Training("no").run(range(4), clip=1e6)
    halves = Halves("fp16", accumulation=2).run(range(4))

    assert torch.allclose(whole.weights(), halves.weights(), atol=3e-3)


def test_options_of_scaling_come_as_a_handler() -> None:
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=7)]
    )
    said = str(accelerator.explain())

    assert "compute float16, output float32" in said
    assert "dynamic, 1024 now; times 2 after 7 steps in a row without overflow, times 0.5 after one" in said


def test_a_handler_beside_an_object_is_an_error() -> None:
    with pytest.raises(ValueError, match="GradScalerKwargs"):
        Accelerator(mixed_precision=FP16(), kwargs_handlers=[GradScalerKwargs()])


def test_bf16_leaves_plain_backwards_and_steps_alone() -> None:
    """No hook of the loop is taken over, so nothing has to be scaled, and nothing is saved."""
    training = Training("bf16")
    before = training.weights()
    nn.functional.cross_entropy(training.model(batch()[0]), batch()[1]).backward()
    training.optimizer.step()

    assert not torch.equal(training.weights(), before)
    assert not hasattr(BF16(), "state_dict")


def test_hardware_that_cannot_compute_in_the_dtype_is_refused_when_a_model_is_prepared() -> None:
    precision = BF16True()
    Accelerator(mixed_precision=precision).prepare(built(Net))

    precision._device = torch.device("meta")
    with pytest.raises(ValueError, match=r"BF16True\(\) computes in bfloat16, and meta cannot"):
        precision.convert_model()


def resumed(folder: str) -> torch.Tensor:
    """Three steps, a save, three steps."""
    training = Training(FP16(init_scale=2.0**14, growth_interval=2)).run(range(3))
    training.accelerator.save_state(folder)
    return training.run(range(3, 6)).weights()


def goes_on(folder: str) -> tuple[torch.Tensor, str]:
    """Three steps from what was saved there, by a scale that began elsewhere."""
    training = Training(FP16(init_scale=4.0, growth_interval=2))
    training.accelerator.load_state(folder)
    return training.run(range(3, 6)).weights(), str(training.accelerator.explain())


def test_a_run_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    expected = resumed(str(tmp_path / "saved"))
    found, said = goes_on(str(tmp_path / "saved"))

    assert torch.equal(found, expected)
    assert "dynamic, 65536 now" in said  # 2**14, doubled after two steps, and after four


def test_a_checkpoint_without_a_scale_is_refused(tmp_path: Path) -> None:
    training = Training("bf16").run(range(1))
    training.accelerator.save_state(str(tmp_path / "saved"))

    with pytest.raises(CheckpointError, match="the precision has a state here, and none in the checkpoint"):
        goes_on(str(tmp_path / "saved"))


def on_ranks(folder: str) -> dict[str, Any]:
    """All that needs two ranks, in one launch."""
    found: dict[str, Any] = {"weights": {}}
    for name in ("no", *LOW):
        found["weights"][name] = Training(name).run(range(4)).weights()
    overflow = Training(FP16(init_scale=1024.0))
    overflow.run(range(4), overflow_at=1)
    found["overflow"] = {
        "skipped": overflow.skipped,
        "schedule": overflow.scheduler.last_epoch,
        "said": str(overflow.accelerator.explain()),
        "weights": overflow.weights(),
    }
    found["saved"] = resumed(folder)
    found["resumed"] = goes_on(folder)[0]
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2, str(tmp_path_factory.mktemp("ranks") / "saved"))


@pytest.mark.parametrize("name", ["no", *LOW])
def test_two_ranks_train_as_one_does(two_ranks: Any, name: str) -> None:
    exact = Training("no").run(range(4)).weights()
    tolerance = {"no": 1e-6, "fp16": 3e-3, "fp16-true": 3e-3}.get(name, 0.02)

    for found in two_ranks:
        assert torch.allclose(found["weights"][name], exact, atol=tolerance)
        assert torch.equal(found["weights"][name], two_ranks[0]["weights"][name])


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(two_ranks: Any) -> None:
    for found in (each["overflow"] for each in two_ranks):
        assert found["skipped"] == [False, True, False, False]
        assert found["schedule"] == 3
        assert "dynamic, 512 now" in found["said"]
        assert torch.equal(found["weights"], two_ranks[0]["overflow"]["weights"])


def test_two_ranks_go_on_from_a_checkpoint_bit_by_bit(two_ranks: Any) -> None:
    for found in two_ranks:
        assert torch.equal(found["saved"], found["resumed"])
