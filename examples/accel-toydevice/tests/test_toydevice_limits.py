"""What a device may lack is lacking where a switch says so, and what a process leaves behind is in order."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def ran(code, **switches):
    """What a program with these switches printed, and how it ended."""
    program = "import torch, accel_toydevice\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | switches,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


def test_switches_take_away_what_devices_may_lack():
    code = """
    def refused(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}".split("\\n")[0]
        return "allowed"

    x = torch.ones(1, device="toy")
    print(refused(lambda: torch.ones(1, dtype=torch.float64, device="toy")))
    print(refused(lambda: x.double()))
    print(torch.accelerator.device_count(), refused(lambda: torch.ones(1, device="toy:1")))
    print(hasattr(torch.toy.get_device_properties(0), "uuid"))
    print(refused(torch.accelerator.memory_allocated))
    target = torch.zeros(1)
    target.copy_(x, non_blocking=True)
    print(target.item(), torch.toy.waits())
    with torch.toy.held():
        import threading
        threading.Timer(0.5, torch.toy.release).start()
        for _ in range(100):
            x.add_(1)
            assert torch.toy.queued() <= 8
    print(x.item())
    """
    status, lines, errors = ran(
        code,
        TOY_FLOAT64="0",
        TOY_VISIBLE_DEVICES="1",
        TOY_UUID="0",
        TOY_STATISTICS="0",
        TOY_LATE_COPIES="0",
        TOY_QUEUE_LENGTH="8",
    )
    assert status == 0, errors
    assert lines[0].startswith("TypeError: Cannot make a tensor of Double on a toy device, which has no float64 here")
    assert lines[1].startswith("TypeError: Cannot make a tensor of Double")
    assert lines[2].startswith("1 RuntimeError: toy:1 was asked for, but there are 1 toy devices")
    assert lines[3] == "False"
    assert "is not a DeviceAllocator" in lines[4]
    assert lines[5:] == ["1.0 {'copy to the host': 1}", "101.0"]


def test_a_wrong_switch_is_named():
    status, _, errors = ran("", TOY_VISIBLE_DEVICES="2")
    assert status != 0
    assert "TOY_VISIBLE_DEVICES is 2, but the devices are 0 and 1" in errors


def test_a_process_ends_with_work_queued_and_tells_of_errors_nobody_has_seen():
    code = """
    import os
    x = torch.ones(1000, device="toy")
    torch.toy.held().__enter__()
    for _ in range(100):
        x = x * 1.5
    torch.nn.functional.embedding(torch.tensor([99], device="toy"), torch.ones(3, 2, device="toy"))
    print("end")
    """
    status, lines, errors = ran(code)
    assert (status, lines) == (0, ["end"])
    assert "nothing waited for this error of a kernel: index out of range" in errors


def test_a_child_of_a_fork_is_refused_the_device_and_ends():
    code = """
    import os
    x = torch.ones(3, device="toy")
    child = os.fork()
    if child == 0:
        assert torch.toy._is_in_bad_fork()
        torch.manual_seed(0)
        try:
            x + 1
        except RuntimeError as error:
            print(str(error)[:59], flush=True)
        del x
        raise SystemExit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.tolist())
    """
    status, lines, errors = ran(code)
    assert status == 0, errors
    assert lines == ["A toy device was used in a process that was forked from one", "5 [1.0, 1.0, 1.0]"]


def test_a_loader_with_workers_and_pinned_memory_feeds_the_device():
    code = """
    from torch.utils.data import DataLoader, TensorDataset
    torch.ones(1, device="toy")
    total = torch.zeros(1, device="toy")
    for (batch,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, pin_memory=True, num_workers=2):
        assert batch.is_pinned()
        total += batch.to("toy", non_blocking=True).sum()
    print(total.item())
    """
    status, lines, errors = ran(code)
    assert (status, lines) == (0, ["2016.0"]), errors
