"""Machines of fixed ranks meet at a store of machine 0, in rounds; every reason why they cannot is said at once."""

from __future__ import annotations

import os
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
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from accel_launch.starting import board, claims, deadline, heartbeat, outcome
from accel_launch.starting.board import Address, MeetingError, connect_again
from accel_launch.starting.claims import Card
from accel_launch.starting.interfaces import interface_to, own_addresses, variables_towards
from accel_launch.starting.interruptible_store import Board
from accel_launch.starting.meeting import MachineRendezvous, register
from accel_launch.starting.rounds import AgentStore

pytestmark = pytest.mark.timeout(60)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Cluster:
    """Machines that are threads of this process: each with a rendezvous of its own, which it leaves at the end."""

    def __init__(self, machines: int, host: str = "127.0.0.1") -> None:
        self.machines, self.address = machines, Address(host, unused_port())
        self.pool = ThreadPoolExecutor(16)
        self.members: list[MachineRendezvous] = []

    def machine(self, rank: int, *, timeout: float = 20, **told: object) -> MachineRendezvous:
        card = Card(rank, **{"machines": self.machines, "processes": 2 * self.machines, **told})
        member = MachineRendezvous(self.address, card, timedelta(seconds=timeout))
        self.members.append(member)
        return member

    def come(self, *members: MachineRendezvous) -> list[Future]:
        return [self.pool.submit(member.next_rendezvous) for member in members]

    def met(self, *members: MachineRendezvous) -> list:
        return [future.result(20) for future in self.come(*members)]

    def vanish(self, member: MachineRendezvous) -> None:
        """As if power was lost: no word to the others."""
        member._heart.stop()
        member._board = member._heart = None

    def close(self) -> None:
        for member in reversed(self.members):
            with suppress(MeetingError):
                member.fail("the test is over")
        self.pool.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Clusters in which a machine counts as gone sooner than in life."""
    monkeypatch.setattr(claims, "SILENCE", 1.0)
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    made: list[Cluster] = []

    def make(*args, **kwargs) -> Cluster:
        made.append(Cluster(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def error_of(future: Future, within: float = 3.0) -> str:
    with pytest.raises(MeetingError) as caught:
        future.result(within)
    return str(caught.value)


def eventually(condition: Callable[[], bool], within: float = 5.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_machines_have_the_ranks_that_they_were_given_and_meet_again_in_rounds(cluster):
    run = cluster(3)
    zero, one, two = (run.machine(rank) for rank in range(3))
    late = run.come(two, one)  # before machine 0, which opens the board
    time.sleep(0.3)
    infos = [run.met(zero)[0], *(future.result(20) for future in reversed(late))]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    points = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
    assert len(points) == 1
    ((host, port),) = points
    assert host == "127.0.0.1"
    assert port not in (0, run.address.port)
    infos[1].store.set("key", "of round 0")
    assert infos[2].store.get("key") == b"of round 0"
    assert [each.num_nodes_waiting() for each in (zero, one, two)] == [0, 0, 0]
    assert zero.get_backend() == "machines"
    assert not zero.use_agent_store
    assert not zero.is_closed()

    back = run.come(one)  # the processes of machine 1 have failed, say: it is ready for another round
    eventually(lambda: zero.num_nodes_waiting() == 1 and two.num_nodes_waiting() == 1)
    again = [*run.met(zero, two), back[0].result(20)]
    assert not again[0].store.check(["key"])
    time.sleep(0.3)
    assert [each.num_nodes_waiting() for each in (zero, one, two)] == [0, 0, 0]


def test_a_machine_that_vanished_takes_its_rank_back_and_the_others_see_it(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    run.vanish(one)
    restarted = run.machine(1)
    (coming,) = run.come(restarted)
    eventually(lambda: zero.num_nodes_waiting() == 1)
    assert [info.rank for info in run.met(zero)] == [0]
    assert coming.result(20).rank == 1


def test_a_machine_that_was_frozen_and_lost_its_rank_meanwhile_ends(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    frozen = one._heart
    frozen.stop()
    (coming,) = run.come(run.machine(1))
    eventually(lambda: zero.num_nodes_waiting() == 1)
    frozen._beat()
    with pytest.raises(MeetingError, match=r"This machine had rank 1 of 2 .* and machine 1 \(.*\) has taken its rank"):
        one.num_nodes_waiting()
    run.met(zero)
    assert coming.result(20).rank == 1
    one._board = one._heart = None


def test_a_machine_0_that_does_not_answer_for_long_counts_as_gone(cluster, monkeypatch):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    monkeypatch.setattr(heartbeat, "LOST", -1.0)
    with pytest.raises(MeetingError, match=r"machine 0, which keeps the meeting point, is gone: no answer for \d+ s"):
        one.num_nodes_waiting()


def test_processes_meet_at_the_port_behind_the_machines_or_at_a_free_one():
    port = unused_port()
    assert board.free_port(port) == port
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert board.free_port(port) not in {0, port}
    assert 0 < board.free_port(1 << 16) < 1 << 16


@pytest.mark.full
def test_a_machine_that_comes_and_vanishes_before_the_round_is_complete_is_waited_for(cluster):
    run = cluster(3)
    zero, one, two = (run.machine(rank, timeout=4 if rank == 1 else 20) for rank in range(3))
    coming = run.come(zero, one)
    eventually(lambda: one._heart is not None)
    time.sleep(0.3)
    one._heart.stop()  # its thread in this process goes on to wait; nobody hears from it
    time.sleep(1.4)
    last = run.come(two)
    time.sleep(0.5)
    assert not last[0].done()
    assert not coming[0].done()
    restarted = run.machine(1)
    assert run.met(restarted)[0].rank == 1
    assert coming[0].result(20).world_size == last[0].result(20).world_size == 3


def test_two_machines_that_claim_one_rank_fail_at_once_and_so_does_the_run_if_it_has_not_begun(cluster):
    run = cluster(3)
    first, second = run.machine(1), run.machine(1)
    (waiting,) = run.come(run.machine(0))
    eventually(lambda: run.members[-1]._heart is not None)
    coming = run.come(first)
    eventually(lambda: first._heart is not None)
    start = time.monotonic()
    coming += run.come(second)
    messages = [error_of(future) for future in [*coming, waiting]]
    assert time.monotonic() - start < 3
    assert len(set(messages)) == 1
    assert re.fullmatch(
        r"Machine rank 1 of 3 was claimed twice: by machine 1 \(\S+, process \d+\) and by \S+, process \d+\. Give each machine "
        r"a machine_rank of its own, from 0 to 2, and each run a main_process_port of its own\.",
        messages[0],
    )


def test_a_stray_newcomer_does_not_touch_a_run_that_has_begun(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    message = error_of(*run.come(run.machine(1)))
    assert "claimed twice" in message
    assert message.endswith("The run that had begun goes on.")
    message = error_of(*run.come(run.machine(1, processes=64)))
    assert "claimed twice" in message
    time.sleep(0.3)
    assert zero.num_nodes_waiting() == one.num_nodes_waiting() == 0
    message = error_of(run.pool.submit(come_and_leave, run.machine(2, machines=3)))
    assert message.startswith("The machines of a run were told different numbers:")
    assert message.endswith("The run that had begun goes on.")
    second_zero = run.machine(0)
    assert "Machine rank 0 of 2 was claimed twice" in error_of(*run.come(second_zero))
    time.sleep(0.3)
    assert zero.num_nodes_waiting() == one.num_nodes_waiting() == 0


def test_numbers_that_differ_are_shown_as_a_table_on_all_that_have_come(cluster):
    run = cluster(3)
    coming = run.come(run.machine(0), run.machine(2))
    eventually(lambda: all(member._heart is not None for member in run.members))
    coming += run.come(run.machine(1, machines=2, processes=8))
    messages = [error_of(future) for future in coming]
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert lines[0] == "The machines of a run were told different numbers:"
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["machine", "num_machines", "num_processes"],
        ["0", "3", "6"],
        ["1", "2", "8"],
        ["2", "3", "6"],
    ]
    assert "same num_machines and num_processes" in lines[5]


def test_versions_that_differ_are_a_line_on_every_machine(cluster, capfd):
    run = cluster(2)
    run.met(run.machine(0), run.machine(1, versions={**claims._versions(), "torch": "1.0"}))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("accel launch: torch differs")]
    assert len(lines) == 2
    assert "1.0 on machine 1" in lines[0]
    assert "install the same version on all" in lines[0]


def test_a_machine_that_has_failed_for_good_ends_the_others_at_once(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    run.pool.submit(one.shutdown)  # torch's agent never came to the barrier at the end

    def ended() -> bool:
        try:
            zero.num_nodes_waiting()
        except MeetingError as error:
            return "Machine 1 (" in str(
                error
            ) and "has failed and does not come back: its processes have failed" in str(error)
        return False

    eventually(ended, within=2)
    assert "has failed" in error_of(*run.come(zero))


def come_and_leave(member: MachineRendezvous) -> None:
    """As the launcher does."""
    try:
        member.next_rendezvous()
    finally:
        member.shutdown()


def finish(member: MachineRendezvous, world: int) -> None:
    """As torch's agent does when all its processes have ended well."""
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.utils import store

    store.barrier(member._agents, world, api._TERMINAL_STATE_SYNC_ID, 20)
    member.shutdown()


