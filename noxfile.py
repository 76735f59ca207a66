"""Checks of the project: `nox` runs all, `nox -s lint` one, `nox -l` lists them.

Sessions of one runtime share an environment in .nox/environments, which stays until its packages change here or in
pyproject.toml; without .nox, it is made with the newest releases. With GRAPHSCALE_TEST_SINCE=COMMIT, sessions run the
test files alone that the changes since a commit can reach (tests/selection.py).
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nox

sys.path.insert(0, str(Path(__file__).parent))
from tests.selection import Selection, select_since

nox.options.default_venv_backend = "venv"
nox.options.sessions = [
    "quick",
    "lint",
    "full",
    "stock",
    "oldest",
    "pytorch",
    "mpi",
    "tensorflow",
    "jax",
    "examples",
    "docs",
]

PYTEST = ("python", "-m", "pytest", "-q")
TWO_PROCESSES = ("-n", "2", "--durations=40")
# Of how many shares of the full tier a session runs one; 1: all of it.
SHARES = int(os.environ.get("GRAPHSCALE_TEST_SHARES", "1"))
PROJECT = Path("pyproject.toml")
(OLDEST,) = nox.project.load_toml(PROJECT)["project"]["optional-dependencies"]["ort"]
# Each has one build of ONNX Runtime, which all its sessions run on.
RUNNER = ("hypothesis", "pytest", "pytest-xdist", "scikit-learn")
ENVIRONMENTS = {
    "training": ("-e", ".[test,lint,mpi,docs]"),
    "stock": (
        *("-e", ".[ort,browser,jax,plot,tensorboard]", *RUNNER, "jsonschema"),
        *("nbclient", "ipykernel"),  # a kernel runs the notebook of examples/
    ),
    "oldest": ("-e", ".[ort,plot]", OLDEST.replace(">=", "=="), *RUNNER),
    "pytorch": ("-e", ".[training]", "torch==2.13.0", "onnxscript", "onnxsim", "onnxslim", *RUNNER),
    "tensorflow": ("-e", ".[ort,tensorflow]", *RUNNER),
}
# As in models/zoo/README.md. tf2onnx needs an older onnx.
ZOO = {
    ("pytorch", "jax", "hand"): (
        *("torch==2.13.0", "onnxscript==0.7.2", "transformers==5.23.0", "onnx==1.23.2", "onnxruntime==1.31.1"),
        *("jax==0.10.2", "jax2onnx==0.17.1", "optax==0.2.8", "keras==3.15.1", "onnxsim==0.8.1"),
    ),
    ("tensorflow",): ("tensorflow-cpu==2.19.0", "tf2onnx==1.17.0", "onnx==1.22.0"),
}


@functools.cache
def count_commits() -> int:
    """Count the commits of this branch; 0 without git."""
    done = subprocess.run(("git", "rev-list", "--count", "HEAD"), capture_output=True, check=False, text=True)
    return int(done.stdout or 0)


def share(number: int) -> dict[str, str]:
    """Choose the share of the full tier that a session runs, other ones for the next commit (tests/tiers.py)."""
    return {"GRAPHSCALE_TEST_SHARE": f"{(count_commits() + number) % SHARES + 1}/{SHARES}"}


def make_once(session: nox.Session, folder: Path, *commands: Sequence[str]) -> None:
    """Run the commands that fill a folder, unless the same ones filled it before."""
    made = folder / "made.txt"
    text = "\n".join((sys.version, PROJECT.read_text(encoding="utf-8"), *map(shlex.join, commands)))
    if not made.exists() or made.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in commands:
            session.run_install(*command, external=True)
        made.write_text(text, encoding="utf-8")


def enter(session: nox.Session, name: str) -> Callable[..., None]:
    """Return a function that runs programs of an environment, which the first session that needs it makes."""
    folder = (session.cache_dir.parent / "environments" / name).absolute()
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    python, packages = str(programs / "python"), ENVIRONMENTS[name]
    make_once(
        session,
        folder,
        (sys.executable, "-m", "venv", str(folder)),
        (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages),
    )
    session.env["VIRTUAL_ENV"] = str(folder)
    session.env["PATH"] = os.pathsep.join((str(programs), os.environ["PATH"]))

    def run(program: str, *arguments: str, **options: Any) -> None:
        session.run(str(programs / program), *arguments, **options)

    return run


@functools.cache
def selection() -> Selection:
    """Select the test files that the changes since GRAPHSCALE_TEST_SINCE can reach; all without that variable."""
    return select_since(os.environ.get("GRAPHSCALE_TEST_SINCE", ""))


def is_whole() -> bool:
    """Return whether all test files are selected."""
    return selection().tests == selection().tree.tests


def choose(session: nox.Session, mark: str, paths: Sequence[str]) -> Sequence[str]:
    """Choose the selected test files of a session, or skip it; those alone with its mark, which others only collect."""
    selected = selection()
    if is_whole() and not (mark and selected.tests):
        session.log(f"all tests: {selected.reason}")
        return paths
    files = selected.marked(mark) if mark else selected.tests
    chosen = sorted(file for file in files if not paths or file.startswith(tuple(paths)))
    if not chosen:
        session.skip(f"nothing that it tests can be reached by {selected.reason}")
    session.log(f"{len(chosen)} of {len(selected.tree.tests)} test files: {selected.reason}")
    return chosen


def run_tests(
    session: nox.Session,
    environment: str,
    expression: str,
    *options: str,
    mark: str = "",
    paths: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> None:
    """Run the tests of an expression in an environment, where all of them have a mark or lie at certain paths."""
    chosen = choose(session, mark, paths)
    enter(session, environment)(
        *(*PYTEST, *options, "-m", expression, *chosen, *session.posargs),
        env=env,
        # 5: no test of the chosen files is in the session
        success_codes=[0] if is_whole() else [0, 5],
    )


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Run the quick tier of the tests, or another selection: `nox -s quick -- -m full`."""
    enter(session, "training")(*PYTEST, *TWO_PROCESSES, "-m", "not full and not mpi", *session.posargs)


