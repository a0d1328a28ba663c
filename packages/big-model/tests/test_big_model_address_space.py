"""A file that is larger than the memory a process may have is loaded onto disk, and runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

WIDTH, LAYERS = 2048, 48  # 16 MiB a layer, 768 MiB
LIMIT = 256  # MiB that the process may take after its imports: a third of the file, and more than a few layers

PROGRAM = """
import json, resource, sys
import torch
from torch import nn
from accel_big_model import init_empty_weights, load_checkpoint_and_dispatch

folder, place, width, layers, mib = *sys.argv[1:3], *map(int, sys.argv[3:])

def loaded(name, place, width, layers):
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    with torch.no_grad():
        model = load_checkpoint_and_dispatch(model, f"{folder}/{name}.safetensors", device_map={"": place})
        return [model(torch.ones(1, width)).flatten().tolist() for _ in range(2)]

loaded("small", "disk", 512, 2)  # makes what libraries allocate once
(status,) = (line for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = int(status.split()[1]) * 1024 + mib * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(json.dumps(loaded("large", place, width, layers)))
except (MemoryError, RuntimeError, OSError) as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def write(path, width: int, layers: int) -> torch.Tensor:
    """Writes a model, and returns its output. Most of the file is a hole, which reads as zeros and takes no room."""
    nbytes, x = width * width * 4, torch.ones(1, width)
    spans = {f"{at}.weight": [at * nbytes, (at + 1) * nbytes] for at in range(layers)}
    header = {name: {"dtype": "F32", "shape": [width, width], "data_offsets": span} for name, span in spans.items()}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + layers * nbytes)
        for at in range(layers):
            rows = torch.randn(2, width, generator=torch.Generator().manual_seed(at))
            file.seek(8 + len(text) + at * nbytes)
            file.write(rows.numpy().tobytes())
            weight = torch.cat([rows, torch.zeros(width - 2, width)])
            x = nn.functional.linear(x, weight)
    assert x.isfinite().all()
    assert x.any()
    return x.flatten()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write(folder / "small.safetensors", 512, 2)
    return folder, write(folder / "large.safetensors", WIDTH, LAYERS)


def run(folder, place: str) -> list[list[float]] | str:
    command = [sys.executable, "-c", PROGRAM, str(folder), place, str(WIDTH), str(LAYERS), str(LIMIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: list[list[float]] | str = json.loads(done.stdout)
    return found


def test_a_file_larger_than_the_address_space_is_loaded_onto_disk_and_runs(output):
    folder, expected = output
    found = run(folder, "disk")
    assert not isinstance(found, str), found
    assert [torch.tensor(each).equal(expected) for each in found] == [True, True]


def test_the_same_file_does_not_fit_into_memory(output):
    """Without this, the limit of the test above might be none."""
    found = run(output[0], "cpu")
    assert isinstance(found, str)
    assert "memory" in found
