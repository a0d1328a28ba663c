"""The contract of a loader, as a suite of tests to inherit.

    from accel_testing import LoaderSuite
    from my_package import MyLoader

    class TestMyLoader(LoaderSuite):
        loader = MyLoader

Each test proves one sentence of the contract in `accel_core.contract.hook_specs`, with real ranks,
against what one process reads. It needs pytest and no plugin of it.

What a loader cannot do is declared, with the reason, and then has to fail: a lack that has vanished
is noticed.

    lacks = {"test_an_iterable_dataset_is_read_once[2]": "samples without an index cannot be divided by arithmetic"}

The jobs of one world size share one launch, for fresh ranks are what costs. When a job breaks it (a
rank is stuck, or raises where others do not), the tests of that job fail, and the jobs after it get
another launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, ClassVar

from accel_testing import loader_jobs
from accel_testing.loader_data import BROKEN, CASES, Case, parts_of_teams
from accel_testing.loader_jobs import LoaderJob, LoaderSubject, Reading, Resumption
from accel_testing.shared_launch import Raised
from accel_testing.suite import Suite, require

Told = list[tuple[int, Case, Reading]]


class LoaderSuite(Suite):
    """The tests of a loader component. Subclass it as `Test…`, and set `loader`.

    Attributes:
        loader: the name of an installed loader, or what makes one without arguments: the class, or
            a function at the level of a module, because it is pickled by its name.

    For `worlds`, `lacks`, `cpu`, `patience` and `timeout` see `accel_testing.suite.Suite`.
    """

    loader: ClassVar[str | Callable[[], object]]
    _examined: ClassVar[str] = "loader"
    _jobs = loader_jobs.JOBS

    def test_every_sample_is_counted_once(self, world: int) -> None:
        """`gather_for_metrics` over an epoch gives each sample once; padding does not count."""
        for rank, case, reading in self._told(loader_jobs.sequences, world):
            if reading.counted is not None and not case.drop_last:
                _compare_samples(reading.counted, list(range(case.samples)), f"Of {case} on rank {rank}, metrics")

    def test_batches_of_one_sample_are_divided(self, world: int) -> None:
        """The smallest batch size is one like others."""
        for rank, reading in enumerate(self._facts(loader_jobs.singles, world)):
            what = f"Of 5 samples in batches of one, metrics on rank {rank}"
            require(reading.counted is not None, "Of 5 samples in batches of one, ranks have unequally many batches.")
            _compare_samples(reading.counted, list(range(5)), what)

    def test_metrics_come_in_the_order_of_one_process(self, world: int) -> None:
        """Metrics that are gathered step by step are in the order of the dataset."""
        for rank, case, reading in self._told(loader_jobs.sequences, world):
            found = reading.counted
            require(
                found is None or found == sorted(found),
                f"Of {case} on rank {rank}, metrics came in the order {found}. A global batch is a stretch of the order, "
                f"and rank 0 has the first part of it.",
            )

    def test_a_dropped_tail_is_less_than_a_global_batch(self, world: int) -> None:
        """`drop_last=True` leaves out an incomplete global batch, and nothing is filled up."""
        for rank, case, reading in self._told(loader_jobs.sequences, world):
            if not case.drop_last:
                continue
            rows = {len(batch) for batch in reading.batches}
            require(len(rows) <= 1, f"Of {case}, rank {rank} has batches of {sorted(rows)} rows; expected whole ones.")
            found = [] if reading.counted is None else reading.counted
            once, most = len(set(found)) == len(found), reading.shards * case.batch
            require(
                once and case.samples - most < len(found) <= case.samples,
                f"Of {case} on rank {rank}, {len(found)} samples were read: {found}. Each at most once, and fewer than "
                f"{most} of {case.samples} left out, are expected.",
            )

    def test_all_ranks_have_equally_many_batches(self, world: int) -> None:
        """Also where samples do not divide, so that no rank waits for one that has ended."""
        facts = self._facts(loader_jobs.sequences, world)
        for number, case in enumerate(CASES):
            steps = [len(readings[number].batches) for readings in facts]
            require(len(set(steps)) == 1, f"Of {case}, the ranks have {steps} batches. Fill up, or drop on every rank.")

    def test_len_is_the_number_of_batches(self, world: int) -> None:
        """`len(loader)` on each rank."""
        for rank, case, reading in self._told(loader_jobs.sequences, world):
            require(
                reading.length == len(reading.batches),
                f"Of {case} on rank {rank}, len() said {reading.length}, and {len(reading.batches)} batches came.",
            )

    def test_ranks_of_one_shard_read_the_same(self, world: int) -> None:
        """The part follows the `Shard`, not the rank: tensor-parallel peers read alike."""
        facts = self._facts(loader_jobs.sequences_in_teams, world)
        for number, case in enumerate(CASES):
            shards = facts[0][number].shards
            team = world // shards
            for first in range(0, world, team):
                read = [facts[rank][number].batches for rank in range(first, first + team)]
                require(
                    all(other == read[0] for other in read),
                    f"Of {case}, ranks {first} to {first + team - 1} have one shard of {shards}, and read {read}.",
                )
            for rank in range(world):
                found = facts[rank][number].counted
                if found is not None and not case.drop_last:
                    _compare_samples(
                        found, list(range(case.samples)), f"Of {case} in {shards} shards, rank {rank}'s metrics"
                    )

    def test_an_iterable_dataset_is_read_once(self, world: int) -> None:
        """Its samples have no index and no number; each is counted once, in each epoch."""
        for rank, epochs in enumerate(self._facts(loader_jobs.streams, world)):
            for samples, found in zip((22, 22, 3), epochs, strict=True):
                _compare_samples(found, list(range(samples)), f"Of an iterable dataset on rank {rank}, metrics")

    def test_batches_of_varying_sizes_lose_nothing(self, world: int) -> None:
        """A batch sampler of the user's own, without a `batch_size`."""
        for rank, epochs in enumerate(self._facts(loader_jobs.growing, world)):
            for found in epochs:
                _compare_samples(found, list(range(23)), f"Of batches of varying sizes on rank {rank}, metrics")

    def test_shuffling_gives_each_epoch_an_order_of_its_own(self, world: int) -> None:
        """Each epoch is another permutation; so are those of two loaders, or of two seeds."""
        names = ("epoch 0", "epoch 1", "epoch 2", "epoch 0 of a second loader", "epoch 0 of another seed")
        for rank, found in enumerate(self._facts(loader_jobs.orders, world)):
            for name in names:
                _compare_samples(found[name], list(range(12 * world)), f"In {name} on rank {rank}, metrics")
            _require_distinct({name: found[name] for name in names}, rank)

    def test_the_order_depends_on_seed_and_epoch_alone(self, world: int) -> None:
        """A rebuilt run reads alike, whatever is drawn beside it; all ranks see one order."""
        facts = self._facts(loader_jobs.orders, world)
        for rank, found in enumerate(facts):
            for name in ("epoch 0", "epoch 1"):
                _require_equal(
                    found[f"{name} beside random draws"], found[name], f"{name} of a rebuilt run, rank {rank}"
                )
                _require_equal(found[name], facts[0][name], f"{name} as rank {rank} gathered it, against rank 0")

    def test_set_epoch_repeats_an_epoch(self, world: int) -> None:
        """`loader.set_epoch(1)` gives epoch 1, and after it comes epoch 2."""
        for rank, found in enumerate(self._facts(loader_jobs.orders, world)):
            _require_equal(found["set_epoch(1)"], found["epoch 1"], f"The epoch after set_epoch(1) on rank {rank}")
            following = found["the epoch after set_epoch(1)"]
            _require_equal(following, found["epoch 2"], f"The second epoch after set_epoch(1) on rank {rank}")

    def test_the_order_is_the_same_for_any_number_of_shards(self, world: int) -> None:
        """Dividing the data among fewer changes who reads what, and not the order."""
        divided = self._facts(loader_jobs.orders, world)
        for rank, epochs in enumerate(self._facts(loader_jobs.orders_in_teams, world)):
            for number, found in enumerate(epochs):
                expected = divided[rank][f"epoch {number}"]
                _require_equal(found, expected, f"Epoch {number} of rank {rank}, divided among fewer shards")

    def test_workers_change_nothing_that_is_read(self, world: int) -> None:
        """Without workers, with two, and with two that live on, epochs are the same."""
        for rank, found in enumerate(self._facts(loader_jobs.workers, world)):
            for way, epochs in found.items():
                for number, (epoch, expected) in enumerate(zip(epochs, found["no workers"], strict=True)):
                    _compare_samples(epoch, list(range(12 * world)), f"With {way} on rank {rank}, metrics")
                    _require_equal(epoch, expected, f"Epoch {number} with {way} on rank {rank}")

    def test_workers_draw_by_shard_and_epoch(self, world: int) -> None:
        """Augmentation in workers differs by shard and epoch; ranks of one shard draw alike."""
        facts = self._facts(loader_jobs.draws, world)
        drawn = [
            (f"rank {rank}, epoch {n}", draws)
            for rank, fact in enumerate(facts)
            for n, draws in enumerate(fact["apart"])
        ]
        for (where, draws), (other, others) in combinations(drawn, 2):
            require(
                not set(draws) & set(others),
                f"Workers drew the same random numbers on {where} and on {other}. torch seeds them from the generator of the "
                f"loader: give it one of its own, seeded by accel_core.api.component.derive_seed from its seed, epoch and shard.index.",
            )
        team = world // parts_of_teams(world)
        for rank, fact in enumerate(facts):
            first = rank // team * team
            require(
                fact["in teams"] == facts[first]["in teams"],
                f"Ranks {first} and {rank} have one shard, and their workers drew other random numbers. Derive the seed of the "
                f"workers from the index of the shard, and not from the rank.",
            )

    def test_a_sampler_of_the_users_own_is_followed_or_refused(self, world: int) -> None:
        """Its order and its number of samples, or a `ValueError` that says so on every rank."""
        size = 12 * world
        for rank, found in enumerate(self._facts(loader_jobs.samplers, world)):
            for name, epochs in found.items():
                if isinstance(epochs, Raised):
                    require(
                        epochs.kind == "ValueError" and bool(epochs.message),
                        f"A sampler of the user's ({name}) led to {_words(epochs)} on rank {rank}. Follow it, or raise a ValueError.",
                    )
                    continue
                for epoch in epochs:
                    follows = epoch == list(range(size))[::-1] or name != "from the end"
                    require(
                        follows and len(set(epoch)) == len(epoch) == (size if name == "from the end" else size // 2),
                        f"A sampler of the user's ({name}) over {size} samples was read as {epoch} on rank {rank}. Follow it, or "
                        f"raise a ValueError.",
                    )

    def test_batches_keep_their_structure_on_the_device(self, world: int) -> None:
        """Dicts, tuples, texts and dtypes are as torch collates; tensors are on the device."""
        for rank, batches in enumerate(self._facts(loader_jobs.structures, world)):
            for found, expected in batches:
                require(found == expected, f"On rank {rank} a batch is\n{found}\nand plain torch makes\n{expected}")

    def test_the_users_loader_is_kept_and_left_alone(self, world: int) -> None:
        """The prepared loader keeps class, attributes and workers; the user's is unchanged."""
        for rank, facts in enumerate(self._facts(loader_jobs.belongings, world)):
            lost = [what for what, kept in facts.items() if not kept]
            require(
                not lost, f"On rank {rank} this does not hold: {'; '.join(lost)}. Copy the loader, and change the copy."
            )

    def test_preparing_leaves_the_surroundings_alone(self, world: int) -> None:
        """Random streams and the environment belong to the user."""
        for rank, kept in enumerate(self._facts(loader_jobs.surroundings, world)):
            changed = [name for name, same in kept.items() if not same]
            require(not changed, f"prepare() changed {' and '.join(changed)} on rank {rank}. Restore what you touch.")

    def test_windows_of_accumulation_end_with_the_epoch(self, world: int) -> None:
        """Ten batches by four give windows of 4, 4 and 2, also beside an evaluation."""
        for rank, found in enumerate(self._facts(loader_jobs.windows, world)):
            for name, (steps, closed) in found.items():
                window = loader_jobs.WINDOW
                expected = [*range(window, steps, window), steps]
                require(
                    steps > window and closed == expected,
                    f"With {steps} batches, windows by {window} closed after {closed} of them on rank {rank} ({name}), "
                    f"expected {expected}. Report what remains: feed.enter(), passage.advance() with each batch, "
                    f"passage.leave() at the end.",
                )

    def test_a_run_goes_on_where_its_state_was_taken(self, world: int) -> None:
        """A fresh run that loads a state reads the rest of the epoch, then the next one whole."""
        for rank, found in enumerate(self._facts(loader_jobs.resumptions, world)):
            for stop, resumption in found.items():
                _check_resumption(resumption, f"A state taken {stop}, loaded on rank {rank}")

    def test_each_state_of_an_epoch_is_right(self, world: int) -> None:
        """The second one, one of a resumed epoch, and one that is loaded where it was taken."""
        for rank, found in enumerate(self._facts(loader_jobs.resumptions_again, world)):
            for when, resumption in found.items():
                _check_resumption(resumption, f"A state taken {when}, loaded on rank {rank}")

    def test_skipped_batches_are_left_out(self, world: int) -> None:
        """By `skip_first_batches`, from the beginning of the epoch; the next one is whole."""
        for rank, found in enumerate(self._facts(loader_jobs.skipped, world)):
            for when, (whole, rest, length, following) in found.items():
                expected = whole[0][loader_jobs.SKIPPED :]
                require(
                    rest == expected and length == len(expected),
                    f"Of {whole[0]} {loader_jobs.SKIPPED} batches were to be left out {when}; on rank {rank} {rest} came, and len() "
                    f"said {length}. `skipped` of the source counts from the beginning of the epoch.",
                )
                require(
                    following == whole[1],
                    f"After an epoch of which batches were left out {when}, the next one on rank {rank} is {following}, expected {whole[1]}.",
                )

    def test_a_state_counts_what_was_yielded(self, world: int) -> None:
        """And not what workers have fetched beyond it."""
        for rank, found in enumerate(self._facts(loader_jobs.resumption_with_workers, world)):
            _check_resumption(found, f"A state taken while workers were ahead, loaded on rank {rank}")

    def test_a_state_loads_into_any_number_of_shards(self, world: int) -> None:
        """More or fewer shards go on with the same rest of the epoch."""
        for rank, found in enumerate(self._facts(loader_jobs.carried_states, world)):
            for way, resumption in found.items():
                _check_resumption(resumption, f"A state carried {way} shards, loaded on rank {rank}")

    def test_a_state_of_another_dataset_is_refused(self, world: int) -> None:
        """With a `ValueError` that says so, on every rank."""
        for rank, [raised] in enumerate(self._facts(loader_jobs.foreign_state, world)):
            require(
                raised is not None and raised.kind == "ValueError" and bool(raised.message),
                f"The state of a loader over twice as many samples led to {_words(raised)} on rank {rank}. Keep the length of the "
                f"dataset in the state, and raise a ValueError where it differs.",
            )

    def test_a_prepared_loader_is_not_prepared_again(self, world: int) -> None:
        """The Accelerator that prepared it gives it back, and another one refuses it."""
        for rank, (same, raised) in enumerate(self._facts(loader_jobs.prepared_again, world)):
            require(same, f"prepare() was given a prepared loader again on rank {rank}, and returned another object.")
            require(
                raised is not None and raised.kind == "ValueError" and bool(raised.message),
                f"Preparing the loader of another Accelerator led to {_words(raised)} on rank {rank}. Raise a ValueError: it "
                f"would be divided twice.",
            )

    def test_copies_read_what_the_loader_reads(self, world: int) -> None:
        """A deep copy and a pickle, made before the loader is read, read alike or are refused."""
        for rank, found in enumerate(self._facts(loader_jobs.copies, world)):
            for way, (copied, expected) in found.items():
                if isinstance(copied, Raised):
                    require(bool(copied.message), f"{way} of a prepared loader fails without a word:\n{copied.text}")
                else:
                    _require_equal(copied, expected, f"What a copy by {way} reads on rank {rank}")

    def test_nothing_is_kept_alive(self, world: int) -> None:
        """A loader and its dataset die with their last reference."""
        self._require_freed(loader_jobs.released, world)

    def test_an_error_of_the_dataset_reaches_the_loop(self, world: int) -> None:
        """On the rank whose samples could not be read, and with the dataset's own words."""
        facts = self._facts(loader_jobs.broken, world)
        raised = [error for _, error in facts if error is not None]
        read = [sample for batches, _ in facts for batch in batches for sample in batch]
        words = f"sample {BROKEN} is broken"
        require(
            any(error.kind == "ValueError" and words in error.message for error in raised),
            f"A dataset raised ValueError({words!r}), and the loops saw {[_words(error) for error in raised]}. Let it pass.",
        )
        require(BROKEN not in read, f"Sample {BROKEN}, which cannot be read, was read: {read}.")

    def _told(self, job: LoaderJob, world: int) -> Told:
        facts = self._facts(job, world)
        return [
            (rank, case, reading) for rank, fact in enumerate(facts) for case, reading in zip(CASES, fact, strict=True)
        ]

    def _subject(self, world: int) -> LoaderSubject:
        strategy = "single" if world == 1 else "ddp"
        return LoaderSubject(strategy, self.cpu, timedelta(seconds=self.patience), type(self).loader)


def _compare_samples(found: Sequence[int], expected: Sequence[int], what: str) -> None:
    """Fails unless each expected sample was found once, in any order."""
    missing = sorted(set(expected) - set(found))
    repeated = sorted({sample for sample in found if found.count(sample) > 1})
    strange = sorted(set(found) - set(expected))
    require(
        not (missing or repeated or strange),
        f"{what} should count each of {len(expected)} samples once. Missing: {missing}, repeated: {repeated}, "
        f"not in the dataset: {strange}.",
    )


def _require_equal(found: Any, expected: Any, what: str) -> None:
    require(found == expected, f"{what} is {found}, expected {expected}. The order is a function of seed and epoch.")


def _require_distinct(orders: Mapping[str, Sequence[int]], rank: int) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for name, order in orders.items():
        other = seen.setdefault(tuple(order), name)
        require(
            other == name,
            f"{other} and {name} have the same order on rank {rank}: {list(order)}. Derive it from the seed of the loader "
            f"(accel_core.api.component.loader_seed) and the epoch.",
        )


def _check_resumption(found: Resumption, what: str) -> None:
    """Fails unless what comes after the state is the rest of its epoch, and then whole epochs."""
    whole = found.epochs[found.epoch]
    require(
        found.before == whole[: len(found.before)],
        f"{what}: before it was taken, {found.before} were counted, and the uninterrupted run has {whole}.",
    )
    rest = [] if found.over else [whole[len(found.before) :]]
    expected = [*rest, *found.epochs[found.epoch + 1 :]][: len(found.after)]
    require(
        found.after == expected[: len(found.after)],
        f"{what}, is followed by the iterations {found.after}, expected {expected}. A state is (seed, epoch, samples that "
        f"all ranks have yielded); the first iteration goes on with the epoch, the next is whole.",
    )


def _words(raised: Raised | None) -> str:
    return "nothing" if raised is None else f"{raised.kind}: {raised.message}"
