"""What `accel doctor script.py` says of a script, and what it does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel_compat.script_check.command import check, main
from accel_compat.script_check.running import _SERVICES

FOLDER = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[4]
OPENING = "from accelerate import Accelerator\n"
PREPARED = "accelerator = Accelerator()\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"


def rules(source: str) -> set[str]:
    return {finding.rule for finding in check(source)}


def marked(path: Path) -> set[tuple[int, str]]:
    """The lines of a script whose comment names the rule."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return {(number, match[1]) for number, line in lines if (match := re.search(r"# ([a-z]+(?:-[a-z]+)*)$", line))}


@pytest.mark.parametrize("name", ["text_classification", "moved"])
def test_every_marked_line_of_a_script_is_found_and_no_other(name: str):
    path = FOLDER / f"{name}.py"
    assert {(each.line, each.rule) for each in check(path.read_text(encoding="utf-8"))} == marked(path)


def test_every_marked_line_of_a_script_with_trackers_is_found_and_no_other():
    path = FOLDER / "diffusion.py"
    found = check(path.read_text(encoding="utf-8"))
    # A name is where it is imported.
    assert {(each.line, each.rule) for each in found if each.rule != "name"} == {
        each for each in marked(path) if each[1] != "name"
    }
    assert [each.before for each in found if each.rule == "name"] == [
        "is_wandb_available is imported from accelerate.utils."
    ]


def test_there_is_no_false_alarm_in_the_examples_of_this_repository():
    scripts = sorted(path for path in ROOT.glob("examples/**/*.py") if "tests" not in path.parts)
    assert len(scripts) > 5
    assert {str(path): check(path.read_text(encoding="utf-8")) for path in scripts} == {
        str(path): [] for path in scripts
    }


@pytest.mark.parametrize(
    ("rule", "script", "fine"),
    [
        (
            "schedule-length",
            PREPARED.replace("accelerator.prepare", "OneCycleLR(optimizer, 1.0, total_steps=len(loader)); accelerator.prepare", 1)
            .replace("model, optimizer, loader = OneCycleLR", "s = OneCycleLR")
            .replace("; accelerator", "\nmodel, optimizer, loader = accelerator"),
            PREPARED + "s = OneCycleLR(optimizer, 1.0, total_steps=len(loader))",
        ),
        (
            "schedule-processes",
            PREPARED + "n = 10 * accelerator.num_processes\ns = CosineAnnealingLR(optimizer, n)",
            PREPARED + "n = 10 * accelerator.num_processes\nprint(n)",
        ),
        (
            "schedule-steps",
            "accelerator = Accelerator()\ns = StepLR(optimizer, 3)\ns = accelerator.prepare(s)",
            "accelerator = Accelerator(split_batches=True)\ns = StepLR(optimizer, 3)\ns = accelerator.prepare(s)",
        ),
        ("plain-backward", PREPARED + "loss.backward()", PREPARED + "accelerator.backward(loss)"),
        (
            "torch-clipping",
            PREPARED + "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            PREPARED + "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        ),
        (
            "unprepared-optimizer",
            "accelerator = Accelerator()\nmodel = accelerator.prepare(model)\nadam = torch.optim.AdamW(model.parameters())\nadam.step()",
            "accelerator = Accelerator()\nadam = torch.optim.AdamW(model.parameters())\nmodel, adam = accelerator.prepare(model, adam)\nadam.step()",
        ),
        (
            "unprepared-optimizer",
            PREPARED + "self.sgd = SGD(critic.parameters())\nself.sgd.step()",
            "accelerator = Accelerator()\nparts = accelerator.prepare(*parts)\nsgd = SGD(critic.parameters())\nsgd.step()",
        ),
        (
            "own-scaler",
            PREPARED + "scaler = torch.amp.GradScaler()\naccelerator.backward(scaler.scale(loss))",
            "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()",
        ),
        (
            "clip-in-window",
            PREPARED + "with accelerator.accumulate(model):\n  accelerator.clip_grad_norm_(p, 1.0)",
            PREPARED
            + "with accelerator.accumulate(model):\n  if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_(p, 1.0)",
        ),
        (
            "zero-grad-first",
            PREPARED + "with accelerator.accumulate(model):\n  optimizer.zero_grad()\n  accelerator.backward(loss)",
            PREPARED + "with accelerator.accumulate(model):\n  accelerator.backward(loss)\n  optimizer.zero_grad()",
        ),
        (
            "short-window",
            "a = Accelerator(gradient_accumulation_steps=4)",
            "a = Accelerator(gradient_accumulation_steps=1)",
        ),
        (
            "unwrapped-forward",
            PREPARED + "for b in loader:\n  accelerator.backward(accelerator.unwrap_model(model)(b))",
            PREPARED + "for b in loader:\n  with torch.no_grad():\n    accelerator.unwrap_model(model)(b)",
        ),
        ("name", "from accelerate.utils import ParallelismConfig", "from accelerate.utils import set_seed"),
        ("argument", "a = Accelerator(parallelism_config=p)", "a = Accelerator(mixed_precision='bf16')"),
        (
            "fsdp-option",
            "from accelerate import FullyShardedDataParallelPlugin\nFullyShardedDataParallelPlugin(use_orig_params=True)",
            "from accelerate import FullyShardedDataParallelPlugin\nFullyShardedDataParallelPlugin(cpu_offload=True)",
        ),
        ("attribute", PREPARED + "accelerator.gradient_state.end_of_dataloader", PREPARED + "accelerator.sync_gradients"),
        ("wrapped-object", PREPARED + "optimizer.optimizer.state", PREPARED + "optimizer.state"),
        (
            "state-write",
            PREPARED + "accelerator.state.downcast = True",
            PREPARED + "print(accelerator.state.num_processes)",
        ),
        (
            "shared-state",
            "from accelerate.state import AcceleratorState\nAcceleratorState()",
            "from accelerate import PartialState\nPartialState()",
        ),
        ("reduce-default", "from accelerate.utils import reduce\nreduce(x)", "from accelerate.utils import reduce\nreduce(x, 'sum')"),
        ("reduce-none", PREPARED + "accelerator.reduce(x, 'none')", PREPARED + "accelerator.reduce(x, 'mean')"),
        (
            "collective-alone",
            PREPARED + "if accelerator.is_main_process:\n  accelerator.get_state_dict(model)",
            PREPARED + "if not accelerator.is_main_process:\n  pass\nelse:\n  pass\naccelerator.get_state_dict(model)",
        ),
        ("collective-alone", PREPARED + "if accelerator.process_index == 0 and x:\n  accelerator.save_model(model, 'f')", PREPARED),
        ("checkpoint-file", PREPARED + "torch.load(folder + '/optimizer.bin')", PREPARED + "open('weights.bin')"),
        ("checkpoint-pickle", PREPARED + "accelerator.save_state('f', safe_serialization=False)", PREPARED + "accelerator.save_state('f')"),
        ("fp16-on-cpu", "a = Accelerator(cpu=True, mixed_precision='fp16')", "a = Accelerator(mixed_precision='fp16')"),
        ("distributed-sampler", PREPARED + "s = DistributedSampler(data)", PREPARED + "s = RandomSampler(data)"),
    ],
)  # fmt: skip
def test_a_rule_finds_what_it_is_for_and_leaves_what_is_fine(rule: str, script: str, fine: str):
    assert rule in rules(OPENING + script)
    assert rule not in rules(OPENING + fine)


