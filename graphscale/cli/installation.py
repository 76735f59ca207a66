"""The facts on an installation: runtimes, providers, extras, targets, and the commands that would mend or extend it."""

from __future__ import annotations

import dataclasses
import importlib
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import graphscale
from graphscale.errors import SessionError, one_line
from graphscale.graph.releases import release_of
from graphscale.process.extras import RUNTIME, requirements_of
from graphscale.targets import CPU_PROVIDER, CUDA_PROVIDER, MIN_IR_VERSION, MIN_OPSET, TARGETS, Target

__all__ = ["Extra", "Installation", "Runs", "examine"]

# Extras of developers, and the two that are runtimes.
_OTHER_EXTRAS = {"test", "docs", "lint", "dev", "browser", "runtime", "ort", "training"}


@dataclasses.dataclass(frozen=True)
class Extra:
    """An extra of the package.

    Attributes:
        installed: `{distribution: version}` of those that it requires.
        missing: the unmet requirements.
    """

    installed: dict[str, str]
    missing: list[str]


@dataclasses.dataclass(frozen=True)
class Runs:
    """The support for a target on this machine.

    Attributes:
        opset: the oldest and the newest opset.
        ir_version: the oldest and the newest IR version.
        lacks: the package or provider that is missing; empty where the target runs here.
    """

    opset: tuple[int, int]
    ir_version: tuple[int, int]
    lacks: str


@dataclasses.dataclass
class Installation:
    """The facts on an installation.

    Attributes:
        graphscale: the version of graphscale.
        location: the folder of the package.
        python: the version of Python.
        executable: the path of Python.
        platform: system and machine.
        runtimes: `{distribution: version}` of those that share the import name onnxruntime.
        providers: `{name: the reason why it cannot start}` of the one that is imported; the reason is empty for one
            that starts, and for those other than CPU and CUDA, which are not tried.
        extras: by name.
        targets: by name.
        problems: the faults of a broken installation.
        advice: `{purpose: command}` for problems, extras that are missing, and the runtime where there is none.
    """

    graphscale: str
    location: str
    python: str
    executable: str
    platform: str
    runtimes: dict[str, str] = dataclasses.field(default_factory=dict)
    providers: dict[str, str] = dataclasses.field(default_factory=dict)
    extras: dict[str, Extra] = dataclasses.field(default_factory=dict)
    targets: dict[str, Runs] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    advice: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def examine() -> Installation:
    """Collect the facts on the installation that runs."""
    found = Installation(
        graphscale=metadata.version("graphscale"),
        location=str(Path(graphscale.__file__).parent),
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.machine()}",
    )
    names = sorted({*metadata.packages_distributions().get(RUNTIME, ())})
    found.runtimes = {name: metadata.version(name) for name in names}
    _try_runtime(found)
    _add_extras(found)
    found.targets = {target.name: _support(target, found) for target in TARGETS.values()}
    return found


def _try_runtime(found: Installation) -> None:
    """Import the runtime, run a node on it, and note its problems."""
    if not found.runtimes:
        found.advice["gs.Session, verify and train"] = _install(["onnxruntime"])
        return
    if len(found.runtimes) > 1:
        names = [*found.runtimes]
        found.problems.append(f"{' and '.join(names)} are installed over each other: they share one import name")
        kept = next((name for name in reversed(names) if name != RUNTIME), names[0])
        uninstall = shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", *names])
        found.advice["one runtime alone"] = f"{uninstall} && {_install(_pinned({kept: found.runtimes[kept]}))}"
    try:
        runtime = importlib.import_module(RUNTIME)
        found.providers = dict.fromkeys(runtime.get_available_providers(), "")
        _run_node(runtime, CPU_PROVIDER)
        if CUDA_PROVIDER in found.providers:
            try:
                _run_node(runtime, CUDA_PROVIDER)
            except SessionError as error:
                found.providers[CUDA_PROVIDER] = one_line(error)
    except Exception as error:  # whatever a damaged package raises
        found.problems.append(f"{RUNTIME} cannot be used: {one_line(error)}")
        found.advice.setdefault("the runtime again", _install(_pinned(found.runtimes), "--force-reinstall"))


def _run_node(runtime: Any, provider: str) -> None:
    import numpy as np
    import onnx_ir as ir

    from graphscale.session.loading import choose_device, create

    float32 = ir.TensorType(ir.DataType.FLOAT)
    x, y = (ir.Value(name=name, shape=ir.Shape([1]), type=float32) for name in "xy")
    graph = ir.Graph([x], [y], nodes=[ir.Node("", "Neg", [x], outputs=[y])], name="neg", opset_imports={"": MIN_OPSET})
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    choose_device([provider])
    session = create(ir.Model(graph, ir_version=MIN_IR_VERSION), None, (), {}, [provider], options)
    (got,) = session.run(None, {"x": np.ones(1, np.float32)})
    if got.tolist() != [-1.0]:
        raise RuntimeError(f"the negative of 1 is {got.tolist()}")


def _pinned(versions: dict[str, str]) -> list[str]:
    return [f"{name}=={number}" for name, number in versions.items()]


def _install(requirements: Iterable[str], *options: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *options, *requirements])


def _add_extras(found: Installation) -> None:
    """Add the extras, and note requirements of graphscale itself that are not met."""
    own = _examine_extra("")
    if own.missing:
        found.problems.append(f"graphscale needs {', '.join(own.missing)}")
        found.advice["the requirements of graphscale"] = _install(own.missing)
    for name in metadata.metadata("graphscale").get_all("Provides-Extra") or ():
        if name not in _OTHER_EXTRAS:
            found.extras[name] = extra = _examine_extra(name)
            if extra.missing:
                found.advice[f"the extra {name}"] = _install(extra.missing)


def _examine_extra(name: str) -> Extra:
    installed, missing = dict[str, str](), list[str]()
    for requirement in requirements_of(name):
        try:
            number = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            number = ""
        if number and requirement.specifier.contains(number, prereleases=True):
            installed[requirement.name] = number
        else:
            missing.append(f"{requirement.name}{requirement.specifier}")
    return Extra(installed, missing)


def _support(target: Target, found: Installation) -> Runs:
    fitting = {name: number for name, number in found.runtimes.items() if name in target.packages}
    release, lacks = target.release, ""
    if not fitting:
        lacks = target.packages[0]
    elif target.cuda and found.providers.get(CUDA_PROVIDER, CUDA_PROVIDER):
        lacks = CUDA_PROVIDER
    for number in fitting.values():
        installed = release_of(number)
        if installed is not None and installed.number < release.number:
            release = installed
    return Runs((MIN_OPSET, release.max_opset), (MIN_IR_VERSION, release.max_ir_version), lacks)
