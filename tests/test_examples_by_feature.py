"""examples/by_feature: each script shows its feature, in one process and in two, and what it prints at its end is right.

A few of them run every time, all of them where they have changed (group `examples`).
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from accel_launch.commands import launch
from accel_testing import preload, run_ranks

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "by_feature").glob("*.py"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
PICTURES = 1797  # of scikit-learn's digits

group = pytest.mark.full(group="examples")
worlds = pytest.mark.parametrize("world", [1, 2])
pytestmark = [
    pytest.mark.timeout(300),
    *(
        pytest.mark.skipif(
            importlib.util.find_spec(needed) is None,
            reason=f"{needed} is missing: pip install -r examples/by_feature/requirements.txt",
        )
        for needed in ("sklearn", "transformers", "peft")
    ),
]

preload("sklearn.datasets", "sklearn.model_selection")


def play(script, options, folder):
    """What a script prints, as one rank among others."""
    os.chdir(folder)
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(Path(script).parent))
    with redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:  # of --help
            assert end.code == 0
    return printed.getvalue()


def run(folder, name, *options, world=1, **variables):
    """What the main process prints; the others print nothing but what libraries log."""
    script = ROOT / "examples" / "by_feature" / f"{name}.py"
    first, *others = run_ranks(play, world, script, options, folder, timeout=200, env=variables)
    assert not [line for printed in others for line in printed.splitlines() if not line.startswith("[")]
    return first


def last(printed):
    """The numbers in the last line."""
    return [float(number) for number in NUMBER.findall(printed.splitlines()[-1])]


def test_small_batches_accumulate_to_the_step_of_a_large_one(tmp_path):
    sizes = {(1, 64, 1), (1, 8, 8), (2, 8, 4)}
    printed = {
        run(tmp_path, "gradient_accumulation", "--batch-size", str(batch), "--accumulation", str(steps), world=world)
        for world, batch, steps in sizes
    }
    assert {text.splitlines()[0] for text in printed} == {"batch of 64, 112 steps"}
    (loss, *others) = (last(text)[0] for text in printed)
    assert loss < 0.3
    assert others == pytest.approx([loss] * len(others), abs=2e-4)


@group
def test_tokens_weigh_the_same_in_whatever_batch_they_are(tmp_path):
    sizes = [(1, 32, 1), (1, 8, 4), (2, 8, 2)]
    losses = [
        run(tmp_path, "token_weighted_accumulation", "--batch-size", str(batch), "--accumulation", str(n), world=world)
        for world, batch, n in sizes
    ]
    firsts, lasts = zip(*(map(float, re.findall(r"epoch (\S+)", text)) for text in losses), strict=True)
    assert lasts == pytest.approx([lasts[0]] * 3, abs=5e-4)
    assert lasts[0] < firsts[0] - 0.2


@group
@worlds
def test_a_run_that_was_stopped_goes_on(world, tmp_path):
    whole = run(tmp_path, "checkpointing", "--save", "whole", world=world)
    assert last(whole)[0] == 84
    assert "stopped at step 40" in run(tmp_path, "checkpointing", "--save", "run", "--stop-after", "40", world=world)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    resumed = run(tmp_path, "checkpointing", "--save", "run", "--resume", world=world)
    assert resumed == f"resumed at step 30\n{whole}"


@group
def test_a_run_goes_on_in_another_number_of_processes(tmp_path):
    whole = run(tmp_path, "checkpointing", "--save", "whole")
    run(tmp_path, "checkpointing", "--save", "run", "--stop-after", "40", world=2)
    assert last(run(tmp_path, "checkpointing", "--save", "run", "--resume")) == pytest.approx(last(whole), abs=1e-3)


@group
@worlds
def test_a_run_is_recorded(world, tmp_path):
    assert run(tmp_path, "tracking", world=world).startswith("87 steps recorded by jsonl, accuracy 0.9")
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    losses = [row["values"]["train/loss"] for row in rows if "train/loss" in row.get("values", {})]
    assert len(losses) == 87
    assert losses[-1] < losses[0] / 2
    text = json.dumps(rows)
    assert all(name in text for name in ("accuracy by epoch", "train/accuracy", "last outputs", "pictures"))
    assert json.loads((file.parent / "config.json").read_text(encoding="utf-8"))["lr"] == 0.01
    assert len(list(file.parent.rglob("*.png"))) == 12


@worlds
def test_all_processes_stop_where_one_decides(world, tmp_path):
    *epochs, most = last(run(tmp_path, "early_stopping", world=world))
    assert len(epochs) == world
    assert len(set(epochs)) == 1
    assert 2 < epochs[0] < most == 100


@worlds
def test_every_picture_is_predicted_once_by_a_model_that_never_saw_it(world, tmp_path):
    predictions, models, accuracy = last(run(tmp_path, "cross_validation", world=world))
    assert (predictions, models) == (PICTURES, 3)
    assert 0.93 < accuracy < 0.97


@group
@worlds
def test_a_batch_size_that_fits_is_found(world, tmp_path):
    *tried, loss = last(run(tmp_path, "memory", "--room", "400", world=world))
    assert tried == [512, 460, 414, 372]
    assert loss < 1


@group
@worlds
def test_three_steps_are_profiled(world, tmp_path):
    printed = run(tmp_path, "profiling", world=world)
    assert printed.endswith("6 calls of aten::addmm in 3 of 29 steps\n")
    for rank in range(world):
        events = json.loads((tmp_path / "traces" / f"profile_{rank}.json").read_bytes())["traceEvents"]
        steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
        assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}
        assert any(event.get("args", {}).get("Input Dims") for event in events), "shapes are recorded"


@group
@worlds
def test_equal_blocks_are_compiled_once(world, tmp_path):
    operations, graphs, blocks, loss = last(run(tmp_path, "compilation", "--backend", "eager", world=world))
    assert (operations, graphs, blocks) == (5, 1, 8), "those of one block"
    assert (loss,) == pytest.approx(last(run(tmp_path, "compilation", "--backend", "no"))[3:], abs=2e-3)


@worlds
def test_each_process_has_a_part_of_the_model(world, tmp_path):
    from safetensors.torch import load_file

    here, whole, loss = last(run(tmp_path, "fsdp", world=world))
    assert here == whole / world
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == whole
    assert "blocks.3.down.weight" in weights
    assert loss == pytest.approx(last(run(tmp_path, "fsdp", "--strategy", "single"))[-1], abs=2e-3)


@group
def test_peers_share_the_heads_and_train_what_one_process_trains(tmp_path):
    (heads, total, loss), (here, _, shared) = (last(run(tmp_path, "tensor_parallel", world=world)) for world in (1, 2))
    assert (heads, total, here) == (8, 8, 4)
    assert loss < 2
    assert shared == pytest.approx(loss, abs=2e-3)


@group
def test_peers_share_sequences_and_train_what_one_process_trains(tmp_path):
    alone, shared = (run(tmp_path, "context_parallel", world=world) for world in (1, 2))
    assert [last(text)[0] for text in (alone, shared)] == [128, 64]
    assert last(alone)[-1] < last(alone.splitlines()[0])[-1] - 0.1
    assert last(shared)[-1] == pytest.approx(last(alone)[-1], abs=2e-3)


@group
@worlds
def test_processes_are_apart_until_parameters_are_averaged(world, tmp_path):
    training, end = run(tmp_path, "local_sgd", world=world).splitlines()
    widest, together, loss = last(training)
    assert (widest > 0) == (world > 1)
    assert together == (87 // 8 if world > 1 else 87)
    assert last(end) == [0]
    assert loss < 1
    compared = run(tmp_path, "local_sgd", "--every", "0", world=world).splitlines()[0]
    assert last(compared)[:2] == [0, 87]


@group
@pytest.mark.parametrize("options", [(), ("--stage", "3", "--offload")])
def test_zero_shares_out_the_state_of_the_optimizer(options, tmp_path):
    state, losses = {}, {}
    for world in (1, 2):
        first, second = run(tmp_path, "deepspeed_zero", *options, world=world).splitlines()[-2:]
        (stage, state[world]), (weights, losses[world]) = last(first), last(second)
        assert (stage, weights) == (int(options[1]) if options else 2, 4810)
    assert state[2] == pytest.approx(state[1] / 2, rel=0.01)
    assert losses[1] < 1
    assert losses[2] == pytest.approx(losses[1], abs=5e-3)


@group
@worlds
def test_a_generator_learns_from_its_critic(world, tmp_path):
    distance, before = last(run(tmp_path, "gan", world=world))
    assert distance < before / 3


@group
@worlds
def test_an_agent_learns_from_the_games_of_all_processes(world, tmp_path):
    first, final = run(tmp_path, "ppo", world=world).splitlines()
    falls, _, steps = last(final)
    assert falls < last(first)[0] / 4
    assert steps == 20 * 64 * 32 * world


@group
@worlds
def test_an_average_of_the_weights_is_better_than_the_last_ones(world, tmp_path):
    loss, averaged = last(run(tmp_path, "ema", world=world))
    assert averaged < loss < 1


@group
@worlds
def test_a_network_for_pictures_counts_every_one_of_them(world, tmp_path):
    right, total, accuracy = last(run(tmp_path, "vision", "--workers", "1", world=world))[1:]
    assert total == 360
    assert accuracy == pytest.approx(right / 360, abs=1e-3)
    assert accuracy > 0.88


@group
@worlds
def test_a_language_model_is_trained_and_then_tuned(world, tmp_path):
    first, final, _ = last(run(tmp_path, "language_model", "--out", "base", world=world))
    assert 7.5 < first < 9
    assert final < 5
    tuned = last(run(tmp_path, "language_model", "--text", "email", "--model", "base", "--out", "tuned", world=world))
    assert tuned[0] < 6, "it begins with what it has learnt"
    assert tuned[1] < tuned[0]
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "tuned").iterdir()}


@group
@worlds
def test_adapters_are_trained_and_the_model_is_not(world, tmp_path):
    from safetensors.torch import load_file

    printed = run(tmp_path, "lora", world=world)
    trained, total = last(printed.splitlines()[0])
    assert "the others are as they were" in printed
    assert trained < total / 10
    first, final, _ = last(printed)
    assert final < first - 0.3
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapters.values()) == trained
    assert all(tensor.any() for tensor in adapters.values()), "the second of each pair begins as zero"


@group
@worlds
def test_a_model_on_disk_answers_as_one_in_memory(world, tmp_path):
    in_memory, on_disk, answers, error = last(run(tmp_path, "big_model", world=world))
    assert (in_memory, on_disk, answers) == (1, 8, 11)
    assert error < 1e-5


def commands(script):
    """The commands in the docstring of a script that start it: words before its path, and after it."""
    path = f"examples/by_feature/{script.name}"
    for line in script.read_text(encoding="utf-8").split('"""')[1].splitlines():
        for command in re.split(r"&&|  #", line):
            if path in command:
                words = shlex.split(command)
                yield words[: words.index(path)], words[words.index(path) + 1 :]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_says_how_it_is_started(script, capsys):
    """Alone, in two processes and in eight; `accel launch` takes the options that it is shown."""
    starts = [start for start, _ in commands(script)]
    assert ["python"] in starts
    for processes in ("2", "8"):
        assert ["accel", "launch", "--num-processes", processes] in [start[:4] for start in starts]
    for start in starts:
        if start[0] == "accel":
            assert launch.main([*start[2:], "--dry-run", str(script)]) == 0
    capsys.readouterr()


