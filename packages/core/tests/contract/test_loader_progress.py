"""The feed: which iterator counts, in every kind of loop."""

from __future__ import annotations

import gc

from accel_core.contract.loader_progress import PASSED, Feed, Rows


def test_an_iterator_that_advanced_reports_what_remains() -> None:
    feed = Feed()
    passage = feed.enter()
    passage.advance(3)
    assert feed.begin_step() == 3


def test_an_idle_iterator_says_only_that_it_is_at_its_end() -> None:
    """Several micro-batches of one batch."""
    feed = Feed()
    passage = feed.enter()
    passage.advance(1)
    assert [feed.begin_step(), feed.begin_step()] == [1, None]  # how many are to come of this batch, nobody knows
    passage.advance(0)
    assert [feed.begin_step(), feed.begin_step()] == [0, 0]
    passage.leave()
    assert feed.begin_step() is None


def test_zipped_iterators_stay_at_the_end_of_the_shorter_one() -> None:
    feed = Feed()
    shorter, longer = feed.enter(), feed.enter()
    for left in (1, 0):
        shorter.advance(left)
        longer.advance(left + 5)
        seen = [feed.begin_step(), feed.begin_step()]
    assert seen == [0, 0]


def test_an_iterator_inside_of_one_at_its_end_counts_alone() -> None:
    feed = Feed()
    outer = feed.enter()
    outer.advance(0)
    inner = feed.enter()
    inner.advance(2)
    assert feed.begin_step() == 2
    inner.leave()
    assert feed.begin_step() == 0  # the rest of the body of the outer loop


def test_an_iterator_that_is_held_at_its_end_closes_no_window_of_a_later_loop() -> None:
    feed = Feed()
    held = feed.enter()
    held.advance(0)
    later = feed.enter()
    later.advance(5)
    assert [feed.begin_step(), feed.begin_step()] == [5, None]
    assert held.remaining == 0


def test_zipped_iterators_end_with_the_shorter_one() -> None:
    feed = Feed()
    longer, shorter = feed.enter(), feed.enter()
    longer.advance(9)
    shorter.advance(1)
    longer.advance(8)
    shorter.advance(0)
    assert feed.begin_step() == 0


def test_advancing_forgets_an_iterator_that_was_entered_later_and_left_behind() -> None:
    """An evaluation loop that was broken out of, its iterator still referenced."""
    feed = Feed()
    training = feed.enter()
    training.advance(5, Rows(4, 4))
    evaluation = feed.enter()
    evaluation.advance(0, Rows(2, 1))
    training.advance(4, Rows(4, 4))
    assert feed.begin_step() == 4
    assert feed.current_rows() == Rows(4, 4)
    evaluation.leave()
    assert feed.begin_step() is None


def test_an_iterator_that_died_is_forgotten() -> None:
    """A loop that was broken out of on its last batch must not close every later window."""
    feed = Feed()
    passage = feed.enter()
    passage.advance(0)
    del passage
    gc.collect()
    assert feed.begin_step() is None


def test_metrics_refer_to_the_innermost_live_iterator() -> None:
    feed = Feed()
    outer, inner = feed.enter(), feed.enter()
    outer.advance(1, Rows(8, 8))
    inner = feed.enter()
    inner.advance(1, Rows(3, 2))
    assert feed.current_rows() == Rows(3, 2)
    inner.leave()
    assert feed.current_rows() == Rows(8, 8)


def test_metrics_refer_to_a_batch_whose_iterator_is_dead() -> None:
    """`gather_for_metrics(next(iter(loader)))`."""
    feed = Feed()
    passage = feed.enter()
    passage.advance(0, Rows(5, 4))
    passage.leave()
    assert feed.current_rows() == Rows(5, 4)


def test_an_iterator_that_was_forgotten_comes_back_when_it_advances() -> None:
    feed = Feed()
    outer = feed.enter()
    outer.advance(7)
    inner = feed.enter()
    inner.advance(3)
    outer.advance(6)
    inner.advance(2)
    assert feed.begin_step() == 2


def two_epochs_beside_a_kept_iterator(steps_per_batch: int) -> list[list[int | None]]:
    """What remains, by epochs of four batches, with an iterator of a second loader that lasts."""
    feed, kept, seen = Feed(), None, []
    for _ in range(3):
        passage = feed.enter()
        seen.append([])
        for left in (3, 2, 1, 0):
            passage.advance(left)
            kept = kept or feed.enter()
            kept.advance(20)
            seen[-1] += [feed.begin_step() for _ in range(steps_per_batch)]
        passage.leave()
    return seen


def test_an_epoch_beside_an_iterator_that_is_kept_over_several_ends() -> None:
    # In the first batch it may be an evaluation that was broken out of, or the loop inside of the other.
    assert two_epochs_beside_a_kept_iterator(1) == [[20, 2, 1, 0]] * 3
    assert two_epochs_beside_a_kept_iterator(2) == [[20, None, 2, None, 1, None, 0, 0]] * 3


def test_an_iterator_of_which_a_batch_is_evaluated_now_and_then_does_not_count() -> None:
    feed = Feed()
    training = feed.enter()
    training.advance(9)
    assert feed.begin_step() == 9
    evaluation = feed.enter()
    for left in (7, 5, 3, 1):
        evaluation.advance(0)
        training.advance(left)
        assert feed.begin_step() == left
        training.advance(left - 1)
        assert feed.begin_step() == left - 1


def test_a_batch_that_was_filled_up_is_none_for_metrics_once_its_loop_has_ended_and_its_samples_stay_known() -> None:
    feed = Feed()
    full, filled = Rows(4, 4), Rows(4, 3)
    for rows, now in ((full, full), (filled, PASSED)):
        passage = feed.enter()
        passage.advance(0, rows, [1, 2, 3, 1])
        passage.leave(ended=True)
        assert feed.current_rows() is now
        assert feed.current_drawn() == [([1, 2, 3, 1], rows)]


def test_a_loop_inside_that_has_ended_leaves_the_batch_outside() -> None:
    feed = Feed()
    outer, outside, inside = feed.enter(), Rows(2, 1), Rows(4, 3)
    outer.advance(1, outside)
    inner = feed.enter()
    inner.advance(0, inside)
    inner.leave(ended=True)
    assert feed.current_rows() is outside
    outer.advance(0, outside)
    outer.leave()  # by a break
    assert feed.current_rows() is outside
