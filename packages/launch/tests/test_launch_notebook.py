"""A notebook, executed for real: functions of its cells run on several processes, and what they print and raise is seen there."""

from __future__ import annotations

import os
import textwrap

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(240)

CELLS = {
    "set-up": """
        import os, pickle, signal, sys, threading, time
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset
        from accel_core import Accelerator
        from accel_launch import notebook_launcher
        torch.set_num_threads(2)
        (torch.randn(500, 500) @ torch.randn(500, 500)).sum().item()  # OpenMP's threads run in the kernel from here on
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

        def processes():
            return {pid for task in os.listdir("/proc/self/task")
                    for pid in open(f"/proc/self/task/{task}/children").read().split()}
        environ, before = dict(os.environ), processes()
    """,
    "two": """
        class Rows(Dataset):
            def __len__(self):
                return 16
            def __getitem__(self, index):
                return torch.tensor([float(index)])

        def train(epochs, rows):
            accelerator = Accelerator()
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), 1e-3), DataLoader(rows, batch_size=2, num_workers=1)
            )
            for epoch in range(epochs):
                for batch in loader:
                    optimizer.zero_grad()
                    accelerator.backward(model(batch).pow(2).mean())
                    optimizer.step()
                print(f"epoch {epoch} on rank {accelerator.process_index} of {accelerator.num_processes}")
            sys.stderr.write("10%\\r20%\\rno line end")
            weights = accelerator.gather(torch.cat([each.detach().flatten() for each in model.parameters()]))
            assert type(pickle.loads(pickle.dumps(rows))) is Rows, "it is found by its name there, too"
            rows.weights = weights.view(accelerator.num_processes, -1)
            return rows, accelerator.num_processes, accelerator.mixed_precision, os.getpid()

        rows, size, precision, pid = notebook_launcher(train, (2, Rows()), num_processes=2)
        assert (size, precision) == (2, "no") and pid != os.getpid()
        assert torch.equal(rows.weights[0], rows.weights[1]), "every rank has the same weights"
        assert type(rows) is Rows, "what comes back is of the notebook's own class"
        assert dict(os.environ) == environ and processes() == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        dist.destroy_process_group()
    """,
    "refused": """
        accelerator = Accelerator()
        def step():
            return accelerator.num_processes
        def uses():
            return step()
        try:
            notebook_launcher(uses, num_processes=2)
        except ValueError as error:
            print(error)
    """,
    "precision": """
        def add(addend):
            accelerator = Accelerator()
            print("adds")
            return accelerator.mixed_precision, accelerator.reduce(torch.tensor([1.0])).item() + addend
        print(notebook_launcher(add, (1,), 2, "bf16", log_line_prefix_template="rank ${rank}: "))
        print(notebook_launcher(add, (1,), 1, "bf16"))
    """,
    "failure": """
        class TrainingError(Exception):
            def __init__(self, attempt):
                self.attempt, self.time = attempt, time.time()
                super().__init__(f"attempt {attempt} is bad")
            def __reduce__(self):
                return type(self)._again, (self.attempt, self.time)
            @classmethod
            def _again(cls, attempt, when):
                error = cls(attempt)
                error.time = when
                return error

        def fail():
            accelerator = Accelerator()
            if accelerator.process_index == 1:
                raise TrainingError(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            accelerator.wait_for_everyone()

        try:
            notebook_launcher(fail, num_processes=2, max_restarts=1)
        except TrainingError as error:
            assert error.attempt == 1 and time.time() - error.time < 15
            print(error.__cause__)
        assert processes() == before
    """,
    "stopped": """
        def wait(folder):
            open(f"{folder}/{os.environ['RANK']}", "w").close()
            time.sleep(100)
        def press_stop(folder):
            while len(os.listdir(folder)) < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press_stop, args=(os.environ["FOLDER"],)).start()
        try:
            notebook_launcher(wait, (os.environ["FOLDER"],), num_processes=2)
        except KeyboardInterrupt:
            print("stopped")
        assert processes() == before and dict(os.environ) == environ
    """,
}
"""The cells by a name. What holds inside of the notebook is asserted there."""


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each cell of the notebook has printed, by cell and stream."""
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    folder = str(tmp_path_factory.mktemp("here"))
    NotebookClient(notebook, timeout=90, kernel_name="python3").execute(
        env={**os.environ, "OMP_NUM_THREADS": "2", "FOLDER": folder}
    )
    return {
        name: {
            stream: "".join(each["text"] for each in cell.outputs if each.get("name") == stream)
            for stream in ("stdout", "stderr")
        }
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


def test_the_output_of_all_ranks_appears_in_the_cell(printed):
    two = printed["two"]
    lines = {f"epoch {epoch} on rank {rank} of 2" for epoch in range(2) for rank in range(2)}
    assert set(two["stdout"].splitlines()) == lines
    assert two["stderr"].count("10%\r") == 2
    assert two["stderr"].count("20%\r") == 2
    assert two["stderr"].count("no line end") == 2


def test_an_accelerator_of_the_notebook_is_refused_by_its_name_and_line(printed):
    assert printed["refused"]["stdout"] == (
        "notebook_launcher(uses, ...) was to run uses() in other processes, and uses() uses step(), which uses `accelerator`: "
        "an Accelerator, which cannot be sent to them (an Accelerator belongs to the process that made it). Make it inside of the function, from plain data.\n"
    )


def test_mixed_precision_takes_effect_on_two_ranks_and_here_and_lines_are_marked(printed):
    assert sorted(printed["precision"]["stdout"].splitlines()) == [
        "('bf16', 2.0)",
        "('bf16', 3.0)",
        "adds",
        "rank 0: adds",
        "rank 1: adds",
    ]


def test_what_a_rank_raises_is_raised_in_the_cell_after_the_restarts(printed):
    cause, told = printed["failure"]["stdout"], printed["failure"]["stderr"]
    assert "notebook_launcher(fail, ...): rank 1 of 2 (process " in cause
    assert "failed first. It raised:\n\nTraceback (most recent call last):\n" in cause
    assert 'raise TrainingError(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))' in cause
    assert cause.endswith("TrainingError: attempt 1 is bad\n")
    assert "TrainingError: attempt 0 is bad\n" in told
    assert "All are started again" in told
    assert "attempt 1" not in told


def test_interrupting_the_cell_ends_all_ranks(printed):
    assert printed["stopped"] == {"stdout": "stopped\n", "stderr": ""}
