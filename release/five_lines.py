"""Runs the first program of README.md, its five lines, with what is installed for this Python, in a folder without our sources.

python release/five_lines.py         in one process
python release/five_lines.py 2       in two, by `accel launch`
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 300
LEAST = 0.1
"""Squared errors; before training it is about 4. Two processes take half as many steps as one."""


def main() -> None:
    world = sys.argv[1] if len(sys.argv) > 1 else "1"
    source = re.search(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )[1]
    launch = ["-m", "accel_launch", "launch", "--num-processes", world] if world != "1" else []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(source, encoding="utf-8")
        command = [sys.executable, *launch, "train.py"]
        ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    error = float(re.search(r"^error (\S+)$", ended.stdout, re.MULTILINE)[1])
    if not error < LEAST:
        raise SystemExit(
            f"The five lines trained in {world} processes, to an error of {error}, which is not below {LEAST}."
        )
    print(f"The five lines of README.md in {world} processes: error {error:.1e}")


if __name__ == "__main__":
    main()
