"""Trackers on the command line, in variables and in files: several are chosen at a time, and each has a section."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from accel_core import Tracker
from accel_core.api.component import how_to_install
from accel_core.api.launcher import CHANNEL, Offer, given_outside
from accel_launch.commands import launch, plugins
from accel_launch.errors import SettingsError
from accel_launch.settings.catalog import Catalog
from accel_launch.settings.command_line import parse
from accel_launch.settings.files import ConfigFile
from accel_launch.settings.resolution import resolve


class Diary(Tracker):
    """Records in a book.

    Args:
        pages: how many it has.
    """

    name = "diary"

    def __init__(self, pages: int = 100) -> None:
        self.pages = pages


class Slate(Diary):
    """Records on stone."""

    @classmethod
    def unusable(cls):
        return "there is no chalk. Type: pip install chalk"


class Puzzle(Diary):
    """Records in riddles."""

    @classmethod
    def unusable(cls):
        raise LookupError("no idea")


@pytest.fixture
def catalog(monkeypatch):
    """What is installed beside the core's own: trackers that work, are not usable here, and are broken."""
    module = ModuleType("stationery")
    module.__dict__.update(Diary=Diary, Slate=Slate, Puzzle=Puzzle)
    monkeypatch.setitem(sys.modules, "stationery", module)
    kinds = {"diary": "Diary", "slate": "Slate", "puzzle": "Puzzle", "torn": "Torn"}
    trackers = [
        Offer("accel.trackers", name, f"stationery:{kind}", "stationery", "1.5") for name, kind in kinds.items()
    ]
    return Catalog([*(offer for offer in Catalog().offers if offer.group != "accel.trackers"), *trackers])


def resolved(catalog, *words, environ=None, file=None, thorough=False):
    line = parse(words, catalog, launch.SWITCHES)
    return resolve(
        catalog, line, None if file is None else ConfigFile("c.yaml", file), environ or {}, thorough=thorough
    )


def problems(catalog, *words, **given):
    with pytest.raises(SettingsError) as caught:
        resolved(catalog, *words, **given)
    return str(caught.value)


def plain(name):
    return name.rpartition(":")[2]


def trackers_of(found):
    return [name for name in found.active if plain(name) in found.catalog.names("log_with")]


@pytest.mark.parametrize(
    ("words", "given", "names"),
    [
        (["--log-with", "diary"], {}, ["diary"]),
        (["--log_with=diary,slate"], {}, ["diary", "slate"]),
        (['--log-with=["slate", "diary"]'], {}, ["slate", "diary"]),
        ([], {"environ": {"ACCELERATE_LOG_WITH": "slate, diary"}}, ["slate", "diary"]),
        ([], {"file": {"log_with": "diary"}}, ["diary"]),
        ([], {"file": {"log_with": ["diary", "slate"]}}, ["diary", "slate"]),
        (["--log-with="], {"file": {"log_with": "diary"}}, []),
        (["--log-with", "slate"], {"file": {"log_with": "diary"}}, ["slate"]),
        (["--log-with", "diary,stationery:slate"], {}, ["diary", "stationery:slate"]),
        ([], {}, []),
    ],
)
def test_several_trackers_are_chosen_by_names_between_commas(catalog, monkeypatch, words, given, names):
    found = resolved(catalog, *words, **given)
    assert (found.get("log_with").value or []) == names
    assert trackers_of(found) == names
    assert [value.section for value in found.values if value.option == "pages"] == [plain(name) for name in names]
    monkeypatch.setenv(CHANNEL, found.channel)
    if words:
        assert given_outside("ACCELERATE_LOG_WITH").text == ",".join(names)


def test_all_stands_for_what_works_wherever_the_script_runs(catalog):
    found = resolved(catalog, "--log-with", "all", "--slate.pages", "7")
    assert trackers_of(found) == ["diary", "slate", "puzzle"]
    assert found.get("pages", "slate").value == 7
    assert json.loads(found.channel)["command line"]["ACCELERATE_LOG_WITH"] == [["all"], "--log-with"]


def test_each_tracker_has_a_section(catalog):
    found = resolved(
        catalog,
        "--log-with=diary,slate",
        "--diary.pages=1",
        environ={"ACCELERATE_SLATE__PAGES": "2"},
        file={"diary": {"pages": 3}, "puzzle": {"pages": 4}},
    )
    assert (found.get("pages", "diary").value, found.get("pages", "slate").value) == (1, 2)
    assert [value.key for value in found.idle] == ["puzzle.pages"]
    assert "c.yaml: options of 'puzzle' without effect, for 'puzzle' is not chosen" in found.notes[0]
    assert "Add --log-with diary,slate,puzzle to use them." in found.notes[0]
    assert json.loads(found.channel)["file"]["ACCELERATE_PUZZLE__PAGES"] == [4, "c.yaml"]


