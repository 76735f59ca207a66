"""Execution of a case on ONNX Runtime or ONNX's reference evaluator."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from graphscale.graph.releases import release_of
from tests.operators.cases import TRAINING, Case
from tests.operators.values import Data, all_close, copy_data

# The newest IR version that onnxruntime-training 1.19.2 loads.
_IR_VERSION = 10
_INSTALLED = release_of(ort.__version__)
_NEWEST = TRAINING if _INSTALLED is None else _INSTALLED.max_opset

_RANDOM = re.compile("Dropout|Random|Bernoulli|Multinomial")

_WITHOUT_ARRAYS = re.compile("float8|float4|bfloat16|int4|int2")

Run = Callable[[Mapping[str, Data]], list[Data]]


class RefusedError(Exception):
    """No runtime at hand runs a case."""


def open_case(case: Case) -> Run:
    """Return the function that computes a case's outputs from its feeds.

    ONNX Runtime comes first. An operator of an opset that it does not load, or without a kernel in it, runs in an older
    one if nothing but types changed in between and the case's own results come out. The reference evaluator of ONNX
    runs the rest.

    Raises:
        RefusedError: no runtime has this operator with these operands.
    """
    refusals = []
    newest = functools.partial(_open_session, newest=_NEWEST)
    for make in (*([newest] if case.opset > TRAINING else []), _open_session, _open_reference):
        try:
            run = make(case)
            outputs = run(case.feeds)
        except Exception as error:  # the runtimes' exceptions share no public base class
            refusals.append(f"{type(error).__name__}: {error}")
            continue
        if case.expected is None or all_close(outputs, case.expected):
            return run
        refusals.append("the results are not those of the case")
    raise RefusedError("; ".join(refusals))


def is_reference(run: Run) -> bool:
    """Return whether a function of `open_case` runs the reference evaluator."""
    return getattr(run, "__qualname__", "").startswith(_open_reference.__name__)


def run_with_seed(case: Case, seed: int) -> list[Data] | None:
    """Return what a case computes if ONNX Runtime has a seed, and the node none; None if it has no kernel."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    for attribute in list(node.attribute):
        if attribute.name == "seed":
            node.attribute.remove(attribute)
    try:
        return _run_session(_make_session(_serialize(model), seed), case.feeds)
    except Exception:  # ONNX Runtime's exceptions share no public base class
        return None


def run_in_place(case: Case) -> Mapping[str, Data] | None:
    """Return the operands as ONNX Runtime leaves them in the memory that is fed; None if it has no kernel."""
    feeds = {name: copy_data(value) for name, value in case.feeds.items() if value is not None}
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    # A graph's output has a buffer of its own; in a training step another node reads what an operator updates.
    for value in model.graph.output:
        if value.HasField("type"):
            model.graph.value_info.add().CopyFrom(value)
        model.graph.node.add(op_type="Identity", input=[value.name], output=[f"{value.name}.read"])
        value.name += ".read"
    try:
        _make_session(_serialize(model)).run(None, feeds, _run_options())
    except Exception:  # ONNX Runtime's exceptions share no public base class
        return None
    return feeds


def _open_session(case: Case, newest: int = TRAINING) -> Run:
    serialized = _serialize(case.model, newest)
    if _RANDOM.search(case.node.op_type):
        # Draws go on from run to run, and start from the seed in a new session.
        return lambda feeds: _run_session(_make_session(serialized), feeds)
    session = _make_session(serialized)
    if any(_WITHOUT_ARRAYS.search(output.type) for output in session.get_outputs()):
        raise RefusedError("ONNX Runtime returns bytes in place of such numbers")
    return functools.partial(_run_session, session)


def _serialize(model: onnx.ModelProto, newest: int = TRAINING) -> bytes:
    """Return a model of one node in a version that ONNX Runtime loads, in an opset up to `newest`."""
    loaded = onnx.ModelProto()
    loaded.CopyFrom(model)
    loaded.ir_version = min(model.ir_version, _IR_VERSION)
    node = model.graph.node[0]
    for entry in loaded.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            if node.domain in ("", "ai.onnx") and not _same_but_types(node.op_type, entry.version, newest):
                raise RefusedError(f"opset {entry.version} changes the operator")
            entry.version = newest
    return loaded.SerializeToString()


def _make_session(serialized: bytes, seed: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Nothing may be rewritten: the node itself is in question.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ort.set_seed(seed)
    return ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


def _run_options() -> ort.RunOptions:
    options = ort.RunOptions()
    options.log_severity_level = 4
    return options


def _run_session(session: ort.InferenceSession, feeds: Mapping[str, Data]) -> list[Data]:
    copies = {name: copy_data(value) for name, value in feeds.items() if value is not None}
    return [copy_data(value) for value in session.run(None, copies, _run_options())]


def _open_reference(case: Case) -> Run:
    evaluator = ReferenceEvaluator(case.model)

    def run(feeds: Mapping[str, Data]) -> list[Data]:
        with np.errstate(all="ignore"):
            outputs = evaluator.run(None, {name: copy_data(value) for name, value in feeds.items()})
        return [copy_data(value) for value in outputs]

    return run


@functools.cache
def _same_but_types(name: str, opset: int, other: int) -> bool:
    if not onnx.defs.has(name, other, ""):
        return False
    one, two = (_signature(onnx.defs.get_schema(name, version, "")) for version in (opset, other))
    return one == two


def _signature(schema: onnx.defs.OpSchema) -> tuple[Any, ...]:
    attributes = {
        name: (attribute.type, attribute.required, attribute.default_value.SerializeToString())
        for name, attribute in schema.attributes.items()
    }
    return attributes, *([(entry.name, entry.option) for entry in side] for side in (schema.inputs, schema.outputs))
