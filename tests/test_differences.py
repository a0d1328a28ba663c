"""The page on differences stays true of the source: what it tells to write exists, and what it calls missing is missing."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import accel_core
import accel_data
import accel_fsdp
import accel_precision
from accel_core import Accelerator, CheckpointError, ProjectConfiguration, load_checkpoint_in_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/explanation/differences.md", *sorted((ROOT / "docs/explanation/differences").glob("*.md"))]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
MISSING = PAGE.partition("## Not there yet")[2].partition("\n## ")[0]
ASKED_FOR = "\n".join(re.findall(r"^(\|[^|]*\|)", MISSING, re.MULTILINE))  # the first column
OLDER = PAGE.partition("| Older | Write |")[2].partition("\n\n")[0]
OURS = (accel_core, accel_data, accel_fsdp, accel_precision)
ROOTS = {
    "accelerator": accel_core.Accelerator,
    "accel_core": accel_core,
    "torch": torch,
    **{name: getattr(module, name) for module in OURS for name in module.__all__},
    **{name: value for name, value in vars(accel_core.Accelerator).items() if not name.startswith("_")},
}


def code_of(text):
    """What stands in backticks outside of the blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def parsed_calls():
    """Every piece of code that is one call of something public, with its text."""
    for code in dict.fromkeys(code_of(PAGE)):
        try:
            node = ast.parse(code.replace("=...", "=0"), mode="eval").body
        except SyntaxError:
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ROOTS:
            yield code, node


CALLS = dict(parsed_calls())


@pytest.mark.parametrize("code", CALLS)
def test_a_call_on_the_page_names_options_that_exist(code):
    first, *others = ast.unparse(CALLS[code].func).split(".")
    found = ROOTS[first]
    for name in others:
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters
    assert {keyword.arg for keyword in CALLS[code].keywords} <= set(parameters)


def test_the_switches_to_the_behaviour_of_the_peer_are_among_the_calls():
    assert "Accelerator(step_scheduler_per_process=True)" in CALLS
    assert len(CALLS) > 15


@pytest.mark.parametrize("name", re.findall(r"`((?:accelerator|accel_core)\.\w+)`", ASKED_FOR))
def test_a_name_that_is_said_to_be_missing_is_missing(name):
    first, attribute = name.split(".")
    assert not hasattr(ROOTS[first], attribute)


def test_the_older_spellings_on_the_page_are_those_of_the_source():
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py")]
    declared = [
        tuple(ast.literal_eval(argument) for argument in node.args)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Deprecation"
    ]
    assert declared
    assert set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", OLDER, re.MULTILINE)) == set(declared)


CHECKPOINTS = PAGE.partition("## Checkpoints")[2].partition("\n## ")[0]


class Registered:
    """An object of a user's."""

    def __init__(self, state=None):
        self.state = {} if state is None else state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def run(*registered, optimizers=1, **options):
    """A small run: its Accelerator, its model."""
    accelerator = Accelerator(**options)
    model = nn.Linear(2, 1)
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    accelerator.prepare(model, *made)
    accelerator.register_for_checkpointing(*registered)
    return accelerator, model


def named(folder, **options):
    return ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **options)


def unplain_state_is_refused(folder):
    accelerator, _ = run(Registered({"key": [object()]}))
    with pytest.raises(CheckpointError, match=r"object\.0 was to be saved, but state\['key'\]\[0\] is a object"):
        accelerator.save_state(folder / "refused")
    run()[0].save_state(folder / "saved")
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def pickled_weights_are_refused(folder):
    accelerator, model = run()
    with pytest.raises(ValueError, match="a pickled checkpoint is never loaded"):
        accelerator.save_state(folder, safe_serialization=False)
    accelerator.save_model(model, folder, safe_serialization=False)


def a_failed_save_deletes_nothing(folder):
    registered = Registered()
    accelerator, _ = run(registered, project_config=named(folder, total_limit=1))
    accelerator.save_state()
    registered.state = {"key": object()}
    with pytest.raises(CheckpointError):
        accelerator.save_state()
    run(Registered(), project_config=named(folder))[0].load_state()
    registered.state = {}
    accelerator.save_state()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_1"]


def an_unfinished_save_is_passed_over(folder):
    accelerator, _ = run(project_config=named(folder))
    first, second = accelerator.save_state(), accelerator.save_state()
    Path(second, "manifest.json").unlink()
    registered = Registered()
    resumed, _ = run(project_config=named(folder))
    resumed.register_load_state_pre_hook(lambda _, folder: registered.load_state_dict(folder))
    resumed.load_state()
    assert registered.state == first


