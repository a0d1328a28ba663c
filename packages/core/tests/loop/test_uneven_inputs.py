"""Ranks that end at different batches, on real gloo ranks under DDP: to the end, equal afterwards, and nothing left behind."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator
from accel_core.contract.loader_progress import Feed
from accel_core.loop.uneven_inputs import evenness
from accel_testing import RanksFailed, run_ranks

LENGTHS = (5, 3, 0)
Values = dict[str, Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def state(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten().float() for value in model.state_dict().values()])


def same_everywhere(accelerator: Accelerator, value: torch.Tensor) -> bool:
    first, *others = accelerator.gather(value[None])
    return all(first.equal(other) for other in others)


def plain_join(accelerator: Accelerator) -> torch.Tensor:
    """What torch's own wrapper and context make of the same batches."""
    rank = accelerator.process_index
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(), Join([model]):
        for batch in batches(rank, LENGTHS[rank]):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model.module)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int) -> None:
    for batch in batches(accelerator.process_index, count):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()


def uneven_ranks() -> Values:
    accelerator, found = Accelerator(cpu=True), {}
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1))
    filters = list(warnings.filters)
    with accelerator.join_uneven_inputs([model]):
        found["the feed says so"] = accelerator._feed.joining
        train(accelerator, model, optimizer, LENGTHS[accelerator.process_index])
    found["all ranks have the same model"] = same_everywhere(accelerator, state(bare))
    found["it is the one that torch's Join gives"] = bool(torch.allclose(state(bare), plain_join(accelerator)))
    found["the feed is as before"] = not accelerator._feed.joining
    found["the filters of warnings are as before"] = list(warnings.filters) == filters
    with torch.no_grad():  # a forward that communicated would hang
        found["a forward on one rank alone communicates nothing"] = accelerator.process_index != 1 or model.eval()(
            torch.ones(4, 3)
        ).shape == (4, 1)
    model.train()
    train(accelerator, model, optimizer, 2)
    found["training goes on"] = same_everywhere(accelerator, state(bare)[:16])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_5_3_and_0_batches_train_to_the_end(size: int) -> None:
    for found in run_ranks(uneven_ranks, size):
        assert [what for what, holds in found.items() if not holds] == []


def moments_and_rates() -> Values:
    accelerator, found = Accelerator(cpu=True), {}
    bare = net()
    optimizer = torch.optim.Adam(bare.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(bare, optimizer, scheduler)
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for batch in batches(accelerator.process_index, LENGTHS[accelerator.process_index]):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    found["rates"] = scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.1 * 0.5**10]
    found["steps"] = {int(each["step"]) for each in optimizer.state.values()} == {10}
    train(accelerator, model, optimizer, 3)
    found["parameters stay equal over the even steps that follow"] = same_everywhere(
        accelerator, nn.utils.parameters_to_vector(bare.parameters()).detach()
    )
    return found


def test_optimizers_and_schedulers_are_those_of_the_rank_that_went_on_longest() -> None:
    assert (
        run_ranks(moments_and_rates, 3)
        == [{"rates": True, "steps": True, "parameters stay equal over the even steps that follow": True}] * 3
    )


