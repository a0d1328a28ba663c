"""Writes what can be derived from the source: all of docs/reference/ but environment.md and the pages on checkpoints.

    nox -s docs          (or `python docs/generate.py` where all packages are installed)

tests/test_docs.py compares each file with what `pages` gives, so that nothing public changes without its
page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import accel_core
from accel_core import accelerator, api
from accel_core.contract import hook_specs
from accel_core.facade import older_arguments
from accel_core.options.conversion import expected, to_data
from accel_core.plugins import list_offers
from accel_launch.settings import catalog

REFERENCE = Path(__file__).parent / "reference"
NAMES = Path(__file__).parents[1] / "tests" / "names.py"
OURS = {
    path.parent.name.removesuffix("-plugin") for path in Path(__file__).parents[1].glob("packages/*/pyproject.toml")
}
NO_DOORS = {
    "all",
    "core",
    "compat",
    "compat-metadata",
}  # nothing to import, or a page of its own; the door of compat is `accelerate`
LINE = 120  # signatures that are longer have a line for each argument
WORDS = 1800  # of functions on one page

FOLDERS = (
    "accelerator",
    "options",
    "doors",
    "classes",
    "functions",
    "hooks",
    "names",
)  # of pages that are all written here
WRITTEN = "<!-- Written by docs/generate.py from the docstrings: change them there, then run `nox -s docs`. -->"
COMMON = "Common options"

HOOKS_HEAD = """\
<!-- Written by docs/generate.py from accel_core/contract/hook_specs.py: change the hooks there, then run `nox -s docs`. -->
# Hooks

A plugin takes over a hook by a method of the same name, marked with `accel_core.hookimpl`, that takes the arguments it
needs by name and leaves out the others. A hook has **one owner** (exactly one implementation is used: the active
component's, else the core's default) or **many listeners** (everyone who implements it is called). Where no default is named,
nothing happens without an owner.

The hooks of saving and loading are on [a page of their own](hooks/checkpoints.md).
"""

CHECKPOINT_HOOKS_HEAD = """\
<!-- Written by docs/generate.py from accel_core/contract/hook_specs.py: change the hooks there, then run `nox -s docs`. -->
# Hooks of checkpoints

These hooks save and load. [Hooks](../hooks.md) explains how a plugin takes one over, and has the others.
"""

FIRST_OF_CHECKPOINTS = "save_checkpoint"  # from it on, hooks are about checkpoints

ACCELERATOR_HEAD = """\
<!-- Written by docs/generate.py from accel_core/accelerator.py and accel_core/facade: change it there, then run `nox -s docs`. -->
# Accelerator

This is the class `accel_core.Accelerator`. Where a docstring says *collective*, every rank has to make the call, in the
same order. [Your loop](../tutorial/your-loop.md) shows most of it in use; [the environment](environment.md) lists the
variables that stand for arguments.
"""

NAMES_HEAD = """\
<!-- Written by docs/generate.py from tests/names.py and the docstrings: change them there, then run `nox -s docs`. -->
# Names

Every name that a script written for Accelerate may use, with what it does here. All of them are imported from the package that
stands before the dot: `from accel_core import set_seed`. `*` and `**` stand for any number of positional and of keyword
arguments; our functions may take more than those that are listed. After a colon stand the members of an enumeration.

This page has the constructor, preparing and the loop. [The other names](names/others.md) are about processes, data, strategies, checkpoints
and the rest.
"""

OTHER_NAMES_HEAD = """\
<!-- Written by docs/generate.py from tests/names.py and the docstrings: change them there, then run `nox -s docs`. -->
# Other names

[Names](../names.md) explains how to read the tables, and has the names of the constructor, of preparing and of the loop.
"""

OPTIONS_HEAD = """\
<!-- Written by docs/generate.py from the constructors: change an option there, then run `nox -s docs`. -->
# Options

