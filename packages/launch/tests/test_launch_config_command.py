"""`accel config default`, `show`, `validate` and `path`."""

from __future__ import annotations

import json
import re

import pytest

from accel_launch.commands import config
from accel_launch.errors import SettingsError
from accel_launch.settings.files import own_path, read


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ACCELERATE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def run(capsys, *words):
    status = config.main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_default_writes_what_suits_this_machine_and_what_is_given(capsys):
    status, out, _ = run(capsys, "default", "--mixed-precision", "bf16", "--fsdp", "--fsdp.cpu-offload")
    assert status == 0
    assert f"{own_path()} is written." in out
    data = dict(read(own_path()).data)
    assert data.pop("num_processes") >= 1
    assert data == {"mixed_precision": "bf16", "strategy": "fsdp", "fsdp": {"cpu_offload": True}}
    assert "# keep parameters, gradients" in own_path().read_text()


def test_default_replaces_a_file_only_by_force(capsys):
    own_path().parent.mkdir(parents=True)
    own_path().write_text("num_processes: [")
    with pytest.raises(SettingsError, match="would be replaced: nothing was written. Add --force"):
        run(capsys, "default")
    assert own_path().read_text() == "num_processes: ["
    assert run(capsys, "default", "--force", "--cpu", "--num-processes", "3")[0] == 0
    assert read(own_path()).data == {"cpu": True, "num_processes": 3}


def test_default_refuses_what_cannot_hold(capsys, home):
    with pytest.raises(SettingsError, match="expected a whole number"):
        run(capsys, "default", "--num-processes", "x", "--config-file", str(home / "a.yaml"))
    assert not (home / "a.yaml").exists()


def test_show_has_every_option_with_value_and_source(capsys, home, monkeypatch):
    file = home / "a.yaml"
    file.write_text("num_processes: 2\nfp16: {init_scale: 2.0}\n")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "INFO")
    words = ("--config-file", str(file), "--fsdp", "--fsdp.wrap", "A,B")
    status, out, err = run(capsys, "show", "--all", *words)
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert status == 0
    assert rows["num_processes"] == ["2", str(file)]
    assert rows["log_level"] == ["info", "ACCELERATE_LOG_LEVEL"]
    assert rows["fsdp.wrap"] == ["A,B", "--fsdp.wrap"]
    assert rows["fsdp.shard"] == ["-", "default"]
    assert rows["fp16.init_scale"] == ["2.0", f"{file} (no effect: not chosen)"]
    assert "fsdp.parallelize_plan" not in rows
    assert "options of 'fp16' without effect" in err
    found = json.loads(run(capsys, "show", *words, "--json")[1])
    assert {"option": "fsdp.wrap", "value": ["A", "B"], "source": "--fsdp.wrap", "active": True} in found
    assert {"option": "fp16.init_scale", "value": 2.0, "source": str(file), "active": False} in found


def test_show_says_what_holds_where_no_strategy_is_given(capsys):
    _, out, _ = run(capsys, "show", "--all")
    assert "ddp, or single for one process" in out


def test_show_has_what_was_given_and_says_how_much_has_its_default(capsys, home):
    file = home / "a.yaml"
    file.write_text("num_processes: 2\nfp16: {init_scale: 2.0}\n")
    status, out, _ = run(capsys, "show", "--config-file", str(file), "--fsdp")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["num_processes", "strategy", "fp16.init_scale"]
    every = len(run(capsys, "show", "--config-file", str(file), "--fsdp", "--all")[1].splitlines()) - 1
    assert out.splitlines()[-1] == (
        f"{every - 3} more options have their defaults. `accel config show --all` lists them, too."
    )
    file.write_text("")
    _, out, _ = run(capsys, "show", "--config-file", str(file))
    assert re.fullmatch(r"\d+ options have their defaults\. `accel config show --all` lists them, too\.\n", out)


def test_validate_lists_all_mistakes_at_once_with_their_lines(capsys, home):
    file = home / "bad.yaml"
    file.write_text(
        "num_processes: two\nnum_machine: 2\nfsdp:\n  cpu_ofload: true\nbf16-true:\n  reduce_dtype: no\nstrategy: fsdp\n"
        "nothing:\n  a: 1\n"
    )
    status, _, err = run(capsys, "validate", str(file))
    assert status == 1
    for expected in (
        "5 mistakes:",
        f"num_processes='two' was given by {file}, line 1",
        f"num_machine was given by {file}, line 2",
        "Type 'num_machines' if that was meant",
        f"fsdp.cpu_ofload was given by {file}, line 4",
        "Type 'cpu_offload' if that was meant",
        f"bf16-true.reduce_dtype='no' was given by {file}, line 6",
        f"nothing was given by {file}, line 8",
    ):
        assert expected in err
    assert all(line.startswith("  ") for line in err.splitlines()[1:])


