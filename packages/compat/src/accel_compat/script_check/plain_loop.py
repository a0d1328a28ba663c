"""Rules about what a plain loop of torch has, and an Accelerator replaces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accel_compat.script_check.finding import Finding, at
from accel_compat.script_check.script import Script, last

_OPTIMIZER = re.compile(r"(\w*Adam\w*|\w*SGD|Adagrad|Adadelta|Adafactor|RMSprop|Rprop|\w*Lion\w*|LBFGS|Muon)$")
_UNPREPARED = (
    "it steps in every micro-batch of a window, with scaled gradients under fp16, and no checkpoint has its state."
)


def unprepared_optimizers(script: Script) -> Iterator[Finding]:
    """Optimizers that step, and that `prepare` is not given."""
    given = script.methods("prepare", "prepare_optimizer")
    if not given or any(isinstance(each, ast.Starred) for call in given for each in call.args):
        return  # what is passed on is not known
    steps = [
        (call.func.value, call)
        for call in script.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    ]
    stepping = {ast.unparse(each): call for own, call in steps for each in (own, *call.args)}  # or of a scaler
    assigned = [node for node in script.all(ast.Assign) if isinstance(node, ast.Assign)]
    for node in assigned:
        if not (isinstance(node.value, ast.Call) and _OPTIMIZER.match(last(node.value.func))):
            continue
        for target in node.targets:
            step = stepping.get(name := ast.unparse(target))
            if step is not None and script.beside_accelerator(step) and not script.is_prepared(target):
                yield at(
                    node,
                    "unprepared-optimizer",
                    _UNPREPARED,
                    f"the same; under FSDP it trains nothing. Pass {name} to accelerator.prepare, with the model.",
                    compat=True,
                )


def scalers(script: Script) -> Iterator[Finding]:
    """A `GradScaler` of one's own."""
    for call in script.called("GradScaler"):
        if script.beside_accelerator(call):
            yield at(
                call,
                "own-scaler",
                "under fp16 the loss is scaled twice, and the step of the scaler knows nothing of windows.",
                'the same. Take it out: mixed_precision="fp16" scales in accelerator.backward(loss), and optimizer.step() unscales.',
                compat=True,
            )


RULES = (unprepared_optimizers, scalers)
