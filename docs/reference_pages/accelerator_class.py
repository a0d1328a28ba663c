"""accelerator.md, and a page for each subject."""

from __future__ import annotations

import ast
import re
import sys

from accel_core import accelerator
from reference_pages.markdown import WRITTEN, prose, signature
from reference_pages.source import class_in, public_members

ACCELERATOR_HEAD = """\
<!-- Written by docs/generate.py from accel_core/accelerator.py and accel_core/facade: change it there, then run `nox -s docs`. -->
# Accelerator

This is the class `accel_core.Accelerator`. Where a docstring says *collective*, every rank has to make the call, in the
same order. [Your loop](../tutorial/your-loop.md) shows most of it in use; [the environment](environment.md) lists the
variables that stand for arguments.
"""

GROUPS = {
    "Who and where": (
        "device",
        "process_index",
        "local_process_index",
        "num_processes",
        "use_distributed",
        "is_main_process",
        "is_local_main_process",
        "is_last_process",
        "mixed_precision",
        "state",
        "layout",
        "distributed_type",
        "explain",
        "print",
        "split_between_processes",
    ),
    "One process, or one after the other": (
        "on_main_process",
        "on_local_main_process",
        "on_last_process",
        "on_process",
        "on_local_process",
        "main_process_first",
        "local_main_process_first",
        "set_trigger",
        "check_trigger",
        "check_breakpoint",
    ),
    "Preparing": (
        "prepare",
        "prepare_model",
        "prepare_data_loader",
        "skip_first_batches",
        "prepare_optimizer",
        "prepare_scheduler",
        "build_model",
        "unwrap_model",
        "mark_forward_method",
        "verify_device_map",
    ),
    "Loading": (
        "dataloader_config",
        "split_batches",
        "dispatch_batches",
        "even_batches",
        "use_seedable_sampler",
        "non_blocking",
        "rng_types",
        "running_loader",
    ),
    "The loop": (
        "gradient_accumulation_steps",
        "step",
        "sync_gradients",
        "optimizer_step_was_skipped",
        "scaler",
        "step_scheduler_with_optimizer",
        "accumulate",
        "backward",
        "lomo_backward",
        "forward_backward",
        "no_sync",
        "trigger_sync_in_backward",
        "join_uneven_inputs",
        "clip_grad_norm_",
        "clip_grad_value_",
        "unscale_gradients",
        "autocast",
        "maybe_context_parallel",
        "profile",
    ),
    "Collectives": ("wait_for_everyone", "gather", "reduce", "gather_for_metrics", "pad_across_processes"),
    "Checkpoints": (
        "save_state",
        "load_state",
        "wait_for_checkpoint",
        "register_for_checkpointing",
        "register_save_state_pre_hook",
        "register_load_state_pre_hook",
        "stop_on_signal",
        "should_stop",
        "project_configuration",
        "project_dir",
    ),
    "Tracking": (
        "init_trackers",
        "log",
        "log_images",
        "log_table",
        "get_tracker",
        "trackers",
        "log_with",
        "logging_dir",
    ),
    "Weights, and ending": (
        "get_state_dict",
        "save",
        "save_model",
        "free_memory",
        "clear",
        "end_training",
    ),
}
"""Which heading of the page a public member of the Accelerator stands under; below it, the order is that of the source."""


def accelerator_pages() -> dict[str, str]:
    """accelerator.md, and a page for each of GROUPS. Raises `ValueError` if GROUPS and the class have other members."""
    node = class_in(accelerator, "Accelerator")
    # The bases first: a member that the Accelerator has of its own stands where the Accelerator says it.
    bases = [base for base in reversed(accelerator.Accelerator.__mro__) if base.__module__.startswith("accel_core.")]
    members: dict[str, str] = {}
    for base in bases:
        members |= public_members(class_in(sys.modules[base.__module__], base.__name__))
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(members):
        missing, stale = members.keys() - set(grouped), set(grouped) - members.keys()
        raise ValueError(
            f"GROUPS in docs/reference_pages/accelerator_class.py has each public member of the Accelerator once. Not in it: {sorted(missing)}; no "
            f"members: {sorted(stale)}; twice: {sorted({name for name in grouped if grouped.count(name) > 1})}."
        )
    files = {heading: f"accelerator/{re.sub('[^a-z]+', '-', heading.lower())}.md" for heading in GROUPS}
    rows = [
        (f"[{heading}]({files[heading]})", ", ".join(f"[`{name}`]({files[heading]}#{name})" for name in names))
        for heading, names in GROUPS.items()
    ]
    index = "\n".join(["| Subject | Names |", "|---|---|", *(f"| {heading} | {names} |" for heading, names in rows)])
    constructor = next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    call = signature(constructor, "Accelerator").removesuffix(" -> None")
    about = f"## Constructor\n\n```text\n{call}\n```\n\n{prose(ast.get_docstring(node) or '')}\n"
    pages = {"accelerator.md": f"{ACCELERATOR_HEAD}\n{index}\n\n{about}"}
    for heading, names in GROUPS.items():
        parts = [f"{WRITTEN}\n# {heading}\n\nMembers of [the Accelerator](../accelerator.md).\n"]
        pages[files[heading]] = "\n".join([*parts, *(text for name, text in members.items() if name in names)])
    return pages
