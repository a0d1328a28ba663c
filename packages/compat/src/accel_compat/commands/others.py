"""`accelerate env`, `test`, `estimate-memory` and `merge-weights`, by the commands of `accel`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_compat.commands.config_file import present_file
from accel_compat.commands.options import Parser
from accel_compat.fsdp_weights import check_outside, merge_fsdp_weights
from accel_launch import run_command


def _parser(name: str, about: str, subparsers: Any) -> argparse.ArgumentParser:
    if subparsers is None:
        return Parser(f"accelerate {name}", description=about)
    found: argparse.ArgumentParser = subparsers.add_parser(name, description=about, help=about)
    return found


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for `accelerate env`."""
    parser = _parser("env", "Print facts for a bug report, by `accel env`.", subparsers)
    parser.add_argument("--config_file", type=os.path.expanduser, metavar="FILE", help="show this configuration file")
    return parser


def env_command(args: argparse.Namespace) -> int:
    """Prints what `accel env` prints, with the configuration file of `accelerate launch`."""
    return run_command(["env", *_file_of(args)])


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028
    """A parser for `accelerate test`."""
    parser = _parser("test", "Check this set-up for real, by `accel test`.", subparsers)
    parser.add_argument(
        "--config_file", type=os.path.expanduser, metavar="FILE", help="the configuration file, instead of the user's"
    )
    return parser


def test_command(args: argparse.Namespace) -> int:
    """Checks the set-up that the configuration file describes."""
    # A process of its own: `accel test` may become what it starts.
    return subprocess.run([sys.executable, "-m", "accel_launch", "test", *_file_of(args)], check=False).returncode


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for `accelerate estimate-memory`."""
    about = "Estimate the memory that a model needs; `accel estimate-memory -h` has more."
    parser = _parser("estimate-memory", about, subparsers)
    parser.add_argument("model_name", help="a name on the hub, a folder, or a configuration")
    parser.add_argument("--library_name", choices=("timm", "transformers"), help="where the model comes from")
    words = ("float32", "float16", "bfloat16", "int8", "int4")
    parser.add_argument("--dtypes", nargs="+", choices=words, help="default: float32 and bfloat16")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    return parser


def estimate_command(args: argparse.Namespace) -> int:
    """Prints what `accel estimate-memory` prints. Raises `ValueError` for what it cannot estimate."""
    return run_command(["estimate-memory", *_of_estimate(args)])


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for `accelerate merge-weights`."""
    parser = _parser("merge-weights", "Write the weights of a checkpoint as safetensors.", subparsers)
    parser.add_argument("checkpoint_directory", help="a checkpoint, or a folder of parts that FSDP wrote")
    parser.add_argument("output_path", help="the folder to write to")
    parser.add_argument("--unsafe_serialization", action="store_true", help="refused: weights are safetensors")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="delete the checkpoint afterwards")
    return parser


def merge_command(args: argparse.Namespace) -> int:
    """Writes weights; deletes the checkpoint afterwards if that was asked for. Raises `ValueError` if they are in it."""
    if args.unsafe_serialization:
        raise ValueError(
            "--unsafe_serialization was given, and weights are written as safetensors, which every library loads. "
            "Leave it out."
        )
    if args.remove_checkpoint_dir:
        check_outside(args.output_path, args.checkpoint_directory)
    if (Path(args.checkpoint_directory) / ".metadata").is_file():
        merge_fsdp_weights(args.checkpoint_directory, args.output_path)
        status = 0
    else:
        status = run_command(["merge-weights", args.checkpoint_directory, args.output_path])
    if status == 0 and args.remove_checkpoint_dir:
        shutil.rmtree(args.checkpoint_directory)
    return status


def _file_of(args: argparse.Namespace) -> list[str]:
    path = args.config_file or present_file()
    return [f"--config-file={path}"] if path else []


def _of_estimate(args: argparse.Namespace) -> Iterator[str]:
    """The words for `accel estimate-memory`; raises `ValueError` for what it cannot estimate."""
    if args.library_name == "timm":
        raise ValueError(
            f"--library_name timm was given: type accel estimate-memory timm:create_model --arguments "
            f'\'{{"model_name": "{args.model_name}"}}\''
        )
    yield args.model_name
    if args.library_name:
        yield f"--library_name={args.library_name}"
    if args.trust_remote_code:
        yield "--trust_remote_code"
    if args.dtypes:
        yield from ("--dtypes", *args.dtypes)
