"""`accelerate to-fsdp2`: a configuration file of FSDP's first generation becomes one of the second."""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

from accel_compat.commands.config_file import read, write
from accel_compat.commands.options import Parser

logger = logging.getLogger(__name__)

_GONE = {
    "fsdp_backward_prefetch": "the next unit is gathered ahead by itself",
    "fsdp_forward_prefetch": "the next unit is gathered ahead by itself",
    "fsdp_sync_module_states": "ranks take rank 0's parameters",
    "fsdp_use_orig_params": "parameters keep their names and shapes",
}
_RESHARDS = {
    "FULL_SHARD": True,
    "HYBRID_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with the options of the second generation; says what it leaves out."""
    before = config.get("fsdp_config") or {}
    if not before:
        logger.info("The file has no fsdp_config: nothing is converted.")
        return config
    if str(before.get("fsdp_version", 1)) == "2":
        logger.warning("Config already specifies FSDP2, skipping conversion...")  # the words that its tests look for
        return config
    after: dict[str, Any] = {"fsdp_version": 2}
    for key, value in before.items():
        if key in _GONE:
            logger.warning("%s is left out: %s.", key, _GONE[key])
        elif key in {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"}:
            after["fsdp_reshard_after_forward"] = _RESHARDS.get(str(value).upper(), value)
        elif key != "fsdp_version":
            after[key] = value
    return {**config, "fsdp_config": after}


def load_config(config_file: str) -> dict[str, Any]:
    """The content of a file; `ValueError` for an empty one."""
    if not (content := read(config_file)):
        raise ValueError(f"{config_file} is empty, and there is nothing to convert.")
    return content


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser for `accelerate to-fsdp2`."""
    about = "Convert a configuration file of FSDP's first generation."
    parser: argparse.ArgumentParser = (
        Parser("accelerate to-fsdp2", description=about)
        if subparsers is None
        else subparsers.add_parser("to-fsdp2", description=about, help=about)
    )
    parser.add_argument(
        "--config_file", type=os.path.expanduser, required=True, metavar="FILE", help="the file to convert"
    )
    parser.add_argument("--output_file", type=os.path.expanduser, metavar="FILE", help="where to write the result")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Converts a file; raises `FileNotFoundError`, `FileExistsError`, or `ValueError` without a place to write to."""
    if not os.path.exists(args.config_file):
        raise FileNotFoundError(2, "there is no such configuration file", args.config_file)
    if args.output_file is None and not args.overwrite:
        raise ValueError("Nothing says where to write to. Give --output_file FILE, or --overwrite for the file itself.")
    if args.output_file is not None and not args.overwrite and os.path.exists(args.output_file):
        raise FileExistsError(
            17, "the file is there already: give --overwrite, or another --output_file", args.output_file
        )
    write(args.output_file or args.config_file, convert_config_to_fsdp2(load_config(args.config_file)))
