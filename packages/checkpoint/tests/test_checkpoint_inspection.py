"""Looking into checkpoints: which there are, and whether they are whole."""

from __future__ import annotations

import json

import pytest
import torch

from accel_checkpoint.files.folder import Draft
from accel_checkpoint.files.index import Index
from accel_checkpoint.files.manifest import Manifest
from accel_checkpoint.files.part_file import write_part
from accel_checkpoint.inspection.command import describe, list_checkpoints, main, verify
from accel_core import CheckpointError

DAY = "2030-01-31T12:00:00+00:00"
WEIGHT = torch.arange(12.0).reshape(4, 3)


class Writer:
    """Writes checkpoints by hand: what is in which file, and what the index says of it."""

    def __init__(self):
        self.files, self.tensors, self.aliases, self.objects = {}, {}, {}, {}

    def put(self, rank, key, tensor):
        self.files.setdefault(f"rank-{rank:05d}.safetensors", {})[key] = tensor
        return {"file": f"rank-{rank:05d}.safetensors", "key": key}

    def tensor(self, name, tensor, rows=None, kind="elementwise"):
        """`rows`: how many of them each rank has."""
        parts, start = [], 0
        for rank, count in enumerate(rows or [len(tensor) if tensor.dim() else 1]):
            part = tensor[start : start + count] if tensor.dim() else tensor
            offsets = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            box = {"offsets": offsets, "sizes": list(part.shape)} if kind == "elementwise" else {}
            parts.append({**box, **self.put(rank, f"{name}@{start}", part)})
            start += count
        self._describe(name, tensor, kind, parts)
        return self

    def object(self, unit, skeleton, tensors=(), ranks="all"):
        rank = 0 if ranks == "all" else ranks[0]
        places = {path: self.put(rank, f"{unit}/{path}", tensor) for path, tensor in dict(tensors).items()}
        self.objects.setdefault(unit, []).append({"ranks": ranks, "skeleton": skeleton, "tensors": places})
        return self

    def alias(self, name, of):
        self.aliases[name] = of
        return self

    def _describe(self, name, tensor, kind, parts):
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors[name] = {"kind": kind, "shape": list(tensor.shape), "dtype": dtype, "parts": parts}

    def publish(self, folder, record=()):
        draft = Draft.begin(folder)
        stored = {name: write_part(draft.data / name, tensors) for name, tensors in self.files.items()}
        index = Index(stored, self.tensors, self.aliases, self.objects).write(draft.data)
        draft.publish(
            Manifest(draft.id, DAY, index, {name: each.nbytes for name, each in stored.items()}, dict(record))
        )
        return folder


def training(rows=(4,)):
    """A model, its optimizer, a schedule, a loader, an object of the user's, and the random streams of two ranks."""
    writer = Writer().tensor("model.0/weight", WEIGHT, rows).tensor("model.0/count", torch.tensor(3), kind="replicated")
    writer.alias("model.0/head", "model.0/weight").tensor("optimizer.0/weight/exp_avg", WEIGHT / 2, rows)
    writer.object("optimizer.0", {"kind": "torch.optim.adamw:AdamW", "groups": [{"lr": 0.1}]})
    writer.object("optimizer.0.values", {"weight": {}})
    writer.object("scheduler.0", {"last_epoch": 7, "rates": [0.1, 0.2]})
    writer.object("loader.10", {"samples": 64, "epoch": 1}).object("loader.2", {"samples": 320, "epoch": 0})
    writer.object("object.0", {"best": {"tag": "tensor"}}, {"best": torch.ones(2)})
    for rank in (0, 1):
        writer.object("random", {"python": [3, rank]}, {"torch": torch.full((4,), rank)}, ranks=[rank])
    return writer


def command(*words):
    return main([str(word) for word in words])