def test_machine_0_stays_until_all_have_finished_and_nobody_waits_for_one_that_has(cluster):
    run = cluster(3)
    members = [run.machine(rank) for rank in range(3)]
    run.met(*members)
    finishing = [run.pool.submit(finish, member, 3) for member in members[:2]]
    time.sleep(0.2)
    message = error_of(*run.come(members[2]))
    assert "those of 2 of the machines have finished already" in message
    members[2].fail("rank 5 was ended with status 3")
    for number, future in enumerate(finishing):
        assert error_of(future) == (
            f"The processes of machine {number} have finished, but: Machine 2 "
            f"({socket.gethostname()}, process {os.getpid()}) has failed and does not come back: rank 5 was ended with status 3. "
            f"Look at what it printed. To go on after failures, from a checkpoint: --max-restarts, the same on all machines."
        )


def test_a_run_that_ends_well_leaves_the_port_to_the_next(cluster):
    run = cluster(2)
    for _ in range(2):
        members = [run.machine(0), run.machine(1)]
        run.met(*members)
        for future in [run.pool.submit(finish, member, 2) for member in members]:
            future.result(10)


@pytest.mark.full
def test_without_machine_0_the_others_end(cluster):
    run = cluster(2)
    zero, one = run.machine(0), run.machine(1)
    run.met(zero, one)
    zero._agents = None
    run.vanish(zero)  # and with it the store

    def ended() -> bool:
        try:
            one.num_nodes_waiting()
        except MeetingError as error:
            return "machine 0, which keeps the meeting point, is gone" in str(error)
        return False

    eventually(ended, within=3)
    assert "start all machines again" in error_of(*run.come(one))
    one.fail("its processes have failed")  # nobody is left to be told


