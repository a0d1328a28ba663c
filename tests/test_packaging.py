"""What a package says of itself, how it is installed today, and what stands before a release. Read from files; nothing is imported."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "release"))
import check_distributions  # noqa: E402
import check_licences  # noqa: E402
import check_tag  # noqa: E402
import projects  # noqa: E402

sys.path.remove(str(ROOT / "release"))

FOLDERS, PROJECTS = projects.FOLDERS, projects.PROJECTS
METADATA = "compat-metadata"
OURS = [project["name"] for folder, project in PROJECTS.items() if folder != METADATA]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "examples/**/*.md", "benchmarks/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
PYTHONS = [f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    """A page without its blocks of code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def tracked():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_says_who_made_it_and_for_whom_it_is(folder):
    project = PROJECTS[folder]
    assert project["authors"] == [{"name": "The accel authors"}]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (project["requires-python"], project["readme"]) == (">=3.10", "README.md")
    assert 20 < len(project["description"]) < 160
    classifiers = project["classifiers"]
    assert {*PYTHONS, "Development Status :: 3 - Alpha", "Intended Audience :: Developers"} <= set(classifiers)
    assert not [each for each in classifiers if each.startswith("License ::")]  # the expression says it
    assert ("Typing :: Typed" in classifiers) == bool([*FOLDERS[folder].glob("src/*/py.typed")])
    if folder != METADATA:
        assert [each for each in classifiers if each.startswith("Topic ::")]
        assert project["keywords"] or folder == "all"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_says_where_it_is(folder):
    home = projects.repository()
    assert PROJECTS[folder]["urls"] == {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Source": f"{home}/tree/main/packages/{folder}",
        "Changelog": f"{home}/blob/main/packages/{folder}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def test_what_cannot_be_installed_from_an_index_is_private():
    private = {project["name"] for folder, project in PROJECTS.items() if folder not in projects.PUBLIC}
    assert {PROJECTS[METADATA]["name"]} <= private
    for folder in projects.PUBLIC:
        needed = {re.match(r"[\w.-]+", each)[0] for each in PROJECTS[folder]["dependencies"]}
        assert not needed & private, (
            f"{folder} needs what no index will have: give it the classifier {projects.PRIVATE!r}"
        )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_readme_that_an_index_shows_has_no_relative_link(folder):
    links = LINK.findall(text_of(FOLDERS[folder] / "README.md"))
    assert not [link for link in links if not link.startswith("https://")]


HOME = projects.repository()
LINKS = [
    (relative(page), link)
    for page in PAGES
    for link in dict.fromkeys(LINK.findall(text_of(page)))
    if link.startswith(f"{HOME}/")
]


def test_the_repository_has_one_address():
    """Others' repositories have other names; a workflow's badge is GitHub's own page."""
    name = HOME.rpartition("/")[2]
    found = {
        f"{relative(path)}: {match}"
        for path in tracked()
        if path != Path(__file__)
        for match in re.findall(rf"https://github\.com/[\w-]+/{name}(?![\w-])", path.read_text(encoding="utf-8"))
        if match != HOME
    }
    assert not found


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_a_link_into_the_repository_leads_to_a_file_and_its_heading(page, link):
    kind, _, rest = link.removeprefix(f"{HOME}/").partition("/")
    if kind in ("issues", "security", "actions"):
        return
    branch, _, target = rest.partition("/")
    name, _, anchor = target.partition("#")
    assert (kind, branch) == ("tree" if (ROOT / name).is_dir() else "blob", "main")
    assert (ROOT / name).exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("folder", [each for each in FOLDERS if each != METADATA])
def test_a_package_is_installed_from_a_clone_by_one_file(folder):
    name = PROJECTS[folder]["name"]
    written = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert written == projects.requirements_of(folder), "type `python release/projects.py requirements`"
    order = [line.removeprefix("./packages/") for line in written.splitlines() if line.startswith("./")]
    for place, each in enumerate(order):
        assert set(projects.needed(each)) <= set(order[: place + 1])
    assert f"pip install -r requirements/{name}.txt" in (FOLDERS[folder] / "README.md").read_text(encoding="utf-8")


def test_there_is_no_file_for_a_package_that_is_gone():
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == set(OURS)


def test_messages_know_which_of_ours_no_index_has_and_where_they_are():
    """Read as messages read it: a package leaves the list with its first date in a CHANGELOG, and what is not for an index never."""
    text = (ROOT / check_tag.ADVICE).read_text(encoding="utf-8")
    folders = dict(re.findall(r'"([\w-]+)": "([\w-]+-plugin)"', re.search(r"^_FOLDERS = (.*)$", text, re.MULTILINE)[1]))
    said = {
        name: folders.get(name.removeprefix("accel-"), name.removeprefix("accel-")) for name in check_tag.unpublished()
    }
    ours = {name: folder for name, folder in projects.FOLDER_OF.items() if folder != METADATA}
    assert said == {name: folder for name, folder in ours.items() if not is_released(folder)}


def is_released(folder):
    dated = re.search(r"^## \S+ \(\d{4}-", (FOLDERS[folder] / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    return folder in projects.PUBLIC and dated is not None


def bare(text, names=OURS):
    """Lines that install one of these by name, and do not say that this is for later.

    That is, have pip look for it on an index: not `./packages/data`, `requirements/accel-data.txt` or `accel-data @ git+…`.
    """
    of_ours = re.compile(
        rf"pip3? install[^\n`]*?(?<![\w/=@.-])({'|'.join(sorted(names, key=len, reverse=True))})(?![\w.])"
    )
    return [
        line.strip()
        for line in text.splitlines()
        for match in [of_ours.search(line.partition(" #")[0])]
        if match and not re.search(r"[Oo]nce (it is |they are )?published", line) and " @ git+" not in line
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pip install accel-core accel-data", True),
        ('pip install --upgrade "accel-trackers[wandb]"', True),
        ("`pip install accel-launch` brings it", True),
        ("pip install accel-data   # once it is published", False),
        ("pip install -r requirements/accel-data.txt", False),
        ("pip install ./packages/data   # not accel-all", False),
        ("pip install accel-hello", False),
    ],
)
def test_a_command_that_asks_an_index_for_one_of_ours_is_recognised(line, expected):
    assert bool(bare(line)) is expected


def test_nobody_is_told_to_install_a_name_that_is_not_ours_yet():
    """Whoever types it would get what somebody else has put there."""
    pages = [*PAGES, *ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("docs/*.py")]
    found = {
        f"{relative(path)}: {line}"
        for path in pages
        if "decisions" not in path.parts and path.name != "CHANGELOG.md"
        for line in bare(path.read_text(encoding="utf-8"), check_tag.unpublished())
    }
    assert not found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_changelog_says_whether_its_version_is_released(folder):
    heading, notes = projects.notes_of(folder, PROJECTS[folder]["version"])
    assert re.fullmatch(r"\(unreleased\)|\(\d{4}-\d\d-\d\d\)", heading)
    assert notes


@pytest.fixture
def released(monkeypatch):
    """A package that may be released, as the release reads it."""
    monkeypatch.setattr(check_tag, "repository", lambda: "https://github.com/owner/accel")
    monkeypatch.setattr(check_tag, "notes_of", lambda *_: ("(2030-01-31)", "- First version."))
    monkeypatch.setattr(check_tag, "unpublished", set)
    return PROJECTS["data"]["version"]


def test_a_tag_of_what_is_ready_may_be_released(released):
    assert check_tag.split(f"accel-data-v{released}") == ("data", released)
    assert check_tag.problems("data", released) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("repository", lambda: f"https://github.com/{projects.NOT_SET}/accel", "has no address yet"),
        ("notes_of", lambda *_: None, "CHANGELOG.md has no heading for"),
        ("notes_of", lambda *_: ("(unreleased)", "- x"), r"has \(unreleased\) behind .*, and not the date"),
        ("notes_of", lambda *_: ("(2030-01-31)", ""), "says nothing of"),
        ("unpublished", lambda: {"accel-data"}, "messages say that no index has accel-data"),
        ("PUBLIC", [], "accel-data is not for an index"),
    ],
)
def test_a_tag_is_refused_with_the_reason(released, monkeypatch, name, value, said):
    monkeypatch.setattr(check_tag, name, value)
    (problem,) = check_tag.problems("data", released)
    assert re.search(said, problem)