def test_trackers_that_are_not_installed_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("accel_compat.script_check.running.find_spec", lambda name: None if name == "wandb" else name)
    found = [
        each for each in check(OPENING + "a = Accelerator(log_with=['wandb', 'tensorboard'])") if each.rule == "tracker"
    ]
    assert [each.before.split()[0] for each in found] == ["wandb"]
    assert "pip install wandb" in found[0].here
    assert "wandb" in _SERVICES


def test_a_script_that_has_moved_is_not_told_what_only_accelerate_does():
    moved = "from accel_core import Accelerator\n"
    assert not rules(moved + "a = Accelerator(gradient_accumulation_steps=4)")
    assert not rules(moved + PREPARED + "with accelerator.accumulate(model):\n  accelerator.clip_grad_norm_(p, 1.0)")
    assert rules(moved + PREPARED + "if accelerator.is_main_process:\n  accelerator.get_state_dict(model)")


def test_what_is_another_accelerator_is_left_alone():
    assert not rules("accelerator = torch.accelerator.current_accelerator()\naccelerator.reduce(x, 'none')")
    assert not rules(OPENING + "accelerator = find()\nif accelerator.is_main_process:\n  accelerator.get_state_dict(m)")


def test_the_command_says_file_line_meaning_and_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.py"
    path.write_text(OPENING + PREPARED + "loss.backward()\n")
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:4: plain-backward  [through accel-compat too]\n    in Accelerate: " in out
    assert "here: a RuntimeError at the step of a window, or under fp16. Write accelerator.backward(loss)." in out
    assert main(["--json", str(path)]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["file"], row["line"], row["rule"], row["compat"]) == (str(path), 4, "plain-backward", True)
    path.write_text(OPENING + PREPARED)
    assert main([str(path)]) == 0
    assert "nothing that is known to be different" in capsys.readouterr().out


def test_what_is_no_python_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text("import torch\nif:\n")
    with pytest.raises(ValueError, match=r"train\.py, line 2: this is no Python"):
        main([str(path)])


def test_accel_doctor_reads_a_script_and_does_not_run_it(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(OPENING + "open('ran', 'w')\n" + PREPARED + "loss.backward()\n")
    run = subprocess.run(
        [sys.executable, "-m", "accel_launch", "doctor", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (run.returncode, run.stderr) == (1, "")
    assert "train.py:5: plain-backward" in run.stdout
    assert not (tmp_path / "ran").exists()
