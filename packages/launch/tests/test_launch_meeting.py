"""Machines claim their ranks at a store of machine 0 before torch's rendezvous; every reason why they cannot meet is said at once."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest

from accel_launch.starting import machines, meeting_store
from accel_launch.starting.interfaces import own_addresses, variables_towards
from accel_launch.starting.machines import Machines
from accel_launch.starting.meeting_point import Address
from accel_launch.starting.meeting_store import Card, MeetingError
from accel_launch.starting.plan import OWN_STORE

pytestmark = pytest.mark.timeout(60)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Cluster:
    """Machines that are threads of this process: each with a rendezvous of its own, which it leaves at the end."""

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        self.count, self.address = count, Address(host, unused_port())
        self.pool = ThreadPoolExecutor(16)
        self.members: list[Machines] = []

    def machine(self, rank: int, *, timeout: float = 20, **told: int) -> Machines:
        card = Card(rank, **{"machines": self.count, "processes": 2 * self.count, **told})
        self.members.append(Machines(self.address, card, timedelta(seconds=timeout), "127.0.0.1"))
        return self.members[-1]

    def come(self, *members: Machines) -> list[Future]:
        return [self.pool.submit(come, member) for member in members]

    def met(self, *members: Machines) -> list:
        return [future.result(20) for future in self.come(*members)]

    def close(self) -> None:
        for member in reversed(self.members):
            member.shutdown()
        self.pool.shutdown()


def come(member: Machines) -> object:
    """As the launcher does."""
    try:
        return member.next_rendezvous()
    except MeetingError:
        member.shutdown()
        raise


def finish(member: Machines) -> int:
    try:
        return member.finish()
    finally:
        member.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Clusters in which a machine counts as gone sooner than in life."""
    monkeypatch.setattr(meeting_store, "SILENCE", 1.0)
    monkeypatch.setattr(machines, "BEAT", 0.05)
    monkeypatch.setattr(machines, "_LAST_WORDS", 1.0)
    made: list[Cluster] = []

    def make(*args: object) -> Cluster:
        made.append(Cluster(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def vanish(member: Machines) -> None:
    """As if power was lost: no word to the others."""
    member._stop()
    member._store = None


def error_of(future: Future, within: float = 15.0) -> str:
    with pytest.raises(MeetingError) as caught:
        future.result(within)
    return str(caught.value)


def eventually(condition: Callable[[], object], within: float = 20.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def error_that_ends(member: Machines) -> str:
    """What a launcher that looks after its processes hears."""
    found: list[str] = []

    def ended() -> bool:
        try:
            member.num_nodes_waiting()
        except MeetingError as error:
            found.append(str(error))
        return bool(found)

    eventually(ended)
    return found[0]


def test_machines_have_the_ranks_that_they_were_given_and_share_a_store(cluster):
    run = cluster(3)
    zero, one, two = (run.machine(rank) for rank in range(3))
    late = run.come(two, one)  # before machine 0, which opens the store
    time.sleep(0.3)
    infos = [run.met(zero)[0], *(future.result(20) for future in reversed(late))]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    points = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
    assert points == {tuple(run.address)}
    infos[1].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"
    assert [each.num_nodes_waiting() for each in (zero, one, two)] == [0, 0, 0]
    assert (zero.get_backend(), zero.get_run_id(), zero.use_agent_store) == ("static", "accel", True)
    assert not zero.is_closed()


def test_with_restarts_a_machine_that_vanished_comes_back_in_a_round_of_torch(cluster, monkeypatch):
    monkeypatch.setenv(OWN_STORE, "1")  # as the plan does
    run = cluster(2)
    zero, one = (run.machine(rank, restarts=1) for rank in range(2))
    assert sorted(info.rank for info in run.met(zero, one)) == [0, 1]
    assert not zero.use_agent_store
    one._rounds._stop_heartbeats()
    vanish(one)
    time.sleep(1.2)
    (coming,) = run.come(run.machine(1, restarts=1))
    again = run.met(zero)[0], coming.result(20)
    assert sorted(info.rank for info in again) == [0, 1]


def test_two_machines_that_claim_one_rank_fail_at_once_and_so_does_the_run_if_it_has_not_begun(cluster):
    run = cluster(3)
    first, second = run.machine(1), run.machine(1)
    (waiting,) = run.come(run.machine(0))
    eventually(lambda: run.members[-1]._store is not None)
    coming = run.come(first)
    eventually(lambda: first._store is not None)
    start = time.monotonic()
    coming += run.come(second)
    messages = [error_of(future) for future in [*coming, waiting]]
    assert time.monotonic() - start < 15  # and not after the 20 s that a machine waits
    assert len(set(messages)) == 1
    assert re.fullmatch(
        r"Machine rank 1 of 3 was claimed twice: by machine 1 \(\S+, process \d+\) and by \S+, process \d+\. Give each machine "
        r"a machine_rank of its own, from 0 to 2, and each run a main_process_port of its own; where a machine that was lost may "
        r"come back, give all of them --max-restarts\.",
        messages[0],
    )


def test_a_stray_newcomer_does_not_touch_a_run_that_has_begun(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    for stray in (run.machine(1), run.machine(0)):
        message = error_of(*run.come(stray))
        assert "claimed twice" in message
        assert message.endswith("The run that had begun goes on.")
    message = error_of(*run.come(run.machine(2, machines=3)))
    assert message.startswith("The machines of a run were told different numbers:")
    assert message.endswith("The run that had begun goes on.")
    time.sleep(0.3)
    assert zero.num_nodes_waiting() == one.num_nodes_waiting() == 0


def test_numbers_that_differ_are_shown_as_a_table_on_all_that_have_come(cluster):
    run = cluster(3)
    coming = run.come(run.machine(0), run.machine(2))
    eventually(lambda: all(member._store is not None for member in run.members))
    coming += run.come(run.machine(1, machines=2, processes=8, restarts=4))
    messages = [error_of(future) for future in coming]
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert lines[0] == "The machines of a run were told different numbers:"
    assert [line.split()[:4] for line in lines[1:5]] == [
        ["machine", "num_machines", "num_processes", "max_restarts"],
        ["0", "3", "6", "0"],
        ["1", "2", "8", "4"],
        ["2", "3", "6", "0"],
    ]
    assert "same num_machines, num_processes and max_restarts" in lines[5]


def test_a_machine_that_has_failed_for_good_ends_the_others_at_once(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    one.shutdown()
    assert re.match(
        r"Machine 1 \(.*\) has failed and does not come back: its processes have failed", error_that_ends(zero)
    )
    assert "has failed" in error_of(*run.come(zero))


def test_machine_0_stays_until_all_have_finished_and_nobody_waits_for_one_that_has(cluster, capfd, monkeypatch):
    monkeypatch.setattr(meeting_store, "FIRST_LINE", 0.1)
    run = cluster(3)
    members = [run.machine(rank) for rank in range(3)]
    run.met(*members)
    finishing = [run.pool.submit(finish, member) for member in members[:2]]
    time.sleep(0.5)
    assert "accel launch: this machine has finished, and waits for machine" in capfd.readouterr().err
    message = error_of(*run.come(members[2]))
    assert "those of 2 of the machines have finished already" in message
    for number, future in enumerate(finishing):
        assert error_of(future) == f"The processes of machine {number} have finished, but: {message}"


def test_a_run_that_ends_well_leaves_the_port_to_the_next(cluster):
    run = cluster(2)
    for _ in range(2):
        members = [run.machine(0), run.machine(1)]
        run.met(*members)
        assert [future.result(10) for future in [run.pool.submit(finish, member) for member in members]] == [0, 0]


@pytest.mark.parametrize("vanished", [0, 1])
def test_a_machine_that_vanished_before_it_had_finished_is_a_failure(cluster, monkeypatch, vanished):
    run = cluster(2)
    members = [run.machine(0), run.machine(1)]
    run.met(*members).clear()  # and with them machine 0's store, if it goes
    monkeypatch.setattr(machines, "LOST", 2.0)
    vanish(members[vanished])
    message = error_of(run.pool.submit(finish, members[1 - vanished]))
    assert message.startswith(f"The processes of machine {1 - vanished} have finished, but: Machine ")
    if vanished:
        assert re.search(
            r"Machine 1 \(\S+, process \d+\) gave no sign of life for 2 s, and had not finished\. Look at the", message
        )
    else:
        assert "machine 0, which keeps the meeting point, is gone" in message


def test_a_launcher_that_was_halted_does_not_take_the_meeting_point_for_lost(cluster, monkeypatch):
    run = cluster(1)
    zero = run.machine(0)
    run.met(zero)
    monkeypatch.setattr(machines, "BEAT", 30.0)  # as of a thread that stood still with its process
    monkeypatch.setattr(machines, "LOST", 0.2)
    time.sleep(0.5)
    assert zero.num_nodes_waiting() == 0


def test_a_machine_that_gives_no_sign_of_life_for_some_time_is_waited_for(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    one._stop()
    finishing = run.pool.submit(finish, zero)
    time.sleep(1.5)  # longer than SILENCE
    assert not finishing.done()
    assert [one.finish(), finishing.done()] == [0, False], "machine 0 waits until it has left"
    one.shutdown()
    assert finishing.result(10) == 0


def test_all_machines_hear_by_which_signal_one_was_told_to_stop(cluster, capfd):
    run = cluster(3)
    zero, one, two = members = [run.machine(rank) for rank in range(3)]
    run.met(*members)
    finishing = run.pool.submit(finish, zero)
    one.stop(signal.SIGTERM, 10)
    time.sleep(0.3)
    assert not finishing.done(), "machine 2 is at work"
    assert [run.pool.submit(finish, two).result(10), finishing.result(10)] == [signal.SIGTERM] * 2
    assert len(re.findall(r"accel launch: machine 1 \(.*\) was told to stop by SIGTERM", capfd.readouterr().err)) == 2


def test_machine_0_that_was_told_to_stop_stays_for_the_others_as_long_as_its_ranks_had_time(cluster):
    for patience, ends in ((10, True), (0, False)):
        run = cluster(2)
        zero, one = run.machine(0), run.machine(1)
        run.met(zero, one)
        start = time.monotonic()
        leaving = run.pool.submit(zero.stop, signal.SIGINT, patience)
        time.sleep(0.3)
        if ends:
            assert run.pool.submit(finish, one).result(10) == signal.SIGINT
        leaving.result(10)
        assert time.monotonic() - start < 5


def test_a_machine_that_was_told_to_stop_and_has_come_back_stops_nobody(cluster, monkeypatch):
    monkeypatch.setenv(OWN_STORE, "1")  # as the plan does
    run = cluster(2)
    zero, one = (run.machine(rank, restarts=1) for rank in range(2))
    run.met(zero, one)
    one._rounds._stop_heartbeats()
    one.stop(signal.SIGTERM, 0)
    (coming,) = run.come(again := run.machine(1, restarts=1))
    eventually(lambda: again._rounds is not None)
    run.met(zero)
    coming.result(20)
    assert [future.result(10) for future in [run.pool.submit(finish, each) for each in (zero, again)]] == [0, 0]
    for each in (zero, again):
        each._rounds._stop_heartbeats()


@pytest.mark.parametrize("failed", [0, 1])
def test_a_machine_that_is_to_start_again_hears_that_the_other_has_finished_meanwhile(cluster, failed):
    """Neither waits as long as machines may need to come."""
    run = cluster(2)
    both = [run.machine(rank, restarts=1) for rank in range(2)]
    run.met(*both)
    (again,) = run.come(both[failed])
    eventually(both[1 - failed].num_nodes_waiting)
    finished = run.pool.submit(finish, both[1 - failed])
    reason = (
        rf"Another machine is to start its processes again, but those of machine {1 - failed} \(\S+, process \d+\) have "
        r"finished already\. Look at what failed there; start all machines again to go on from a checkpoint\."
    )
    assert re.fullmatch(reason, error_of(again, 10))
    assert re.fullmatch(rf"The processes of machine {1 - failed} have finished, but: {reason}", error_of(finished, 10))


def test_a_round_in_which_not_all_start_again_is_told_in_words(cluster):
    run = cluster(2)
    zero, one = (run.machine(rank, restarts=1, timeout=2) for rank in range(2))
    run.met(zero, one)
    (again,) = run.come(one)
    assert re.fullmatch(
        r"Machine 1 \(\S+, process \d+\) was to start its processes, and waited 0:00:02 for the other machines, which "
        r"did not come \(RendezvousTimeoutError\)\. Look at their output; start all machines again to go on from a checkpoint\.",
        error_of(again),
    )


def test_without_machine_0_the_others_end(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    infos = run.met(zero, one)
    vanish(zero)
    infos.clear()  # and with it the store
    assert "machine 0, which keeps the meeting point, is gone" in error_that_ends(one)
    assert "start all machines again" in error_of(*run.come(one))


def test_a_machine_0_that_does_not_answer_for_long_counts_as_gone(cluster, monkeypatch):
    run = cluster(2)
    script = (
        "import signal, sys\n"
        "from datetime import timedelta\n"
        "from accel_launch.starting.machines import Machines\n"
        "from accel_launch.starting.meeting_point import Address\n"
        "from accel_launch.starting.meeting_store import Card\n"
        "Machines(Address('127.0.0.1', int(sys.argv[1])), Card(0, 2, 4), timedelta(seconds=20), '127.0.0.1').next_rendezvous()\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(run.address.port)]) as zero:
        try:
            one = run.machine(1, timeout=40)
            run.come(one)[0].result(40)
            assert one.num_nodes_waiting() == 0
            monkeypatch.setattr(machines, "LOST", 0.3)
            zero.send_signal(signal.SIGSTOP)
            assert re.search(
                r"machine 0, which keeps the meeting point, is gone: no answer for \d+ s", error_that_ends(one)
            )
            one.shutdown()
        finally:
            zero.kill()


def test_who_waits_says_for_whom_and_gives_up_in_words(cluster, capfd, monkeypatch):
    monkeypatch.setattr(meeting_store, "FIRST_LINE", 0.2)
    run = cluster(4)
    (alone,) = run.come(run.machine(2, timeout=0.5))
    message = error_of(alone)
    assert "Machine 2 (" in message
    assert f"at {run.address}" in message
    assert "machine 0 did not open this meeting point" in message
    assert "firewall" in message
    coming = run.come(run.machine(2, timeout=10), run.machine(0, timeout=1.5))
    messages = [error_of(future) for future in coming]
    assert f"waiting for machines 1, 3 of 4 at {run.address}" in messages[0]
    assert "longer meeting_timeout" in messages[0]
    assert messages[0] == messages[1]
    said = capfd.readouterr().err
    assert f"accel launch: waiting for machine 0 to open {run.address} (" in said
    assert f"accel launch: waiting for machines 1, 3 of 4 at {run.address}" in said


def test_a_port_that_is_taken_is_said(cluster, monkeypatch):
    monkeypatch.setattr(meeting_store, "_CONNECT", timedelta(seconds=1))
    run = cluster(2)
    with socket.socket() as taken:
        taken.bind(("", run.address.port))
        taken.listen()
        threading.Thread(target=_refuse, args=(taken,), daemon=True).start()
        message = error_of(*run.come(run.machine(0)))
        assert f"port {run.address.port}" in message
        assert "it is taken by another program" in message
        assert "another main_process_port" in message
        taken.shutdown(socket.SHUT_RDWR)


def _refuse(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            client.close()


def test_what_listens_and_never_answers_is_no_meeting_point(cluster, monkeypatch):
    monkeypatch.setattr(meeting_store, "_CONNECT", timedelta(seconds=1))
    monkeypatch.setattr(meeting_store, "_ANSWER", 0.3)
    run = cluster(2)
    with socket.socket() as mute:
        mute.bind(("", run.address.port))
        mute.listen()
        message = error_of(*run.come(run.machine(1, timeout=0.5)))
        assert "what listens there does not answer as a store" in message
    eventually(lambda: not any(thread.name == "accel-connect" for thread in threading.enumerate()))


def test_machine_0_is_told_that_the_address_is_not_its_own(cluster, monkeypatch):
    monkeypatch.setattr(meeting_store, "_CONNECT", timedelta(seconds=1))
    run = cluster(2)
    run.address = Address("192.0.2.1", run.address.port)  # of no machine: for documentation
    message = error_of(*run.come(run.machine(0)))
    assert "does not reach itself there" in message
    assert "main_process_ip" in message
    assert ", ".join(own_addresses()) in message


def test_the_interface_to_an_address_is_the_one_that_routes_there():
    assert variables_towards("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables_towards("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}) == {}
    assert variables_towards("no.such.host.invalid", {}) == {}
    for address in own_addresses():
        assert variables_towards(address, {})


def test_the_launcher_ends_quietly_while_its_heart_beats():
    """A thread that is in torch while the interpreter ends can take the process down."""
    script = (
        "from datetime import timedelta\n"
        "from accel_launch.starting import machines\n"
        "from accel_launch.starting.machines import Machines\n"
        "from accel_launch.starting.meeting_point import Address\n"
        "from accel_launch.starting.meeting_store import Card\n"
        "def stop(self, stop=Machines._stop):\n"
        "    machines.BEAT = 1.0\n"  # it waits for so long, and no machine is too busy for that
        "    stop(self)\n"
        "Machines._stop, machines.BEAT = stop, 0.001\n"
        f"m = Machines(Address('127.0.0.1', {unused_port()}), Card(0, 1, 1), timedelta(seconds=5))\n"
        "m.next_rendezvous()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=50, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