@nox.session(venv_backend="none", tags=["ci"])
def lint(session: nox.Session) -> None:
    """Run the linters, the type checker and the contract of the layers."""
    run = enter(session, "training")
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")
    run("mypy", "--strict", "-p", "graphscale")
    run("lint-imports")


@nox.session(venv_backend="none", tags=["ci"])
def full(session: nox.Session) -> None:
    """Run the tests that the quick tier leaves out."""
    run_tests(session, "training", "full and not mpi", *TWO_PROCESSES, env=share(1))


@nox.session(venv_backend="none", tags=["ci"])
def stock(session: nox.Session) -> None:
    """Run the tests that run graphs on the newest ONNX Runtime, without onnxruntime-training; and open the pages."""
    portable = "not training and not packaging and not static and not jax"
    run_tests(session, "stock", portable, *TWO_PROCESSES, env=share(2))


@nox.session(venv_backend="none", tags=["ci"])
def oldest(session: nox.Session) -> None:
    """Run whole steps and sessions on the oldest ONNX Runtime that pyproject.toml admits."""
    chosen = "not training and not static and not full"
    run_tests(session, "oldest", chosen, *TWO_PROCESSES, paths=("tests/session", "tests/pipeline"))


@nox.session(venv_backend="none", tags=["ci"])
def pytorch(session: nox.Session) -> None:
    """Run the tests that need PyTorch, those of the real onnxruntime.training package among them."""
    run_tests(session, "pytorch", "pytorch", *TWO_PROCESSES, mark="pytorch", env=share(1))


@nox.session(venv_backend="none", tags=["ci"])
def mpi(session: nox.Session) -> None:
    """Run the tests of replicas, in processes of MPI."""
    run_tests(session, "training", "mpi", "--durations=40", mark="mpi", env=share(1))


