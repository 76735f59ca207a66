"""Checks of the project, each in an environment of its own: `nox` runs all, `nox -s lint` one, `nox -l` lists them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import nox

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
# As in models/zoo/README.md. tf2onnx needs an older onnx.
ZOO = {
    ("pytorch", "jax"): (
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


@nox.session
def quick(session: nox.Session) -> None:
    """Run the quick tier of the tests, or another selection: `nox -s quick -- -m full`."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, *TWO_PROCESSES, *session.posargs)


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Run the linters, the type checker and the contract of the layers."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--strict", "-p", "graphscale")
    session.run("lint-imports")


@nox.session(tags=["ci"])
def full(session: nox.Session) -> None:
    """Run the tests that the quick tier leaves out."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, *TWO_PROCESSES, "-m", "full", *session.posargs, env=share(1))


@nox.session(tags=["ci"])
def stock(session: nox.Session) -> None:
    """Run the tests that run graphs on the newest ONNX Runtime, without onnxruntime-training; and open the pages."""
    session.install(
        *(".[ort,browser]", "hypothesis", "matplotlib", "pytest", "pytest-xdist", "scikit-learn", "tensorboardX"),
        *("nbclient", "ipykernel"),  # a kernel runs the notebook of examples/
    )
    portable = "not training and not packaging and not static"
    session.run(*PYTEST, *TWO_PROCESSES, "-m", portable, *session.posargs, env=share(2))


@nox.session(tags=["ci"])
def oldest(session: nox.Session) -> None:
    """Run whole steps and sessions on the oldest ONNX Runtime that pyproject.toml admits."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    (runtime,) = project["optional-dependencies"]["ort"]
    session.install(
        ".[ort]", runtime.replace(">=", "=="), "hypothesis", "matplotlib", "pytest", "pytest-xdist", "scikit-learn"
    )
    chosen = "not training and not static and not full"
    session.run(*PYTEST, *TWO_PROCESSES, "-m", chosen, "tests/session", "tests/pipeline", *session.posargs)


@nox.session(tags=["ci"])
def pytorch(session: nox.Session) -> None:
    """Run the tests that need PyTorch, those of the real onnxruntime.training package among them."""
    session.install(
        ".[training]", "torch==2.13.0", "onnxscript", "hypothesis", "pytest", "pytest-xdist", "scikit-learn"
    )
    session.run(*PYTEST, *TWO_PROCESSES, "-m", "pytorch", *session.posargs, env=share(1))


@nox.session(tags=["ci"])
def mpi(session: nox.Session) -> None:
    """Run the tests of replicas, in processes of MPI."""
    session.install(".[training,mpi]", "hypothesis", "pytest")
    session.run(*PYTEST, "--durations=40", "-m", "mpi", *session.posargs, env=share(1))


@nox.session(tags=["ci"])
def tensorflow(session: nox.Session) -> None:
    """Run the tests that need TensorFlow, its exporter among them."""
    session.install(".[ort]", "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0", "onnx==1.22.0", "hypothesis", "pytest")
    session.run(*PYTEST, "--durations=40", "-m", "tensorflow", *session.posargs, env=share(1))


@nox.session(tags=["ci"])
def examples(session: nox.Session) -> None:
    """Train in Python, C++, Node and Chromium without graphscale. Needs g++, apt, npm and Chromium."""
    session.install(".[ort,browser]", "hypothesis", "pytest", "scikit-learn")
    folder = Path(session.create_tmp()).absolute()
    packages = [
        f"{name}@{release}"
        for host in ("node", "browser")
        for name, release in json.loads(Path("examples", host, "package.json").read_text())["dependencies"].items()
    ]
    npm = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", f"--prefix={folder}")
    session.run_install(*npm, *packages, external=True)
    session.run_install("examples/cpp/get_headers.sh", str(folder / "headers"), external=True)
    files = {"NODE_MODULES": str(folder / "node_modules"), "ONNXRUNTIME_HEADERS": str(folder / "headers")}
    session.run(
        *PYTEST,
        "--durations=5",
        "-m",
        "",
        "tests/examples/test_hosts.py",
        "tests/examples/test_browser_training.py",
        *session.posargs,
        env=files,
    )


@nox.session(tags=["ci"])
def jax(session: nox.Session) -> None:
    """Run the tests that need JAX: its exporter."""
    session.install(
        *(".[ort]", "jax==0.10.2", "jax2onnx==0.17.1", "optax==0.2.8", "onnx==1.23.2"),
        *("hypothesis", "jsonschema", "pytest", "pytest-xdist"),
    )
    session.run(*PYTEST, *TWO_PROCESSES, "-m", "jax", *session.posargs, env=share(1) | {"JAX_PLATFORMS": "cpu"})


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """Build the site; nothing that it links to may be missing."""
    session.install(".[docs]")
    session.run(
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