def data_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_is_described_by_its_manifest(tmp_path, capsys):
    folder = training((1, 3)).publish(tmp_path / "run", {"world": {"size": 2, "source": "torchrun"}, "step": 7})
    assert command(folder) == 0
    text = capsys.readouterr().out
    assert "created     2030-01-31T12:00:00+00:00" in text
    assert "world       2" in text
    assert "2 files with tensors" in text
    assert "record" not in text
    assert command(folder, "--record") == 0
    assert '"step": 7' in capsys.readouterr().out
    assert command(folder, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(json.dumps(describe(folder)))
    index = next(folder.glob("data-*/index.json"))
    assert content["bytes"] == index.stat().st_size + sum(content["files"].values())


def test_a_folder_of_checkpoints_is_a_table_by_number(tmp_path, capsys):
    for number in (2, 10, 11):
        training().publish(tmp_path / f"checkpoint_{number}")
    Draft.begin(tmp_path / "checkpoint_12")
    flip(tmp_path / "checkpoint_2" / "manifest.json")
    next((tmp_path / "checkpoint_11").glob("data-*/rank-00001.safetensors")).unlink()
    rows = list_checkpoints(tmp_path)
    states = ["damaged", "complete", "damaged", "unfinished"]
    assert [(row["number"], row["state"]) for row in rows] == list(zip((2, 10, 11, 12), states, strict=True))
    assert rows[1]["bytes"] == describe(tmp_path / "checkpoint_10")["bytes"]
    assert command(tmp_path) == 0
    text = capsys.readouterr().out
    assert [line.split()[-1] for line in text.splitlines()[1:5]] == states
    assert "rank-00001.safetensors is missing" in text
    assert command(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoints": rows}


def test_what_is_whole_is_verified_file_by_file(tmp_path, capsys):
    folder = training((1, 3)).publish(tmp_path / "run")
    assert command(folder, "--verify") == 0
    printed = capsys.readouterr()
    assert printed.out == f"intact: {folder}\n"
    assert "rank-00000.safetensors" in printed.err
    assert "file 2 of 2" in printed.err


def test_one_flipped_byte_in_any_file_is_found_and_the_file_is_named(tmp_path, capsys):
    folder = training((1, 3)).publish(tmp_path / "run")
    files = data_files(folder)
    assert [path.name for path in files] == [
        *("index.json", "rank-00000.safetensors", "rank-00001.safetensors"),
        "manifest.json",
    ]
    for path in files:
        for position in (0, path.stat().st_size // 2, -1):
            if path.name == "manifest.json" and position == 0:
                continue  # then it is a manifest of another kind
            flip(path, position)
            assert [damage.file for damage in verify(folder)] == [str(path)]
            flip(path, position)
    flip(files[1])
    flip(files[2], 20)
    assert command(folder, "--verify") == 1
    text = capsys.readouterr().out
    assert f"damaged: {files[1]}" in text
    assert f"damaged: {files[2]}" in text
    assert "intact" not in text


def test_files_that_are_gone_or_cut_are_damaged(tmp_path):
    folder = training((1, 3)).publish(tmp_path / "run")
    index, first, second, _ = data_files(folder)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert [damage.file for damage in verify(folder)] == [str(first), str(second)]
    index.unlink()
    assert [damage.file for damage in verify(folder)] == [str(index), str(first), str(second)]


def test_all_checkpoints_of_a_folder_are_verified(tmp_path, capsys):
    folders = [training().publish(tmp_path / f"checkpoint_{number}") for number in range(3)]
    Draft.begin(tmp_path / "checkpoint_3")
    broken = data_files(folders[1])[1]
    flip(broken)
    assert command(tmp_path, "--verify", "--json") == 1
    content = json.loads(capsys.readouterr().out)
    assert [damage["file"] for damage in content["damaged"]] == [str(broken)]
    assert content["verified"] == [str(folder) for folder in folders]


@pytest.mark.parametrize("way", [[], ["--verify"]])
def test_a_folder_without_a_checkpoint_is_no_answer(way, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert command(tmp_path / "empty", *way) == 2
    assert command(tmp_path / "nowhere", *way) == 2
    printed = capsys.readouterr()
    assert "has no manifest.json" in printed.err
    nowhere = str(tmp_path / "nowhere")
    assert printed.err.endswith(f"\nThere is no folder {nowhere!r}. Give a folder that a run has saved.\n")
    assert not printed.out


def test_a_folder_of_unfinished_saves_cannot_be_verified(tmp_path, capsys):
    Draft.begin(tmp_path / "checkpoint_0")
    assert command(tmp_path, "--verify") == 2
    assert "none of them was ever finished" in capsys.readouterr().err


def test_what_a_newer_version_wrote_is_not_called_damaged(tmp_path):
    folder = training().publish(tmp_path / "run")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"version": 1', '"version": 2'), "utf-8")
    with pytest.raises(CheckpointError, match="written by a newer accel-core"):
        verify(folder)
