"""Folders that DeepSpeed wrote go on as neutral checkpoints: the same weights, the same moments, the same next step."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from deepspeed_folders import COMPILED, RUNS, STEPS, compile_operator, go_on, make, train_with_deepspeed

from accel_testing import run_ranks

UNIVERSAL = ("zero1", "zero3", "bf16-zero2", "bf16-zero3")
NAMES = [*RUNS, *(f"{name}-universal" for name in UNIVERSAL)]
EXACT = [name for name in NAMES if not name.startswith("bf16")]  # the others compute in bf16, as nothing here does
(main,) = (offer.load() for offer in entry_points(group="accel.commands", name="checkpoint"))
TAG = f"global_step{STEPS}"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """What DeepSpeed saved, on two ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    run_ranks(train_with_deepspeed, 2, folder, list(RUNS), list(UNIVERSAL), timeout=110, env={"DS_ACCELERATOR": "cpu"})
    return folder


@pytest.fixture(scope="module")
def targets(source, tmp_path_factory) -> dict[str, Path]:
    """The neutral checkpoints, by the name of the run."""
    folder = tmp_path_factory.mktemp("imported")
    for name in NAMES:
        assert main(["import", str(source / name), str(folder / name)]) == 0
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def alone(targets):
    """The runs that went on in one process, by name."""
    return run_ranks(go_on, 1, targets)[0]


def expected(source: Path, name: str) -> dict:
    return torch.load(source / f"{name.removesuffix('-universal')}.pt", weights_only=True)


def difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_masters_are_those_of_deepspeed_to_the_bit(source, alone, name):
    assert difference(expected(source, name)["saved"], alone[name].loaded["fp32"]) == 0.0


@pytest.mark.parametrize("name", UNIVERSAL)
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_are_those_that_deepspeed_itself_puts_together(source, alone, name, moment):
    whole = source / f"{name}-universal" / f"{TAG}_universal" / "zero"
    for key, value in alone[name].loaded[moment].items():
        found = torch.load(whole / key / f"{moment}.pt", weights_only=True)
        found = found["param"] if isinstance(found, dict) else found
        assert torch.equal(found.view_as(value), value)
        assert torch.equal(alone[f"{name}-universal"].loaded[moment][key], value)


@pytest.mark.parametrize("name", EXACT)
def test_the_next_step_alone_is_that_of_deepspeed(source, alone, name):
    assert difference(expected(source, name)["next"], alone[name].after) <= 1e-6


def test_the_next_step_under_ddp_is_that_of_deepspeed(source, targets):
    names = ["zero2", "zero3", "zero3-universal"]
    for rank in run_ranks(go_on, 2, {name: targets[name] for name in names}):
        assert max(difference(expected(source, name)["next"], rank[name].after) for name in names) <= 1e-6