@pytest.mark.full
def test_who_waits_says_for_whom_and_gives_up_in_words(cluster, capfd, monkeypatch):
    monkeypatch.setattr(deadline, "FIRST_LINE", 0.2)
    run = cluster(4)
    (alone,) = run.come(run.machine(2, timeout=0.5))
    message = error_of(alone)
    assert "Machine 2 (" in message
    assert f"at {run.address}" in message
    assert "machine 0 did not open this meeting point" in message
    assert "machine_rank 0" in message
    assert "firewall" in message
    zero = run.machine(0, timeout=1.5)
    coming = run.come(run.machine(2, timeout=10)), run.pool.submit(come_and_leave, zero)
    messages = [error_of(coming[1]), error_of(*coming[0])]
    assert f"waiting for machines 1, 3 of 4 at {run.address}" in messages[0]
    assert "longer meeting_timeout" in messages[0]
    assert messages[0] == messages[1]
    said = capfd.readouterr().err
    assert f"accel launch: waiting for machine 0 to open {run.address} (" in said
    assert f"accel launch: waiting for machines 1, 3 of 4 at {run.address}" in said


def test_a_port_that_is_taken_names_who_has_it(cluster):
    run = cluster(2)
    with socket.socket() as taken:
        taken.bind(("", run.address.port))
        taken.listen()
        answering = threading.Thread(target=_refuse, args=(taken,), daemon=True)
        answering.start()
        message = error_of(*run.come(run.machine(0)), within=5)
        assert f"port {run.address.port}" in message
        assert f"taken by process {os.getpid()} (" in message
        assert "another main_process_port" in message
        taken.shutdown(socket.SHUT_RDWR)
        answering.join(5)
    eventually(lambda: not any("connect" in thread.name for thread in threading.enumerate()))  # torch's tries


