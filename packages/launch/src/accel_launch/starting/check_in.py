"""The check before machines meet: each finds the store of machine 0, and claims its rank there."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch.distributed import DistError, TCPStore

from accel_launch.starting.interfaces import own_addresses
from accel_launch.starting.meeting_store import (
    BEGUN,
    CONNECT,
    ENDED,
    FINISHED,
    OPENED,
    Card,
    MeetingError,
    capital,
    cards,
    connect,
    lives,
    owner,
    phase,
    refuse,
)

if TYPE_CHECKING:
    from accel_launch.starting.meeting_store import Address, Waiting


def open_store(address: Address, card: Card) -> TCPStore:
    """Opens the store on this machine, and makes sure that it is what the others find; else that of another machine 0."""
    own, taken = None, None
    try:
        own = TCPStore("127.0.0.1", address.port, is_master=True, wait_for_workers=False, timeout=CONNECT)
        own.set(OPENED, card.identity)
    except DistError as error:
        taken = error
    try:
        found = connect(address)
    except (DistError, OSError) as error:
        if taken is not None:
            raise MeetingError(
                f"Machine 0 was to open port {address.port} for the machines to meet at {address}, and it is taken by "
                f"another program. Give all machines another main_process_port, or end what uses this one."
            ) from taken
        raise MeetingError(
            f"Machine 0 was to be met at {address}, but this machine, which is machine 0, does not reach itself there: {error}. "
            f"Found these addresses of this machine: {', '.join(own_addresses()) or 'none'}. Give the one that the other machines "
            f"reach as main_process_ip, the same on every machine; or give this machine another machine_rank."
        ) from error
    if own is not None and found.check([OPENED]) and found.get(OPENED).decode() == card.identity:
        return own
    return found


def find_store(address: Address, card: Card, wait: Waiting) -> TCPStore:
    """The store of this run, and not of an earlier one, which is about to close."""
    while True:
        try:
            store = connect(address)
            problem = "" if store.check([OPENED]) else "a store answers there that no machine 0 has opened"
            if not problem and phase(store).startswith(ENDED):
                problem = phase(store).removeprefix(ENDED).splitlines()[0]
            if not problem and store.check([f"{FINISHED}/{card.rank}"]):
                problem = f"machine {card.rank} has finished"
            if not problem:
                return store
        except (DistError, OSError) as error:
            problem = str(error).splitlines()[0]
        if not wait.goes_on(lambda: f"waiting for machine 0 to open {address} ({problem})"):  # noqa: B023
            raise MeetingError(
                f"{capital(card)} was to meet {card.machines - 1} others at {address}. It waited {wait.waited}, and "
                f"machine 0 did not open this meeting point: {problem}. Check that accel launch runs on machine 0, with machine_rank "
                f"0; that main_process_ip and main_process_port are the same on every machine; and that no firewall closes this "
                f"port and those above 1024 between them."
            )


def claim(store: TCPStore, card: Card) -> None:
    """Makes the rank of this machine its own. Raises `MeetingError` if another machine has it, and lives."""
    mine = json.dumps(asdict(card))
    found = store.compare_set(owner(card.rank), "", mine).decode()
    while found != mine:
        other = Card(**json.loads(found))
        if lives(store, other.identity) or (phase(store) == BEGUN and not card.restarts):
            refuse(
                store,
                f"Machine rank {card.rank} of {card.machines} was claimed twice: by {other} and by {card.host}, process {card.pid}. "
                f"Give each machine a machine_rank of its own, from 0 to {card.machines - 1}, and each run a main_process_port of "
                f"its own; where a machine that was lost may come back, give all of them --max-restarts.",
            )
        found = store.compare_set(owner(card.rank), found, mine).decode()


def compare_numbers(store: TCPStore, card: Card) -> None:
    """Raises `MeetingError` if this machine was told other numbers than machine 0; on all, if the run has not begun."""
    first = Card(**json.loads(store.get(owner(0))))
    if first.numbers == card.numbers:
        return
    came = [each for each in cards(store, max(first.machines, card.machines)).values() if each is not None]
    rows = [
        f"  {each.rank:>7}  {each.machines:>12}  {each.processes:>13}  {each.restarts:>12}  {each.host}, process {each.pid}"
        for each in came
    ]
    refuse(
        store,
        "\n".join(
            [
                "The machines of a run were told different numbers:",
                "  machine  num_machines  num_processes  max_restarts  who",
                *rows,
                "Give all machines the same num_machines, num_processes and max_restarts, those of the whole run.",
            ]
        ),
    )
