"""Two machines on this one: network namespaces that only a virtual cable joins. Each reaches nothing but itself and the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "10.77.13"
FILES = Path("/etc/netns")
"""Where `ip netns exec` finds files that replace those of /etc."""


class Machine:
    """One of the two.

    Args:
        name: of its network namespace.
        address: of its end of the cable, by which the other reaches it.
        interface: that end.
    """

    def __init__(self, name: str, address: str, interface: str) -> None:
        self.name, self.address, self.interface = name, address, interface

    def start(self, arguments: list[str], output: Path, env: dict[str, str]) -> subprocess.Popen:
        """Starts a command there; what it prints goes to the end of a file."""
        with output.open("ab") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=env,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """What runs there."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def lose_power(self) -> None:
        """Kills everything that runs there, and leaves it no last word."""
        while found := self.pids():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why no namespaces can be made here; None if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2) here"
    name = f"accel-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the right to make network namespaces is missing here ({error})"
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            ip("netns", "del", name)
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a cable between them, which are gone at the end with all that runs there."""
    key = f"{os.getpid():x}"
    machines = [Machine(f"accel-{key}-{rank}", f"{PREFIX}.{rank + 1}", f"acc{key}{rank}"[:15]) for rank in range(2)]
    try:
        for machine in machines:
            ip("netns", "add", machine.name)
            # No server of names is reached from there: nobody shall wait for one.
            (FILES / machine.name).mkdir(parents=True)
            (FILES / machine.name / "nsswitch.conf").write_text("hosts: files\n")
        zero, one = machines
        ip(
            "-n",
            zero.name,
            "link",
            "add",
            zero.interface,
            "type",
            "veth",
            "peer",
            "name",
            one.interface,
            "netns",
            one.name,
        )
        for machine in machines:
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            ip("-n", machine.name, "link", "set", machine.interface, "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
        yield zero, one
    finally:
        for machine in machines:
            with contextlib.suppress(OSError):
                machine.lose_power()
            with contextlib.suppress(OSError):
                ip("netns", "del", machine.name)
            shutil.rmtree(FILES / machine.name, ignore_errors=True)
