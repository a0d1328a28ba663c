"""Windows: when they close, and what each micro-batch weighs."""

from __future__ import annotations

import pytest

from accel_core.contract.loader_progress import Feed
from accel_core.loop.accumulation import Accumulation


class Models:
    def __init__(self) -> None:
        self.factors: list[float] = []

    def rescale(self, factor: float) -> None:
        self.factors.append(factor)


def epoch(window: Accumulation, feed: Feed, batches: int, known: bool = True) -> list[tuple[bool, float]]:
    """Runs one loop; per micro-batch whether it closed the window, and its weight."""
    passage = feed.enter()
    seen = []
    for index in range(batches):
        passage.advance(batches - index - 1 if known else None)
        closes = window.enter()
        seen.append((closes, window.weight))
        window.leave()
    passage.leave()
    return seen


def test_the_last_window_is_shorter_and_averages_over_what_is_in_it() -> None:
    """Ten batches, accumulation 4: three updates, the last over two."""
    models, feed = Models(), Feed(4)
    window = Accumulation(4, feed, models.rescale)
    seen = epoch(window, feed, 10)
    assert [closes for closes, _ in seen] == [False, False, False, True] * 2 + [False, True]
    assert [weight for _, weight in seen] == [0.25] * 8 + [0.5] * 2
    assert models.factors == []


def test_without_a_prepared_loader_windows_are_full() -> None:
    models, feed = Models(), Feed(3)
    window = Accumulation(3, feed, models.rescale)
    assert [closes for closes, _ in epoch(window, feed, 5, known=False)] == [False, False, True, False, False]
    assert window.open


def test_a_window_that_was_left_open_goes_on_with_the_next_loop() -> None:
    models, feed = Models(), Feed(4)
    window = Accumulation(4, feed, models.rescale)
    passage = feed.enter()
    passage.advance(20)
    window.enter()
    window.leave()
    passage.leave()
    assert [closes for closes, _ in epoch(window, feed, 4)] == [False, False, True, True]
    assert models.factors == []


def test_a_loader_shorter_than_the_rest_of_the_window_closes_it_and_rescales_what_is_pending() -> None:
    models, feed = Models(), Feed(4)
    window = Accumulation(4, feed, models.rescale)
    passage = feed.enter()
    passage.advance(20)
    window.enter()
    window.leave()
    passage.leave()
    assert epoch(window, feed, 2) == [(False, 0.25), (True, 1 / 3)]
    assert models.factors == [pytest.approx(4 / 3)]


def test_sync_with_dataloader_false_ignores_the_ends_of_loaders() -> None:
    models, feed = Models(), Feed(4)
    window = Accumulation(4, feed, models.rescale, sync_with_dataloader=False)
    assert [closes for closes, _ in epoch(window, feed, 6)] == [False, False, False, True, False, False]


def test_one_step_never_asks_the_feed() -> None:
    models, feed = Models(), Feed(1)
    window = Accumulation(1, feed, models.rescale)
    assert epoch(window, feed, 3) == [(True, 1.0)] * 3


def test_a_loop_that_counts_itself_holds_back_and_lets_go() -> None:
    models, feed = Models(), Feed(1)
    window = Accumulation(1, feed, models.rescale)
    window.hold(True)
    window.count_backward()
    assert window.open
    assert window.is_pending(settled=-1)  # what was gathered is not cleared
    window.hold(False)
    assert not window.open
    assert not window.lacks_backward(settled=-1)
    assert window.enter()  # a block behind it is a window of its own
