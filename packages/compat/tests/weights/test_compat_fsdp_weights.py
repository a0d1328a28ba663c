"""Weights and optimizer states in files of torch: whole, in parts, of what is trained alone, merged."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_core import CheckpointError
from accel_testing import run_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4), nn.Linear(4, 2)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.adapter(self.base(x))


def trained(seed):
    from accel_core import Accelerator

    torch.manual_seed(seed)
    accelerator = Accelerator(strategy="fsdp")
    model = Model()
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return accelerator, model, optimizer


def seen(accelerator, model, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    whole = {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    return whole, {name: {key: value.tolist() for key, value in entry.items()} for name, entry in state.items()}


def saved_and_loaded(folder, kind, adapter_only, use_dcp):
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator, model, optimizer = trained(0)
    save_fsdp_model(plugin, accelerator, model, folder, adapter_only=adapter_only, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    before = seen(accelerator, model, optimizer)
    accelerator, model, optimizer = trained(1)
    apart = seen(accelerator, model, optimizer)
    load_fsdp_model(plugin, accelerator, model, folder, adapter_only=adapter_only, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    return before, apart, seen(accelerator, model, optimizer)


@pytest.mark.parametrize(
    "kind, adapter_only, use_dcp, files",
    [
        ("FULL_STATE_DICT", False, True, ["optimizer.bin", "pytorch_model_fsdp.bin"]),
        ("FULL_STATE_DICT", True, True, ["optimizer.bin", "pytorch_model_fsdp.bin"]),
        ("SHARDED_STATE_DICT", False, True, ["optimizer_0", "pytorch_model_fsdp_0"]),
        (
            "SHARDED_STATE_DICT",
            False,
            False,
            [f"{name}_0_rank{rank}.bin" for name in ("optimizer", "pytorch_model_fsdp") for rank in (0, 1)],
        ),
    ],
)
def test_what_was_written_is_read_on_two_ranks(tmp_path, kind, adapter_only, use_dcp, files):
    ranks = run_ranks(saved_and_loaded, 2, tmp_path, kind, adapter_only, use_dcp)
    assert ranks[0][0][0] != ranks[0][1][0]
    for before, apart, after in ranks:
        assert after[1] == before[1] != apart[1]
        for name, values in after[0].items():
            expected = apart if adapter_only and name.startswith("base") else before
            assert values == expected[0][name], name
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def saved_on_a_full_disk(folder):
    """Whether the file of the last save is there, and whole, when the next one has no room."""
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    accelerator, model, _ = trained(0)
    save_fsdp_model(plugin, accelerator, model, folder)
    file = Path(folder) / "pytorch_model_fsdp.bin"
    before = file.read_bytes()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        save_fsdp_model(plugin, accelerator, model, folder)
    return file.read_bytes() == before


def test_a_save_that_has_no_room_leaves_the_one_before(tmp_path):
    assert run_ranks(saved_on_a_full_disk, 1, tmp_path) == [True]


def read_nothing(folder, use_dcp):
    """What every rank says of files of which one is missing."""
    from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_model, save_fsdp_model

    kind = "SHARDED_STATE_DICT" if not use_dcp else "FULL_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator, model, _ = trained(0)
    save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    if accelerator.is_main_process:
        next(path for path in sorted(Path(folder).iterdir())).unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(OSError) as raised:
        load_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    accelerator.wait_for_everyone()
    return str(raised.value)


@pytest.mark.parametrize("use_dcp", [True, False])
def test_a_file_that_one_rank_cannot_read_is_an_error_of_all(tmp_path, use_dcp):
    for said in run_ranks(read_nothing, 2, tmp_path, use_dcp):
        assert "No such file" in said
        assert "pytorch_model_fsdp" in said


def test_a_folder_of_parts_is_merged(tmp_path):
    from accelerate.utils import merge_fsdp_weights

    before, *_ = run_ranks(saved_and_loaded, 2, tmp_path, "SHARDED_STATE_DICT", False, True)[0]
    with pytest.raises(ValueError, match="pytorch_model_fsdp_0"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")
    parts = tmp_path / "pytorch_model_fsdp_0"
    with pytest.raises(ValueError, match="Give a folder outside of that"):
        merge_fsdp_weights(parts, parts / "merged", remove_checkpoint_dir=True)
    merge_fsdp_weights(parts, tmp_path / "merged", remove_checkpoint_dir=True)
    from accelerate.utils import load_state_dict

    merged = load_state_dict(tmp_path / "merged" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in merged.items()} == before[0]
    assert not (Path(tmp_path) / "pytorch_model_fsdp_0").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes, without a group
def test_a_folder_without_a_model_or_with_a_part_of_one_is_refused(tmp_path, monkeypatch):
    from torch.distributed import checkpoint

    from accel_compat.checkpoints import distributed_files
    from accelerate.utils import merge_fsdp_weights

    checkpoint.save({"optimizer": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="other has no weights of a model"):
        merge_fsdp_weights(tmp_path / "other", tmp_path / "merged")
    checkpoint.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "part", no_dist=True)
    stored = distributed_files._stored
    monkeypatch.setattr(
        distributed_files, "_stored", lambda *given: [each._replace(shape=(4,)) for each in stored(*given)]
    )
    with pytest.raises(CheckpointError, match=r"part was to be read, but it has only a part of \('w',\)"):
        merge_fsdp_weights(tmp_path / "part", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
