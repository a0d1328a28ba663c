"""Rules about the training loop: schedules, accumulation, gradients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accel_compat.script_check.finding import Finding, at
from accel_compat.script_check.script import Script, constant, keyword, last

_SCHEDULER = re.compile(r"(get_\w*schedule\w*|\w+LR|\w+Scheduler|CosineAnnealingWarmRestarts)$")
_PER_PROCESS = "Accelerator(step_scheduler_per_process=True) steps it as before"


def schedules(script: Script) -> Iterator[Finding]:
    """Lengths of schedules that were counted before `prepare`, or multiplied by the number of processes."""
    counted = [call for call in script.calls if last(call.func) == "len" and _is_before_prepare(script, call)]
    multiplied = [
        node
        for node in script.all(ast.Attribute)
        if isinstance(node, ast.Attribute) and node.attr == "num_processes" and script.is_accelerator(node.value)
    ]
    found = False
    for node in counted:
        if _reaches_a_schedule(script, node):
            found = True
            yield at(
                node,
                "schedule-length",
                f"{ast.unparse(node)} before prepare counts the batches of all processes, and the schedule is stepped once per process.",
                "a schedule is stepped once per optimizer step, so it would be too long by the number of processes: count "
                f"behind prepare, math.ceil({ast.unparse(node)} / accumulation_steps) * epochs. Or: {_PER_PROCESS}.",
            )
    for factor in multiplied:
        if _reaches_a_schedule(script, factor):
            found = True
            yield at(
                factor,
                "schedule-processes",
                "the schedule is stepped num_processes times per optimizer step, so its length is multiplied by that.",
                f"it is stepped once per optimizer step: leave the factor out. Or: {_PER_PROCESS}.",
            )
    if not found and script.is_of_peer:
        yield from _prepared_schedules(script)


def _prepared_schedules(script: Script) -> Iterator[Finding]:
    """Schedulers that are prepared and whose lengths say nothing about processes."""
    made = script.called("Accelerator")
    if any(constant(keyword(call, "split_batches")) is True for call in made):
        return
    if any(constant(keyword(call, "step_scheduler_with_optimizer")) is False for call in made):
        return
    for node in _assigned_schedulers(script):
        if any(script.is_prepared(target) for target in node.targets):
            yield at(
                node,
                "schedule-steps",
                "one scheduler.step() is num_processes steps of the schedule.",
                f"it is one step, on any number of processes. To keep the curve of several processes: {_PER_PROCESS}.",
            )


def _assigned_schedulers(script: Script) -> Iterator[ast.Assign]:
    for node in script.all(ast.Assign):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _SCHEDULER.match(last(node.value.func))
        ):
            yield node


def _is_before_prepare(script: Script, call: ast.Call) -> bool:
    """Whether `len(x)` is above the line at which `x` is prepared, in one function."""
    if len(call.args) != 1:
        return False
    line = script.prepared.get((script.scope(call), ast.unparse(call.args[0])))
    return line is not None and call.lineno < line


def _reaches_a_schedule(script: Script, node: ast.AST) -> bool:
    """Whether a value is an argument of a scheduler, or in a variable that is, in the same function."""
    scope = script.scope(node)
    inside = [each for each in ast.walk(scope) if script.scope(each) is scope]
    assignments = sorted(
        (each for each in inside if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign) and each.value),
        key=lambda each: each.lineno,
    )
    schedulers = [each for each in inside if isinstance(each, ast.Call) and _SCHEDULER.match(last(each.func))]
    carriers: set[str] = set()

    def carries(tree: ast.AST) -> bool:
        return any(
            each is node or (isinstance(each, ast.Name | ast.Attribute) and ast.unparse(each) in carriers)
            for each in ast.walk(tree)
        )

    for each in assignments:
        if (
            each.value is not None
            and each.value not in schedulers
            and not _prepares(script, each.value)
            and carries(each.value)
        ):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            carriers |= {ast.unparse(target) for target in targets}
    return any(
        carries(argument) for call in schedulers for argument in (*call.args, *(each.value for each in call.keywords))
    )


def _prepares(script: Script, node: ast.expr) -> bool:
    return node in script.methods("prepare")


def backwards(script: Script) -> Iterator[Finding]:
    """`loss.backward()` beside an Accelerator."""
    for call in script.calls:
        function = call.func
        if not (
            isinstance(function, ast.Attribute) and function.attr == "backward" and script.beside_accelerator(call)
        ):
            continue
        name = ast.unparse(function.value)
        if "loss" in name.lower() and not script.is_accelerator(function.value):
            yield at(
                call,
                "plain-backward",
                "the gradient is neither divided by the accumulation steps nor scaled under fp16, and the step is made.",
                f"a RuntimeError at the step of a window, or under fp16. Write accelerator.backward({name}).",
                compat=True,
            )


def clippings(script: Script) -> Iterator[Finding]:
    """torch's clipping, and ours inside of a window without a condition."""
    for call in script.calls:
        if last(call.func) not in {"clip_grad_norm_", "clip_grad_value_"} or not script.beside_accelerator(call):
            continue
        if isinstance(call.func, ast.Attribute) and script.is_accelerator(call.func.value):
            block = script.accumulating(call)
            if block is not None and script.is_of_peer and not _is_under_sync(script, call):
                yield at(
                    call,
                    "clip-in-window",
                    "it clips the partial gradient of each micro-batch.",
                    "it does nothing while the window is open, and clips the whole gradient. Nothing is to be written.",
                    compat=True,
                )
        elif not isinstance(call.func, ast.Attribute) or ast.unparse(call.func).startswith(("torch.", "nn.")):
            yield at(
                call,
                "torch-clipping",
                "it clips what this process holds, scaled gradients under fp16, and parts under FSDP.",
                f"the same, so the norm is another one: write accelerator.{last(call.func)}(...), which unscales and knows parts.",
                compat=True,
            )