These options may be given outside of the code: in a file, on the command line, or by a variable. An option has one name in all three places.
In a file it is a key under its component; on the command line it is `--component.option`, where `_` and `-` are the same; as
[a variable](environment.md) it is in capitals, `ACCELERATE_COMPONENT__OPTION`. [Configure and start](../how-to/configure-and-start.md) says which
of them counts if several are given. "Python" marks an option that only code can give.

This page has the options of every run. Components have pages of their own:

"""

DOORS_HEAD = """\
<!-- Written by docs/generate.py from the `__init__.py` of each package and from accel_core/api: change them there, then run
`nox -s docs`. -->
# Doors

A door is a module whose names others may import: scripts import from `accel_core`, plugins from `accel_core` and `accel_core.api`, and
every other package offers its names under its own. Version promises hold for these names. Every other module moves and changes without
notice, except in `accel_testing`, where each module is a tool.

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


def hooks_pages() -> dict[str, str]:
    """The whole of docs/reference/hooks.md, and of the page with the hooks of checkpoints."""
    specs = class_in(hook_specs, "HookSpecs")
    loop = f"```text\n{ast.get_docstring(specs)}\n```\n"
    sections = {node.name: hook_section(node) for node in specs.body if isinstance(node, ast.FunctionDef)}
    first = list(sections).index(FIRST_OF_CHECKPOINTS)
    of_the_loop, of_checkpoints = list(sections.values())[:first], list(sections.values())[first:]
    return {
        "hooks.md": "\n".join([HOOKS_HEAD, loop, *of_the_loop]),
        "hooks/checkpoints.md": "\n".join([CHECKPOINT_HOOKS_HEAD, *of_checkpoints]),
    }


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
            f"GROUPS in docs/generate.py has each public member of the Accelerator once. Not in it: {sorted(missing)}; no "
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


def names_pages() -> dict[str, str]:
    """docs/reference/names.md, with the names of the Accelerator, and a page with all others."""
    data = runpy.run_path(str(NAMES))
    older = {name: described_argument(name) for name in data["OLDER_ARGUMENTS"]}
    described = arguments_of(accelerator.Accelerator.__doc__ or "")
    own, others = [NAMES_HEAD], [OTHER_NAMES_HEAD]
    for (row, heading), texts in data["OLDER_NAMES"].items():
        parts = own if row.startswith("A") else others
        parts.append(names_table(f"## {heading}", (name_row(text, data["COMES_WITH"]) for text in texts)))
        if heading == "The constructor":
            rows = {name: described.get(name, MISSING) for name in given_to(texts[0])} | older
            parts.append(names_table("### Its arguments", (("`" + name + "`", rows[name]) for name in rows)))
    return {"names.md": "\n".join(own), "names/others.md": "\n".join(others)}


MISSING = "*missing*"


def names_table(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """A heading, and a table of names and what they do."""
    lines = [f"| {name} | {does} |".replace("  ", " ") for name, does in rows]
    return "\n".join([heading, "", "| Name | What it does |", "|---|---|", *lines, ""])


def given_to(text: str) -> list[str]:
    """The arguments in a text of tests/names.py."""
    return text.partition("(")[2].removesuffix(")").split(", ")


def name_row(text: str, comes_with: dict[str, str]) -> tuple[str, str]:
    """One name of tests/names.py: how it is called, and the first line of its docstring."""
    path = re.split(r"[(:]", text)[0]
    whole = f"accel_core.{path}" if path.startswith("Accelerator") else path
    shown = f"`{path}`" if path.endswith(".Accelerator") else f"`{text}`"
    if path in comes_with:
        return shown, f"*comes with {comes_with[path]}*"
    package, *members = whole.split(".")
    found: object = importlib.import_module(package)
    for member in members:
        found = getattr(found, member, None)
    summary = (inspect.getdoc(found) or "").partition("\n")[0] if found is not None else MISSING
    return shown, summary.replace("|", "\\|")


def arguments_of(docstring: str) -> dict[str, str]:
    """Each argument under `Args:` with its whole description, in one line."""
    listed = inspect.cleandoc(docstring).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w+:)", listed, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}


