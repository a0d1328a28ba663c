"""Weights are fetched ahead in the order of the pass before; a wrong guess costs a read, never a result."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from collections import deque

import pytest
import torch

from accel_big_model.prefetch import Prefetcher, _use


class Source:
    execution_device = torch.device("cpu")

    def __init__(self, name: str, nbytes: int = 1):
        self.name, self.nbytes = name, nbytes
        self.fetched: list[str] = []  # in which threads
        self.fails = False

    def fetch(self):
        self.fetched.append("ahead" if threading.current_thread() is not threading.main_thread() else "here")
        if self.fails:
            raise OSError(self.name)
        return {"weight": torch.zeros(1), self.name: torch.zeros(1)}

    def note(self, weights):
        return []


def passed(prefetcher: Prefetcher, sources: list[Source]) -> None:
    for source in sources:
        assert list(prefetcher.take(source)) == ["weight", source.name]


def waiting(prefetcher: Prefetcher) -> list[str]:
    for each in prefetcher._ahead:
        each.weights.exception(timeout=10)
    return [each.source().name for each in prefetcher._ahead]


def test_the_second_pass_finds_everything_fetched():
    sources, prefetcher = [Source(name) for name in "abc"], Prefetcher()
    passed(prefetcher, sources)
    assert [source.fetched for source in sources] == [["here"]] * 3
    passed(prefetcher, sources)
    passed(prefetcher, sources)
    waiting(prefetcher)
    assert [source.fetched[1:3] for source in sources] == [["here", "ahead"], ["ahead"] * 2, ["ahead"] * 2]


def test_as_much_is_ahead_as_the_largest_module_has_or_one_module():
    sources, prefetcher = (
        [Source(name, nbytes) for name, nbytes in zip("abcdef", (8, 3, 4, 2, 8, 1), strict=True)],
        Prefetcher(),
    )
    passed(prefetcher, sources)
    found = []
    for source in sources:
        passed(prefetcher, [source])
        found.append("".join(waiting(prefetcher)))
    assert found == ["bc", "cd", "d", "e", "f", "a"]


def test_no_more_than_a_few_small_modules_are_ahead():
    sources, prefetcher = [Source(str(index)) for index in range(40)], Prefetcher()
    passed(prefetcher, [Source("large", 1000), *sources])
    passed(prefetcher, sources[:1])
    assert waiting(prefetcher) == [str(index) for index in range(1, 9)]


def test_another_order_gives_the_same_weights():
    a, b, c = sources = [Source(name) for name in "abc"]
    prefetcher = Prefetcher()
    passed(prefetcher, sources)
    passed(prefetcher, [a, c, b, a, a, b, c, b])


def test_a_module_that_is_called_twice_is_read_for_each_call():
    a, b = Source("a"), Source("b", 5)
    prefetcher = Prefetcher()
    for _ in range(3):
        passed(prefetcher, [a, b, b, a, b])


def test_an_error_of_reading_ahead_is_raised_for_its_module_only():
    sources, prefetcher = [Source(name) for name in "abc"], Prefetcher()
    passed(prefetcher, sources)
    sources[1].fails = True
    passed(prefetcher, sources[:1])
    with pytest.raises(OSError, match="b"):
        prefetcher.take(sources[1])
    sources[1].fails = False
    passed(prefetcher, sources)


def test_a_copy_learns_its_own_order():
    prefetcher = Prefetcher()
    passed(prefetcher, [Source(name) for name in "ab"])
    assert not copy.deepcopy(prefetcher)._next


def test_threads_that_are_in_several_modules_get_their_own_weights():
    """The other thread takes its weights while the first one has looked at what is ahead, and not taken it."""
    sources, prefetcher = [Source(name) for name in "abc"], Prefetcher()
    passed(prefetcher, sources), passed(prefetcher, sources)
    others: list[threading.Thread] = []

    class Looked(deque):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            if not others:
                others.append(threading.Thread(target=prefetcher.take, args=(sources[1],)))
                others[0].start()
                others[0].join(1)  # it cannot come in between; if it can, it is done by then
            return found

    waiting(prefetcher)
    prefetcher._ahead = Looked(prefetcher._ahead)
    assert list(prefetcher.take(sources[0])) == ["weight", "a"]
    others[0].join(20)
    assert not others[0].is_alive()


def test_a_process_that_is_forked_fetches_by_itself():
    sources, prefetcher = [Source(name) for name in "abc"], Prefetcher()
    passed(prefetcher, sources), passed(prefetcher, sources)
    child = multiprocessing.get_context("fork").Process(target=passed, args=(prefetcher, sources))
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0


class Weight:
    """A weight on a device that notes the streams which use it, or one that is made of such."""

    device = torch.device("mps")

    def __init__(self, *parts):
        self.used = []
        for number, part in enumerate(parts):
            setattr(self, f"part{number}", part)
        if parts:
            self.__tensor_flatten__ = lambda: ([f"part{number}" for number in range(len(parts))], None)

    def record_stream(self, stream):
        assert not hasattr(self, "__tensor_flatten__"), "quantised weights know no such operator"
        self.used.append(stream)


def test_the_memory_of_a_weight_lasts_until_the_stream_of_its_call_has_used_it(monkeypatch):
    """That of a quantised one is in its parts."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device.type}")
    parts = Weight(), Weight()
    source, prefetcher = Source("a"), Prefetcher()
    monkeypatch.setattr(source, "fetch", lambda: {"weight": Weight(*parts), "bias": torch.zeros(1)})
    prefetcher.take(source)
    assert [part.used for part in parts] == [["stream of mps"]] * 2
    _use(Weight(Weight(parts[0])))
    assert parts[0].used == ["stream of mps"] * 2