def _refuse(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            client.close()


def test_what_listens_and_never_answers_is_no_meeting_point(cluster, monkeypatch):
    monkeypatch.setattr(board, "ANSWER", timedelta(seconds=0.5))
    run = cluster(2)
    with socket.socket() as mute:
        mute.bind(("", run.address.port))
        mute.listen()
        message = error_of(*run.come(run.machine(1)))
        assert "no store of machine 0 (it does not answer)" in message
        assert "another main_process_port" in message


def _relay(port: int, flows: threading.Event) -> socket.socket:
    """A server that hands what one client sends on to `port`, and back, as long as it flows."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                flows.wait(30)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError), server.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as host:
            threading.Thread(target=pump, args=(client, host), daemon=True).start()
            pump(host, client)

    threading.Thread(target=serve, daemon=True).start()
    return server


def test_a_network_that_swallows_all_holds_nobody_up_and_a_signal_gets_through():
    host = Board("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    flows = threading.Event()
    flows.set()
    with _relay(host.port, flows) as server:
        guest = Board("127.0.0.1", server.getsockname()[1], is_master=False, wait_for_workers=False)
        guest.set("a", "b")
        assert guest.compare_set("a", "b", "c") == b"c"
        flows.clear()
        guest.limit = 0.2
        start = time.monotonic()
        for words in ("no answer for", "it has not answered before"):
            with pytest.raises(DistError, match=words):
                guest.add("number", 1)
        assert time.monotonic() - start < 5
        flows.set()
        del guest

    def interrupt(*_: object) -> None:
        raise InterruptedError("a signal")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(InterruptedError, match="a signal"):
            AgentStore(host, 0).wait(["never"], timedelta(seconds=20))
        assert time.monotonic() - start < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        connect_again(host, Address("127.0.0.1", host.port)).set("round/0/agents/never", "")


def test_machine_0_is_told_that_the_address_is_not_its_own(cluster):
    run = cluster(2, host="127.0.0.1")
    run.address = Address("192.0.2.1", run.address.port)  # of no machine: for documentation
    message = error_of(*run.come(run.machine(0)), within=5)
    assert "does not reach itself there" in message
    assert "main_process_ip" in message
    assert ", ".join(own_addresses()) in message


def test_torch_finds_the_rendezvous_by_its_name_and_is_told_what_is_missing():
    register()
    register()

    def parameters(**options) -> RendezvousParameters:
        return RendezvousParameters("machines", "127.0.0.1:29500", "run", 2, 2, **options)

    handler = get_rendezvous_handler(parameters(rank=1, processes=4, timeout=5))
    assert isinstance(handler, MachineRendezvous)
    assert handler.get_run_id() == "run"
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert handler.shutdown() is True
    with pytest.raises(MeetingError, match="Give main_process_ip, main_process_port and machine_rank"):
        get_rendezvous_handler(parameters(processes=4, timeout=5))


def test_the_interface_to_an_address_is_the_one_that_routes_there():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no.such.host.invalid") is None
    assert variables_towards("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables_towards("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}) == {}
    assert variables_towards("no.such.host.invalid", {}) == {}
    for address in own_addresses():
        assert interface_to(address)


def test_the_launcher_ends_quietly_while_its_heart_beats():
    """A thread that is in torch while the interpreter ends can take the process down."""
    script = (
        "from datetime import timedelta\n"
        "from accel_launch.starting import heartbeat\n"
        "def stop(self, stop=heartbeat.Heartbeat.stop):\n"
        "    heartbeat.BEAT = 1.0\n"  # it waits for so long, and no machine is too busy for that
        "    stop(self)\n"
        "heartbeat.Heartbeat.stop, heartbeat.BEAT = stop, 0.001\n"
        "from accel_launch.starting.meeting import MachineRendezvous, Address, Card\n"
        f"m = MachineRendezvous(Address('127.0.0.1', {unused_port()}), Card(0, 1, 1), timedelta(seconds=5))\n"
        "m.next_rendezvous()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=50, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert outcome.GOES_ON
