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
    assert epoch(window, feed, 2) == [(False, 1 / 3), (True, 1 / 3)]
    assert models.factors == [pytest.approx(4 / 3)]


@pytest.mark.parametrize(
    ("steps", "batches", "parts", "closing"),
    [
        (4, 3, 3, "...S..SSS"),  # nine micro-batches: every one of the last batch closes
        (4, 2, 5, "...S.SSSSS"),
        (8, 1, 3, "SSS"),
        (4, 5, 2, "...S...SSS"),
    ],
)
def test_micro_batches_of_the_last_batch_close_their_windows(
    steps: int, batches: int, parts: int, closing: str
) -> None:
    """No window stays open behind a loop, and each weighs what is in it: the gradient is its mean."""
    feed, gradient, means = Feed(steps), [0.0], []

    class Summing:
        def rescale(self, factor: float) -> None:
            gradient[0] *= factor

    models = Summing()
    window, seen = Accumulation(steps, feed, models.rescale), ""
    for _ in range(2):
        passage = feed.enter()
        for batch in range(batches):
            passage.advance(batches - batch - 1)
            for _ in range(parts):
                closes = window.enter()
                gradient[0] += window.weight
                seen += ".S"[closes]
                window.leave()
                if closes:
                    means.append(gradient.pop())
                    gradient.append(0.0)
        passage.leave()
    assert seen == closing * 2
    assert means == [pytest.approx(1)] * len(means)
    assert not window.open


def test_a_window_that_is_drawn_before_it_is_used_is_whole() -> None:
    models, feed = Models(), Feed(4)
    window, passage, seen = Accumulation(4, feed, models.rescale), feed.enter(), ""
    for drawn, left in ((4, 6), (4, 2), (2, 0)):
        passage.advance(left)
        for _ in range(drawn):
            seen += ".S"[window.enter()]
            window.leave()
    assert seen == "...S...SSS"
    assert models.factors == [pytest.approx(0.75)]  # the second was to be of three: two batches were left


def test_a_window_of_several_micro_batches_of_a_batch_is_resumed() -> None:
    models, feed = Models(), Feed(4)
    window, passage = Accumulation(4, feed, models.rescale), feed.enter()
    passage.advance(1)
    for _ in range(2):
        window.enter()
        window.leave()
    later = Accumulation(4, Feed(4), models.rescale)
    later.load_state_dict(window.state_dict())
    passage = later.feed.enter()
    passage.advance(0)
    for _ in range(2):
        assert later.enter()
        later.leave()
    assert models.factors == [pytest.approx(0.5), pytest.approx(4 / 3)]  # two of two, of four, and then of three


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
