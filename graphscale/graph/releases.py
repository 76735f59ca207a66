"""The installed releases of ONNX Runtime, and their limits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import onnx_ir as ir

from graphscale.errors import TargetError
from graphscale.targets import MIN_IR_VERSION, MIN_OPSET, RELEASES, TRAINING_BUILD, Release, Target, default_opset

__all__ = ["advise_missing", "check_versions", "describe_installed", "installed_runtime", "release_of", "too_new"]


def release_of(number: str) -> Release | None:
    """Return the limits of a version of ONNX Runtime, or None for an untried version.

    Args:
        number: the version, such as "1.32.0".
    """
    try:
        major, minor = (int(part) for part in number.split(".")[:2])
    except ValueError:
        return None
    if not RELEASES[0].number <= (major, minor) <= RELEASES[-1].number:
        return None
    return max((each for each in RELEASES if each.number <= (major, minor)), key=lambda each: each.number)


def installed_runtime(target: Target) -> tuple[str, str] | None:
    """Return the name and the version of the installed distribution of a target's runtime, or None."""
    for package in target.packages:
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def too_new(number: str, opset: int, ir_version: int) -> str:
    """Return a clause on versions that ONNX Runtime does not load; empty if it loads them, or was not tried.

    Args:
        number: the version of ONNX Runtime.
        opset: the model's version of ai.onnx.
        ir_version: the model's IR version.
    """
    release = release_of(number)
    if release is None or (opset <= release.max_opset and ir_version <= release.max_ir_version):
        return ""
    return (
        f"it loads up to opset {release.max_opset} and IR version {release.max_ir_version}; "
        f"the model has opset {opset} and IR version {ir_version}"
    )


def advise_missing(message: str) -> str:
    """Return advice on operators that the installed ONNX Runtime lacks; empty if its message is about something else.

    Args:
        message: the text with which it refused a model.
    """
    if "is not a registered function" in message:
        package = TRAINING_BUILD.replace(" ", "==")
        return f"; on Python 3.11, pip uninstall onnxruntime, then pip install {package}"
    return "; run it where all operators have kernels, as on CUDA" if "NOT_IMPLEMENTED" in message else ""


def describe_installed(target: Target) -> str:
    """Return a parenthesis on the limits of the installed runtime, or nothing."""
    if (found := installed_runtime(target)) is None:
        return ""
    name = f"{' '.join(found)}, installed here,"
    if (release := release_of(found[1])) is None:
        return f" ({name} was not tried)"
    return f" ({name} loads up to opset {release.max_opset} and IR version {release.max_ir_version})"


def check_versions(model: ir.Model, target: Target) -> None:
    """Refuse a model that no release of the target's runtime loads. graphscale never converts versions unasked.

    Messages name the installed release, but it decides nothing: the model may be for another machine.

    Raises:
        TargetError: the IR version or the opset is out of the target's range.
    """
    opset = default_opset(model)
    if model.ir_version < MIN_IR_VERSION:
        raise TargetError(
            f"the model has IR version {model.ir_version}, without constants; export it with "
            f"ir_version={target.max_ir_version}, or set it: model.ir_version = {MIN_IR_VERSION}"
        )
    if model.ir_version > target.max_ir_version:
        raise TargetError(
            f"the model has IR version {model.ir_version}, and target {target.name!r} ({target.runs_on}) loads up to "
            f"{target.max_ir_version}{describe_installed(target)}; export it with ir_version={target.max_ir_version}"
        )
    if not MIN_OPSET <= opset <= target.max_opset:
        raise TargetError(
            f"the model has opset {opset}, and target {target.name!r} ({target.runs_on}) takes {MIN_OPSET} to "
            f"{target.max_opset}{describe_installed(target)}; export it with an opset in that range"
        )
