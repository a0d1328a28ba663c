"""Asks about each file of the command line, one after another, in one process, and prints how that ended."""

import os
import sys
from pathlib import Path

from accel_launch.questionnaire import ask
from accel_launch.settings.catalog import Catalog

for name in sys.argv[1:]:
    os.environ["TERM"] = "dumb" if name == "dumb" else "xterm-256color"
    try:
        print(f"[{Path(name).name} ended with {ask(Catalog(), Path(name))}]", flush=True)
    except ValueError as error:
        print(f"[{Path(name).name} was refused: {error}]", flush=True)
