"""Scripts in the style of those that people have for `accelerate`, each alone, in two processes, or through its launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
FSDP += ["--fsdp_transformer_layer_cls_to_wrap", "Block", "--fsdp_state_dict_type", "FULL_STATE_DICT"]
ZERO = ["--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "1.0"]
SCRIPTS = {
    "nlp_example": r"epoch 1: 45 samples, accuracy 0\.\d+",
    "cv_example": r"epoch 1: 37 samples, accuracy 0\.[6-9]\d+",
    "gradient_accumulation": r"(44|22) steps, weight (1|2)\.\d+",
    "checkpointing": r"steps (66|33) weight",
    "tracking": r"tracked (44|22) steps",
    "early_stopping": r"stopped behind \d+ steps",
    "local_sgd": r"weight \d\.\d+ in (1|2) processes",
    "memory": r"batch sizes \[32, .*\], loss",
    "cross_validation": r"13 predictions of 3 folds",
    "distributed_inference": r"5 answers of (1|2) processes",
}
"""Script → what it prints when all is well. Each asserts more itself."""
ALWAYS = {("cross_validation", 1), ("checkpointing", 2)}


def run(script, folder, *options, start=(), cpu=True):
    """What a script prints."""
    given = [
        *(["--cpu"] if cpu else []),
        *([] if script in {"nlp_example", "cv_example"} else ["--output_dir", str(folder)]),
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *start, str(HERE / f"{script}.py"), *given]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def cases():
    for script in SCRIPTS:
        for world in (1, 2):
            yield pytest.param(script, world, marks=() if (script, world) in ALWAYS else pytest.mark.full)


@pytest.mark.timeout(160)
@pytest.mark.parametrize(("script", "world"), list(cases()))
def test_a_script_runs_unchanged(script, world, tmp_path):
    printed = run(script, tmp_path, start=TORCHRUN if world == 2 else ())
    assert len(re.findall(SCRIPTS[script], printed)) == 1, printed


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize("every", ["epoch", "5"])
def test_a_script_goes_on_from_its_checkpoint(every, tmp_path):
    whole = run("checkpointing", tmp_path, "--checkpointing_steps", every, start=TORCHRUN)
    saved = tmp_path / ("epoch_1" if every == "epoch" else "step_15")
    resumed = run("checkpointing", tmp_path, "--resume_from_checkpoint", str(saved), start=TORCHRUN)
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("FSDP", FSDP),
        pytest.param("DEEPSPEED", ZERO, marks=pytest.mark.full),
        pytest.param("MULTI_CPU", [], marks=pytest.mark.full),
    ],
)
def test_the_launcher_says_which_engine_a_script_trains_with(engine, options, tmp_path):
    printed = run("by_feature", tmp_path, start=[*LAUNCH, *options], cpu=False)
    assert re.search(rf"{engine} 2: ", printed), printed
    assert list((tmp_path / "saved").glob("model*.safetensors"))
