"""`debug_launcher` from a test and from a script; and what both launchers refuse, before any process is started."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.utils.data import DataLoader

from accel_core import Accelerator, PluginError
from accel_core.api.launcher import list_offers
from accel_launch import LaunchError, RankFailedError, debug_launcher, notebook_launcher
from accel_launch.notebook import channel, function_pickle, rank
from accel_launch.notebook.function_pickle import Told, failure_told, packed, result_told, unpacked
from accel_launch.notebook.running import raise_first, result_of
from accel_launch.starting.devices import Accelerators, usable_cores
from accel_launch.starting.failures import Failure
from accel_launch.starting.meeting_store import MeetingError

SCRIPT = """
import os
from accel_launch import debug_launcher

def die():
    from accel_core import Accelerator
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        os._exit(7)
    accelerator.wait_for_everyone()

print("the script runs")
debug_launcher(die)
"""


def job(addend):
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index])).item()
    print(f"rank {accelerator.process_index} computes with {torch.get_num_threads()} threads")
    return total + addend, dist.get_backend(), str(accelerator.device), str(accelerator.explain())


def test_a_test_runs_a_function_of_its_module_on_two_ranks(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    total, backend, device, explained = debug_launcher(job, (10,))
    assert (total, backend, device) == (13.0, "gloo", "cpu")
    assert "debug_launcher" in explained, "the source of cpu=True is named"
    cores = max(1, usable_cores() // 2)
    assert sorted(re.findall(r"rank \d computes with \d+ threads", capsys.readouterr().out)) == [
        f"rank {rank} computes with {cores} threads" for rank in range(2)
    ]


def test_a_script_needs_no_guard_and_learns_which_rank_was_lost(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stdout.count("the script runs") == 1, "it is executed once, not by every rank"
    assert "RankFailedError: debug_launcher(die, ...): rank 1 of 2 (process " in ended.stderr
    assert "failed first, and raised nothing: exit status 7. What it printed may say why." in ended.stderr


def ends_at_once():
    os._exit(0)


def test_a_rank_that_ends_before_its_function_returns_is_a_failure():
    with pytest.raises(
        RankFailedError, match=r"ranks 0–1 of this machine ended with exit status 0 before the function had"
    ):
        debug_launcher(ends_at_once)


def precision_of_an_accelerator():
    return Accelerator().mixed_precision


def raises():
    raise KeyError("on purpose")


def test_one_process_is_this_one_and_its_environment_is_as_before():
    before = dict(os.environ)
    assert notebook_launcher(os.getpid, num_processes=1) == os.getpid()
    assert notebook_launcher(precision_of_an_accelerator, (), 1, "bf16") == "bf16"
    assert notebook_launcher(precision_of_an_accelerator, (), 1, "no", use_port="29500", rdzv_backend="static") == "no"
    with pytest.raises(KeyError, match="on purpose"):
        notebook_launcher(raises, num_processes=1, mixed_precision="bf16")
    assert dict(os.environ) == before


def test_what_was_said_outside_stays_said(monkeypatch):
    said = '{"command line": {"ACCELERATE_USE_CPU": [true, "--cpu"], "ACCELERATE_MIXED_PRECISION": ["no", "--x"]}, "file": {}}'
    monkeypatch.setenv("ACCELERATE_CONFIG", said)
    assert notebook_launcher(precision_of_an_accelerator, mixed_precision="bf16") == "bf16"
    assert os.environ["ACCELERATE_CONFIG"] == said


def test_an_unknown_precision_is_refused_at_once_with_the_list():
    with pytest.raises(Exception, match=r"The precision 'bf61' was asked for.*\nType 'bf16' if") as raised:
        notebook_launcher(os.getpid, mixed_precision="bf61", num_processes=2)
    for offer in list_offers("accel.precisions"):
        assert repr(offer.name) in str(raised.value)
    with pytest.raises(PluginError, match="The precision 'torch.bfloat16' was asked for"):
        notebook_launcher(os.getpid, mixed_precision=torch.bfloat16)


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_a_rank_of_a_run_starts_none(launcher, monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        LaunchError, match=r"was called on rank 1 of 2, which torchrun has started: .*Call the function itself"
    ):
        launcher(os.getpid)


def test_a_rank_of_a_process_group_starts_none():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(LaunchError, match=r"was called on rank 0 of 2, which are in torch's process group: "):
            debug_launcher(os.getpid)
    finally:
        dist.destroy_process_group()


def test_more_processes_than_accelerators_are_refused_in_the_words_of_python(monkeypatch):
    # No machine of the tests has accelerators: what torch would count is given.
    monkeypatch.setattr("accel_launch.starting.plan.find_accelerators", lambda: Accelerators("cuda", 1))
    with pytest.raises(LaunchError, match=r"2 processes .* Give num_processes=1, or ACCELERATE_USE_CPU=1 to train on"):
        notebook_launcher(os.getpid, num_processes=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_processes": 0}, "num_processes=0 was given, expected a whole number of at least 1, or None"),
        ({"num_processes": "two"}, "num_processes='two' was given, expected a whole number"),
        ({"num_processes": 2, "use_port": "http"}, "use_port='http' was given, expected a whole number"),
        (
            {"num_nodes": 2},
            r"num_nodes=2 was given, and not at which port of node 0 \(127.0.0.1\) they meet. Add use_port=29500",
        ),
        ({"node_rank": 1}, "node_rank=1 was given, and there are num_nodes=1, .*or the right num_nodes, the same"),
        ({"rdzv_backend": "c10d", "num_nodes": 2}, "c10d was given, .*use_port None. Add rdzv_endpoint=HOST:PORT"),
        ({"rdzv_conf": {"timeout": 3}}, r"rdzv_conf was given, .*Add rdzv_backend=c10d"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(LaunchError, match=message):
        notebook_launcher(os.getpid, **options)


def test_a_call_instead_of_a_function_is_refused():
    with pytest.raises(
        LaunchError, match=r"A launcher was called with 3, expected a function. .*notebook_launcher\(train, "
    ):
        debug_launcher(3)


def test_a_system_without_such_files_is_told_so(monkeypatch):
    monkeypatch.delattr(os, "pread")
    with pytest.raises(LaunchError, match=r"was to start 2 processes, which needs files of Unix"):
        debug_launcher(os.getpid)


def test_the_last_record_of_each_counts_and_standard_input_is_as_before():
    before = os.fstat(0)
    with channel.opened(b"work") as descriptor:
        for whose, content in ((0, b""), (1, b"first"), (0, b"zero"), (1, b"last")):
            channel.append(descriptor, whose, content)
        assert channel.records(descriptor) == {channel.WORK: b"work", 0: b"zero", 1: b"last"}
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)  # its process was killed while it wrote
        assert channel.records(descriptor) == {channel.WORK: b"work", 0: b"zero", 1: b"first"}
        channel.append(descriptor, 2, b"two")
        assert channel.records(descriptor) == {channel.WORK: b"work", 0: b"zero", 1: b"first", 2: b"two"}
        assert os.path.sameopenfile(0, descriptor)
    assert os.path.samestat(os.fstat(0), before)


@pytest.mark.parametrize("args", [3, "abc", None])
def test_arguments_that_are_no_tuple_are_refused(args):
    with pytest.raises(LaunchError, match=r"args=.* was given for getpid\(\), expected a tuple .*: args=\(.*,\)"):
        notebook_launcher(os.getpid, args)


def test_what_a_launcher_said_and_nobody_can_read_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_CONFIG", "{")
    with pytest.raises(ValueError, match="ACCELERATE_CONFIG cannot be read"):
        debug_launcher(os.getpid)


def ends_the_launcher():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def test_a_signal_ends_the_ranks_and_then_does_what_it_does(monkeypatch):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(RankFailedError, match=r"debug_launcher\(ends_the_launcher, ...\) was ended by SIGTERM"):
            debug_launcher(ends_the_launcher, num_processes=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_nodes_of_which_one_does_not_start_again_are_told_so():
    """In the words of the meeting point, and not in those of the error of torch behind it."""

    def start_again(*_, **__):
        try:
            raise RendezvousTimeoutError
        except RendezvousTimeoutError as error:
            raise MeetingError("The other machines did not come.") from error

    with (
        mock.patch("accel_launch.notebook.running.supervise", start_again),
        pytest.raises(LaunchError, match=r"^debug_launcher\(getpid, ...\): The other machines did not come\.$"),
    ):
        debug_launcher(os.getpid)


def test_nodes_that_do_not_meet_are_told_where_they_were_to():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        LaunchError, match=rf"was to meet at 127.0.0.1:{port}, .*'c10d'.* and that has failed: .*accel doctor"
    ):
        notebook_launcher(
            os.getpid,
            num_processes=1,
            num_nodes=2,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_conf={"is_host": "false", "read_timeout": 1},
        )


LOCK = threading.Lock()


def uses_lock():
    with LOCK:
        pass


def has_iterator():
    batches = iter(DataLoader([1, 2, 3]))

    def inner():
        return next(batches)

    return inner


def has_file_as_default():
    def inner(log=sys.__stderr__):
        log.write("")

    return inner


@pytest.mark.parametrize(
    "function, args, message",
    [
        (uses_lock, (), r"uses_lock\(\) uses `LOCK`: a lock, .*cannot pickle '_thread.lock'"),
        (has_iterator(), (), r"inner\(\) uses `batches`: a _SingleProcessDataLoaderIter, which cannot be sent"),
        (has_file_as_default(), (), r"inner\(\) uses `log` as a default: a TextIOWrapper, which cannot be sent"),
        (os.getpid, (1, threading.Lock()), r"getpid\(\) was given args\[1\]: a lock, which cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(function, args, message):
    def there(name):
        """As if a cell had defined it."""
        return types.FunctionType(
            function.__code__,
            {**function.__globals__, "__name__": "__main__"},
            name,
            function.__defaults__,
            function.__closure__,
        )

    if isinstance(function, types.FunctionType):
        function = there(function.__name__)
        function.__module__ = "__main__"
    with pytest.raises(LaunchError, match=message):
        packed("notebook_launcher(...)", function, args)


def test_the_store_of_a_process_group_is_refused():
    store = dist.HashStore()
    with pytest.raises(LaunchError, match=r"was given args\[0\]: a HashStore, .*belongs to the process that made it"):
        packed("call", os.getpid, (store,))


def test_a_function_of_a_module_that_nobody_else_can_import_travels(tmp_path):
    path = tmp_path / "nowhere_else.py"
    path.write_text("NUMBER = 7\ndef number():\n    return NUMBER\n")
    spec = importlib.util.spec_from_file_location("nowhere_else", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nowhere_else"] = module
    try:
        spec.loader.exec_module(module)
        work = packed("call", module.number, ())
    finally:
        del sys.modules["nowhere_else"]
    assert unpacked(work)[0]() == 7


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.detach])
def test_a_tensor_of_a_device_travels_as_what_it_is(kind):
    """There is no device here, so the CPU stands for one."""
    tensor = kind(torch.arange(3.0))
    make, parts, *_ = function_pickle._on_cpu(tensor)
    found = make(*parts)
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found, tensor)


def test_a_result_that_cannot_be_sent_is_a_warning():
    told = pickle.loads(result_told(threading.Lock()))
    with pytest.warns(
        UserWarning, match=r"call has ended, .*stays with rank 0, .*: a lock: cannot pickle .*None is returned"
    ):
        assert result_of("call", told) is None
    assert result_of("call", pickle.loads(result_told({"loss": torch.ones(1)}))) == {"loss": torch.ones(1)}


def leaves():
    sys.exit(3)


def test_a_function_that_ends_its_process_has_failed(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the rank replaces
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RuntimeError, match="The function ended its process, with 3 as exit status"):
        rank._run(packed("call", leaves, ()))
    assert result_of("call", pickle.loads(rank._run(packed("call", sys.exit, ())))) is None


class StubbornError(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def test_an_exception_that_cannot_be_sent_is_shown_as_text():
    failure = Failure(rank=3, local_rank=1, pid=42, status=1, time=0.0)
    told = pickle.loads(failure_told(StubbornError(1, 2), "Traceback ...\nStubbornError: 1\n"))
    assert told == Told(text="Traceback ...\nStubbornError: 1\n", raised=True)
    with pytest.raises(RankFailedError, match="It raised:\n\nTraceback"):
        raise_first("call", 4, [failure], told._replace(error=b"no pickle"))
    with pytest.raises(
        RankFailedError, match=r"call: rank 3 of 4 \(process 42\) failed first. It raised:\n\nTraceback"
    ):
        raise_first("call", 4, [failure], told)


def test_the_failure_of_another_machine_is_said_to_be_that():
    with pytest.raises(
        RankFailedError, match=r"call: no rank of this machine has failed; the run was ended because of another"
    ):
        raise_first("call", 4, [], None)


def says_who_it_is():
    print("begun")
    print("10%", file=sys.stderr)


def test_lines_of_ranks_are_marked(capsys):
    notebook_launcher(says_who_it_is, num_processes=2, log_line_prefix_template="${role_name}/${rank}: ")
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["notebook/0: begun", "notebook/1: begun"]
    assert sorted(shown.err.splitlines()) == ["notebook/0: 10%", "notebook/1: 10%"]
