"""Sessions of ONNX Runtime from models: sources, initializers and execution providers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from graphscale.errors import SessionError, one_line, reporting
from graphscale.files import model_files
from graphscale.graph.releases import advise_missing, too_new
from graphscale.pipeline import ScaledModel
from graphscale.session.carried import Device, read_values
from graphscale.targets import CPU_PROVIDER, CUDA_PROVIDER, default_opset

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["choose_device", "create", "make_quiet_options", "maps_files", "open_model"]

_FATAL = 4  # ORT warns on stderr of each initializer that is also an input; errors come as exceptions anyway


def open_model(model: Any) -> tuple[ir.Model, str | None]:
    """Return a model as an onnx_ir model, and the path of its file."""
    if isinstance(model, ScaledModel):
        model = model.model
    if isinstance(model, ir.Model):
        return model, None
    if isinstance(model, onnx.ModelProto):
        return model_files.from_proto(model), None
    if not isinstance(model, str | os.PathLike):
        raise SessionError(f"a session takes a path, a ScaledModel or a model; got a {type(model).__name__}")
    return model_files.load(model), os.fspath(model)


def make_quiet_options() -> ort.SessionOptions:
    """Return ONNX Runtime's default options, without its warnings on stderr."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    return options


def create(
    model: ir.Model,
    path: str | None,
    bound: Collection[str],
    held: Mapping[str, Any],
    providers: Sequence[Any] | None,
    options: ort.SessionOptions,
) -> ort.InferenceSession:
    """Make the session of ONNX Runtime on a model, which may have a file.

    State that is always `bound` is removed from the initializers, so that the session does not keep it. The session
    uses the buffers `held` for state that the graph writes in place.

    Raises:
        SessionError: a provider is missing, or the model cannot be loaded.
    """
    import onnxruntime as ort

    wanted = list(providers or [CPU_PROVIDER])
    problem = "the session options hold the state of another session already; make new ones"
    with reporting(SessionError, problem, Exception):
        for name, buffer in held.items():
            options.add_initializer(name, buffer)
    limits = too_new(ort.__version__, default_opset(model), model.ir_version)
    problem = f"ONNX Runtime {ort.__version__} cannot load the model" + (f" ({limits})" if limits else "")
    # If a provider fails, ONNX Runtime prints that it falls back to the CPU; newer releases can be silenced.
    try:
        with contextlib.redirect_stdout(StringIO()):
            session = ort.InferenceSession(_source(model, path, bound), options, providers=wanted, enable_fallback=0)
    except Exception as error:  # those of ONNX Runtime share no public base class
        advice = advise_missing(str(error))
        more = f"{advice}, or scale the original with --target onnx" if advice else ""
        raise SessionError(f"{problem}: {one_line(error)}{more}") from error
    started = session.get_providers()
    if missing := [name for name in map(_name, wanted) if name not in started]:
        raise SessionError(
            f"the execution provider {missing[0]!r} could not start on this machine (no such device, or its libraries "
            f"are missing); the session would run on {', '.join(started)}"
        )
    return session


def choose_device(providers: Sequence[Any] | None) -> Device:
    """Return the device of the state: the GPU if CUDA comes first, else the CPU.

    Raises:
        SessionError: a provider is not installed, or there is no driver for it.
    """
    import onnxruntime as ort

    wanted = list(providers or [CPU_PROVIDER])
    for provider in wanted:
        has_options = isinstance(provider, tuple) and len(provider) == 2 and isinstance(provider[1], dict)
        if not (isinstance(provider, str) or (has_options and isinstance(provider[0], str))):
            raise SessionError(f"a provider is a name, or (name, options as a dict); got {provider!r}")
    if missing := [name for name in map(_name, wanted) if name not in ort.get_available_providers()]:
        there = ort.get_available_providers()
        near = [name for name in ort.get_all_providers() if name.lower().startswith(missing[0].lower())]
        hint = f"; did you mean {near[0]}?" if near else ""
        if missing[0] == CUDA_PROVIDER:
            hint = "; for CUDA, pip uninstall onnxruntime and pip install onnxruntime-gpu"
        raise SessionError(
            f"the execution provider {missing[0]!r} is not in the installed onnxruntime {ort.__version__}, which has "
            f"{', '.join(there)}{hint}"
        )
    if CUDA_PROVIDER in map(_name, wanted):
        try:  # ONNX Runtime would report that there is no driver with many lines on stderr
            ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError as error:
            raise SessionError(
                f"the execution provider {CUDA_PROVIDER!r} cannot start: this machine has no NVIDIA driver ({error})"
            ) from error
    name, options = wanted[0] if isinstance(wanted[0], tuple) else (wanted[0], {})
    return Device("cuda", int(options.get("device_id", 0))) if name == CUDA_PROVIDER else Device()


def maps_files(model: ir.Model, bound: Collection[str]) -> bool:
    """Return whether ONNX Runtime must map external files of values other than fed state."""
    values = model.graph.initializers
    return any(isinstance(v.const_value, ir.ExternalTensor) for name, v in values.items() if name not in bound)


def _source(model: ir.Model, path: str | None, bound: Collection[str]) -> str | bytes:
    if path is not None and maps_files(model, bound):
        return os.path.realpath(path)  # for a link, ONNX Runtime looks for weights beside the link
    copy = model.clone()
    for name in set(bound) & set(model.graph.initializers):
        del copy.graph.initializers[name]
    for value in copy.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.tensor(read_values(value), name=value.name)
    # Two fusions of ONNX Runtime next to nameless nodes give their results the same name.
    for i, node in enumerate(copy.graph):
        node.name = node.name or f"graphscale/unnamed.{i}"
    data: bytes = ir.to_proto(copy).SerializeToString()
    return data


def _name(provider: Any) -> str:
    return str(provider[0] if isinstance(provider, tuple) else provider)
