"""Weights come out of checkpoints and other files as plain safetensors, one tensor at a time, or not at all."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from sharded_strategies import Uneven
from torch import nn
from weight_reader import read_weights

from accel_checkpoint import export_weights, load_checkpoint_in_model, write_weights
from accel_checkpoint.inspection.command import main as checkpoint_command
from accel_core import Accelerator, CheckpointError
from accel_testing import run_ranks
from accel_testing.memory_peaks import PEAKS_ARE_MEASURED, extra_memory


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.low = nn.Parameter(torch.randn(3).bfloat16())

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


def seeded(seed=0):
    torch.manual_seed(seed)
    return Tied()


def save(folder, *models, strategy=None):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    accelerator.prepare(*models)
    accelerator.save_state(folder)
    accelerator.free_memory()


def save_in_shards(folder):
    save(folder, seeded(), strategy=Uneven())


def assert_is(directory, model):
    expected = model.state_dict()
    found = read_weights(directory)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype
    other = seeded(5)
    load_checkpoint_in_model(other, directory)
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight


def test_what_ranks_saved_in_shards_is_one_plain_file(tmp_path):
    run_ranks(save_in_shards, 2, tmp_path / "saved")
    written = export_weights(tmp_path / "saved", tmp_path / "out")
    assert written.files == ("model.safetensors",)
    assert_is(tmp_path / "out", seeded())
    plain = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert plain.keys() | {"head.weight"} == seeded().state_dict().keys()  # a tie is there once
    assert (written.tensors, written.aliases, written.nbytes) == (len(plain), 1, sum(v.nbytes for v in plain.values()))


def test_parts_are_as_large_as_was_asked_and_their_index_names_them(tmp_path):
    save(tmp_path / "saved", seeded())
    done = []
    written = export_weights(
        tmp_path / "saved", tmp_path / "out", "100B", report=lambda name, so_far, total: done.append((so_far, total))
    )
    index = json.loads((tmp_path / "out" / written.files[0]).read_bytes())
    assert {*index["weight_map"].values()} == {*written.files[1:]}
    assert len(written.files) > 2
    assert done[-1] == (written.nbytes, written.nbytes)
    assert len(done) == written.tensors
    assert_is(tmp_path / "out", seeded())


@pytest.mark.parametrize("form", [{"max_shard_size": 100}, {"safe_serialization": False}])
def test_files_of_save_model_are_put_together_too_even_in_their_own_place(form, tmp_path):
    write_weights(seeded().state_dict(), tmp_path, **form)
    (tmp_path / "notes.txt").write_text("mine")
    export_weights(tmp_path, tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}
    assert (tmp_path / "notes.txt").exists()
    assert_is(tmp_path, seeded())


def test_weights_that_are_there_stay_unless_they_may_be_replaced(tmp_path):
    save(tmp_path / "saved", seeded())
    write_weights(seeded(1).state_dict(), tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"holds weights already: model.safetensors.*overwrite=True \(--force\)"):
        export_weights(tmp_path / "saved", tmp_path / "out")
    assert_is(tmp_path / "out", seeded(1))
    export_weights(tmp_path / "saved", tmp_path / "out", overwrite=True)
    assert_is(tmp_path / "out", seeded())


def test_of_several_models_one_has_to_be_chosen(tmp_path):
    save(tmp_path / "saved", seeded(), seeded(1))
    with pytest.raises(
        ValueError, match=r"has 2: model.0 \(8 tensors\), model.1 .*Choose one .*model=0\) \(--model 0\)"
    ):
        export_weights(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(
        ValueError, match="The weights of model 2 were to be read from .*, but this checkpoint has 2: model.0"
    ):
        export_weights(tmp_path / "saved", tmp_path / "out", model=2)
    assert not (tmp_path / "out").exists()
    export_weights(tmp_path / "saved", tmp_path / "out", model=1)
    assert_is(tmp_path / "out", seeded(1))
    with pytest.raises(ValueError, match="Model 1 of .* was asked for: it is no checkpoint"):
        export_weights(tmp_path / "out", tmp_path / "other", model=1)


def test_damage_is_found_and_leaves_what_was_there(tmp_path):
    save(tmp_path / "saved", seeded())
    write_weights(seeded(1).state_dict(), tmp_path / "out")
    (file,) = (tmp_path / "saved").glob("data-*/*.safetensors")
    content = bytearray(file.read_bytes())
    content[content.index(bytes(seeded().embedding.weight.untyped_storage()))] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        export_weights(tmp_path / "saved", tmp_path / "out", overwrite=True)
    assert_is(tmp_path / "out", seeded(1))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_is_no_source_or_no_target_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match="is neither a file nor a directory"):
        export_weights(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(ValueError, match="which is neither a .safetensors, nor a .bin"):
        export_weights(tmp_path / "notes.txt", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="should hold a checkpoint"):
        export_weights(tmp_path, tmp_path / "out")
    write_weights({"a": torch.ones(1)}, tmp_path / "one")
    for target in ("out.safetensors", "notes.txt"):
        with pytest.raises(NotADirectoryError, match="should be a directory"):
            export_weights(tmp_path / "one", tmp_path / target)
    with pytest.raises(ValueError, match="max_shard_size='much'"):
        export_weights(tmp_path, tmp_path / "out", "much")
    write_weights({"odd": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "odd", safe_serialization=False)
    with pytest.raises(CheckpointError, match=r"'odd' is complex128\[2\].*accelerator.save_model"):
        export_weights(tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def memory_of_exporting(folder, count, nbytes):
    layers = nn.ParameterList([nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(count)])
    save(folder / "saved", layers)
    export_weights(folder / "saved", folder / "warm")
    return extra_memory(lambda: export_weights(folder / "saved", folder / "out"))


@pytest.mark.skipif(not PEAKS_ARE_MEASURED, reason="this system does not tell how much memory was used at most")
def test_it_takes_the_memory_of_one_tensor(tmp_path):
    nbytes = 16 << 20
    (extra,) = run_ranks(memory_of_exporting, 1, tmp_path, 8, nbytes)
    assert extra < 2.5 * nbytes


def test_checkpoints_are_looked_into_by_a_command_of_their_own(tmp_path, capsys):
    save(tmp_path / "saved", seeded())
    assert checkpoint_command([str(tmp_path / "saved"), "--record"]) == 0
    assert '"models": 1' in capsys.readouterr().out
    assert checkpoint_command([str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