@pytest.mark.parametrize(
    ("words", "file", "message"),
    [
        (["--log-with", "dairy,slate"], {}, r"'dairy' was asked for.*Type 'diary' if that was meant"),
        (["--log-with", "wandb"], {}, r"'wandb' was asked for.*" + how_to_install("accel-trackers")),
        (["--diary.pages", "1"], {}, r"'diary', which is not chosen\. Add --log-with diary\."),
        (
            ["--log-with", "diary", "--diary.pages", "x"],
            {},
            r"diary\.pages='x' was given by --diary\.pages: expected a whole",
        ),
        ([], {"log_with": "[1"}, r"log_with='\[1' was given by c\.yaml: expected a list, each a text"),
        ([], {"log_with": {"diary": {}}}, r"log_with=\{.*expected a list, each a text"),
        ([], {"log_with": ["diary", 3]}, r"'3' was asked for, and nothing"),
        ([], {"diary": 5}, r"Write `log_with: diary` to choose it"),
        ([], {"log_with": "diary", "diary": {"page": 5}}, r"'diary' has no option 'page'.*Type 'pages' if"),
        (
            [],
            {"wandb": {"mode": "offline"}},
            r"the tracker 'wandb' is not installed\. " + how_to_install("accel-trackers"),
        ),
        (["--log-with", "torn", "--torn.pages=2"], {}, r"torn.*is broken"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_to_type(catalog, words, file, message):
    try:
        told_all = problems(catalog, *words, file=file)
    except Exception as error:  # an option of what is broken is refused where the command line is read
        told_all = str(error)
    assert re.search(message, told_all, re.DOTALL)


def test_a_tracker_as_a_flag_says_what_to_type(catalog):
    with pytest.raises(SettingsError, match=r"Give one of them, --diary\.OPTION; .* --log-with diary chooses it\."):
        parse(["--diary", "script.py"], catalog, launch.SWITCHES)
    with pytest.raises(
        SettingsError, match=r"--log-with was given without its value.*names between commas, of diary, slate"
    ):
        parse(["--log-with", "--cpu"], catalog, launch.SWITCHES)


def test_a_file_that_is_validated_notes_which_tracker_cannot_be_used_here(catalog):
    found = resolved(catalog, file={"log_with": "diary,slate"}, thorough=True)
    assert found.notes == (
        "log_with names 'slate' (c.yaml), which cannot be used here: there is no chalk. Type: pip install chalk",
    )
    assert "'torn'" in problems(catalog, file={"log_with": "torn"}, thorough=True)


def test_choices_say_which_cannot_be_used_here_and_why(catalog, monkeypatch, capsys):
    found = {choice.name: choice.problem for choice in catalog.choices("log_with")}
    assert found["diary"] == ""
    assert found["slate"] == "unusable: there is no chalk. Type: pip install chalk"
    assert found["puzzle"] == "unusable: LookupError: no idea"
    assert found["torn"].startswith("broken: AttributeError")
    monkeypatch.setattr(plugins, "list_offers", lambda: catalog.offers)
    assert plugins.main([]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^accel\.trackers +diary +stationery +1\.5 +ok$", shown, re.MULTILINE)
    assert re.search(r"^accel\.trackers +slate +stationery +1\.5 +unusable: there is no chalk", shown, re.MULTILINE)


def test_help_says_what_is_installed_and_shows_the_options_of_a_tracker(catalog, monkeypatch, capsys):
    monkeypatch.setattr(launch, "Catalog", lambda: catalog)
    assert launch.main(["-h"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--log-with NAME,... services and files that record the run" in shown
    assert "[installed: diary, slate, puzzle, torn]" in shown
    assert "--diary, --slate" in shown
    assert launch.main(["--diary", "-h"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.partition("diary (stationery 1.5): ")[2].startswith(
        "Records in a book. --diary.pages N how many it has."
    )


MODULE = '''
from accel_core import Tracker


class Diary(Tracker):
    """Records in a book.

    Args:
        pages: how many it has.
    """

    name = "diary"

    def __init__(self, pages: int = 100) -> None:
        self.pages = pages
'''
JOB = """
import json, sys
from accel_core import Accelerator
accelerator = Accelerator(cpu=True)
explained = accelerator.explain().as_dict()
chosen = [[each["name"], each["source"]] for each in explained["parts"] if each["role"] == "tracker"]
setting = [each["value"] for each in explained["settings"] if each["option"] == "diary.pages"]
print(json.dumps([chosen, setting, [name for name in sys.modules if name in {"stationery", "missing", "accel_trackers.tensorboard"}]]))
"""


@pytest.mark.timeout(120)
def test_chosen_trackers_and_their_options_arrive_in_the_processes_and_nothing_else_is_imported(tmp_path):
    about = tmp_path / "stationery-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stationery\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("[accel.trackers]\ndiary = stationery:Diary\ntorn = missing:Torn\n")
    (tmp_path / "stationery.py").write_text(MODULE)
    script, config = tmp_path / "job.py", tmp_path / "config.yaml"
    script.write_text(JOB)
    config.write_text("log_with: [diary]\ndiary: {pages: 3}\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accel_launch", "launch", "--config-file", config, "--diary.pages=8", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[["diary", str(config)]], ["8"], ["stationery"]]
