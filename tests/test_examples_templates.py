"""Templates in examples/: configurations that `accel launch` reads, and jobs of Slurm and Kubernetes that start with it.

There is no Slurm here: a program named `srun` starts the tasks, with the variables that Slurm's gives them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from accel_launch.commands import launch
from accel_testing import no_leaks

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGURATIONS = {
    "cpu": ["num_processes 1", "cpu true"],
    "one_gpu": ["num_processes 1", "mixed_precision bf16"],
    "gpus": ["strategy ddp", "ddp.gradient_as_bucket_view true", "process_group.timeout 15m"],
    "fsdp": ["num_processes 8", "strategy fsdp", "fsdp.wrap LlamaDecoderLayer", "fsdp.activation_checkpointing true"],
    "deepspeed": ["num_processes 8", "strategy deepspeed", "deepspeed.zero_stage 3"],
    "machines": ["num_machines 2", "num_processes 16", "main_process_ip 10.0.0.1", "fsdp.replicate 2"],
}
"""Configuration → some of what is read out of it."""
SRUN = r"""#!/bin/bash
# A task on each node, all on this machine, with the variables that srun gives a task.
while [[ $1 == --* ]]; do shift; done
each=${SLURM_TASKS_PER_NODE%%(*}
for ((rank = 0; rank < SLURM_NNODES * each; rank++)); do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$((SLURM_NNODES * each)) SLURM_STEP_TASKS_PER_NODE=$SLURM_TASKS_PER_NODE \
        SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_PROCID=$rank SLURM_NODEID=$((rank / each)) \
        SLURM_LOCALID=$((rank % each)) "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


@pytest.fixture(autouse=True)
def leak_police():
    with no_leaks():
        yield


def test_every_configuration_is_tried():
    assert {path.stem for path in (EXAMPLES / "configurations").iterdir()} == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_accel_launch_reads_a_configuration(name, capsys):
    path = EXAMPLES / "configurations" / f"{name}.yaml"
    command = re.search(r"accel launch (.+) train\.py", path.read_text(encoding="utf-8"))[1].split()
    command = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in command]
    assert launch.main([*command, "--dry-run", str(EXAMPLES / "quickstart.py")]) == 0
    shown, noted = capsys.readouterr()
    assert noted == ""
    for row in CONFIGURATIONS[name]:
        option, value = row.split()
        assert re.search(rf"^{re.escape(option)} +{value} +\S*{name}\.yaml", shown, re.MULTILINE), row


def sbatch(folder, template, *arguments, nodes, each, tasks=1):
    """What a job prints: on so many nodes, with so many GPUs and tasks on each, as the script asks for them."""
    (folder / "srun").write_text(SRUN, encoding="utf-8")
    (folder / "srun").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), environment["PATH"]]),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": str(nodes),
        "SLURM_GPUS_ON_NODE": str(each),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{node + 1}" for node in range(nodes)),
        "ACCELERATE_USE_CPU": "yes",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(EXAMPLES / "slurm" / template), *arguments]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("template", sorted((EXAMPLES / "slurm").iterdir()), ids=lambda path: path.name)
def test_a_batch_script_is_one_of_bash_and_asks_for_what_it_uses(template):
    subprocess.run(["bash", "-n", str(template)], check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", template.read_text(encoding="utf-8"), re.MULTILINE))
    assert asked["signal"].startswith("TERM@")
    assert "export SRUN_CPUS_PER_TASK=" in template.read_text(encoding="utf-8"), "srun does not take it from the job"
    each = asked["gpus-per-node"] if template.name == "task_for_each_gpu.sh" else "1"
    assert asked["ntasks-per-node"] == each
    assert (asked["nodes"] == "1") == (template.name == "one_node.sh")


def test_one_node_has_a_process_for_each_gpu(tmp_path):
    shown = sbatch(tmp_path, "one_node.sh", "--dry-run", str(EXAMPLES / "quickstart.py"), nodes=1, each=4)
    assert "4 under an agent" in shown
    assert re.search(r"^shutdown_timeout +100 ", shown, re.MULTILINE)


def test_several_nodes_meet_and_each_starts_its_part(tmp_path):
    shown = sbatch(tmp_path, "several_nodes.sh", "--dry-run", str(EXAMPLES / "quickstart.py"), nodes=2, each=4)
    assert shown.count("4 under an agent") == 2
    assert sorted(re.findall(r"^machines +2; this is (\d)", shown, re.MULTILINE)) == ["0", "1"]
    assert len(set(re.findall(r"^meeting +at (127\.0\.0\.1:\d+)", shown, re.MULTILINE))) == 1


@pytest.mark.full(group="examples")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("template", "tasks"), [("several_nodes.sh", 1), ("task_for_each_gpu.sh", 2)])
def test_a_job_on_several_nodes_trains(template, tasks, tmp_path):
    """Four processes on two nodes decide together."""
    script = EXAMPLES / "by_feature" / "early_stopping.py"
    shown = sbatch(tmp_path, template, str(script), "--epochs", "2", nodes=2, each=2, tasks=tasks)
    assert "stopped after epochs [2, 2, 2, 2], of at most 2" in shown.splitlines()


def test_a_job_of_kubernetes_gives_each_pod_its_number(monkeypatch, capsys):
    service, job = YAML(typ="safe").load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text(encoding="utf-8"))
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (container,) = pod["containers"]
    words = container["args"][0].replace('"$JOB_COMPLETION_INDEX"', "1").split()
    assert words[:3] == ["exec", "accel", "launch"]
    assert f"{name}-0.{service['metadata']['name']}" in words
    words = [str(EXAMPLES / "quickstart.py") if word == "train.py" else word for word in words]
    words = ["127.0.0.1" if word.startswith(f"{name}-0.") else word for word in words]  # there is no such name here
    assert launch.main(["--dry-run", *words[3:]]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^num_machines +{job['spec']['completions']} ", shown, re.MULTILINE)
    assert re.search(r"^machine_rank +1 ", shown, re.MULTILINE)
    assert f"{container['resources']['limits']['nvidia.com/gpu']} under an agent" in shown
    assert pod["terminationGracePeriodSeconds"] > int(re.search(r"^shutdown_timeout +(\d+) ", shown, re.MULTILINE)[1])
