"""The text of `NonFiniteError`: what was found on each rank, and what to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_diagnostics.findings import Finding

_ADVICE = {
    "input": "Look at these samples in the dataset, and at what transforms them; leave out or repair what is not finite.",
    "parameter": "An earlier step made it so, or it was loaded: look at the step before, its learning rate, and "
    "accelerator.clip_grad_norm_().",
    "output": "Look at what the module computes for these inputs: logarithms and divisions need a positive floor, exponentials a "
    "ceiling, narrow dtypes smaller values.",
    "loss": "Look at the loss function and the targets of these samples: means over nothing, logarithms of 0, labels out of "
    "range.",
    "gradient": "The forward is finite and its derivative is not: square roots and norms at 0, or a torch.where whose other "
    "branch is not finite. Move the floor inside, as in (x + eps).sqrt().",
    "not reproduced": "Something in the forward is not repeatable: a random stream of its own, a state that it keeps, a kernel "
    "that is not deterministic. Try set_seed(seed, deterministic=True), and torch.autograd.set_detect_anomaly(True).",
}


def describe_findings(findings: Sequence[Finding | None]) -> str:
    """The message of `NonFiniteError`: what each rank found, the first one first; what to try."""
    found = sorted((finding for finding in findings if finding is not None), key=lambda each: each.order)
    first, others = found[0], found[1:]
    lines = [
        f"A loss or gradient is not finite after {first.step} optimizer steps. The window was repeated on every rank. First:",
        f"  {describe(first)}",
        *(f"  also {describe(each)}" for each in others[:8]),
    ]
    clean = len(findings) - len(found)
    if clean:
        lines.append(f"  The micro-batches of the other {clean} rank(s) are finite by themselves.")
    return "\n".join([*lines, _ADVICE[first.kind]])


def describe(finding: Finding) -> str:
    """One finding, in one line."""
    parts = [f"rank {finding.rank}, micro-batch {finding.micro_batch} of the window: {_what(finding)}"]
    if finding.values:
        parts.append(f"{finding.nan} nan and {finding.inf} inf of {finding.values} values")
    if finding.low is not None and finding.high is not None:
        parts.append(f"finite inputs of the module from {finding.low:.6g} to {finding.high:.6g}")
    parts += _samples(finding)
    return "; ".join(parts) + "."


def _what(finding: Finding) -> str:
    module = f"module {finding.module!r}" if finding.module else "the model"
    module = "no module" if finding.module is None else f"{module} ({finding.module_class})"
    note = f", {finding.note}" if finding.note else ""
    if finding.kind == "input":
        passed = "" if finding.module is None else f", and {module} is the first whose output is not"
        return f"{finding.name} of the model is not finite{passed}{note}"
    if finding.kind == "parameter":
        return f"{finding.name!r} is not finite before the forward, and {module} uses it{note}"
    if finding.kind == "output":
        return f"{finding.name} of {module} is the first that is not finite{note}"
    if finding.kind == "loss":
        return f"the loss is not finite, and the outputs of the model are{note}"
    if finding.kind == "gradient" and finding.module is None:
        return f"the gradient is not finite{note}"
    if finding.kind == "gradient":
        return f"{finding.name} in {module} is the first that is not finite{note}"
    return f"not reproduced: {finding.note}"


def _samples(finding: Finding) -> list[str]:
    if not finding.samples or all(each is None for each in finding.samples):
        return ["samples unknown"]
    told = ["unknown" if each is None else each.describe() for each in finding.samples]
    if len(told) > 1:
        return ["samples, of the loaders that were being iterated, outermost first: " + " | ".join(told)]
    parts = [f"samples of the micro-batch: {told[0]}"]
    only = finding.samples[0]
    if finding.rows is not None and only is not None:
        parts.append(f"in rows {', '.join(map(str, finding.rows[:16]))}: {only.describe(finding.rows)}")
    return parts
