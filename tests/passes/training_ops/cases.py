"""One node of a training operator with its operands: run by ONNX Runtime's kernel, and run in its standard form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort

from graphscale.operators import MICROSOFT
from graphscale.passes.lower_training_ops.lower_training_ops import LowerTrainingOps
from tests.operators.values import Data, copy_data

# The largest versions that onnxruntime-training 1.19.2 loads.
IR_VERSION = 10
# Relative to the largest magnitude in the kernel's result.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One node.

    Attributes:
        op_type: the operator.
        inputs: its operands: arrays, lists of arrays for sequences, None for one that is left out.
        attributes: its attributes.
        outputs: number of results.
        unnamed: the indices of results that are left out.
        constants: the indices of operands that are initializers of the model.
        domain: the operator's domain.
        opset: the version of ai.onnx.
        static: whether the model says the sizes of the axes; else it says their number alone.
        ranked: whether it says at least that.
        tolerance: the largest error, relative to the largest magnitude in the result.
        shapes: the shapes of the results, float32 all, if the kernel reads them from the model.
    """

    op_type: str
    inputs: tuple[Data | None, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    unnamed: tuple[int, ...] = ()
    constants: tuple[int, ...] = ()
    domain: str = MICROSOFT
    opset: int = 17
    static: bool = True
    ranked: bool = True
    tolerance: float = TOLERANCE
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def output_names(self) -> list[str]:
        """The names of the results that are not left out."""
        return [f"y{i}" for i in range(self.outputs) if i not in self.unnamed]

    def feeds(self) -> dict[str, Data]:
        """Copies of the operands that are fed: kernels of optimizers write into them."""
        fed = {f"x{i}": value for i, value in enumerate(self.inputs) if value is not None and i not in self.constants}
        return {name: copy_data(value) for name, value in fed.items()}


def make_model(case: Case, expected: Sequence[Data]) -> onnx.ModelProto:
    """Build the model of one node, with results of the types of some data."""
    inputs = [value if value is None else f"x{i}" for i, value in enumerate(case.inputs)]
    outputs = [f"y{i}" if i not in case.unnamed else "" for i in range(case.outputs)]
    node = onnx.helper.make_node(
        case.op_type, [name or "" for name in inputs], outputs, "the-node", domain=case.domain, **case.attributes
    )
    is_sized = case.static or bool(case.shapes)
    graph = onnx.helper.make_graph(
        [node],
        "case",
        [_value_info(name, value, case.static, case.ranked) for name, value in case.feeds().items()],
        [_value_info(name, value, is_sized) for name, value in zip(case.output_names, expected, strict=True)],
        [onnx.numpy_helper.from_array(np.asarray(case.inputs[i]), f"x{i}") for i in case.constants],
    )
    imports = [onnx.helper.make_opsetid("", case.opset)]
    if case.domain:
        imports.append(onnx.helper.make_opsetid(case.domain, 1))
    return onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=imports)


# The results of operators that have no kernel for a CPU, or a wrong one: by other kernels.
REFERENCES: dict[tuple[str, str], Callable[[Case], list[Data]]] = {}


def run_reference(case: Case) -> list[Data]:
    """Return what onnxruntime-training computes, or ought to."""
    reference = REFERENCES.get((case.domain, case.op_type), run_kernel)
    return reference(case)


def run_kernel(case: Case) -> list[Data]:
    """Return what onnxruntime-training computes."""
    results = [np.zeros(shape, np.float32) for shape in case.shapes] or [np.zeros(())] * len(case.output_names)
    model = make_model(case, results)
    for value in () if case.shapes else model.graph.output:
        value.ClearField("type")
    return _run(model, case, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)


def lower_case(case: Case, expected: Sequence[Data]) -> onnx.ModelProto:
    """Return the standard form of a case's model; nothing in it needs a training build."""
    model = ir.from_proto(make_model(case, expected))
    LowerTrainingOps()(model)
    assert not LowerTrainingOps.applies(model)
    assert MICROSOFT not in model.opset_imports or case.domain != MICROSOFT
    lowered = ir.to_proto(model)
    if case.ranked:
        onnx.checker.check_model(lowered, full_check=True)
    else:  # the checker wants a shape of each input
        onnx.shape_inference.infer_shapes(lowered, check_type=True, strict_mode=True)
    return lowered


def check_case(case: Case, expected: Sequence[Data]) -> float:
    """Run the standard form of a case, compare it with the kernel's results, and return the largest relative error."""
    actual = _run(lower_case(case, expected), case, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    errors = [0.0]
    for name, one, other in zip(case.output_names, actual, expected, strict=True):
        errors += _errors(one, other, f"{case.op_type} {name} {case}")
    assert max(errors) <= case.tolerance, f"the error is {max(errors):.2e}: {case}"
    return max(errors)


def _errors(actual: Data, expected: Data, name: str) -> list[float]:
    if isinstance(expected, list):
        assert len(actual) == len(expected), name
        return [error for pair in zip(actual, expected, strict=True) for error in _errors(*pair, name)]
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    if not np.issubdtype(expected.dtype, np.floating):
        np.testing.assert_array_equal(actual, expected, name)
        return []
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0, actual), np.where(finite, 0, expected), name)
    largest = np.abs(expected[finite]).max(initial=0)
    error = np.abs(actual.astype(np.float64) - expected)[finite].max(initial=0)
    return [float(error / largest) if largest else float(error)]


def _value_info(name: str, value: Data, static: bool, ranked: bool = True) -> onnx.ValueInfoProto:
    if isinstance(value, list):
        element = onnx.helper.np_dtype_to_tensor_dtype(value[0].dtype)
        return onnx.helper.make_tensor_sequence_value_info(name, element, None)
    element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    shape = value.shape if static else [f"{name}_{axis}" for axis in range(value.ndim)]
    return onnx.helper.make_tensor_value_info(name, element, shape if ranked else None)


def _run(model: onnx.ModelProto, case: Case, level: ort.GraphOptimizationLevel) -> list[Data]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = level
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [copy_data(value) for value in session.run(case.output_names, case.feeds())]
