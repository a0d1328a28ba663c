"""One rank of `accel doctor`: examines its machine, tries the others, reports; rank 0 prints all.

The examination runs in a thread: whatever gets stuck, the rank hands in its report in time, and
says where it was stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist

from accel_core import PartialState
from accel_core.api.component import memory_info
from accel_core.api.launcher import Place, open_store, read_place
from accel_launch.checking import doctor_doors, doctor_facts, peer_access, verdict
from accel_launch.checking.doctor_findings import LARGE, Report, as_json, examine, print_page

_GRACE = 15.0  # seconds that rank 0 waits longer than the others try: a busy machine may stand still for some of them


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines this rank; rank 0 prints the page."""
    parser = verdict.options()
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with _output_apart() if options.json else nullcontext() as output:
        return _examine_rank(options, output)


@contextmanager
def _output_apart() -> Iterator[TextIO]:
    """Standard output, for JSON alone: what is printed meanwhile, as by gloo of torch 2.9, goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        try:
            yield output
        finally:
            sys.stdout.flush()
            os.dup2(output.fileno(), 1)


def _examine_rank(options: argparse.Namespace, output: TextIO | None) -> int:
    """Returns the exit status; rank 0 writes JSON into `output`, or prints the page without it."""
    place = read_place(os.environ)
    report: Report = doctor_facts.facts(place)
    end, trial = time.monotonic() + options.patience, peer_access.begin() if place.local_rank == 0 else None
    if place.size == 1:
        _examine_in_time(report, lambda: _try_group(report), options.patience)
        report |= {} if trial is None else {"peers": trial.result(end)}
        is_well = _conclude([report], place, output)
    else:
        store = _meet(place, options.patience)
        # With a connection of its own: one that waits lets nobody else through.
        _examine_in_time(report, lambda: _examine(report, place, _meet(place, options.patience)), options.patience)
        report |= {} if trial is None else {"peers": trial.result(end)}
        store.set(f"report/{place.rank}", json.dumps(report))
        if place.rank == 0:
            reports = _collect(report, place, store, time.monotonic() if trial is None else end)
            store.set("well", str(_conclude(reports, place, output)))
        store.wait(["well"], timedelta(seconds=options.patience + 2 * _GRACE))
        is_well = store.get("well") == b"True"
        store.set(f"read/{place.rank}", "")
        if place.rank == 0:  # which keeps the store
            store.wait([f"read/{each['rank']}" for each in reports], timedelta(seconds=_GRACE))
    status = verdict.leave(options, is_good=is_well)
    if "stuck" in report:
        os._exit(status)  # nothing that is stuck holds this up
    return status


def _meet(place: Place, patience: float) -> dist.Store:
    """The store of this examination, beside that in which training would meet."""
    store = open_store(place.meeting_point(), place, timedelta(seconds=patience))
    return dist.PrefixStore("accel-doctor", store)


def _examine_in_time(report: Report, examination: Callable[[], None], patience: float) -> None:
    """Runs an examination for at most `patience` seconds, and reports how it ended."""

    def examined() -> None:
        try:
            examination()
            del report["step"]
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what the report is about)
            report["error"] = "".join(traceback.format_exception_only(error)).strip()

    report["step"] = "the beginning"
    thread = threading.Thread(target=examined, daemon=True)
    thread.start()
    thread.join(patience)
    if thread.is_alive():
        report["stuck"] = report["step"]


def _examine(report: Report, place: Place, store: dist.Store) -> None:
    """Tries the doors before a process group, which would wait for one without naming it."""
    assert place.address is not None, "the ranks have met there"
    start = time.perf_counter()
    report["step"] = "meeting the others at the store"
    keeper = doctor_doors.DoorKeeper(place.address)
    store.set(f"door/{place.rank}", json.dumps(keeper.door))
    others = [rank for rank in range(place.size) if rank != place.rank]
    doors = {rank: doctor_doors.Door(*json.loads(store.get(f"door/{rank}"))) for rank in others}
    report["gathered"] = time.perf_counter() - start
    report["step"] = "trying plain connections to the others"
    report["doors"] = doctor_doors.knock(doors)
    if any("error" in found for found in report["doors"].values()):
        store.add("closed doors", 1)
    if store.add("knocked", 1) == place.size:
        store.set("all have knocked", "")
    store.wait(["all have knocked"])
    keeper.close()
    if not store.add("closed doors", 0):
        _try_group(report)


def _try_group(report: Report) -> None:
    """Meets the others, and computes a sum, as they do in training. Collective."""
    report["step"] = "meeting the others"
    start = time.perf_counter()
    state = PartialState()
    size, device, model = state.num_processes, state.device, ""
    if device.type != "cpu":
        model = _model(device)
    found = {"device": f"{device} {model}".strip(), "model": model, "met": time.perf_counter() - start}
    if size > 1:
        report["step"] = "a sum over all ranks"
        start = time.perf_counter()
        total = torch.full((1024,), float(state.process_index + 1), device=device)
        dist.all_reduce(total)
        found |= {"sum": total[-1].item(), "expected": size * (size + 1) / 2, "took": time.perf_counter() - start}
        report["step"] = "a large sum over all ranks"
        found["GB/s"] = _bandwidth(size, device)
        report["step"] = "the end"
        dist.barrier()
    report["group"] = found


def _model(device: torch.device) -> str:
    """The name of a device and its memory, as far as torch tells them."""
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")(device)
    memory = memory_info(device)
    return str(name) if memory is None else f"{name}, {memory[1] / 2**30:.0f} GiB".removeprefix(", ")


def _bandwidth(size: int, device: torch.device) -> float:
    """Gigabytes per second that leave each rank in a sum of `LARGE` bytes over all. Collective."""
    block = torch.ones(LARGE // 4, device=device)
    for _ in range(2):  # the first one makes connections
        start = time.perf_counter()
        dist.all_reduce(block)
        block[-1].item()  # waits for the device
    # Of a ring, which is as fast as its slowest connection, each rank sends all but its own part, twice.
    return 2 * (size - 1) / size * LARGE / (time.perf_counter() - start) / 1e9


def _collect(own: Report, place: Place, store: dist.Store, end: float) -> list[Report]:
    """The reports of all ranks that hand one in, shortly after `end` at the latest."""
    reports, end = [own], max(time.monotonic(), end) + _GRACE
    for rank in range(1, place.size):
        try:
            store.wait([f"report/{rank}"], timedelta(seconds=max(0.01, end - time.monotonic())))
            reports.append(json.loads(store.get(f"report/{rank}")))
        except dist.DistError:
            continue  # the page says who is missing
    return reports


def _conclude(reports: list[Report], place: Place, output: TextIO | None) -> bool:
    """Writes JSON into `output`, or prints the page without it; returns whether all is well."""
    findings = examine(reports, place.size)
    if output is None:
        print_page(reports, findings, place.size)
    else:
        output.write(json.dumps(as_json(reports, findings), indent=2) + "\n")
    (output or sys.stdout).flush()
    return not any(finding.is_problem for finding in findings)


if __name__ == "__main__":
    raise SystemExit(main())