@group
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_has_the_options_that_it_shows(script, tmp_path):
    printed = run(tmp_path, script.stem, "--help")
    for _, arguments in commands(script):
        shown = [word for word in arguments if word.startswith("--")]
        assert all(re.search(rf"^  {option}\b", printed, re.MULTILINE) for option in shown), (shown, printed)


SHARDED = [script for script in SCRIPTS if any("--fsdp" in start for start, _ in commands(script))]
MORE = {"compilation": ["--backend", "eager"]}
"""Script → options that spare a compiler."""


@group
@pytest.mark.parametrize("script", SHARDED, ids=lambda script: script.stem)
def test_a_script_that_says_so_runs_sharded(script, tmp_path):
    (options,) = (arguments for start, arguments in commands(script) if "--fsdp" in start)
    if "--resume" in options:
        run(tmp_path, script.stem, "--save", "run", "--stop-after", "40")
    shown = run(tmp_path, script.stem, *options, *MORE.get(script.stem, []), world=2, ACCELERATE_STRATEGY="fsdp")
    assert last(shown)


def test_scripts_run_sharded_but_for_those_that_choose_a_strategy_or_cannot():
    others = {"fsdp", "tensor_parallel", "context_parallel", "deepspeed_zero", "local_sgd", "big_model"}
    assert {script.stem for script in SCRIPTS} - {script.stem for script in SHARDED} == others


def test_every_script_is_listed():
    listed = re.findall(r"\(by_feature/(\w+)\.py\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [script.stem for script in SCRIPTS]
