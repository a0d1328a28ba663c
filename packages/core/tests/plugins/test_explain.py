"""What runs and why: `explain()`, and `python -m accel_core plugins`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from fake_distributions.installed import install

from accel_core.__main__ import main
from accel_core.contract.hook_specs import hookimpl
from accel_core.plugins import activate, build, passed
from accel_core.plugins.explain import explain
from accel_core.plugins.manager import hook_specs


class Defaults:
    """Stands in for the core's."""


for _name, _spec in hook_specs().items():
    if _spec.kind == "owner" and _name != "prepare_model":
        setattr(Defaults, _name, hookimpl(lambda self: None))


class Watcher:
    @hookimpl
    def start(self):
        pass

    @hookimpl
    def finish(self):
        raise OSError("disk gone")


@pytest.fixture
def run(monkeypatch):
    install(monkeypatch, "fsdp", "other_fsdp", "broken", "future")
    strategy = build("accel.strategies", "accel-fsdp:fsdp")
    watcher = passed(Watcher())
    activation = activate([strategy, watcher], Defaults())
    sources = [("strategy", strategy, "environment variable ACCELERATE_STRATEGY"), ("plugin", watcher, "argument")]
    return activation, sources


def test_each_part_says_what_it_is_who_brings_it_and_who_chose_it(run):
    parts = explain(*run).as_dict()["parts"]
    assert parts[0] == {
        "role": "strategy",
        "name": "fsdp",
        "component": "fake_fsdp.FSDP",
        "distribution": "accel-fsdp",
        "version": "0.3.0",
        "source": "environment variable ACCELERATE_STRATEGY",
    }
    assert (parts[1]["name"], parts[1]["distribution"], parts[1]["source"]) == ("Watcher", None, "argument")


def test_each_hook_says_who_owns_it_or_listens(run):
    told = explain(*run)
    assert told.owners["prepare_model"] == "strategy 'fsdp'"
    assert told.owners["backward"] == "accel-core's default"
    assert told.listeners == {"start": ["plugin 'Watcher'"], "finish": ["plugin 'Watcher'"]}


def test_a_listener_that_was_switched_off_is_shown_so(run):
    with pytest.warns(RuntimeWarning, match="disk gone"):
        run[0].relay.finish()
    assert explain(*run).listeners["start"] == ["plugin 'Watcher' (switched off: finish: OSError: disk gone)"]


def test_what_is_installed_and_not_active_is_listed_without_importing_it(run):
    states = {(offer.distribution, offer.name): offer.state for offer in explain(*run).inactive}
    assert ("accel-fsdp", "fsdp") not in states
    assert states["accel-core", "single"] == "ok"
    assert states["broken-strategy", "broken"] == "ok"
    assert states["other-fsdp", "fsdp"] == "conflicts with accel-fsdp 0.3.0: choose 'other-fsdp:fsdp'"
    assert states["from-the-future", "future"].startswith("misfit: from-the-future 5.0 needs accel-core >=99")
    assert not {"fake_broken", "fake_future", "fake_other_fsdp"} & set(sys.modules)


def test_an_explanation_reads_as_tables_and_is_written_as_json(run):
    told = explain(*run)
    lines = [line.split() for line in str(told).splitlines()]
    assert ["role", "name", "distribution", "component", "chosen", "by"] in lines
    assert ["plugin", "Watcher", "-", f"{__name__}.Watcher", "argument"] in lines
    assert ["prepare_model", "strategy", "'fsdp'"] in lines
    assert json.loads(json.dumps(told.as_dict()))["owners"] == told.owners


def test_a_table_without_rows_says_none(monkeypatch):
    install(monkeypatch)
    selected = build("accel.strategies", Strategy())
    told = explain(activate([selected], Defaults()), [])
    assert str(told).startswith("role  name  distribution  component  chosen by\nnone\n")
    assert "start                     nobody" in str(told)


class Strategy:
    @hookimpl
    def prepare_model(self, model):
        return model


def test_the_command_lists_every_plugin_with_its_state(monkeypatch, capsys):
    install(monkeypatch, "fsdp", "other_fsdp", "broken", "future")
    assert main(["plugins"]) == 0
    rows = {tuple(line.split()[1:3]): line for line in capsys.readouterr().out.splitlines()}
    assert rows["name", "distribution"].split() == ["group", "name", "distribution", "version", "state"]
    assert rows["half", "accel-fsdp"].split() == ["accel.precisions", "half", "accel-fsdp", "0.3.0", "ok"]
    assert "conflicts with other-fsdp 2.0: choose 'accel-fsdp:fsdp'" in rows["fsdp", "accel-fsdp"]
    broken = rows["broken", "broken-strategy"]
    assert "broken: ModuleNotFoundError: No module named 'an_engine_that_is_missing'" in broken
    assert "misfit: from-the-future 5.0 needs accel-core >=99" in rows["future", "from-the-future"]


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "plugins" in capsys.readouterr().out


def test_an_unknown_command_exits_with_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plugin"])
    assert stopped.value.code == 2
    assert "invalid choice: 'plugin'" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "accel_core"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m accel_core")
