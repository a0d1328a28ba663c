"""Every command that a developer or CI runs.

    nox -s tests                   everything that must hold: style, types, the tests of all packages from their wheels
    nox -r -s tests -- core        the inner loop: only the tests of packages/core, one after the other; the rest goes to pytest
    nox -l                         the other sessions

Packages are found by globbing `packages/*`. They are tested as users get them: built into wheels and installed by path,
with what they need of each other, in one pip command, so that pip never looks for them on an index. Every environment is
built with `-c constraints.txt`, which says which torch it is, and runs one thread a process, because ranks share the cores.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PROJECTS = {name: nox.project.load_toml(folder / "pyproject.toml")["project"] for name, folder in PACKAGES.items()}
TESTED = [name for name, folder in PACKAGES.items() if (folder / "tests").is_dir()]
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
THIRD_PARTIES = [path.parent for path in sorted(ROOT.glob("examples/*/pyproject.toml"))]
QUICKSTART = "examples/quickstart.py"
SHARDED = ("--strategy", "fsdp", "--mixed-precision", "bf16")
EXAMPLES = ("-r", "examples/requirements.txt")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ACCEL = ("-m", "accel_launch", "launch", "--num-processes")
COMMON_SERVICES = ("tensorboard", "comet_ml", "wandb", "mlflow")
HEAVY_SERVICES = ("aim", "clearml", "dvclive", "swanlab", "trackio")
ACROSS_SERVICES = ("extras", "names", "options", "whole", "browser")
SIDE_BY_SIDE = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Two processes take one file after the other, in the order that tests/conftest.py gives them: tests of a file share launches."""
COUNT_DEVICES = "import torch; print(torch.__version__, torch.accelerator.device_count())"


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main job: examples/quickstart.py in one process, then in two, then sharded and in bf16."""
    install(session, ["core", "data", "precision", "fsdp-plugin"], *EXAMPLES)
    run_script(session, QUICKSTART, world=1)
    run_script(session, QUICKSTART, world=2)
    run_script(session, QUICKSTART, *SHARDED, world=2)


@nox.session
def tests(session: nox.Session) -> None:
    """What the README calls: style, types and all tests, two at a time. Package names after `--` narrow it to their tests."""
    folders, arguments = chosen(session)
    beside = () if session.posargs else SIDE_BY_SIDE  # whoever names tests wants to see, stop and debug them
    install(session, PACKAGES, *GROUPS["test"], *GROUPS["lint"], *GROUPS["types"], *EXAMPLES)
    if not folders:
        check_style(session)
        check_types(session)
    session.run("pytest", *beside, *folders, *arguments, env=required(COMMON_SERVICES))
    if not folders:
        session.notify("matrix(package='core')")  # the core alone, which no test beside it can show
        session.notify("services")


@nox.session
def services(session: nox.Session) -> None:
    """The trackers whose services are too heavy for `tests`, all trackers together, and their pages in a browser."""
    clients = [need for needs in PROJECTS["trackers"]["optional-dependencies"].values() for need in needs]
    install(session, ["trackers"], *clients, *GROUPS["test"], *GROUPS["browser"], *EXAMPLES)
    tests = [f"packages/trackers/tests/test_trackers_{name}.py" for name in (*HEAVY_SERVICES, *ACROSS_SERVICES)]
    session.run("pytest", *tests, *session.posargs, env=required([*COMMON_SERVICES, *HEAVY_SERVICES, "playwright"]))


@nox.session
@nox.parametrize("package", TESTED)
def tests_package(session: nox.Session, package: str) -> None:
    """The tests of one package from its wheel, with only its own dependencies installed."""
    install(session, [package], *GROUPS["test"])
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
@nox.parametrize("package", list(PACKAGES))
def matrix(session: nox.Session, package: str) -> None:
    """What trains with exactly this package and its dependencies installed, in worlds of one and two."""
    install(session, [package])
    launch = ACCEL if "launch" in closure([package]) else TORCHRUN
    for world in (1, 2):
        run_script(session, "tests/matrix_job.py", world=world, launch=launch)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format of every file."""
    install(session, [], *GROUPS["lint"])
    check_style(session)


