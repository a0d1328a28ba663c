"""A look into checkpoints without a run: their contents, and whether they are whole.

`accel checkpoint FOLDER` and `python -m accel_core checkpoint FOLDER` call `main`. Nothing is
written, and no class of a checkpoint is needed. `accel checkpoint import` is another command:
a folder of that name is `./import`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accel_checkpoint.files import manifest as manifests
from accel_checkpoint.files import retention
from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import Manifest, read_manifest
from accel_checkpoint.files.part_file import PartReader
from accel_core import CheckpointError
from accel_core.api.checkpoint import format_table

FINE, AMISS, NO_ANSWER = 0, 1, 2  # exit statuses: all is well; something is damaged; what was asked cannot be answered
Report = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Show what a saved run contains, or verify its files."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["import"]:
        from accel_checkpoint.importing import command

        return command.main(given[1:])
    asked = parser().parse_args(given)
    try:
        answer, text, status = _verified(asked.folder) if asked.verify else _described(asked.folder, asked.record)
    except (CheckpointError, OSError) as error:
        absent = isinstance(error, FileNotFoundError) and error.filename == str(asked.folder)
        told = f"There is no folder {str(asked.folder)!r}. Give a folder that a run has saved." if absent else error
        print(told, file=sys.stderr)  # noqa: T201
        return NO_ANSWER
    print(json.dumps(answer, indent=2, allow_nan=False) if asked.json else text)  # noqa: T201
    return status


def parser() -> argparse.ArgumentParser:
    """The arguments of this command."""
    epilog = (
        "`accel checkpoint import SOURCE TARGET` converts a checkpoint of another library; `accel checkpoint import -h` says more. "
        "The exit status is 1 if something is damaged, and 2 if there is no answer."
    )
    page = argparse.ArgumentParser(prog="accel checkpoint", description=main.__doc__, epilog=epilog)
    page.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint, or a folder of checkpoints")
    page.add_argument("--verify", action="store_true", help="read all files and look for damage")
    page.add_argument("--record", action="store_true", help="show everything recorded about the run and its settings")
    page.add_argument("--json", action="store_true", help="print everything as JSON, with the record")
    return page


_Answer = tuple[Mapping[str, Any], str, int]
"""The output of the command as JSON and as text, and its exit status."""


def describe(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint as JSON: what it is, what ran. Raises as `read_manifest`."""
    manifest = read_manifest(folder)
    facts = {"folder": str(folder), "id": manifest.id, "created": manifest.created, "bytes": _size_of(manifest)}
    return {**facts, "files": dict(manifest.files), "record": dict(manifest.record)}


def _size_of(manifest: Manifest) -> int:
    return manifest.index.nbytes + sum(manifest.files.values())


def list_checkpoints(root: Path) -> list[dict[str, Any]]:
    """All `checkpoint_<n>` by number: "state" is "complete" (by file sizes), or has a "reason"."""
    return [_listed(root / retention.name(number), number) for number in retention.numbers(root)]


def _listed(folder: Path, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"number": number, "folder": str(folder)}
    found = manifests.examine(folder)
    if isinstance(found, Manifest):
        return {**row, "state": "complete", "created": found.created, "bytes": _size_of(found)}
    return {**row, "state": found.kind, "reason": f"{folder} {found.found}"}


def _described(folder: Path, record: bool = False) -> _Answer:
    if not _is_root(folder):
        content = describe(folder)
        return content, _description(content, record), FINE
    rows = list_checkpoints(folder)
    sizes = [_bytes(row["bytes"]) if "bytes" in row else "-" for row in rows]
    cells = [
        (str(row["number"]), row.get("created", "-"), size, row["state"]) for row, size in zip(rows, sizes, strict=True)
    ]
    reasons = [f"\n{row['reason']}." for row in rows if row["state"] not in {"complete", "unfinished"}]
    text = "".join([format_table(("number", "created", "size", "state"), cells), *reasons])
    return {"checkpoints": rows}, text, FINE


def _description(content: Mapping[str, Any], record: bool) -> str:
    """The facts of a checkpoint; the record of the run, which fills a screen, only if it is asked for."""
    world = content["record"].get("world", "not recorded")
    facts = {
        "checkpoint": content["folder"],
        "id": content["id"],
        "created": content["created"],
        "world": world["size"] if isinstance(world, dict) and "size" in world else world,
        "size": f"{_bytes(content['bytes'])}, {len(content['files'])} files with tensors",
    }
    if record:
        facts["record"] = json.dumps(content["record"], indent=2, ensure_ascii=False)
    return "\n".join(f"{name:<12}{value}" for name, value in facts.items())


def _is_root(folder: Path) -> bool:
    return folder.is_dir() and not (folder / manifests.NAME).exists() and bool(retention.numbers(folder))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


class Damage(NamedTuple):
    """A file that is not what was saved, and how that shows."""

    file: str
    reason: str


def verify(folder: Path, report: Report | None = None) -> list[Damage]:
    """Reads all of a checkpoint; an entry for each damaged file. Raises if it is no checkpoint."""
    manifest = manifests.unseal(folder)
    if not isinstance(manifest, Manifest):
        if manifest.kind == "damaged":
            return [Damage(str(folder / manifests.NAME), manifest.found)]
        manifest = read_manifest(folder)  # which says why it cannot be read
    data = folder / manifest.data
    try:
        index = Index.read(folder, manifest)
    except (CheckpointError, OSError) as error:
        others = [text for text in manifests.wrong_files(folder, manifest) if text.split()[0] != manifests.INDEX]
        damaged = [Damage(str(data / text.split()[0]), text) for text in others]
        return [Damage(str(data / manifests.INDEX), str(error)), *damaged]
    damaged = []
    for number, (name, stored) in enumerate(index.files.items(), start=1):
        if report is not None:
            report(f"{folder}: {name}, {_bytes(stored.nbytes)}, file {number} of {len(index.files)}")
        try:
            with PartReader(data / name, stored) as reader:
                for key in stored.tensors:
                    reader.tensor(key)  # which verifies every block
        except (CheckpointError, OSError) as error:
            damaged.append(Damage(str(data / name), str(error)))
    return damaged


def _verified(folder: Path) -> _Answer:
    folders = [folder]
    if _is_root(folder):
        folders = [Path(row["folder"]) for row in list_checkpoints(folder) if row["state"] != "unfinished"]
    if not folders:
        raise CheckpointError(f"The checkpoints in {folder} were to be verified, but none of them was ever finished.")
    found = {each: verify(each, partial(print, file=sys.stderr)) for each in folders}
    damaged = [damage for each in found.values() for damage in each]
    content = {"verified": [str(each) for each in folders], "damaged": [damage._asdict() for damage in damaged]}
    lines = [f"damaged: {damage.file}\n  {damage.reason}" for damage in damaged]
    lines += [f"intact: {each}" for each, wrong in found.items() if not wrong]
    return content, "\n".join(lines), AMISS if damaged else FINE