def test_a_tag_of_another_version_or_of_nothing_is_refused(released):
    assert "pyproject.toml has version" in check_tag.problems("data", "9.9.9")[0]
    for tag in ("v1.0.0", "accel-data-1.0.0", "accel-none-v1.0.0", "accel-data-v1.0"):
        with pytest.raises(SystemExit, match="is no tag of a release; type <package>-vX"):
            check_tag.split(tag)


def test_nothing_may_be_released_while_the_repository_has_no_address():
    if projects.NOT_SET in projects.repository():
        command = [sys.executable, "release/check_tag.py", f"accel-core-v{PROJECTS['core']['version']}"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode != 0
        assert "the repository has no address yet" in ended.stderr


def test_another_address_is_written_wherever_the_present_one_stands(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "packages/data/pyproject.toml", "packages/data/README.md", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(projects, "ROOT", tmp_path)
    changed = projects.replace_repository("https://github.com/somebody/accel")
    assert sorted(changed) == ["packages/data/README.md", "packages/data/pyproject.toml", "pyproject.toml"]
    assert projects.repository() == "https://github.com/somebody/accel"
    assert HOME not in (tmp_path / "packages/data/README.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="is no address of a repository"):
        projects.replace_repository("accel")


def distributions(folder, *, leave_out=(), add=(), licence="Apache-2.0"):
    """A sdist and a wheel of accel-data as a build writes them, but for what is wrong on purpose."""
    stem = f"accel_data-{PROJECTS['data']['version']}"
    sources = sorted((FOLDERS["data"] / "src").rglob("*"))
    files = {
        path.relative_to(FOLDERS["data"] / "src").as_posix(): path.read_bytes()
        for path in sources
        if path.suffix == ".py"
    }
    files |= {"accel_data/py.typed": b"", f"{stem}.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}
    files[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.4\nLicense-Expression: {licence}\n".encode()
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name, content in {**files, **dict.fromkeys(add, b"")}.items():
            if name not in leave_out:
                wheel.writestr(name, content)
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as sdist:
        for name in {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} - set(leave_out):
            sdist.addfile(tarfile.TarInfo(f"{stem}/{name}"), io.BytesIO())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, None),
        ({"leave_out": ["accel_data/py.typed"]}, "py.typed is missing"),
        ({"leave_out": ["accel_data/sharded.py"]}, "accel_data/sharded.py is missing"),
        ({"leave_out": ["CHANGELOG.md"]}, "tar.gz: CHANGELOG.md is missing"),
        (
            {"leave_out": [f"accel_data-{PROJECTS['data']['version']}.dist-info/licenses/LICENSE"]},
            "has not the LICENSE",
        ),
        ({"add": ["tests/test_data.py"]}, "it has tests/test_data.py"),
        ({"add": ["accel_data/__pycache__/x.pyc"]}, "it has accel_data/__pycache__"),
        ({"licence": "MIT"}, "its licence is MIT"),
    ],
)
def test_what_is_wrong_with_a_built_package_is_found(tmp_path, wrong, said):
    distributions(tmp_path, **wrong)
    found = [each for each in check_distributions.problems(tmp_path) if each.startswith("accel_data-")]
    assert [said] == [said for each in found if said in each] if said else not found


def test_a_package_that_was_not_built_is_missed(tmp_path):
    assert len(check_distributions.problems(tmp_path)) == len(PROJECTS)


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("GPL-3.0-only", True),
        ("GNU Affero General Public License v3", True),
        ("MIT OR GPL-2.0-or-later", False),
        ("", True),
    ],
)
def test_licences_that_not_everybody_can_accept_are_recognised(licence, expected):
    assert check_licences.is_refused(licence) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("nvidia-cublas", True), ("cuda-bindings", True), ("torch", False), ("accel-nvidia-x", False)],
)
def test_libraries_of_torchs_builds_for_cuda_have_terms_of_their_own(name, expected):
    assert bool(check_licences.OF_TORCH.match(name)) is expected


def test_the_hosted_workflows_call_what_is_here():
    """Each script and session that they name exists, and a release is tried before anything is uploaded."""
    sessions = set(
        re.findall(r"^@nox\.session.*?\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE | re.DOTALL)
    )
    workflows = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    for text in workflows.values():
        assert set(re.findall(r"nox -s (\w+)", text)) <= sessions
        for script in re.findall(r"release/\w+\.py|\.ci/run", text):
            assert (ROOT / script).exists()
    assert re.search(r"^ +- run: \.ci/run$", workflows["ci.yml"], re.MULTILINE)
    for system in ("ubuntu", "macos", "windows"):
        assert f"{system}-latest" in workflows["ci.yml"]
    steps = workflows["release.yml"]
    assert steps.index("nox -s release") < steps.index("gh-action-pypi-publish")
    assert "password" not in steps
    assert "id-token: write" in steps


def test_hooks_before_a_commit_use_the_versions_of_the_project():
    """Local ones: what `pip install --group lint --group types` has installed, and nothing that is downloaded beside it."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"repo: (\S+)", text)) == {"local"}
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}
    for command in ("ruff check", "ruff format", "bash -c 'mypy packages/*/src"):
        assert f"entry: {command}" in text