def described_argument(name: str) -> str:
    """What an argument that the signature does not have stands for."""
    renamed = {each.old: each.new for each in older_arguments.OLDER_ARGUMENTS}
    if name in renamed:
        return f"an older spelling of `{renamed[name]}`"
    return "`strategy=` under an older name: a configured object, or a dict of such, the first of which is active"


def options_pages() -> dict[str, str]:
    """options.md, with the options without a section, and a page for the components of each kind."""
    offers = [offer for offer in list_offers() if offer.distribution.removeprefix("accel-") in OURS]
    known = catalog.Catalog(offers)
    kinds = {offer.name: f"{offer.noun.capitalize()} options" for offer in offers}
    pages: dict[str, list[str]] = {}
    for name in known.sections:
        if found := list(known.section(name).values()):
            told = inspect.cleandoc(found[0].owner.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            pages.setdefault(kinds.get(name, COMMON), []).append(f"## `{name}`\n\n{told}\n\n{options_table(found)}")
    files = {title: f"options/{title.lower().replace(' ', '-')}.md" for title in pages}
    links = [
        f"- [{title}]({files[title]}): {', '.join(re.findall('^## (.*)$', ''.join(blocks), re.MULTILINE))}\n"
        for title, blocks in pages.items()
    ]
    own = [
        f"\n## {group.capitalize()}\n\n{options_table([each for each in known.own.values() if each.group == group])}"
        for group in dict.fromkeys(option.group for option in known.own.values())
    ]
    head = f"{WRITTEN}\n# {{}}\n\n[Options](../options.md) explains the columns.\n\n"
    components = {files[title]: head.format(title) + "\n".join(blocks) for title, blocks in pages.items()}
    return {"options.md": "".join([OPTIONS_HEAD, *links, *own]), **components}


def options_table(found: Iterable[catalog.Option]) -> str:
    """Key, variable, type, default and meaning of each."""
    rows = ["| Key | Variable | Value | Default | What it does |", "|---|---|---|---|---|"]
    for option in found:
        field = option.field
        value = "Python" if field.python_only else expected(field.type).replace("|", "\\|")
        default = "" if field.default is None or field.python_only else f"`{to_data(field.default)}`"
        variable = "" if field.python_only else f"`{option.variable}`"
        rows.append(
            f"| `{option.key}` | {variable} | {value} | {default} | {option.help.replace('|', chr(92) + '|')} |"
        )
    return "\n".join(rows) + "\n"


def doors_pages() -> dict[str, str]:
    """doors.md, a page for each door, one for each class, and one for the functions of each door."""
    inner = [importlib.import_module(f"{api.__name__}.{each.name}") for each in pkgutil.iter_modules(api.__path__)]
    packages = [importlib.import_module(f"accel_{name.replace('-', '_')}") for name in sorted(OURS - NO_DOORS)]
    doors = (accel_core, *inner, *packages)
    listed = {value: name for door in doors for name, value in classes_of(door).items()}
    pages: dict[str, str] = {}
    rows, classes, functions = [], [], []
    for module in doors:
        name, about = module.__name__, (inspect.getdoc(module) or "").partition("\n")[0]
        described = dict(described_names(name, module.__all__))
        places: dict[str, str] = {"Accelerator": "../accelerator.md"} if module is accel_core else {}
        own = class_pages(module, places, listed)
        calls = functions_pages(module, places)
        pages |= own | calls
        table = names_table(f"# {name}\n\n{about}", ((linked(each, places), does) for each, does in described.items()))
        pages[f"doors/{name}.md"] = f"{WRITTEN}\n{table}"
        rows.append(f"| [`{name}`](doors/{name}.md) | {len(module.__all__)} | {about} |")
        if own:
            classes.append((f"[`{name}`](doors/{name}.md)", links(own)))
        if calls:
            functions.append((f"[`{name}`](doors/{name}.md)", links(calls)))
    for kind, table in (("Classes", classes), ("Functions", functions)):
        pages[f"{kind.lower()}.md"] = by_door(kind, table)
    pages["doors.md"] = "\n".join([DOORS_HEAD, "| Door | Names | What it is for |", "|---|---|---|", *rows, ""])
    return pages


def links(found: Iterable[str]) -> str:
    """Links to pages, as seen from docs/reference."""
    return ", ".join(f"[`{Path(path).stem}`]({path})" for path in sorted(found, key=str.casefold))


def by_door(kind: str, rows: Iterable[tuple[str, str]]) -> str:
    """The page that lists all classes, or all pages with functions."""
    lines = [f"- {door}: {pages}" for door, pages in rows]
    return "\n".join([f"{WRITTEN}\n# {kind}\n", f"{kind} by [door](doors.md):\n", *lines, ""])


def classes_of(door: ModuleType) -> dict[str, type]:
    """The classes of ours that a door has, by name; the Accelerator has pages of its own."""
    found = {name: getattr(door, name) for name in door.__all__ if name != "Accelerator"}
    return {
        name: value for name, value in found.items() if inspect.isclass(value) and value.__module__.startswith("accel_")
    }


def linked(name: str, places: dict[str, str]) -> str:
    """A name in backticks, as a link where it has a place."""
    bare = name.strip("`")
    return f"[{name}]({places[bare]})" if bare in places else name


def class_pages(door: ModuleType, places: dict[str, str], listed: dict[type, str]) -> dict[str, str]:
    """A page for each class of a door; `places` is filled with where they are, as seen from doors/."""
    pages = {}
    for name, value in classes_of(door).items():
        places[name] = f"../classes/{name}.md"
        pages[f"classes/{name}.md"] = class_page(door.__name__, name, value, listed)
    return pages


def class_page(door: str, name: str, value: type, listed: dict[type, str]) -> str:
    """One class: how it is imported, made and used. What it has of a class with a page of its own, stands there."""
    elsewhere = [base for base in value.__mro__[1:] if base in listed]
    inherited = {further for base in elsewhere for further in base.__mro__}
    ours = [base for base in reversed(value.__mro__) if base.__module__.startswith("accel_") and base not in inherited]
    nodes = [class_in(sys.modules[base.__module__], base.__name__) for base in ours]
    members: dict[str, str] = {}
    for node in nodes:
        members |= public_members(node)
    parts = [
        f"{WRITTEN}\n# {name}\n\n```text\nfrom {door} import {name}\n```\n",
        prose(ast.get_docstring(nodes[-1]) or ""),
        "",
    ]
    if elsewhere:
        base = listed[elsewhere[0]]
        parts.append(f"A subclass of [`{base}`]({base}.md), whose page describes inherited members.\n")
    constructors = [item for node in nodes for item in node.body if getattr(item, "name", "") == "__init__"]
    if constructors and isinstance(constructors[-1], ast.FunctionDef):
        call = signature(constructors[-1], name).removesuffix(" -> None")
        parts.append(f"## Constructor\n\n```text\n{call}\n```\n")
    if fields := [line for node in nodes for line in field_lines(node)]:
        parts.append("## Fields\n\n" + "\n".join(fields) + "\n")
    if members:
        parts += ["## Members\n", *members.values()]
    return "\n".join(parts)


def field_lines(node: ast.ClassDef) -> Iterator[str]:
    """Each annotated field and each member of an enumeration, with the string that follows it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        text = after.value if isinstance(after, ast.Expr) else None
        told = inspect.cleandoc(text.value).replace("\n", " ") if is_text(text) else ""
        name = item.target if isinstance(item, ast.AnnAssign) else None
        is_field = isinstance(name, ast.Name) and not name.id.startswith("_") and not is_shown(item)
        is_member = isinstance(item, ast.Assign) and ast.unparse(item.targets[0]).isupper()
        if is_field or is_member:
            yield f"- `{ast.unparse(item)}`" + (f": {told}" if told else "")


def is_text(node: ast.expr | None) -> bool:
    """Whether it is a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_shown(item: ast.stmt) -> bool:
    """Whether an assignment in a class is a property, whose last argument is its docstring."""
    value = item.value if isinstance(item, ast.AnnAssign) else None
    return isinstance(value, ast.Call) and bool(value.args) and is_text(value.args[-1])


def functions_pages(door: ModuleType, places: dict[str, str]) -> dict[str, str]:
    """The functions of a door, on as many pages as they need; `places` is filled with where they are, as seen from doors/."""
    filled: list[list[str]] = [[]]
    for name in sorted(door.__all__, key=str.casefold):
        value = inspect.unwrap(getattr(door, name))
        if inspect.isfunction(value) and value.__module__.startswith("accel_"):
            node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
            if isinstance(node, ast.FunctionDef):
                call = signature(node, name, of_class=False)
                text = f"## {name}\n\n```text\n{call}\n```\n\n{prose(ast.get_docstring(node) or '')}\n"
                if len(" ".join([*filled[-1], text]).split()) > WORDS:
                    filled.append([])
                filled[-1].append(text)
                places[name] = f"../{functions_file(door, len(filled))}#{name.lower()}"
    counts = [""] if len(filled) == 1 else [f" ({number} of {len(filled)})" for number in range(1, len(filled) + 1)]
    titled = enumerate(zip(counts, filled, strict=True), 1)
    return {
        functions_file(door, number): "\n".join([f"{WRITTEN}\n# Functions of {door.__name__}{count}\n", *texts])
        for number, (count, texts) in titled
        if texts
    }


def functions_file(door: ModuleType, number: int) -> str:
    """The file of a page with functions."""
    return f"functions/{door.__name__}{'' if number == 1 else f'-{number}'}.md"


def described_names(module: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name, and the first sentence of what stands below its definition. Raises `ValueError` where nothing does."""
    found = definitions(importlib.import_module(module))
    for name in sorted(names, key=str.casefold):
        value = getattr(importlib.import_module(module), name)
        text = found.get(name) or (
            inspect.getdoc(value) if inspect.isclass(value) or inspect.isroutine(value) else None
        )
        if not text:
            raise ValueError(f"{module}.{name} has no docstring: say below its definition what it is.")
        yield f"`{name}`", re.split(r"(?<=[.:]) |\n", text, maxsplit=1)[0].rstrip(":").replace("|", "\\|")


def definitions(door: ModuleType) -> dict[str, str]:
    """The docstring of every class, function and value that a module imports or defines, by its name there."""
    found = {}
    tree = ast.parse(inspect.getsource(door))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("accel_"):
            there = documented(importlib.import_module(node.module))
            found.update({alias.name: there[alias.name] for alias in node.names if alias.name in there})
            if any(alias.name not in there for alias in node.names):  # a package that only hands on
                found.update(definitions(importlib.import_module(node.module)))
    return found


def documented(module: ModuleType) -> dict[str, str]:
    """The docstrings of what a module defines: of a value, the string that follows it."""
    found = {}
    body = ast.parse(inspect.getsource(module)).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[target.id] = inspect.cleandoc(text.value)
    return {name: text for name, text in found.items() if text}


def pages() -> dict[str, str]:
    """The text of every page of docs/reference that is written from the source."""
    return {**hooks_pages(), **names_pages(), **accelerator_pages(), **options_pages(), **doors_pages()}


def class_in(module: object, name: str) -> ast.ClassDef:
    """The class of this name as it stands in the source of a module."""
    body = ast.parse(inspect.getsource(module)).body  # type: ignore[arg-type]
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def hook_section(hook: ast.FunctionDef) -> str:
    """One hook: its signature, its kind, and its docstring with a list item for each field."""
    kind = "one owner" if "owner" in map(ast.unparse, hook.decorator_list) else "many listeners"
    summary, _, fields = (ast.get_docstring(hook) or "").partition("\n\n")
    items = re.sub(
        r"^(?!- |$)", "  ", re.sub(r"^([A-Z][a-z ]+):", r"- \1:", fields, flags=re.MULTILINE), flags=re.MULTILINE
    )
    return f"## {hook.name}\n\n```text\n{signature(hook)}\n```\n\n{summary} *({kind})*\n\n{items}".rstrip() + "\n"


def public_members(node: ast.ClassDef) -> dict[str, str]:
    """The section of each public method, property (written as one, or by `shown`) and second name of a class.

    Hooks are left out: they stand on the pages of hooks.
    """
    sections: dict[str, str] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            if "hookimpl" not in map(ast.unparse, item.decorator_list):
                sections[item.name] = member_section(item)
        elif (
            isinstance(item, ast.Assign)
            and isinstance(item.targets[0], ast.Name)
            and isinstance(item.value, ast.Name | ast.Attribute)
            and not ast.unparse(item.value)[0].isupper()
        ):
            name = item.targets[0].id
            if not name.startswith("_") and not name.isupper():
                sections[name] = f"### {name}\n\nAnother name of `{ast.unparse(item.value)}`.\n"
        elif isinstance(item, ast.AnnAssign) and is_shown(item):
            declared, text = ast.unparse(item).partition(" = ")[0], ast.literal_eval(item.value.args[-1])
            sections[ast.unparse(item.target)] = f"### {item.target.id}\n\n```text\n{declared}\n```\n\n{text}\n"
    return sections


def member_section(member: ast.FunctionDef) -> str:
    """One method or property: its signature and its docstring."""
    is_property = "property" in map(ast.unparse, member.decorator_list)
    declared = (
        f"{member.name}: {ast.unparse(member.returns or ast.Constant(None))}" if is_property else signature(member)
    )
    return f"### {member.name}\n\n```text\n{declared}\n```\n\n{prose(ast.get_docstring(member) or '')}\n"


def prose(docstring: str) -> str:
    """A docstring as Markdown: indented paragraphs become code, and the entries of a field the items of a list."""
    blocks = [re.sub(r"\A( {4}.*)\Z", code, block, flags=re.DOTALL) for block in docstring.split("\n\n")]
    return "\n\n".join(
        re.sub(r"\A(Args|Attributes|Raises|Returns):\n(.*)\Z", field, block, flags=re.DOTALL) for block in blocks
    )


def code(block: re.Match[str]) -> str:
    """A paragraph that stands four spaces in, as a code block."""
    return f"```text\n{textwrap.dedent(block[0])}\n```"


def field(block: re.Match[str]) -> str:
    """`Args:` and `Raises:` as a list with an item for each entry; `Returns:` as a paragraph."""
    title, body = block[1], textwrap.dedent(block[2])
    if title == "Returns":
        return f"**Returns.** {body}"
    items = re.sub(r"^(\w[\w, ]*):", r"- `\1`:", body, flags=re.MULTILINE).replace("\n    ", "\n  ")
    return f"**{'Arguments' if title == 'Args' else title}**\n\n{items}"


def signature(function: ast.FunctionDef, name: str = "", *, of_class: bool = True) -> str:
    """How a function is written, without `self`: `name(argument: type, …) -> type`."""
    name, given = name or function.name, arguments(function.args, of_class)
    returned = f" -> {ast.unparse(function.returns) if function.returns else 'None'}"
    short = f"{name}({', '.join(given)}){returned}"
    if len(short) <= LINE:
        return short
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in given), f"){returned}"])


def arguments(given: ast.arguments, of_class: bool) -> list[str]:
    """Each argument with its type and default, without `self` where it is a method."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    found = [one_argument(item, default) for item, default in zip(positional, defaults, strict=True)]
    found = found[1:] if of_class else found
    if given.vararg:
        found.append(f"*{ast.unparse(given.vararg)}")
    elif given.kwonlyargs:
        found.append("*")
    found += [one_argument(item, default) for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*found, f"**{ast.unparse(given.kwarg)}"] if given.kwarg else found


def one_argument(argument: ast.arg, default: ast.expr | None) -> str:
    """`name: type = default`."""
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


if __name__ == "__main__":
    for folder in FOLDERS:
        shutil.rmtree(REFERENCE / folder, ignore_errors=True)
    for name, page in pages().items():
        (REFERENCE / name).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / name).write_text(page, encoding="utf-8")
    print(f"wrote {len(pages())} pages of docs/reference")
