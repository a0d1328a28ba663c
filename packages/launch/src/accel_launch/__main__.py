"""`python -m accel_launch`, and the program `accel`."""

from __future__ import annotations

import gc


def main() -> int:
    """Runs one command with the arguments of this process, and returns the exit status."""
    # Importing torch makes half a million objects, none of them garbage. Looking through them again and again takes a tenth of the
    # time until a script has started.
    gc.set_threshold(100_000)
    from accel_launch.main import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
