"""What the messages tell to type exists: every function, method and attribute that a string of the packages names.

All strings count but docstrings, for advice is often put together away from the `raise` that it ends up in.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import accel_big_model
import accel_core
import accel_data
import accel_deepspeed
import accel_fsdp
import accel_launch
import accel_megatron
import accel_precision
import accel_testing
import accel_trackers
import accel_xla
from accel_core.contract.hook_specs import HookSpecs
from accel_core.plugins import list_offers

ROOT = Path(__file__).parents[1]
MODULES = sorted(ROOT.glob("packages/*/src/**/*.py"))

# `name(`, `a.name(` and `.name(`; not `{}_name(`, the plural "rank(s)" or the `\.name(` of a pattern.
CALLED = re.compile(r"(?:(?<![\w.}])[A-Za-z][\w.]*|(?<![\w\\])\.\w+)(?=\((?!e?s\)))")
DOTTED = re.compile(
    r"(?<![\w./])(?:torch|accel_(?:big_model|core|data|deepspeed|fsdp|launch|megatron|precision|trackers|xla)|[Aa]ccelerator)(?:\.[A-Za-z]\w*)+"
)
FIRST_KEYWORD = re.compile(r"(?<![\w.}])([A-Za-z_][\w.]*)\(([a-z_]\w*)=")

OURS = (
    *(
        accel_big_model,
        accel_core,
        accel_data,
        accel_deepspeed,
        accel_fsdp,
        accel_launch,
        accel_megatron,
        accel_precision,
        accel_testing,
        accel_trackers,
        accel_xla,
    ),
)
TRACKERS = [offer.load() for offer in list_offers("accel.trackers") if offer.distribution == "accel-trackers"]
ROOTS = {
    "itertools": itertools,
    "torch": torch,
    **{package.__name__: package for package in OURS},
    **{tracker.__name__: tracker for tracker in TRACKERS},
}

# What a variable in a message stands for, as in `accelerator.backward(loss)`.
STANDS_FOR = {
    "accelerator": accel_core.Accelerator,
    "feed": accel_core.Feed,
    "loader": accel_data.DataLoaderShard,
    "passage": accel_core.Passage,
    "loss": torch.Tensor,
    "model": torch.nn.Module,
    "models": list,
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "weight": torch.Tensor,
    "weights": list,
    "value": DTensor,
    "y": torch.Tensor,
}

# Whose members may be named bare, as in `prepare(): ...`.
BARE = (
    *(accel_core.Accelerator, accel_core.Strategy, accel_core.Tracker, accel_core.World, HookSpecs),
    *(*OURS, accel_data.DataLoaderShard, torch, torch.utils.data, builtins),
    *(torch.Tensor, torch.nn.Module, torch.nn.functional, torch.optim.lr_scheduler.LRScheduler),
)

ALLOWED = {
    ".__iter__",  # the method that a subclass of DataLoader brings
    ".step",  # of an optimizer whose class a message fills in
    "Float8LinearConfig",  # torchao's
    "TransformerConfig",  # Megatron-core's
    "megatron.core.utils.get_batch_on_this_cp_rank",
    "accel_megatron.families",  # a group of entry points
    "factory",  # an argument of `build_model`
    "Float8LinearConfig.from_recipe_name",
    "SLURM_",  # the beginning of variables, in a pattern
    # the user's model, in an example
    "broadcast_object",  # accel_core.collectives.reduce_gather, called by the library: a table of what the ranks called shows it
    "destroy_process_group",  # torch.distributed's; bare, so that those of its collectives which we lack are missed
    "swanlab.finish",
    "split_dataset_by_node",  # of datasets
    "loss_fn",  # an argument of `forward_backward`
    "os._exit",  # how a process may have ended
    "parameter.data.contiguous",  # torch.Tensor's; `data` says its type of instances only
    "save_pretrained",  # of the user's model, if its class has one
    "replicate",  # a factor in a formula, as in "replicate(2) * context_parallel(1)"
    "shard",  # another one
    "tensor_parallel",  # another one
    "train_micro_batch_size_per_gpu",  # another one
    "gradient_accumulation_steps",  # another one
    "processes",  # another one
    "make_scheduler",  # of the user, in an example
    "nn.Parameter",  # torch's
    "timedelta",  # datetime's
    "x",  # in the pattern of Slurm's "2(x3)"
    # accel-compat: names that the module `accelerate` has, and those of files and scripts that it reads
    "._reset_state",
    "AcceleratorState._reset_state",
    ".select_deepspeed_plugin",
    "select_deepspeed_plugin",
    "find_batch_size",
    "copy_tensor_to_devices",
    "register_tracker_class",
    "tqdm",
    "math.ceil",
    ".state_dict",
    "sampler",
    "pytorch_model",
    "custom_checkpoint_",
    "dl_state_dict",
    "optimizer_",
    "random_states_",
    "torch_",
}


def strings(module: ast.Module):
    """Line and text of every string but docstrings; what an f-string fills in is `{}`."""
    prose = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (prose | inner):
            yield node.lineno, node.value


def named(text: str) -> set[str]:
    """What a message names: everything with a parenthesis behind it, and dotted names of torch and of ours."""
    return {*CALLED.findall(text), *DOTTED.findall(text)}


def find(name: str) -> object:
    """The object of that name; LookupError if there is none."""
    if name.startswith("."):
        return member(torch.Tensor, name[1:])
    head, *rest = name.split(".")
    start = ROOTS.get(head) or STANDS_FOR.get(head)
    if start is None:
        start = next((found for owner in BARE if callable(found := getattr(owner, head, None))), None)
    if start is None:
        raise LookupError(name)
    return functools.reduce(member, rest, start)


def member(owner: object, name: str) -> object:
    if name.startswith("_"):
        raise LookupError(f"{name} is private")
    if hasattr(owner, name):
        return getattr(owner, name)
    try:
        return importlib.import_module(f"{owner.__name__}.{name}")
    except (AttributeError, ImportError):
        raise LookupError(f"{owner} has no {name}") from None


def missing(text: str) -> set[str]:
    """The names in a message that nothing has."""
    wrong = set()
    for name in named(text) - ALLOWED:
        try:
            find(name)
        except LookupError:
            wrong.add(name)
    return wrong


def places(check):
    """Every string in which `check` finds something wrong, with its place."""
    return {
        f"{path.relative_to(ROOT).as_posix()}:{line} names {', '.join(sorted(wrong))}"
        for path in MODULES
        for line, text in strings(ast.parse(path.read_text(encoding="utf-8")))
        if (wrong := check(text))
    }


def test_every_name_in_a_message_exists():
    assert not places(missing)


def test_every_first_keyword_in_a_message_is_an_argument():
    assert not places(unknown_keywords)


def unknown_keywords(text: str) -> set[str]:
    """`name(keyword=` where that function takes no such argument by name."""
    wrong = set()
    for name, keyword in FIRST_KEYWORD.findall(text):
        if name in ALLOWED:
            continue
        parameters = inspect.signature(find(name)).parameters.values()
        if not any(each.name == keyword or each.kind is each.VAR_KEYWORD for each in parameters):
            wrong.add(f"{name}({keyword}=)")
    return wrong


def test_what_is_allowed_is_named():
    said = {name for path in MODULES for _, text in strings(ast.parse(path.read_text("utf-8"))) for name in named(text)}
    assert said >= ALLOWED


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('raise ValueError(f"{x}: call pad_over_processes(tensor) first")', {"pad_over_processes"}),
        ('advice = ("Call " "gather_an_object([...])")', {"gather_an_object"}),
        ('raise ValueError("see Accelerator.no_such_thing.")', {"Accelerator.no_such_thing"}),
        ('raise ValueError("type accelerator.backwards(loss)")', {"accelerator.backwards"}),
        ('raise ValueError("use torch.nn.functional.padding")', {"torch.nn.functional.padding"}),
        ('raise ValueError(f"call {path}.to_denser()")', {".to_denser"}),
        ('raise ValueError(f"call {path}.to_dense(), or accelerator.backward(loss)")', set()),
        (
            'raise ValueError("gather() takes tensors of 2 rank(s); torch.distributed.all_gather_object does not")',
            set(),
        ),
        ('"""Docstrings: foo(1) and Accelerator.foo."""', set()),
    ],
)
def test_a_name_that_does_not_exist_is_recognised(code, expected):
    assert {name for _, text in strings(ast.parse(code)) for name in missing(text)} == expected


def test_a_keyword_that_does_not_exist_is_recognised():
    assert unknown_keywords("save_model(safe=True)") == {"save_model(safe=)"}
    assert not unknown_keywords("save_model(safe_serialization=True)")
