"""The device works behind the host: streams, events, copies, memory and errors are those of an asynchronous one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_toydevice  # noqa: F401  (gives torch the device)

POISONED = torch.full((4,), 0xCB, dtype=torch.uint8).view(torch.float32).item()


@pytest.fixture(autouse=True)
def _quiet():
    """A device that has done everything before and after, and no waits counted."""
    torch.accelerator.synchronize()
    torch.toy.reset_waits()
    yield
    torch.toy.release()
    torch.toy.set_sync_debug_mode("default")
    torch.accelerator.synchronize()


def filled(value, size=1000):
    tensor = torch.full((size,), float(value), device="toy")
    torch.accelerator.synchronize()
    return tensor


def test_the_host_goes_on_while_the_device_stands_still():
    with torch.toy.held():
        x = torch.ones(3, device="toy") * 2
        x = torch.nn.functional.softmax(x, 0).cumsum(0)
        assert x.shape == (3,)
        assert torch.toy.queued() > 2
    torch.testing.assert_close(x.cpu(), torch.tensor([1 / 3, 2 / 3, 1.0]))


def test_a_stream_works_in_order():
    x = torch.zeros(1, device="toy")
    with torch.toy.held():
        for _ in range(100):
            x.mul_(1.01).add_(1)
    expected = torch.zeros(1)
    for _ in range(100):
        expected.mul_(1.01).add_(1)
    torch.testing.assert_close(x.cpu(), expected)


def test_streams_wait_for_events_and_for_nothing_else():
    first, second = torch.Stream(device="toy"), torch.Stream(device="toy")
    event = torch.Event(device="toy", enable_timing=True)
    end = torch.Event(device="toy", enable_timing=True)
    x = filled(0)
    with first:
        event.record()
        torch.toy._sleep(0.2)
        x.fill_(1)
        end.record()
    assert event.query() or not end.query()
    with second:
        unrelated = torch.ones(1, device="toy")
        second.synchronize()
        assert not end.query()  # the other stream did not hold this one up
        second.wait_event(end)
        seen = x.clone()
    second.synchronize()
    assert seen.unique().tolist() == [1.0]
    assert unrelated.tolist() == [1.0]
    assert event.elapsed_time(end) > 150
    assert torch.accelerator.current_stream().stream_id == 0


def test_a_stream_that_does_not_wait_reads_what_is_not_written_yet():
    x, side = filled(0), torch.Stream(device="toy")
    torch.toy._sleep(0.2)
    x.fill_(1)
    with side:
        early = x.clone()
    assert early.unique().tolist() == [0.0]


def test_events_can_be_asked_and_waited_for():
    event = torch.Event(device="toy")
    assert event.query()  # never recorded
    with torch.toy.held():
        filled_later = torch.ones(1, device="toy")
        event.record()
        assert not event.query()
        assert not torch.accelerator.current_stream().query()
    event.synchronize()
    assert event.query()
    assert filled_later.tolist() == [1.0]


def test_the_module_offers_what_torch_asks_of_one():
    stream = torch.toy.Stream(device="toy", priority=-1)
    with torch.toy.stream(stream):
        assert torch.toy.current_stream() == stream
    with torch.toy.stream(None):
        assert torch.toy.current_stream() == torch.toy.default_stream()
    torch.toy.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.toy.set_stream(torch.toy.default_stream())
    assert torch.toy.get_device_properties(0) != torch.toy.get_device_properties(1)
    torch.toy.synchronize()
    torch.toy.empty_cache()


def test_a_copy_from_pinned_memory_is_read_when_its_turn_comes():
    pinned, pageable = torch.zeros(4).pin_memory(), torch.zeros(4)
    with torch.toy.held():
        late, staged = pinned.to("toy", non_blocking=True), pageable.to("toy", non_blocking=True)
        pinned.fill_(5)
        pageable.fill_(5)
    assert (late.tolist(), staged.tolist()) == ([5.0] * 4, [0.0] * 4)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_to_the_host_that_does_not_block_is_late(pinned):
    target = torch.zeros(4, pin_memory=pinned)
    x = filled(3, 4)
    torch.toy.reset_waits()
    with torch.toy.held():
        target.copy_(x, non_blocking=True)
        assert target.tolist() == [0.0] * 4
    assert torch.toy.waits() == {}
    torch.accelerator.synchronize()
    assert target.tolist() == [3.0] * 4


def test_memory_is_pinned_where_torch_is_asked_to():
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(3).pin_memory()[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    [(batch,)] = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=4, pin_memory=True)
    assert batch.is_pinned()
    assert batch.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.ones(3, device="toy").to("cpu", non_blocking=True).is_pinned()


def test_pinned_memory_is_not_given_away_before_the_device_has_read_it():
    with torch.toy.held():
        copies = [torch.full((1000,), float(i)).pin_memory().to("toy", non_blocking=True) for i in range(20)]
        again = [torch.full((1000,), -1.0).pin_memory() for _ in range(20)]
    assert [copy.unique().tolist() for copy in copies] == [[float(i)] for i in range(20)]
    assert len(again) == 20


def test_memory_that_another_stream_uses_unsaid_is_poisoned_under_it():
    for said, expected in ((True, 2.0), (False, 2 * POISONED)):
        x, side = filled(1), torch.Stream(device="toy")
        with side:
            torch.toy._sleep(0.2)
            doubled = x * 2
        if said:
            x.record_stream(side)
        del x
        another = torch.empty(1000, device="toy")
        side.synchronize()
        assert doubled.unique().tolist() == [expected]
        assert another.unique().tolist() == [POISONED]


def test_memory_may_be_freed_under_a_stream_that_its_own_waits_for_before_it_uses_it_again():
    home, side = torch.Stream(device="toy"), torch.Stream(device="toy")
    with home:
        x = filled(1)
    with side:
        torch.toy._sleep(0.2)
        doubled = x * 2
    del x
    with home:
        home.wait_stream(side)
        another = torch.zeros(1000, device="toy")
    torch.accelerator.synchronize()
    assert doubled.unique().tolist() == [2.0]
    assert another.unique().tolist() == [0.0]


def test_memory_is_used_again_by_its_stream_at_once_and_in_order():
    with torch.toy.held():
        x = torch.ones(1000, device="toy")
        address, doubled = x.data_ptr(), x * 2
        del x
        y = torch.zeros(1000, device="toy")
        assert y.data_ptr() == address
    assert doubled.unique().tolist() == [2.0]
    assert y.unique().tolist() == [0.0]


def test_memory_of_another_stream_comes_back_only_after_it_has_passed():
    side, x = torch.Stream(device="toy"), filled(1, 12345)
    address = x.data_ptr()
    with torch.toy.held():
        with side:
            x.mul_(2)
        x.record_stream(side)
        del x
        assert torch.empty(12345, device="toy").data_ptr() != address
    torch.accelerator.synchronize()
    assert address in {torch.empty(12345, device="toy").data_ptr(), filled(0, 12345).data_ptr()} | {
        tensor.data_ptr() for tensor in [torch.empty(12345, device="toy") for _ in range(4)]
    }


def test_what_is_not_written_yet_holds_poison():
    assert torch.empty(4, device="toy").tolist() == [POISONED] * 4


def test_statistics_count_tensors_and_what_is_kept_for_others():
    torch.accelerator.empty_cache()
    before, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    x = torch.empty(1000, device="toy")
    assert torch.accelerator.memory_allocated() == before + 4000
    assert torch.accelerator.memory_reserved() == reserved + 4096
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.memory_reserved() == reserved + 4096
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved


def test_a_storage_that_grows_keeps_what_its_stream_will_have_written():
    with torch.toy.held():
        x = torch.ones(4, device="toy")
        x.add_(1)
        x.resize_(8)
        x[4:].fill_(7)
        storage = x.untyped_storage()
        y = torch.ones(4, device="toy")
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(16)
        y.fill_(3)
    assert storage.nbytes() == 32
    assert x.tolist() == [2.0] * 4 + [7.0] * 4
    assert y.tolist() == [3.0] * 4


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=["foreach", "fused", "plain"])
def test_a_step_of_training_waits_for_nothing(options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(36, 3),
    ).to("toy")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    x, y = torch.randn(2, 1, 5, 5, device="toy"), torch.tensor([0, 2], device="toy")
    torch.accelerator.synchronize()
    torch.toy.reset_waits()
    torch.toy.set_sync_debug_mode("error")
    for _ in range(2):
        with torch.autocast("toy", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.toy.waits() == {}


def test_waits_are_counted_by_what_they_are_for():
    x = torch.tensor([1.0, 0.0], device="toy")
    torch.toy.reset_waits()
    x.sum().item()
    x.nonzero()
    x[x > 0]
    x[x > 0] = 1.0
    x.cpu()
    torch.ones(2).to("toy")
    torch.equal(x, x)
    torch.accelerator.synchronize()
    assert torch.toy.waits() == {
        "aten::_local_scalar_dense": 1,
        "aten::nonzero": 1,
        "aten::index.Tensor": 1,
        "copy to the host": 1,
        "copy to the device": 1,
        "aten::equal": 1,
        "synchronize device": 1,
    }
    assert torch.toy.waits(threading.get_native_id()) == torch.toy.waits()
    assert torch.toy.waits(0) == {}


def test_a_wait_can_be_refused_where_it_is_made():
    x = torch.ones(1, device="toy")
    torch.toy.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        x.item()
    torch.accelerator.synchronize()  # asked for in so many words
    with pytest.raises(ValueError, match='"default" or "error"'):
        torch.toy.set_sync_debug_mode("loud")


def test_an_error_of_a_kernel_is_raised_by_the_next_wait_and_once():
    table = torch.ones(3, 2, device="toy")
    torch.nn.functional.embedding(torch.tensor([99], device="toy"), table)
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    torch.nn.functional.embedding(torch.tensor([99], device="toy"), table)
    with pytest.raises(IndexError, match="out of range"):
        table.sum().item()


def test_errors_of_shapes_and_devices_are_raised_by_the_call():
    x = torch.ones(3, device="toy")
    with pytest.raises(RuntimeError, match="size of tensor a"):
        x + torch.ones(2, device="toy")
    with pytest.raises(RuntimeError, match="toy:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="toy:0 and toy:1"):
        torch.dot(x, torch.ones(3, device="toy:1"))
    with pytest.raises(RuntimeError, match=r"_fused_adam"):
        torch._fused_adam_(
            [x], [x], [x.clone()], [x.clone()], [], [torch.ones(())],
            lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


def test_devices_copy_from_each_other_in_the_order_of_both():
    with torch.toy.held():
        x = torch.ones(3, device="toy:0") * 2
        y = x.to("toy:1") + 1
        x.zero_()
    assert y.tolist() == [3.0] * 3


def test_random_numbers_are_drawn_in_the_order_of_the_calls():
    torch.manual_seed(3)
    expected = [torch.rand(4, device="toy").tolist() for _ in range(6)]
    torch.manual_seed(3)
    side = torch.Stream(device="toy")
    drawn = []
    for i in range(6):
        with torch.toy.stream(side if i % 2 else None):
            if i == 0:
                torch.toy._sleep(0.1)
            drawn.append(torch.rand(4, device="toy"))
    assert torch.toy.waits() == {"copy to the host": 6}
    torch.accelerator.synchronize()
    assert [each.tolist() for each in drawn] == expected


def test_dropout_leaves_the_random_numbers_of_the_host_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    torch.nn.functional.dropout(torch.ones(100, device="toy")).cpu()
    assert torch.equal(torch.rand(1), expected)


def test_a_program_may_take_all_it_allocates_many_times_over():
    total = torch.zeros(1, device="toy")
    for i in range(300):
        x = torch.full((100_000,), float(i), device="toy")
        total += x[:1] * 1
    assert total.item() == sum(range(300))
    assert torch.accelerator.memory_reserved() < 2**28