@nox.session(venv_backend="none", tags=["ci"])
def tensorflow(session: nox.Session) -> None:
    """Run the tests that need TensorFlow, its exporter among them."""
    run_tests(session, "tensorflow", "tensorflow", "--durations=40", mark="tensorflow", env=share(1))


@nox.session(venv_backend="none", tags=["ci"])
def examples(session: nox.Session) -> None:
    """Train in Python, C++, Node and Chromium without graphscale. Needs g++, apt, npm and Chromium."""
    paths = ("tests/examples/test_hosts.py", "tests/examples/test_browser_training.py")
    choose(session, "", paths)
    folder = (session.cache_dir.parent / "environments" / "hosts").absolute()
    packages = [
        f"{name}@{release}"
        for host in ("node", "browser")
        for name, release in json.loads(Path("examples", host, "package.json").read_text())["dependencies"].items()
    ]
    make_once(
        session,
        folder,
        (*("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"), f"--prefix={folder}", *packages),
        ("examples/cpp/get_headers.sh", str(folder / "headers")),
    )
    files = {"NODE_MODULES": str(folder / "node_modules"), "ONNXRUNTIME_HEADERS": str(folder / "headers")}
    run_tests(session, "stock", "", "--durations=5", paths=paths, env=files)


@nox.session(venv_backend="none", tags=["ci"])
def jax(session: nox.Session) -> None:
    """Run the tests that need JAX: its exporter."""
    run_tests(session, "stock", "jax", *TWO_PROCESSES, mark="jax", env=share(1) | {"JAX_PLATFORMS": "cpu"})


@nox.session(venv_backend="none", tags=["ci"])
def docs(session: nox.Session) -> None:
    """Build the site; nothing that it links to may be missing."""
    enter(session, "training")(
        *("python", "-m", "mkdocs", "build", "--strict", "--site-dir", session.create_tmp()),
        env={"NO_MKDOCS_2_WARNING": "1"},
    )


@nox.session(tags=["nightly"])
def hostile(session: nox.Session) -> None:
    """Try hostile files of every category, others each day: `-- --minutes 5` of each. Needs strace, on Linux."""
    session.install("-e", ".[test]")
    today = datetime.now(UTC).date().toordinal()
    session.run("python", "-m", "fuzz.hostile", f"--seed={today}", *(session.posargs or ["--minutes=5"]))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the wheel and the source distribution into dist/, and try each in an environment of its own."""
    session.install(".[test]")
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run(*PYTEST, "-m", "packaging", *session.posargs)
    version = nox.project.load_toml("pyproject.toml")["project"]["version"]
    model, scaled = "models/pytorch/mlp_momentum.onnx", Path(session.create_tmp(), "scaled.onnx")
    for name in (f"graphscale-{version}-py3-none-any.whl", f"graphscale-{version}.tar.gz"):
        place = Path(session.create_tmp(), "environment")
        session.run("python", "-m", "venv", "--clear", str(place))
        session.run(str(place / "bin" / "pip"), "install", "--quiet", f"dist/{name}[ort]", external=True)
        graphscale = str(place / "bin" / "graphscale")
        session.run(graphscale, "scale", model, "-o", str(scaled), external=True)
        session.run(graphscale, "verify", model, str(scaled), "--runs", "1", external=True)


@nox.session
def zoo(session: nox.Session) -> None:
    """Export the steps of models/zoo by all exporters, for hours, and try them; `-- --small`: one of a kind."""
    folder = session.create_tmp()
    for exporters, packages in ZOO.items():
        session.install(".[ort]", *packages)
        session.run(
            *("python", "-m", "models.zoo.export", "--out", folder, "--exporters", *exporters, *session.posargs),
            env={"JAX_PLATFORMS": "cpu"},
            success_codes=[0, 1],  # 1: some step is beyond its exporter
        )
    session.install("onnx==1.23.2")  # graphscale needs a newer protobuf than TensorFlow
    session.run("python", "-m", "models.zoo.trial", folder)
