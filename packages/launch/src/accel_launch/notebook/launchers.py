"""`notebook_launcher` and `debug_launcher`: run a function in several processes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from accel_core.api.launcher import CHANNEL, find, flag, given_outside, read_place, variable_of
from accel_launch.errors import LaunchError
from accel_launch.options import LaunchOptions
from accel_launch.starting.devices import THREADS, VISIBILITY
from accel_launch.starting.plan import Plan, make_plan

_OWN_NAMES = {
    "num_machines": "num_nodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "use_port",
    "--num-machines": "num_nodes",
    "--cpu": f"{variable_of('cpu')}=1",
}
"""Words of the command line, and what they are called here."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str | None = None,
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str | None = None,
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Runs a training function on one or more processes, from a notebook.

        def train(learning_rate):
            accelerator = Accelerator()
            ...
            return loss

        loss = notebook_launcher(train, (1e-3,), num_processes=2)

    One process on one machine, without restarts, is this process itself. Otherwise new processes
    are started, and the function, which may be defined in a cell, is sent to them with its
    arguments and all that it uses of the notebook. What it changes there stays there, so return
    what is wanted here. What belongs to this process (an Accelerator, an open file, a lock) is made
    inside of the function, and large data is opened there, for each process gets a copy. When one
    of them fails, the others are ended; interrupting the cell ends all.

    Args:
        function: what every process calls.
        args: its arguments.
        num_processes: processes of this machine. None: one for each accelerator, one if there is
            none.
        mixed_precision: name of a precision, for every `Accelerator()` that says nothing else.
            None: what else was said holds.
        use_port: where processes meet on node 0: needed for several nodes. None or 0: a free one.
        master_addr: address of node 0.
        node_rank: which of the nodes (machines) this is, from 0.
        num_nodes: machines that take part; each calls `notebook_launcher`, with the same arguments
            but `node_rank`.
        rdzv_backend: how nodes meet. None or "static": by their ranks. Others are backends of
            torch's rendezvous, such as "c10d".
        rdzv_endpoint: where the rendezvous is, as host:port; empty: master_addr and use_port.
        rdzv_conf: further options of torch's rendezvous.
        rdzv_id: the name of the job there, the same on all nodes.
        max_restarts: how often all processes are started again after one has failed.
        monitor_interval: in seconds, how often the processes are looked after.
        log_line_prefix_template: what each line that a process prints begins with; may contain
            ${rank}, ${local_rank} and ${role_name}. None: nothing.

    Returns:
        What the function returned, on the first process of this machine. If it cannot be sent here,
        a warning says why, and None is returned.

    Raises:
        LaunchError: before anything is started, if the function cannot be sent, naming the
            variable; and for options that fit neither together nor to this machine.
        PluginError: there is no such precision.
        RankFailedError: a process was killed. What a function raises is raised here, with a
            RankFailedError as its cause that has the traceback.
    """
    call = f"notebook_launcher({_name(function, args)}, ...)"
    _refuse_in_a_run(call)
    said = _precision(mixed_precision)
    count = _whole("num_processes", num_processes, least=1)
    nodes = _whole("num_nodes", num_nodes, least=1) or 1
    launch = LaunchOptions(
        num_processes=None if count is None else count * nodes,
        num_machines=nodes,
        max_restarts=_whole("max_restarts", max_restarts) or 0,
        monitor_interval=monitor_interval,
        role="notebook",
        **_meeting(nodes, node_rank, master_addr, use_port, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id),
    )
    plan = _plan(launch, flag("cpu", None, variable_of("cpu"), False).value)
    if plan.processes == 1 and not max_restarts and log_line_prefix_template is None:
        with _channel(said):
            return function(*args)
    return _run(call, plan, function, args, said, log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Any:
    """Runs a function on several processes of this machine's CPU, to try it without devices.

    They meet at a free port and communicate by gloo, so that what hangs or differs between ranks
    does so here. For everything else see `notebook_launcher`.

    Args:
        function: what every process calls.
        args: its arguments.
        num_processes: how many.

    Returns:
        What the function returned on rank 0.
    """
    call = f"debug_launcher({_name(function, args)}, ...)"
    _refuse_in_a_run(call)
    launch = LaunchOptions(num_processes=_whole("num_processes", num_processes, least=1), role="debug")
    said = {variable_of("cpu"): [True, "debug_launcher"]}
    return _run(call, _plan(launch, cpu=True), function, args, said)


def _run(
    call: str,
    plan: Plan,
    function: Callable[..., Any],
    args: Sequence[Any],
    said: Mapping[str, Any],
    prefix: str | None = None,
) -> Any:
    if not hasattr(os, "pread"):
        raise LaunchError(
            f"{call} was to start {plan.here} processes, which needs files of Unix, and this system has none. Start one "
            "process here, or a script with `accel launch`."
        )
    from accel_launch.notebook.function_pickle import packed
    from accel_launch.notebook.running import run

    work = packed(call, function, args)
    return run(call, plan, work, {CHANNEL: _added_to_channel(said)} if said else {}, prefix)


def _plan(launch: LaunchOptions, cpu: bool) -> Plan:
    """The plan of the run, made without the variables of a launcher around this process."""
    environ = {name: os.environ[name] for name in (THREADS, *VISIBILITY.values()) if name in os.environ}
    try:
        return make_plan(launch, cpu, environ)
    except LaunchError as error:
        raise LaunchError(_in_own_words(str(error))) from None


def _in_own_words(text: str) -> str:
    """Rewrites command-line options as arguments: --rdzv-backend c10d is rdzv_backend=c10d."""
    text = re.sub(r"--([a-z]+(?:-[a-z]+)+) ([\w:]+)", lambda option: f"{option[1].replace('-', '_')}={option[2]}", text)
    for name, own in _OWN_NAMES.items():
        text = text.replace(name, own)
    return text


def _refuse_in_a_run(call: str) -> None:
    place = read_place(os.environ)
    rank, size, source = place.rank, place.size, f"{place.source} has started"
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, size, source = dist.get_rank(), dist.get_world_size(), "are in torch's process group"
    if size > 1:
        raise LaunchError(
            f"{call} was called on rank {rank} of {size}, which {source}: each of them would start processes of its "
            "own. Call the function itself; or start this program once, with plain python."
        )


def _precision(name: object) -> dict[str, Any]:
    """The precision's entry for the channel. Raises `PluginError` if there is none of that name."""
    if name is None:
        return {}
    chosen = str(getattr(name, "value", name))
    find("accel.precisions", chosen)
    return {variable_of("mixed_precision"): [chosen, f"notebook_launcher(mixed_precision={chosen!r})"]}