def damage_is_found(folder):
    accelerator, _ = run()
    accelerator.save_state(folder)
    (path,) = folder.rglob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=path.name):
        accelerator.load_state(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
        accelerator.load_state(folder)


def misfits_change_nothing(folder):
    run(optimizers=2)[0].save_state(folder)
    accelerator, model = run(Registered())
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"(?s)1 optimizers here, and 2 .*1 registered objects here, and 0"):
        accelerator.load_state(folder)
    assert torch.equal(model.weight, before)
    load_checkpoint_in_model(model, folder)
    assert not torch.equal(model.weight, before)


def the_epoch_goes_on(folder):
    def loader_of(accelerator):
        return accelerator.prepare(torch.utils.data.DataLoader(range(6), batch_size=1))

    accelerator, _ = run()
    loader = loader_of(accelerator)
    for batch in loader:
        if batch.item() == 1:
            accelerator.save_state(folder)
            break
    for skip in (False, True):
        resumed, _ = run()
        loader = loader_of(resumed)
        resumed.load_state(folder)
        rest = resumed.skip_first_batches(loader, 2) if skip else loader
        assert [batch.item() for batch in rest] == [2, 3, 4, 5]


def pending_gradients_come_back(folder):
    accelerator, model = run(gradient_accumulation_steps=4)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state(folder)
    resumed, other = run(gradient_accumulation_steps=4)
    resumed.load_state(folder)
    assert torch.equal(other.weight.grad, model.weight.grad)


def numbers_go_on(folder):
    run(project_config=named(folder, iteration=5))[0].save_state()
    resumed, _ = run(project_config=named(folder))
    with pytest.raises(CheckpointError, match=r"checkpoint_5 exists already.*ProjectConfiguration\(iteration=6\)"):
        resumed.save_state()
    resumed.load_state()
    assert Path(resumed.save_state()).name == "checkpoint_6"


def names_are_given_once(folder):
    with pytest.raises(ValueError, match="Leave one of the two out"):
        run(project_config=named(folder))[0].save_state(folder / "own")
    with pytest.raises(ValueError, match="limits checkpoints with automatic names"):
        ProjectConfiguration(total_limit=1)


def nothing_is_registered_twice(folder):
    registered = Registered()
    accelerator, _ = run(registered)
    with pytest.raises(ValueError, match="registered already"):
        accelerator.register_for_checkpointing(registered)


def weights_of_hooks_are_read_only(folder):
    def change(models, weights, output_dir):
        weights[0]["weight"] = torch.zeros(1, 2)

    def take(models, weights, output_dir):
        torch.save(dict(weights.pop()), Path(output_dir) / "own.pt")

    accelerator, _ = run()
    handle = accelerator.register_save_state_pre_hook(change)
    with pytest.raises(TypeError, match="does not support item assignment"):
        accelerator.save_state(folder)
    handle.remove()
    accelerator.register_save_state_pre_hook(take)
    accelerator.save_state(folder)
    assert json.loads((folder / "manifest.json").read_text())["record"]["left_to_hooks"] == ["model.0"]


def weights_that_do_not_fit_are_refused(folder):
    model, file = nn.Linear(2, 1), folder / "weights.bin"
    before = model.weight.detach().clone()
    torch.save({"weight": torch.ones(1, 2), "other": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"(?s)missing in the file .*bias.*not in the model .*other"):
        load_checkpoint_in_model(model, file)
    assert torch.equal(model.weight, before)
    with pytest.warns(UserWarning, match="bias"):
        load_checkpoint_in_model(model, file, strict=False)
    assert torch.equal(model.weight, torch.ones(1, 2))


PROOFS = {
    "are pickles": unplain_state_is_refused,
    "pickles the weights too": pickled_weights_are_refused,
    "deletes before the new": a_failed_save_deletes_nothing,
    "looks like a checkpoint": an_unfinished_save_is_passed_over,
    "A flipped bit": damage_is_found,
    "finds misfits while it loads": misfits_change_nothing,
    "starts its epoch again": the_epoch_goes_on,
    "Gradients of a window": pending_gradients_come_back,
    "`iteration` at 0": numbers_go_on,
    "beside automatic naming": names_are_given_once,
    "Registering an object twice": nothing_is_registered_twice,
    "A save hook can change": weights_of_hooks_are_read_only,
    "leaves weights unchanged that the file": weights_that_do_not_fit_are_refused,
}


@pytest.mark.parametrize("words", PROOFS)
def test_what_the_page_says_of_checkpoints_is_so(words, tmp_path):
    PROOFS[words](tmp_path)


def test_every_row_on_checkpoints_has_a_proof():
    rows = re.findall(r"^\| ([^|]*) \|", CHECKPOINTS, re.MULTILINE)[1:]
    assert [[words for words in PROOFS if words in row] for row in rows] == [[words] for words in PROOFS]