@pytest.mark.full
@pytest.mark.timeout(500)
def test_an_optimizer_of_deepspeeds_goes_on_as_that_of_torch(tmp_path):
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
    run_ranks(compile_operator, 1, "fused_adam", timeout=350, env=env)
    run_ranks(train_with_deepspeed, 2, tmp_path, list(COMPILED), [], timeout=90, env=env)
    for name in COMPILED:
        assert main(["import", str(tmp_path / name), str(tmp_path / "new")]) == 0
        assert (
            difference(expected(tmp_path, name)["next"], run_ranks(go_on, 1, {name: tmp_path / "new"})[0][name].after)
            <= 1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_buffers_frozen_parameters_ties_and_rates_come_along(alone, name):
    found, frozen = alone[name], make()[0].frozen.weight.detach()
    assert found.buffer.tolist() == [STEPS] * 3
    assert torch.equal(found.frozen, frozen.bfloat16().float() if name.startswith("bf16") else frozen)
    assert found.is_tied
    assert found.rates == [1e-2 / (STEPS + 1), 2e-2 / (STEPS + 1)]


def test_what_is_not_in_the_folder_is_said_at_the_load(alone):
    (warning,) = alone["zero2"].warned
    assert "imported from DeepSpeed 0.19" in warning
    assert "loader.0, the random streams" in warning


def test_each_rank_has_a_file_and_all_of_them_are_intact(targets, capsys):
    assert sorted(path.name for path in targets["zero3"].glob("data-*/rank-*")) == [
        f"rank-0000{rank}.safetensors" for rank in (0, 1)
    ]
    assert main([str(targets["zero3"]), "--verify"]) == 0
    assert "intact" in capsys.readouterr().out


def test_a_dry_run_says_what_is_there_and_writes_nothing(source, tmp_path, capsys):
    assert main(["import", str(source / "bf16-zero2"), str(tmp_path / "new"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    for text in (
        "DeepSpeed 0.19",
        "stage 2, a world of 2",
        "4 trained tensors, 66 elements",
        "torch.optim.AdamW, 2 groups",
        "epoch",
    ):
        assert text in said
    assert not (tmp_path / "new").exists()


def test_the_folder_of_a_tag_is_as_good_as_the_one_above(source, capsys):
    assert main(["import", str(source / "zero2" / TAG), "--dry-run"]) == 0
    assert f"tag         {TAG}" in capsys.readouterr().out


@pytest.fixture
def copy(source, tmp_path):
    """Copies the folder of a run, to be spoilt."""

    def copy(name: str) -> Path:
        return shutil.copytree(source / name, tmp_path / name)

    return copy


def refusal(folder: Path, capsys, *options: str) -> str:
    assert main(["import", str(folder), "--dry-run", *options]) == 2
    return capsys.readouterr().err


def spoil(path: Path, change) -> None:
    content = torch.load(path, weights_only=False)  # the test's own file
    change(content)
    torch.save(content, path)


def test_a_missing_file_of_a_rank_is_named(copy, capsys):
    folder = copy("zero2")
    (folder / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "those of the ranks [1] are missing. Bring the files of all ranks" in refusal(folder, capsys)
    folder = copy("zero3")
    (folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert "those of the ranks [0] are missing" in refusal(folder, capsys)


def test_a_tag_that_is_not_there_is_named_beside_those_that_are(copy, capsys):
    folder = copy("zero2")
    (folder / "latest").write_text("global_step9")
    assert f"names the tag 'global_step9', which is not there: ['{TAG}']" in refusal(folder, capsys)
    (folder / "latest").write_text("../zero2")
    assert "names the tag '../zero2', which is not there" in refusal(folder, capsys)


def test_files_of_different_saves_are_not_mixed(copy, capsys):
    folder = copy("zero2") / TAG
    spoil(
        folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].fill_(7),
    )
    assert "files of different saves are mixed" in refusal(folder, capsys)
    folder = copy("zero3") / TAG
    spoil(folder / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(global_steps=9))
    assert "the files of the model are of the steps ['3', '9']: files of different saves" in refusal(folder, capsys)


def test_shards_that_do_not_make_up_a_parameter_are_refused(copy, capsys):
    folder = copy("zero2") / TAG
    spoil(
        folder / "mp_rank_00_model_states.pt",
        lambda content: content["param_shapes"][0].update({"hidden.weight": torch.Size((5, 6))}),
    )
    assert "of 'hidden.weight' they have 25 elements, and its shape is [5, 6]" in refusal(folder, capsys)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("layer_3_expert_0_mp_rank_00_model_states.pt", "a mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "a mixture of experts"),
        ("layer_01-model_states.pt", "pipeline stages"),
        ("mp_rank_01_model_states.pt", "tensor-parallel ranks"),
    ],
)
def test_other_parallelisms_are_refused_by_their_names(copy, capsys, file, reason):
    folder = copy("zero2") / TAG
    (folder / file).touch()
    said = refusal(folder, capsys)
    assert f"{file} is of {reason}, which cannot be" in said
    assert "Go on with it in DeepSpeed" in said


def test_parameters_shared_out_among_fewer_ranks_are_refused(copy, capsys):
    folder = copy("zero3") / TAG
    for path in folder.glob("*optim_states.pt"):
        spoil(path, lambda content: content["optimizer_state_dict"].update(partition_count=1))
    assert "shared out among [1] of 2 ranks" in refusal(folder, capsys)


def test_shards_of_an_unknown_kind_are_refused(copy, capsys):
    folder = copy("zero3") / TAG
    spoil(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda content: content.update(optimizer_state_dict={"a": 1}),
    )
    assert "it has the shards of no known kind: ['a']" in refusal(folder, capsys)
    folder = copy("zero2") / TAG
    spoil(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda content: content["optimizer_state_dict"].pop("param_slice_mappings"),
    )
    assert "of no known kind" in refusal(folder, capsys)


def test_a_run_without_zero_is_refused(copy, capsys):
    folder = copy("zero2") / TAG
    spoil(folder / "mp_rank_00_model_states.pt", lambda content: content.update(param_shapes=None))
    assert "saved without ZeRO (stage 0)" in refusal(folder, capsys)


def test_an_elastic_checkpoint_is_refused(copy, capsys):
    folder = copy("zero2") / TAG
    for path in folder.glob("*optim_states.pt"):
        spoil(path, lambda content: content["optimizer_state_dict"].update(base_optimizer_state=[{}, {}]))
    assert "saved with elastic_checkpoint" in refusal(folder, capsys)


def test_shards_that_were_moved_to_a_disk_are_refused(copy, capsys, tmp_path):
    folder = copy("zero3") / TAG
    spoil(
        folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda content: content["optimizer_state_dict"].update(fp32_flat_groups=[torch.empty(0), torch.empty(0)]),
    )
    assert main(["import", str(folder), str(tmp_path / "new")]) == 2
    assert "it was moved to a disk (offload to nvme), perhaps" in capsys.readouterr().err
    assert not [*(tmp_path / "new").glob("manifest.json")]


def test_a_conversion_that_was_not_finished_is_refused(copy, capsys, tmp_path):
    folder = copy("zero1-universal") / f"{TAG}_universal"
    (folder / "zero" / "hidden.bias" / "fp32.pt").unlink()
    assert main(["import", str(folder), str(tmp_path / "new")]) == 2
    assert "there is no fp32.pt in it: the conversion was not finished" in capsys.readouterr().err


def of_deepspeed(folder: Path, **options) -> None:
    """Makes the options of groups those of DeepSpeed's own Adam."""

    def change(content):
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
            group.clear()
            group.update({**kept, "bias_correction": True, **options})

    for path in folder.glob("*optim_states.pt"):
        spoil(path, change)


def test_an_optimizer_of_deepspeeds_is_told_by_the_configuration_or_by_the_user(copy, capsys):
    folder = copy("zero2") / TAG
    of_deepspeed(folder)
    said = refusal(folder, capsys)
    assert "cannot be told by its options ['betas', 'bias_correction', 'eps', 'lr', 'weight_decay']" in said
    assert "--optimizer torch.optim.AdamW" in said
    assert "or as 'torch.optim.Nope'" in refusal(folder, capsys, "--optimizer", "torch.optim.Nope")
    assert main(["import", str(folder), "--dry-run", "--optimizer", "torch.optim.Adam"]) == 0
    assert "torch.optim.Adam, 2 groups" in capsys.readouterr().out
    assert main(["import", str(folder), "--dry-run", "--optimizer", "mine.Adam"]) == 0
    assert "mine.Adam, 2 groups" in capsys.readouterr().out
    for kind, options, name in (
        ("Adam", {}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
        ("AdamW", {}, "AdamW"),
    ):
        section = {"optimizer": {"type": kind, "params": options}}
        spoil(
            folder / "mp_rank_00_model_states.pt",
            lambda content, section=section: content.update(ds_config={**content["ds_config"], **section}),
        )
        assert main(["import", str(folder), "--dry-run"]) == 0
        assert f"torch.optim.{name}, 2 groups" in capsys.readouterr().out


def test_an_optimizer_that_torch_has_not_is_not_taken_for_one(copy, capsys):
    folder = copy("zero2") / TAG
    of_deepspeed(folder, bias_correction=False)
    said = refusal(folder, capsys, "--optimizer", "torch.optim.AdamW")
    assert "it has bias_correction=False, which that has not" in said


class Trap:
    """Runs code where a pickle is loaded without care."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_no_file_is_able_to_run_code(copy, capsys, tmp_path):
    import os

    folder, mark = copy("zero2") / TAG, tmp_path / "ran"
    path = folder / "mp_rank_00_model_states.pt"
    spoil(path, lambda content: content.update(mine=Trap(os.mkdir, str(mark))))
    refusal(folder, capsys)
    assert not mark.exists()
    folder = copy("zero1") / TAG
    spoil(
        folder / "mp_rank_00_model_states.pt",
        lambda content: content.update(mine=Trap(eval, f"open({str(mark)!r}, 'w')")),
    )
    assert main(["import", str(folder), "--dry-run"]) == 0  # what it names is never looked up
    assert not mark.exists()


def test_what_cannot_be_read_is_named(copy, capsys):
    folder = copy("zero2") / TAG
    path = folder / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path} was to be imported, but it is damaged, or holds what cannot be read" in refusal(folder, capsys)
    torch.save(OrderedDict(other=1), path)
    assert "it holds no dict with module: DeepSpeed did not write it" in refusal(folder, capsys)