def accumulating() -> tuple[bool, int, list[str], bool]:
    """Windows of two: rank 0 closes two of them and opens a third, rank 1 closes one and opens another."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1, momentum=0.9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model]):
            train(accelerator, model, optimizer, LENGTHS[accelerator.process_index])
    dropped = all(parameter.grad is None or not parameter.grad.any() for parameter in bare.parameters())
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    train(accelerator, model, optimizer, 4)
    return same_everywhere(accelerator, state(bare)[:16]), accelerator.step, said, dropped


def test_windows_close_by_count_and_an_open_one_is_dropped_with_a_warning() -> None:
    for rank, (equal, step, said, dropped) in enumerate(run_ranks(accumulating, 3)):
        assert equal
        assert step == 0
        assert dropped
        if LENGTHS[rank] % 2:
            assert "ended inside a window of accumulation on this rank: 1 of 2" in said[0]
        else:
            assert said == []


def interrupted() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1))
    with pytest.raises(KeyError, match="mine"), accelerator.join_uneven_inputs([model], even_batches=False):
        train(accelerator, model, optimizer, 1)
        raise KeyError("mine")
    feed = accelerator._feed
    found = [feed.joining is False, feed.even_batches is None]
    train(accelerator, model, optimizer, 1)
    with (
        pytest.raises(RuntimeError, match="forward_backward.. counts its window"),
        accelerator.join_uneven_inputs([model]),
    ):
        accelerator.forward_backward(model, [torch.ones(4, 3)], lambda output, batch: (output.sum(), 4))
    return [*found, same_everywhere(accelerator, state(bare)[:16])]


def test_exception_inside_passes_through_and_everything_is_as_before() -> None:
    assert run_ranks(interrupted, 2) == [[True] * 3] * 2


def refusals() -> list[str]:
    accelerator, said = Accelerator(cpu=True), []
    for joinables, even_batches in (([net()], None), ([], 1)):
        with pytest.raises(TypeError) as caught, accelerator.join_uneven_inputs(joinables, even_batches):  # type: ignore[arg-type]
            raise AssertionError("not reached")
        said.append(str(caught.value))
    with accelerator.join_uneven_inputs([], even_batches=False):
        said.append(f"{accelerator._feed.even_batches} {accelerator._feed.joining}")
    return said


def test_what_cannot_join_is_refused_and_nothing_at_all_is_fine() -> None:
    for first, second, third in run_ranks(refusals, 2):
        assert "was given a Sequential, which cannot join" in first
        assert "even_batches=True" in first
        assert "even_batches=1 is a int: expected True or False" in second
        assert third == "False False"


def compiled() -> bool:
    accelerator = Accelerator(cpu=True)
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1))
    outer = torch.compile(model, backend="eager")
    with accelerator.join_uneven_inputs([outer]):
        train(accelerator, model, optimizer, 1 + accelerator.process_index)
    return same_everywhere(accelerator, state(bare))


def test_model_inside_a_compiled_one_joins() -> None:
    assert run_ranks(compiled, 2) == [True, True]


def test_nested_blocks_restore_what_was_asked_for_outside() -> None:
    feed = Feed()
    with evenness(feed, False, joining=True):
        with evenness(feed, True, joining=False):
            assert (feed.even_batches, feed.joining) == (True, False)
        assert (feed.even_batches, feed.joining) == (False, True)
    assert (feed.even_batches, feed.joining) == (None, False)


def test_while_ranks_may_end_apart_the_end_of_a_loader_closes_no_window() -> None:
    feed = Feed()
    passage = feed.enter()
    passage.advance(0)
    feed.joining = True
    assert feed.begin_step() is None
    feed.joining = False
    passage.advance(0)
    assert feed.begin_step() == 0


def test_alone_only_even_batches_acts_and_the_loop_is_plain() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = net()
    loader = DataLoader(TensorDataset(torch.ones(3, 3)), batch_size=1)
    model, loader = accelerator.prepare(bare, loader)
    with accelerator.join_uneven_inputs([model], even_batches=True):
        assert (accelerator._feed.even_batches, accelerator._feed.joining) == (True, False)
        for _ in loader:
            with accelerator.accumulate(model):
                pass
    assert accelerator.step == 0


def fails_alone() -> None:
    accelerator = Accelerator(cpu=True)
    bare = net()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), 0.1))
    with accelerator.join_uneven_inputs([model]):
        if accelerator.process_index == 1:
            raise KeyError("only I")
        train(accelerator, model, optimizer, 1)


def test_rank_that_fails_inside_is_named_on_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fails_alone, 2)
    first, second = caught.value.reports
    assert "rank 1 failed: KeyError: 'only I'" in first.traceback + first.output
    assert "KeyError: 'only I'" in second.traceback
