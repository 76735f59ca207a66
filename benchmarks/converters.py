"""For autocast_peers.py: the float16 converters of others, the graphs of models/, and runs of the results."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import graphscale as gs

MODELS = Path(__file__).resolve().parents[1] / "models"
NAMES = sorted(path.relative_to(MODELS).with_suffix("").as_posix() for path in MODELS.glob("*/*.onnx"))
TOLERANCE, NOISE = 0.02, 1e-6
CRASH = ("crashes", "the process of ONNX Runtime ends (segmentation fault)")
PEERS = {"common": "onnxconverter_common.float16", "ort": "onnxruntime.transformers.float16"}

Arrays = dict[str, np.ndarray]


def installed_peers() -> list[str]:
    """The peers that can be imported; what is missing is printed."""
    found = []
    for name, module in {**PEERS, "auto": "onnxconverter_common.auto_mixed_precision"}.items():
        try:
            importlib.import_module(module)
            found.append(name)
        except ImportError as error:
            print(f"{name} is left out, {module} cannot be imported: {error}\n")
    return found


def convert(tool: str, model: onnx.ModelProto, feeds: Arrays, **options: Any) -> onnx.ModelProto:
    """Convert a copy of a model by the tool of this name, float32 at its inputs and outputs."""
    if tool == "graphscale":
        return gs.autocast(model).model
    if tool == "graphscale, emulated and scaled":
        return gs.autocast(model, emulate=True, loss_scale=gs.DynamicLossScale(2**10)).model
    if tool == "auto":
        return _auto_convert(copy_of(model), feeds)
    function = importlib.import_module(PEERS[tool]).convert_float_to_float16
    return function(copy_of(model), keep_io_types=True, **options)


def _auto_convert(model: onnx.ModelProto, feeds: Arrays) -> onnx.ModelProto:
    function = importlib.import_module("onnxconverter_common.auto_mixed_precision").auto_convert_mixed_precision

    def close(wanted: list[np.ndarray], found: list[np.ndarray]) -> bool:
        return worst(dict(enumerate(wanted)), dict(enumerate(found))) <= TOLERANCE

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its search
        return function(model, feeds, validate_fn=close, keep_io_types=True)


def worst(wanted: Mapping[Any, np.ndarray], found: Mapping[Any, np.ndarray]) -> float:
    """The largest error of an output relative to its largest element; infinite where one is not finite.

    Outputs whose elements are all below 1e-6 are left out: gradients that are zero but for rounding.
    """
    errors = [0.0]
    for name, value in wanted.items():
        exact, other = np.asarray(value, np.float64), np.asarray(found[name], np.float64)
        finite = np.isfinite(exact)
        if finite.all() and np.abs(exact).max(initial=0) < NOISE:
            continue
        if not np.array_equal(finite, np.isfinite(other)):
            return float("inf")
        if finite.any():
            errors.append(np.abs(exact - other)[finite].max() / max(np.abs(exact[finite]).max(), 1e-30))
    return float(max(errors))


def read(name: str) -> tuple[onnx.ModelProto, Arrays]:
    """A graph of models/, and a sample value for each of its inputs."""
    with np.load(MODELS / f"{name}.npz") as stored:
        return onnx.load(MODELS / f"{name}.onnx"), {key: stored[key] for key in stored.files if "/" not in key}


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def casts(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Cast" for node in model.graph.node)


def open_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def loads(model: onnx.ModelProto) -> bool:
    try:
        open_session(model)
    except Exception:  # ONNX Runtime's exceptions share no base class
        return False
    return True


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Run a model once; the outputs, and the buffers that in-place operators wrote into."""
    ort.set_seed(0)
    session = open_session(model)
    wanted = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
    copies = {name: np.array(value) for name, value in feeds.items() if name in wanted}
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, map(np.array, session.run(names, copies)), strict=True))
    return {f"after {name}": value for name, value in copies.items()} | outputs


def short(error: BaseException) -> str:
    """The part of a message that says what is wrong, without the names of nodes and values."""
    text = " ".join(str(error).split())
    found = re.search(r"Type Error: .*|(?<=: )[^:]*$", text)
    text = re.sub(r"(arg|node) ?\([^)]*\)", r"\1 (...)", found[0] if found else text)
    return re.sub(r"/[\w/]*/|\|", "", text)[:140]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the converters, and none of ONNX Runtime."""
    ort.set_default_logger_severity(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Worker:
    """Another process, since ONNX Runtime does not survive some of the graphs."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __call__(self, function: Callable[..., Any], *arguments: str) -> Any:
        """The result of a function of a module; None if its process ended."""
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            return None

    def close(self) -> None:
        self._pool.shutdown()
