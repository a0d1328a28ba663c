"""`accelerate config`: writes the file that `accelerate launch` reads, by the questions of `accel config`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_compat.commands.config_file import default_yaml_config_file, load_config_from_file, present_file, read, write
from accel_compat.commands.merging import STRATEGIES
from accel_compat.configuration.translation import translate
from accel_launch import ask_for_config

_KINDS = {kind.lower(): kind for kind in STRATEGIES.values()}
_SAME = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes", "rdzv_backend")
_ASKED = ("strategy", "mixed_precision", "cpu", *_SAME)
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for `accelerate config` and its subcommands."""
    about = "Write the configuration file: by questions, or `default` without any; `update` rewrites one."
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accelerate config", description=about)
        if subparsers is None
        else subparsers.add_parser("config", description=about, help=about)
    )
    where = f"the file; without it {default_yaml_config_file}"
    parser.add_argument("--config_file", "--config-file", type=os.path.expanduser, metavar="FILE", help=where)
    parser.set_defaults(func=config_command)
    parts = parser.add_subparsers(dest="subcommand", metavar="{default,update}")
    default = parts.add_parser("default", help="write what suits this machine")
    default.add_argument(
        "--config_file",
        "--config-file",
        type=os.path.expanduser,
        dest="save_location",
        default=default_yaml_config_file,
    )
    default.add_argument("--mixed_precision", "--mixed-precision", choices=_PRECISIONS, default="no")
    default.set_defaults(func=default_config_command)
    update = parts.add_parser("update", help="read a file, of an older version too, and write it again")
    update.add_argument("--config_file", "--config-file", type=os.path.expanduser, default=None)
    update.set_defaults(func=update_config_command)
    return parser


def config_command(args: argparse.Namespace) -> int:
    """Asks, and writes the answers. What the file says beside them stays."""
    target = args.config_file or default_yaml_config_file
    before = read(target) if os.path.exists(target) else {}
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.yaml"
        if before:
            imported = translate(before).data
            write(str(answers), {key: imported[key] for key in _ASKED if key in imported})
        else:
            answers.write_text("{}\n", encoding="utf-8")  # or the user would be told of the file that is asked for
        status = ask_for_config(answers)
        if status:
            return status
        content, left = to_peer(read(str(answers)), before)
    write(target, content)
    print(f"\nFor `accelerate launch`, this is written to {target}.")  # noqa: T201
    for key in left:
        print(f"{key} has no place in that file: give it to Accelerator(...) in the script.")  # noqa: T201
    return 0


def to_peer(ours: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The file of `accelerate` that answers to our questions make, over what it said before; and the keys without a place."""
    count, cpu = ours.get("num_processes"), bool(ours.get("cpu", False))
    strategy = str(ours.get("strategy", ""))
    several = "MULTI_CPU" if cpu else "MULTI_GPU"
    kind = _KINDS.get(strategy) or ("NO" if count == 1 else several)
    said = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": str(ours.get("mixed_precision", "no")),
        "use_cpu": cpu,
        "debug": False,
        **{key: ours[key] for key in _SAME if key in ours},
    }
    said.setdefault("num_processes", _processes(cpu))
    kept = {key: value for key, value in before.items() if key not in _SAME or key in ours}
    odd = [] if strategy in {"", "ddp", "single", *_KINDS} else ["strategy"]
    precision = [] if said["mixed_precision"] in _PRECISIONS else ["mixed_precision"]
    if precision:
        said["mixed_precision"] = "no"
    left = [*odd, *precision, *(key for key in ours if key not in _ASKED)]
    return {**kept, **said}, left


def write_basic_config(mixed_precision: str = "no", save_location: str = default_yaml_config_file) -> Path | bool:
    """Writes a file for this machine alone, and returns its path; False if there is one already."""
    if mixed_precision.lower() not in _PRECISIONS:
        raise ValueError(f"mixed_precision={mixed_precision!r} was given: expected one of {', '.join(_PRECISIONS)}.")
    if os.path.exists(save_location):
        print(f"{save_location} is there already: nothing was written. Give another file.", file=sys.stderr)  # noqa: T201
        return False
    import torch

    cpu = not torch.accelerator.is_available()
    count = _processes(cpu)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO" if count == 1 else f"MULTI_{_device_word()}",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision.lower(),
        "num_machines": 1,
        "num_processes": count,
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": cpu,
    }
    write(save_location, content)
    return Path(save_location)


def _processes(cpu: bool) -> int:
    import torch

    return 1 if cpu else max(1, torch.accelerator.device_count())


def _device_word() -> str:
    import torch

    found = torch.accelerator.current_accelerator()
    return "GPU" if found is None or found.type == "cuda" else found.type.upper()


def default_config_command(args: argparse.Namespace) -> int:
    """Writes a file without asking."""
    path = write_basic_config(args.mixed_precision, args.save_location)
    if path:
        print(f"{path} is written.")  # noqa: T201
    return 0


def update_config(args: argparse.Namespace) -> str:
    """Reads a file, of an older version too, and writes it as it would be written today."""
    path = args.config_file or present_file() or default_yaml_config_file
    write(path, load_config_from_file(path).to_dict())
    return path


def update_config_command(args: argparse.Namespace) -> int:
    """Updates a file, and says which."""
    print(f"{update_config(args)} is updated.")  # noqa: T201
    return 0