@nox.session
def types(session: nox.Session) -> None:
    """`mypy --strict` over the sources of every package."""
    install(session, PACKAGES, *GROUPS["test"], *GROUPS["types"])
    check_types(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Writes docs/reference from the source, then runs every example of the documentation and follows every link."""
    install(session, PACKAGES, *GROUPS["test"])
    session.run("python", "docs/generate.py")
    session.run("pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def hello(session: nox.Session) -> None:
    """Distributions as third parties write them: their wheels beside that of the core, and their own tests.

    What they are built with comes first: one of them has a part in C++, which is compiled against the torch that it meets.
    """
    built_with = {need for folder in THIRD_PARTIES for need in build_requirements(folder)}
    session.install("--prefer-binary", "-c", "constraints.txt", *sorted(built_with))
    install(session, ["core"], *GROUPS["test"], others=THIRD_PARTIES)
    for folder in THIRD_PARTIES:  # one process each, because a device is there for the whole process that imports it
        session.run("pytest", str(folder / "tests"), *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Against raw torch and the peers, interleaved in one run: prints each gate with the figure measured."""
    install(session, PACKAGES, "-r", "benchmarks/requirements.txt")
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """All tests, the long ones too, with every loop at its full length."""
    folders, arguments = chosen(session)
    install(session, PACKAGES, *GROUPS["test"], *EXAMPLES)
    session.run("pytest", "-m", "", *folders, *arguments, env={"ACCEL_SOAK": "1"})


@nox.session
def gpu(session: nox.Session) -> None:
    """The main job on the accelerators of this machine: on one, then on all, then sharded and in bf16."""
    install(session, ["core", "data", "precision", "fsdp-plugin"], *EXAMPLES)
    printed = str(session.run("python", "-c", COUNT_DEVICES, silent=True))
    version, devices = printed.splitlines()[-1].split()  # torch may warn before
    if devices == "0":
        session.skip(f"torch {version} finds no accelerator on this machine: nothing was run.")
    run_script(session, QUICKSTART, world=1)
    run_script(session, QUICKSTART, world=int(devices))
    run_script(session, QUICKSTART, *SHARDED, world=int(devices))


def chosen(session: nox.Session) -> tuple[list[str], list[str]]:
    """The test folders of the packages named first after `--`, and what is left for pytest."""
    arguments = list(session.posargs)
    folders = []
    while arguments and arguments[0] in TESTED:
        folders.append(f"packages/{arguments.pop(0)}/tests")
    return folders, arguments


def required(services: Iterable[str]) -> dict[str, str]:
    """Has tests of trackers fail, instead of being skipped, where one of these is missing."""
    return {"ACCEL_SERVICES": ",".join(services)}


def check_style(session: nox.Session) -> None:
    """Fails on any finding of ruff, and on any file that `ruff format` would change."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    """All packages in one run, so that the types of the core hold in its plugins."""
    session.run("mypy", *[str(folder / "src") for folder in PACKAGES.values() if (folder / "src").is_dir()])


def run_script(
    session: nox.Session, script: str, *arguments: str, world: int, launch: Sequence[str] = TORCHRUN
) -> None:
    """Runs a script as one process, or as `world` ranks on this machine on a free port."""
    session.run("python", *([*launch, str(world)] if world > 1 else []), script, *arguments)


def install(session: nox.Session, names: Iterable[str], *requirements: str, others: Sequence[Path] = ()) -> None:
    """Installs packages as wheels, with those of ours that they need and these requirements, in one pip command.

    Ours are uninstalled first: in an environment that is reused, pip would keep a wheel of the same version.
    """
    session.env["OMP_NUM_THREADS"] = "1"
    wheels = []
    folders = [*(PACKAGES[name] for name in closure(names)), *others]
    if folders:
        ours = [project["name"] for project in PROJECTS.values()] + [folder.name for folder in others]
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *ours, silent=True)
        wheels = build_wheels(session, folders)
    session.install("--prefer-binary", "-c", "constraints.txt", *wheels, *requirements)


def build_wheels(session: nox.Session, folders: list[Path]) -> list[str]:
    """Paths of the wheels of these folders; the backend stands in the session itself, so that it costs seconds."""
    wheels = Path(session.virtualenv.location) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("--prefer-binary", *GROUPS["build"])
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    session.run("python", "-m", "pip", "wheel", *options, *map(str, folders))
    return [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]


def build_requirements(folder: Path) -> list[str]:
    """What `pip wheel --no-build-isolation` needs for this folder."""
    required: list[str] = nox.project.load_toml(folder / "pyproject.toml")["build-system"]["requires"]
    return required


def closure(names: Iterable[str]) -> list[str]:
    """These packages and those of `packages/*` that they depend on, however indirectly."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            required = {Requirement(text).name for text in PROJECTS[name]["dependencies"]}
            waiting += [other for other, project in PROJECTS.items() if project["name"] in required]
    return sorted(found)
