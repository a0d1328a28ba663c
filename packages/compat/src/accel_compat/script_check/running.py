"""Rules about processes, checkpoints, trackers and precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec

from accel_compat.script_check.finding import Finding, at
from accel_compat.script_check.script import Script, constant, keyword, last, texts

_COLLECTIVE = (
    "get_state_dict",
    "save_model",
    "save_state",
    "gather",
    "gather_for_metrics",
    "reduce",
    "wait_for_everyone",
)
_UNDER_DDP = ("get_state_dict", "save_model", "save_state")
_SERVICES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
_FILES = re.compile(r"(optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|sampler(_\d+)?\.bin|scaler\.pt|random_states_\w*|"
                    r"custom_checkpoint_\d+\.pkl|pytorch_model_fsdp\w*)(\.pkl)?$")  # fmt: skip


def alone(script: Script) -> Iterator[Finding]:
    """Collective calls on the main process alone."""
    for call in script.methods(*_COLLECTIVE):
        if not script.on_one_process(call):
            continue
        name = last(call.func)
        before = (
            f"{name} on the main process alone works under DDP, and hangs under FSDP."
            if name in _UNDER_DDP
            else f"{name} on one process alone waits for the timeout."
        )
        yield at(
            call,
            "collective-alone",
            before,
            f"an error on all processes, under every strategy: call {name} on all, outside of the condition. For the weights "
            "of one process: accelerator.save(accelerator.unwrap_model(model).state_dict(), file).",
            compat=True,
        )


def checkpoint_files(script: Script) -> Iterator[Finding]:
    """Files of `save_state` by their names."""
    for node in script.all(ast.Constant):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and script.is_of_peer:
            name = node.value.rpartition("/")[2]
            if _FILES.match(name):
                yield at(
                    node,
                    "checkpoint-file",
                    f"{name} is a file that save_state writes.",
                    "save_state writes manifest.json and files with safetensors, and no file of this name. Use load_state(folder), "
                    "or `accel checkpoint FOLDER`.",
                    compat=True,
                )
    for call in script.methods("save_state"):
        if constant(keyword(call, "safe_serialization")) is False and script.is_of_peer:
            yield at(
                call, "checkpoint-pickle", "the weights are pickled.", "a ValueError: leave safe_serialization out."
            )


def trackers(script: Script) -> Iterator[Finding]:
    """Trackers that are not installed."""
    if not script.is_of_peer:
        return
    for call in script.called("Accelerator"):
        for name in texts(keyword(call, "log_with")):
            module = _SERVICES.get(name)
            if module is not None and find_spec(module) is None:
                yield at(
                    call,
                    "tracker",
                    f"{name} is not installed in this environment, and is left out without a word.",
                    f"NotInstalledError. Type: pip install {name.replace('_', '-')}; or leave it out of log_with.",
                    compat=True,
                )


def precision(script: Script) -> Iterator[Finding]:
    """fp16 on a CPU."""
    if not script.is_of_peer:
        return
    for call in script.called("Accelerator"):
        if constant(keyword(call, "mixed_precision")) == "fp16" and constant(keyword(call, "cpu")) is True:
            yield at(
                call,
                "fp16-on-cpu",
                "fp16 on a CPU trains in float32.",
                'it computes in float16, with loss scaling. For float32: mixed_precision="no".',
                compat=True,
            )


def samplers(script: Script) -> Iterator[Finding]:
    """Loaders that are shared out already."""
    for call in script.called("DistributedSampler"):
        if script.beside_accelerator(call):
            yield at(
                call,
                "distributed-sampler",
                "prepare shares the loader out once more, and most samples are never read.",
                "a ValueError in several processes: use shuffle=True, and leave the sampler out.",
                compat=True,
            )


RULES = (alone, checkpoint_files, trackers, precision, samplers)
