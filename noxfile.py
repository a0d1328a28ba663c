"""Every command that a developer or CI runs.

    nox -s tests                   what CI runs: style, types, the tests of all packages from their wheels, but for the longest
    nox -s full                    everything: the longest tests, every tracker's service, every set of packages, third parties
    nox -s oldest                  the tests of packages that ask for an older torch than we develop with, with that one
    nox -s newest                  the tests of all packages with the newest torch
    nox -r -s tests -- core        the inner loop: only the tests of packages/core; what follows the names goes to pytest
    nox -l                         the other sessions

Packages are found by globbing `packages/*`. They are tested as users get them: built into wheels and installed by path,
with what they need of each other, in one pip command, so that pip never looks for them on an index. Every environment is
built with `-c constraints.txt`, which says which torch it is, and runs one thread a process, because ranks share the cores;
but for those of `oldest` and `newest`, which constraints-oldest.txt and constraints-newest.txt describe.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
TEST = [*GROUPS["test"], *GROUPS["compat"]]
METADATA = "compat-metadata"
"""A distribution without code, by which accel-compat is found as `accelerate`."""
TRAINING = [name for name in PACKAGES if name != METADATA]
TOY_DEVICE = ROOT / "examples" / "accel-toydevice"
"""A part in C++, which is compiled against the torch that it meets, and a device for the whole process: a session of its own."""
THIRD_PARTIES = [path.parent for path in sorted(ROOT.glob("examples/*/pyproject.toml")) if path.parent != TOY_DEVICE]
CONSTRAINTS, OLDEST, NEWEST = "constraints.txt", "constraints-oldest.txt", "constraints-newest.txt"
RECENT = {"deepspeed-plugin", "megatron-plugin", "compat"}
"""Packages that ask for the torch of constraints.txt: their tests have not passed with an older one."""
QUICKSTART = "examples/quickstart.py"
ACCEPTANCE = "tests/gpu_acceptance.py"
SHARDED = ("--strategy", "fsdp", "--mixed-precision", "bf16")
ZERO = ("--strategy", "deepspeed")
COMPILED = ("--strategy", "xla", "--steps", "30", "--seconds", "300")  # which compiling is a part of
XLA = ("torch_xla==2.9.0",)  # which fits the torch of constraints-oldest.txt alone
ON_XLA_TESTED = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6", "numpy>=1.26")  # others need a newer torch
EXAMPLES = ("-r", "examples/requirements.txt")
BY_FEATURE = ("-r", "examples/by_feature/requirements.txt")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ACCEL = ("-m", "accel_launch", "launch", "--num-processes")
SERVICES = (
    "tensorboard",
    "comet_ml",
    "wandb",
    "mlflow",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
    "playwright",
)
SIDE_BY_SIDE = ("--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Two processes take one file after the other, in the order that tests/conftest.py gives them: tests of a file share launches."""
TESTED_WITH = {
    "core": ("diagnostics",),
    "data": ("diagnostics",),
    "compat": ("deepspeed-plugin",),
    "deepspeed-plugin": ("fsdp-plugin",),
    "launch": ("fsdp-plugin",),
    "megatron-plugin": ("deepspeed-plugin", "fsdp-plugin"),
}
"""Packages that the tests of another one need beside its own; accel-testing brings accel-checkpoint."""
VERIFIED = ROOT / ".ci" / "verified.json"
VERIFIED_BY_FULL = {
    "suites": (
        "packages/testing/src",
        "packages/testing/tests",
        "packages/core/src/accel_core/contract/hook_specs.py",
    ),
    "benchmarks": ("benchmarks",),
    "megatron": ("packages/megatron-plugin/src", "packages/megatron-plugin/tests"),
    "estimate": (
        "packages/big-model/src/accel_big_model/estimate",
        "packages/big-model/src/accel_big_model/planning",
        "packages/big-model/tests/*estimate*.py",
        "packages/deepspeed-plugin/src",
    ),
    "examples": ("examples/by_feature", "examples/slurm", "tests/test_examples_*.py"),
    "services": ("packages/trackers/src", "packages/trackers/tests/*.py", "packages/trackers/pyproject.toml"),
    "toydevice": (
        "examples/accel-toydevice",
        "tests/acceptance",
        *(f"packages/{name}/src" for name in ("core", "checkpoint", "data", "fsdp-plugin", "big-model", "testing")),
    ),
}
"""Groups of tests that `full` runs, and `tests` only where these sources are not those that `full` has seen last."""
COUNT_DEVICES = "import torch; print(torch.__version__, torch.accelerator.device_count())"


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main job: examples/quickstart.py in one process, then in two, then sharded and in bf16, then under ZeRO."""
    install(session, ["core", "data", "precision", "fsdp-plugin", "deepspeed-plugin"], *EXAMPLES)
    run_script(session, QUICKSTART, world=1)
    run_script(session, QUICKSTART, world=2)
    run_script(session, QUICKSTART, *SHARDED, world=2)
    run_script(session, QUICKSTART, *ZERO, world=2)


@nox.session
def tests(session: nox.Session) -> None:
    """What the README calls: style, types and tests, two at a time. Package names after `--` narrow it to their tests."""
    names, arguments = chosen(session)
    changed = changed_groups()
    with phase("installation"):
        install(session, PACKAGES, *TEST, *GROUPS["lint"], *GROUPS["types"], *EXAMPLES, *BY_FEATURE)
    beside = () if arguments else SIDE_BY_SIDE  # whoever gives pytest arguments wants to see, stop and debug
    with checked(session) if not names else nullcontext(), phase("tests"):
        session.run("pytest", *beside, *selection(changed), *folders(names), *arguments, env=required(["tensorboard"]))
    if not names:
        with phase("the core alone"):
            alone(session, "core")
    if "services" in changed and (not names or "trackers" in names):
        session.notify("services", posargs=())
    if "toydevice" in changed and not names:
        session.notify("toydevice", posargs=())


@nox.session
def full(session: nox.Session) -> None:
    """Everything: before an issue is called done, and before a release. Takes about an hour on two cores."""
    install(session, PACKAGES, *TEST, *GROUPS["lint"], *GROUPS["types"], *EXAMPLES, *BY_FEATURE)
    with checked(session), phase("tests"):
        session.run("pytest", *SIDE_BY_SIDE, "-m", "not soak", *session.posargs, env=required(["tensorboard"]))
    if not session.posargs:
        record_verified("suites", "benchmarks", "megatron", "estimate", "examples")
    for name in ("services", "toydevice", "hello", "quickstart", *(f"matrix(package={name!r})" for name in TRAINING)):
        session.notify(name, posargs=())


@nox.session
def oldest(session: nox.Session) -> None:
    """The tests of all packages but RECENT with the oldest torch: before an issue is called done, and before a release.

    Its builds bring GPU libraries of several gigabytes, which are not used: what is tested are processes on CPUs.
    """
    older = [name for name in TESTED if not RECENT.intersection(closure([name]))]
    run_tests(session, older, GROUPS["test"], OLDEST)


@nox.session
def newest(session: nox.Session) -> None:
    """The tests of all packages with the newest torch: when there is a new one, and before a release.

    What a user gets who has none. As for `oldest`, GPU libraries of several gigabytes come with it.
    """
    run_tests(session, TESTED, TEST, NEWEST)


@nox.session
def xla(session: nox.Session) -> None:
    """accel-xla with torch_xla and the torch that fits it, on XLA's CPU: its tests, and the main job on one and four devices."""
    install(session, ["xla-plugin", "testing", "precision"], *XLA, *ON_XLA_TESTED, *EXAMPLES, constraints=OLDEST)
    session.env.update({"CUDA_VISIBLE_DEVICES": "", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"})
    session.run("pytest", "packages/xla-plugin/tests", *session.posargs)
    for devices in ("1", "4"):
        session.env["CPU_NUM_DEVICES"] = devices
        run_script(session, QUICKSTART, *COMPILED, world=1)


@nox.session
def services(session: nox.Session) -> None:
    """Every tracker over its service's own client, all of them together, and their pages in a browser."""
    clients = [need for needs in PROJECTS["trackers"]["optional-dependencies"].values() for need in needs]
    with phase("installation of services"):
        install(session, ["trackers", "testing"], *clients, *GROUPS["test"], *GROUPS["browser"], *EXAMPLES)
    with phase("services"):
        recording = "--ignore=packages/trackers/tests/recording"  # which no service is needed for
        arguments = ["-m", "not soak", "packages/trackers/tests", recording, *session.posargs]
        session.run("pytest", *SIDE_BY_SIDE, *arguments, env=required(SERVICES))
    if not session.posargs:
        record_verified("services")


@nox.session(venv_backend="none")
def due(session: nox.Session) -> None:
    """Fails if the sources of a group named after `--`, or of any, have changed since `full`: then `tests` runs it too."""
    if found := [group for group in changed_groups() if group in (session.posargs or VERIFIED_BY_FULL)]:
        session.error(f"Changed since `nox -s full`: {', '.join(found)}. `nox -s tests` runs their long tests too")


@nox.session
@nox.parametrize("package", TESTED)
def tests_package(session: nox.Session, package: str) -> None:
    """The tests of one package from its wheel, with only its own dependencies installed, and what its tests train with."""
    install(
        session, [package, "testing", *TESTED_WITH.get(package, ())], *(TEST if package == "compat" else GROUPS["test"])
    )
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
@nox.parametrize("package", TRAINING)
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
    install(session, PACKAGES, *TEST, *GROUPS["types"])
    check_types(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Writes docs/reference from the source, builds the site, looks at it in a Chromium, then runs every example and follows every link.

    The site is build/site; a link that leads nowhere, and a page that no menu lists, end the build.
    """
    install(session, PACKAGES, *GROUPS["test"], *GROUPS["docs"], *GROUPS["browser"])
    session.run("python", "docs/generate.py")
    build = ["--quiet", "--fail-on-warning", "--keep-going", "-j", "auto", "-c", "docs", ".", "build/site"]
    session.run("sphinx-build", *build)
    session.run("python", "docs/look_at_site.py", "build/site")
    session.run("pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def links(session: nox.Session) -> None:
    """Asks every address outside of the repository that a page links to whether it answers. Needs the network."""
    install(session, [], *GROUPS["docs"])
    session.run("sphinx-build", "--quiet", "--keep-going", "-b", "linkcheck", "-c", "docs", ".", "build/links")


@nox.session
def hello(session: nox.Session) -> None:
    """Distributions as third parties write them: their wheels beside that of the core, and their own tests."""
    built_with = {need for folder in THIRD_PARTIES for need in build_requirements(folder)}
    session.install("--prefer-binary", "-c", CONSTRAINTS, *sorted(built_with))
    ours = ["core", "testing", "big-model", "data", "precision", "diagnostics"]
    install(session, ours, *GROUPS["test"], others=THIRD_PARTIES)
    for folder in THIRD_PARTIES:
        session.run("pytest", str(folder / "tests"), *session.posargs)


@nox.session
def toydevice(session: nox.Session) -> None:
    """What only a device with a queue of its own shows, on one that needs no hardware: its tests, and those checks for GPUs that it can run."""
    # What was compiled against another torch would not be compiled anew.
    shutil.rmtree(TOY_DEVICE / "build", ignore_errors=True)
    with phase("installation of the toy device"):
        session.install("--prefer-binary", "-c", CONSTRAINTS, *build_requirements(TOY_DEVICE))
        ours = ["testing", "big-model", "data", "precision", "diagnostics", "fsdp-plugin"]
        install(session, ours, *GROUPS["test"], others=[TOY_DEVICE])
    with phase("toy device"):
        session.run("pytest", str(TOY_DEVICE / "tests"), *session.posargs)
        if not session.posargs:
            session.run("python", ACCEPTANCE, "--import", "accel_toydevice", "--quick", "--patience", "3")
            session.run("pytest", "-m", "full", "tests/test_acceptance.py")
            record_verified("toydevice")


@nox.session
def peer(session: nox.Session) -> None:
    """The tests of the distribution whose names accel-compat has, against accel-compat: what fails is listed, with reasons.

    Its sdist is downloaded into a folder that is gone afterwards; nothing of it comes into the repository.
    """
    install(session, PACKAGES, *TEST, *GROUPS["peer"])
    version = PROJECTS[METADATA]["version"].partition("+")[0]
    with tempfile.TemporaryDirectory() as folder:
        download = ["--quiet", "--no-deps", "--no-binary", "accelerate", "--dest", folder]
        session.run("python", "-m", "pip", "download", *download, f"accelerate=={version}")
        session.run("python", "packages/compat/tests/peer/run_peer_tests.py", folder, *(session.posargs or ("-n", "2")))


@nox.session
def release(session: nox.Session) -> None:
    """Builds sdist and wheel of every package, looks into them, and trains with all wheels in an empty environment.

    A tag behind `--` is refused where it may not be released; what it releases is then in dist/upload.
    """
    tag = session.posargs[0] if session.posargs else None
    session.install("--prefer-binary", *GROUPS["build"], *GROUPS["release"])
    if tag is not None:
        session.run("python", "release/check_tag.py", tag)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in PACKAGES.values():  # the wheel is built from the sdist, as an index's users would
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(folder), silent=True)
    built = [str(path) for path in sorted((ROOT / "dist").iterdir())]
    session.run("python", "-m", "twine", "check", "--strict", *built)
    session.run("python", "release/check_distributions.py", "dist")
    try_wheels(session, [path for path in built if path.endswith(".whl")])
    if tag is not None:
        name, _, version = tag.rpartition("-v")
        (ROOT / "dist" / "upload").mkdir()
        for path in (ROOT / "dist").glob(f"{name.replace('-', '_')}-{version}[-.]*"):
            shutil.copy(path, ROOT / "dist" / "upload")


@nox.session(venv_backend="none")
def first_run(session: nox.Session) -> None:
    """The way of a stranger, timed: clone, environment, installation, README.md, an own script that is killed and goes on in two processes."""
    session.run(sys.executable, "release/first_run.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Against raw torch and the peers, interleaved in one run: prints each gate with the figure measured, and writes docs/benchmarks.md; then docs/performance/convergence.md.

    Without accel-compat, which would stand in the place of Accelerate. What follows `--` goes to benchmarks/run.py, and then no page is written.
    """
    install(session, ["all", "testing"], "-r", "benchmarks/requirements.txt", *EXAMPLES)
    session.run("python", "benchmarks/run.py", "--out", "out/benchmarks.json", *session.posargs)
    if not session.posargs:  # else the page would lose the rows that were left out
        session.run("python", "benchmarks/page.py", "out/benchmarks.json")
        session.run("python", "benchmarks/convergence.py")


@nox.session
def soak(session: nox.Session) -> None:
    """All tests, the long ones too, with every loop at its full length."""
    names, arguments = chosen(session)
    install(session, PACKAGES, *TEST, *EXAMPLES, *BY_FEATURE)
    session.run("pytest", "-m", "", *folders(names), *arguments, env={"ACCEL_SOAK": "1"})


@nox.session
def gpu(session: nox.Session) -> None:
    """The accelerators of this machine: the main job on one, on all, sharded and in bf16; then tests/gpu_acceptance.py.

    What follows `--` goes to that script. It writes out/acceptance.json, which is what to send where something fails.
    """
    engines = [need for need in GROUPS["test"] if need.startswith(("torchao", "bitsandbytes"))]
    ours = ["testing", "data", "precision", "fsdp-plugin", "deepspeed-plugin", "big-model"]
    install(session, ours, *engines, *EXAMPLES)
    printed = str(session.run("python", "-c", COUNT_DEVICES, silent=True))
    version, devices = printed.splitlines()[-1].split()  # torch may warn before
    if devices == "0":
        session.skip(f"torch {version} finds no accelerator on this machine: nothing was run.")
    for world, options in ((1, ()), (int(devices), ()), (int(devices), SHARDED)):
        run_script(session, QUICKSTART, *options, world=world)
    report = [] if "--list" in session.posargs else ["--report", "out/acceptance.json"]
    session.run("python", ACCEPTANCE, *report, *session.posargs)


def chosen(session: nox.Session) -> tuple[list[str], list[str]]:
    """The packages named first after `--`, and what is left for pytest."""
    arguments = list(session.posargs)
    names = []
    while arguments and arguments[0] in TESTED:
        names.append(arguments.pop(0))
    return names, arguments


def folders(names: Iterable[str]) -> list[str]:
    """Where the tests of these packages are."""
    return [f"packages/{name}/tests" for name in names]


def changed_groups() -> list[str]:
    """The groups of long tests whose sources are not those that `full` has seen last."""
    return [group for group in VERIFIED_BY_FULL if digest(group) != verified().get(group)]


def selection(groups: Iterable[str]) -> list[str]:
    """What pytest leaves out: the longest tests, but for these groups. Without any, pyproject.toml says it."""
    added = "".join(f" or full(group='{group}')" for group in groups)
    return ["-m", f"not soak and (not full{added})"] if added else []


def digest(group: str) -> str:
    """Names and contents of the sources of a group, as one hash."""
    found = sorted(
        {path for pattern in VERIFIED_BY_FULL[group] for top in ROOT.glob(pattern) for path in files_of(top)}
    )
    parts = (f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def files_of(path: Path) -> Iterator[Path]:
    """A file itself, or every file below a folder but what Python has compiled and what was built."""
    below = path.rglob("*") if path.is_dir() else [path]
    made = re.compile(r"__pycache__|build|.*\.egg-info")
    yield from (each for each in below if each.is_file() and not any(map(made.fullmatch, each.relative_to(ROOT).parts)))


def verified() -> dict[str, str]:
    """What `full` has seen: group → digest of its sources."""
    found: dict[str, str] = json.loads(VERIFIED.read_text(encoding="utf-8"))
    return found


def record_verified(*groups: str) -> None:
    """Has `tests` leave these groups out until their sources change. The file is to be committed."""
    known = verified() | {group: digest(group) for group in groups}
    VERIFIED.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Prints how long a part of a session took."""
    began = time.monotonic()
    try:
        yield
    finally:
        print(f"seconds: {name} {time.monotonic() - began:.0f}", flush=True)


@contextmanager
def checked(session: nox.Session) -> Iterator[None]:
    """Checks style first, which takes seconds, and types meanwhile, in a thread: the tests leave a core idle now and then."""
    with phase("style"):
        check_style(session)

    def check() -> None:
        with phase("types"):
            check_types(session, silent=True)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(check)
        try:
            yield
        finally:
            if ended.exception() is not None:  # what mypy has found stands far above
                session.error("The types are wrong: nox -s types")


def alone(session: nox.Session, package: str) -> None:
    """Trains in worlds of one and two with this package of ours only: the others are uninstalled."""
    others = [PROJECTS[name]["name"] for name in PACKAGES if name not in closure([package])]
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *others, silent=True)
    for world in (1, 2):
        run_script(session, "tests/matrix_job.py", world=world)


def try_wheels(session: nox.Session, wheels: Sequence[str]) -> None:
    """Installs wheels where there is nothing else, and uses them as a reader of README.md would."""
    folder = Path(session.create_tmp()).resolve() / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "venv", str(folder))
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")

    def run(*words: str, silent: bool = False) -> None:
        session.run(python, *words, silent=silent, external=True, env={"OMP_NUM_THREADS": "1"})

    run("-m", "pip", "install", "--quiet", "--prefer-binary", "-c", "constraints.txt", *wheels)
    run("-m", "pip", "check")
    run("release/check_licences.py", silent=True)
    for name in sorted({path.parent.name for each in PACKAGES.values() for path in each.glob("src/*/py.typed")}):
        run("-c", f"import {name}; print({name}.__name__)")
    run("-m", "accel_launch", "--help")
    run("-m", "accel_launch", "plugins")
    run("release/five_lines.py")
    run("release/five_lines.py", "2")


def required(services: Iterable[str]) -> dict[str, str]:
    """Has tests of trackers fail, instead of being skipped, where one of these is missing."""
    return {"ACCEL_SERVICES": ",".join(services)}


def run_tests(session: nox.Session, packages: Sequence[str], requirements: Sequence[str], constraints: str) -> None:
    """Runs the tests of packages with the torch of a constraints file, on CPUs; names after `--` narrow it."""
    names, arguments = chosen(session)
    with phase("installation"):
        install(session, packages, *requirements, *EXAMPLES, constraints=constraints)
    with phase("tests"):
        hidden = {"CUDA_VISIBLE_DEVICES": "", **required(["tensorboard"])}
        session.run("pytest", *SIDE_BY_SIDE, *folders(names or packages), *arguments, env=hidden)


def check_style(session: nox.Session, *, silent: bool = False) -> None:
    """Fails on any finding of ruff, and on any file that `ruff format` would change."""
    session.run("ruff", "check", ".", silent=silent)
    session.run("ruff", "format", "--check", ".", silent=silent)


def check_types(session: nox.Session, *, silent: bool = False) -> None:
    """All packages in one run, so that the types of the core hold in its plugins; and what a user's script sees of them."""
    sources = [str(folder / "src") for folder in PACKAGES.values() if (folder / "src").is_dir()]
    session.run("mypy", *sources, "tests/typed_script.py", silent=silent)


def run_script(
    session: nox.Session, script: str, *arguments: str, world: int, launch: Sequence[str] = TORCHRUN
) -> None:
    """Runs a script as one process, or as `world` ranks on this machine on a free port."""
    session.run("python", *([*launch, str(world)] if world > 1 else []), script, *arguments)


def install(
    session: nox.Session,
    names: Iterable[str],
    *requirements: str,
    others: Sequence[Path] = (),
    constraints: str = CONSTRAINTS,
) -> None:
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
    session.install("--prefer-binary", "-c", constraints, *wheels, *requirements)


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
