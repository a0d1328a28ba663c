"""`forward_backward`: a window of ragged micro-batches has the gradient of one big batch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from together import Together
from torch import nn
from torch.nn.functional import cross_entropy

from accel_core import Accelerator

IGNORED = -100
ON_TWO = Together(2)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).tanh())


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight sentences of very different lengths; one pair of them is wholly masked."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 11, (8, 12), generator=generator)
    targets = torch.randint(0, 11, (8, 12), generator=generator)
    for row, length in enumerate([12, 1, 7, 2, 0, 0, 11, 3]):
        targets[row, length:] = IGNORED
    return ids, targets


def loss_fn(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    targets = batch[1]
    loss = cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def one_big_batch() -> tuple[float, list[torch.Tensor]]:
    model = Tagger()
    ids, targets = sentences()
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def in_windows(micro_batches: int, twice: bool = False) -> tuple[float, list[torch.Tensor]]:
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    ids, targets = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in sentences())
    window = list(zip(ids.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    loss = accelerator.forward_backward(model, iter(window), loss_fn)
    if twice:
        loss = accelerator.forward_backward(model, window, loss_fn)
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


ON_TWO.add(in_windows, 2)
ON_TWO.add(in_windows, 2, True)


def assert_equal_to_one_batch(found: tuple[float, list[torch.Tensor]], times: int = 1) -> None:
    loss, gradients = one_big_batch()
    assert found[0] == pytest.approx(loss, rel=1e-6)
    for gradient, expected in zip(found[1], gradients, strict=True):
        torch.testing.assert_close(gradient, times * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_micro_batches_weigh_the_tokens_that_they_hold(micro_batches: int) -> None:
    """(batch 8) = (batch 2, accumulation 4); a wholly masked micro-batch is fine."""
    assert_equal_to_one_batch(in_windows(micro_batches))


def test_ranks_weigh_the_tokens_that_they_hold() -> None:
    """(batch 8) = (2 ranks, batch 2, accumulation 2)."""
    for found in ON_TWO.run(in_windows, 2):
        assert_equal_to_one_batch(found)


def without_gradients(precision: str) -> tuple[torch.Tensor, float, bool]:
    """The mean of a window in `no_grad`, that of the same window with gradients, and whether the first left any."""
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    ids, targets = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in sentences())
    window = list(zip(ids.chunk(2), targets.chunk(2), strict=True))

    def rounded(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = loss_fn(output, batch)
        return loss.to(getattr(torch, precision)), weight

    with torch.no_grad():
        mean = accelerator.forward_backward(model, window, rounded)
    left = any(parameter.grad is not None for parameter in model.parameters())
    return mean, accelerator.forward_backward(model, window, rounded).item(), left


ON_TWO.add(without_gradients, "float32")


def test_without_gradients_a_window_is_an_evaluation() -> None:
    for precision in ("float32", "bfloat16"):
        mean, trained, left = without_gradients(precision)
        assert mean.dtype == torch.float32
        assert mean.item() == trained
        assert not left
    for mean, trained, left in ON_TWO.run(without_gradients, "float32"):
        assert mean.item() == pytest.approx(trained, rel=1e-6)
        assert not left


def test_gradients_add_to_those_that_are_there() -> None:
    """Two windows before a step: the correction of the second leaves the first alone."""
    assert_equal_to_one_batch(in_windows(4, twice=True), times=2)
    for found in ON_TWO.run(in_windows, 2, True):
        assert_equal_to_one_batch(found, times=2)


@ON_TWO
def uneven() -> tuple[float, list[torch.Tensor]]:
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    ids, targets = sentences()
    mine = [slice(0, 1), slice(1, 4), slice(4, 6)] if accelerator.process_index == 0 else [slice(6, 8)]
    loss = accelerator.forward_backward(model, [(ids[part], targets[part]) for part in mine], loss_fn)
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def test_ranks_may_have_different_numbers_of_micro_batches() -> None:
    for found in ON_TWO.run(uneven):
        assert_equal_to_one_batch(found)


@ON_TWO
def two_models() -> list[torch.Tensor]:
    accelerator = Accelerator()
    torch.manual_seed(0)
    encoder, decoder = accelerator.prepare(nn.Linear(3, 2), nn.Linear(2, 1))
    x = torch.arange(24.0).view(8, 3).chunk(accelerator.num_processes)[accelerator.process_index]
    accelerator.forward_backward(encoder, x.split(2), lambda out, batch: (decoder(out).pow(2).sum(), len(batch)))
    return [parameter.grad.clone() for model in (encoder, decoder) for parameter in model.parameters()]


def test_every_model_that_the_loss_learns_from_is_weighed_alike() -> None:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(3, 2), nn.Linear(2, 1)
    decoder(encoder(torch.arange(24.0).view(8, 3))).pow(2).mean().backward()
    expected = [parameter.grad for model in (encoder, decoder) for parameter in model.parameters()]
    for found in (two_models(), *ON_TWO.run(two_models)):
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_a_window_that_failed_may_be_repeated() -> None:
    """Half a window leaves nothing behind."""
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    ids, targets = sentences()
    batches = list(zip(ids.chunk(4), targets.chunk(4), strict=True))

    def failing(output: torch.Tensor, batch: Any) -> Any:
        if batch is batches[2]:
            raise MemoryError
        return loss_fn(output, batch)

    with pytest.raises(MemoryError):
        accelerator.forward_backward(model, batches, failing)
    loss = accelerator.forward_backward(model, batches, loss_fn)
    assert_equal_to_one_batch((loss.item(), [parameter.grad for parameter in model.parameters()]))


def test_a_window_steps_and_clears_like_any_other() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = model.head.weight.detach().clone()
    accelerator.forward_backward(model, [sentences()], loss_fn)
    expected = before - model.head.weight.grad
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    torch.testing.assert_close(model.head.weight.detach(), expected)
    assert scheduler.get_last_lr() == [0.5]
    assert model.head.weight.grad is None


def test_a_window_without_any_weight_has_no_mean_and_a_gradient_of_zero() -> None:
    model = Accelerator().prepare(Tagger())
    ids, targets = sentences()
    loss = Accelerator().forward_backward(model, [(ids, torch.full_like(targets, IGNORED))], loss_fn)
    assert loss.isnan()
    assert not model.head.weight.grad.any()


def test_the_mean_of_losses_in_double_precision_is_not_rounded() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1).double())
    x = torch.randn(3, 2, dtype=torch.float64)
    mean = accelerator.forward_backward(model, [x], lambda output, batch: (output.pow(2).sum(), len(batch)))
    assert mean.dtype is torch.float64
    torch.testing.assert_close(mean, model(x).pow(2).sum().detach() / 3, rtol=1e-14, atol=0.0)
    single = accelerator.prepare(nn.Linear(2, 1).bfloat16())
    window = [torch.ones(1, 2, dtype=torch.bfloat16)]
    assert accelerator.forward_backward(single, window, lambda output, _: (output.sum(), 1)).dtype is torch.float32


@pytest.mark.parametrize("batch_type", ["mapping", "tensor", "inputs"])
def test_how_a_model_is_called_with_a_batch(batch_type: str) -> None:
    ids, _ = sentences()
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    batches: dict[str, tuple[Any, Any]] = {
        "mapping": ({"ids": ids}, None),
        "tensor": (ids, None),
        "inputs": ({"text": {"ids": ids}}, lambda batch: ((batch["text"]["ids"],), {})),
    }
    batch, inputs = batches[batch_type]
    assert accelerator.forward_backward(model, [batch], lambda out, _: (out.sum(), 1), inputs).isfinite()


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda out, _: out.sum(), TypeError, r"returned Tensor, expected a tuple \(sum, weight\): .*reduction='sum'"),
        (lambda out, _: (out, 1), ValueError, r"a sum of shape \(8, 12, 11\), expected a scalar tensor. Sum the loss"),
        (lambda out, _: (1.0, 1), ValueError, "a sum of float, expected a scalar tensor"),
    ],
)
def test_what_a_loss_function_must_return(loss: Any, error: type[Exception], message: str) -> None:
    accelerator = Accelerator()
    with pytest.raises(error, match=message):
        accelerator.forward_backward(accelerator.prepare(Tagger()), [sentences()], loss)


def test_gradients_that_were_there_survive_a_loss_function_that_raises() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Tagger())
    accelerator.forward_backward(model, [sentences()], loss_fn)
    before = model.head.weight.grad.clone()
    with pytest.raises(ZeroDivisionError):
        accelerator.forward_backward(model, [sentences()], lambda out, _: 1 / 0)  # type: ignore[arg-type,return-value]
    torch.testing.assert_close(model.head.weight.grad, before)


def test_a_window_needs_a_micro_batch() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="given no micro-batch, and a window has at least one"):
        accelerator.forward_backward(accelerator.prepare(Tagger()), [], loss_fn)


def test_a_window_inside_accumulate_is_refused() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(Tagger())
    with (
        accelerator.accumulate(model),
        pytest.raises(RuntimeError, match=r"a window of accumulate\(\) is open. Take the call out of accumulate\(\)"),
    ):
        accelerator.forward_backward(model, [sentences()], loss_fn)


def test_weights_that_never_come_again_are_not_kept() -> None:
    """Numbers of tokens are new in nearly every window, and a run has millions of them."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))

    def tensors_after(first: int) -> int:
        for tokens in range(first, first + 150):
            accelerator.forward_backward(model, [torch.ones(1, 2)], lambda output, _, n=tokens: (output.sum(), n))
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    begun = tensors_after(1)
    assert tensors_after(1001) - begun < 100
