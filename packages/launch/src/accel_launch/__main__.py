"""`python -m accel_launch`, and the program `accel`."""

from __future__ import annotations

import gc
import os
import signal
import sys


def main() -> int:
    """Runs one command with the arguments of this process, and returns the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who has started this process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (until the end)
    # Importing torch makes half a million objects, none of them garbage. Looking through them again and again takes a tenth of the
    # time until a script has started.
    gc.set_threshold(100_000)
    # A Ctrl-C that breaks off an import comes out as any error at all; while importing, it just ends the process.
    impatient = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if impatient:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from accel_launch.main import main as run

    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