def test_validate_says_that_a_file_is_in_order_and_what_has_no_effect(capsys, home, monkeypatch):
    monkeypatch.setenv("ACCELERATE_QQQ__X", "1")  # not the file's fault
    file = home / "good.yaml"
    file.write_text("num_processes: 2\nfsdp:\n  cpu_offload: true\n")
    status, out, err = run(capsys, "validate", str(file))
    assert (status, out) == (0, f"{file} is in order: 2 options.\n")
    assert "options of 'fsdp' without effect" in err
    assert "There is no configuration file, so defaults hold" in run(capsys, "validate")[1]


def test_validate_refuses_files_that_cannot_be_read_and_backends_that_do_not_exist(capsys, home):
    assert "there is no such file" in run(capsys, "validate", str(home / "none.yaml"))[2]
    file = home / "a.yaml"
    file.write_text("dynamo_backend: inductr\n")
    status, _, err = run(capsys, "validate", str(file))
    assert status == 1
    assert "Type 'inductor' if that was meant" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gradient_accumulation_steps: 0",
            r"\(num_steps=0\): expected an integer of at least 1\. Given was gradient_accumulation_steps=0 by .*a\.yaml\.",
        ),
        (
            "log_with: jsonl\ntracking: {start_timeout: 0}",
            r"expected a positive number\. Given was tracking\.start_timeout=0",
        ),
        ("strategy: fsdp\nfsdp: {shard: 0}", r"Given was fsdp\.shard=0 by"),
        ("mixed_precision: fp16\nfp16: {init_scale: -1.0}", r"Given was fp16\.init_scale=-1\.0 by"),
        ("data_seed: -1", r"Given was data_seed=-1 by"),
    ],
)
def test_validate_refuses_values_that_the_accelerator_refuses(capsys, home, text, message):
    file = home / "a.yaml"
    file.write_text(text)
    status, _, err = run(capsys, "validate", str(file))
    assert status == 1
    assert re.search(message, err), err


def test_path_prints_where_the_file_lies_and_whether_it_is_there(capsys, home):
    status, out, err = run(capsys, "path")
    assert (status, out) == (0, f"{own_path()}\n")
    assert "There is no such file yet: `accel config` writes it." in err
    run(capsys, "default")
    assert run(capsys, "path") == (0, f"{own_path()}\n", "")
    assert run(capsys, "path", "--config-file", str(home / "x.yaml"))[1] == f"{home / 'x.yaml'}\n"


def test_import_writes_a_file_of_our_own(capsys, home):
    pytest.importorskip("accel_compat")  # which translates
    theirs = home / "default_config.yaml"
    theirs.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"
    )
    assert run(capsys, "import", str(theirs))[0] == 0
    assert read(own_path()).data == {"num_processes": 2, "cpu": True}
    assert run(capsys, "validate")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shwo"], "no such subcommand. Known: default, show, validate, path, import. Type `accel config show` if"),
        (["path", "x.yaml"], "accel config path was given x.yaml, and it takes no file"),
        (["validate", "a", "b"], "takes one file"),
        (["path", "--cpu"], "--cpu was given, and accel config path takes no option of a run"),
        (["show", "--num-proceses", "2"], "Type --num-processes if that was meant"),
    ],
)
def test_what_no_subcommand_takes_is_refused(capsys, words, message):
    with pytest.raises(SettingsError, match=message):
        run(capsys, *words)


@pytest.mark.parametrize("name", ["", "default", "show", "validate", "path", "import"])
def test_every_subcommand_has_help(capsys, name):
    status, out, _ = run(capsys, *([name] if name else []), "-h")
    assert status == 0
    assert out.startswith(f"usage: {f'accel config {name}'.strip()} [options]")
    assert "--config-file PATH" in out
    if name == "show":
        assert "--num-processes N" in out
    else:
        assert ("subcommand  what it does" in out) == (name == "")