def _is_under_sync(script: Script, node: ast.AST) -> bool:
    return any(isinstance(each, ast.If) and "sync_gradients" in ast.unparse(each.test) for each in script.above(node))


def zeroing(script: Script) -> Iterator[Finding]:
    """`optimizer.zero_grad()` in front of the backward of a micro-batch."""
    for call in script.calls:
        block = script.accumulating(call) if last(call.func) == "zero_grad" else None
        if block is None or not script.is_of_peer:
            continue
        lines = [each.lineno for each in script.methods("backward") if script.accumulating(each) is block]
        if lines and call.lineno < min(lines):
            yield at(
                call,
                "zero-grad-first",
                "in front of the backward of the last micro-batch, it clears what the window has gathered.",
                "gradients of an open window are kept, wherever the call stands: other numbers than before, and the right ones.",
                compat=True,
            )


def short_windows(script: Script) -> Iterator[Finding]:
    """Accumulation whose last window may be short."""
    if not script.is_of_peer:
        return
    for call in (*script.called("Accelerator"), *script.called("GradientAccumulationPlugin")):
        steps = keyword(call, "gradient_accumulation_steps") or keyword(call, "num_steps")
        if steps is not None and constant(steps) != 1 and keyword(call, "mean_over") is None:
            yield at(
                call,
                "short-window",
                "each micro-batch is divided by the number of steps, also in a short last window of an epoch.",
                "the gradient is the mean over the micro-batches that are there. For the other rule: "
                'GradientAccumulationPlugin(num_steps=..., mean_over="steps").',
            )


def unwrapped_calls(script: Script) -> Iterator[Finding]:
    """A model that is called inside of its wrapper, in training."""
    named = {
        (script.scope(node), ast.unparse(target)): node.lineno
        for node in script.all(ast.Assign)
        if isinstance(node, ast.Assign) and node.value in script.methods("unwrap_model")
        for target in node.targets
    }
    backward = script.methods("backward")
    for call in script.calls:
        line = named.get((script.scope(call), ast.unparse(call.func)), call.lineno)
        is_unwrapped = call.func in script.methods("unwrap_model") or line < call.lineno
        if not is_unwrapped or script.without_gradients(call):
            continue
        loops = [each for each in script.above(call) if isinstance(each, ast.For | ast.While)]
        if loops and any(loops[0] in script.above(each) for each in backward):
            yield at(
                call,
                "unwrapped-forward",
                "gradients of a forward inside of the wrapper are not averaged, and the step is made.",
                "a RuntimeError at the step. Call the prepared model; for another method than forward, "
                'accelerator.mark_forward_method(model, "name").',
                compat=True,
            )


RULES = (schedules, backwards, clippings, zeroing, short_windows, unwrapped_calls)