def _meeting(
    nodes: int,
    node_rank: int,
    master_addr: str,
    use_port: str | int | None,
    backend: str | None,
    endpoint: str,
    conf: Mapping[str, Any] | None,
    name: str | None,
) -> dict[str, Any]:
    """The options that say where and how nodes meet."""
    port, name = _whole("use_port", use_port), None if name == "none" else name
    is_static = backend in {None, "static"}
    by_rank = (backend is None or (is_static and not conf and name is None)) and not endpoint
    if by_rank and nodes > 1 and not port:
        raise LaunchError(
            f"num_nodes={nodes} was given, and not at which port of node 0 ({master_addr}) they meet. Add "
            "use_port=29500, say: one that is free there, the same on every node."
        )
    has_rank = is_static and (nodes > 1 or node_rank)  # another rendezvous numbers nodes as they come
    return {
        "machine_rank": _whole("node_rank", node_rank) if has_rank else None,
        "main_process_port": port,
        "main_process_ip": master_addr if nodes > 1 or port else None,
        "rdzv_id": name,
        "rdzv_conf": {key: str(value) for key, value in conf.items()} if conf else None,
        "rdzv_backend": None if by_rank else backend or "static",
        "rdzv_endpoint": endpoint or None,
    }


def _whole(name: str, value: object, least: int = 0) -> int | None:
    """A whole number, as a number or a text."""
    if value is None:
        return None
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name}={value!r} was given, expected a whole number of at least {least}, or None.")
    return int(text)


def _name(function: object, args: object) -> str:
    """The function's name; `LaunchError` if it is not callable, or `args` is no tuple or list."""
    if not callable(function):
        raise LaunchError(
            f"A launcher was called with {function!r}, expected a function: notebook_launcher(train, (1e-3,))."
        )
    name = str(getattr(function, "__name__", type(function).__name__))
    if not isinstance(args, tuple | list):
        raise LaunchError(
            f"args={args!r} was given for {name}(), expected a tuple of its arguments. Of one: args=({args!r},)."
        )
    return name


def _added_to_channel(said: Mapping[str, Any]) -> str:
    """The channel of the launcher around this one with `said` added, as JSON."""
    given_outside(variable_of("cpu"))  # raises, with advice, if what is there cannot be read
    content = json.loads(os.environ.get(CHANNEL) or "{}")
    return json.dumps({**content, "command line": {**content.get("command line", {}), **said}})


@contextmanager
def _channel(said: Mapping[str, Any]) -> Iterator[None]:
    """A block in which this process is told `said`."""
    before = os.environ.get(CHANNEL)
    if said:
        os.environ[CHANNEL] = _added_to_channel(said)
    try:
        yield
    finally:
        os.environ.pop(CHANNEL, None)
        if before is not None:
            os.environ[CHANNEL] = before
