"""What a step can tell of its gradients: which one was not finite and why, and how many elements are zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import PASS_KEY, Editor, shape_like
from graphscale.graph.types import dtype_of
from graphscale.targets import Target

__all__ = ["find_offender", "zero_fraction"]

# Creates a node from an operator, inputs, the dtype and shape of its output, and attributes; returns that output.
_Make = Callable[..., ir.Value]

_FLAG, _REAL, _INDEX = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64
_NAN, _INF = 1, 2  # the causes; 0 is none


def zero_fraction(editor: Editor, gradients: Sequence[ir.Value], pass_name: str) -> ir.Value:
    """Add nodes that give the share of gradient elements that are zero, a float32 scalar from 0 to 1."""

    def make(op_type: str, inputs: list[ir.Value], dtype: ir.DataType, shape: object, **attributes: object) -> ir.Value:
        outputs = [(f"zeros.{op_type.lower()}", dtype, shape)]
        return editor.node(pass_name, op_type, inputs, outputs, attributes=attributes).outputs[0]  # type: ignore[arg-type]

    def count(flags: ir.Value) -> ir.Value:
        ones = make("Cast", [flags], _REAL, shape_like(flags), to=_REAL)
        return make("ReduceSum", [ones], _REAL, [], keepdims=0)

    # A cast to bool takes whatever is not zero for true, NaN too.
    flags = [make("Cast", [gradient], _FLAG, shape_like(gradient), to=_FLAG) for gradient in gradients]
    nonzero = make("Sum", [count(flag) for flag in flags], _REAL, [])
    total = _known_total(editor, gradients)
    if total is None:
        zeros = [count(make("Not", [flag], _FLAG, shape_like(flag))) for flag in flags]
        total = make("Sum", [nonzero, *zeros], _REAL, [])
    share = make("Div", [nonzero, total], _REAL, [])
    one = editor.constant("graphscale/telemetry.one", np.asarray(1, dtype=np.float32))
    outputs = [("zero_fraction", _REAL, ir.Shape([]))]
    return editor.node(pass_name, "Sub", [one, share], outputs).outputs[0]


def _known_total(editor: Editor, gradients: Sequence[ir.Value]) -> ir.Value | None:
    """How many elements there are, at least 1, where all shapes are known."""
    known = [g.shape for g in gradients if g.shape is not None and g.shape.is_static()]
    if len(known) < len(gradients):
        return None
    total = max(1, sum(int(np.prod(shape.numpy(), dtype=np.int64)) for shape in known))
    return editor.constant("graphscale/telemetry.elements", np.asarray(total, dtype=np.float32))


def find_offender(
    editor: Editor, gradients: Sequence[ir.Value], all_finite: ir.Value, target: Target, pass_name: str
) -> tuple[ir.Value, ir.Value]:
    """Add nodes that find the first gradient that is not finite.

    On the CPU an `If` looks for it only after a step that is not finite. On CUDA, where an `If` waits for the host,
    every step pays for it.

    Returns:
        the cause, an int64 scalar: 0 none, 1 NaN, 2 infinity and no NaN in that gradient; and the gradient's index,
        an int64 scalar, -1 for none.
    """
    if target.cuda:
        return _on_device(editor, gradients, all_finite, pass_name)
    bodies = {
        "then_branch": _body(editor, pass_name, "finite", _none),
        "else_branch": _body(editor, pass_name, "offender", lambda make: _search(make, gradients)),
    }
    outputs = [(name, _INDEX, ir.Shape([])) for name in ("skip_cause", "first_offender")]
    node = editor.node(pass_name, "If", [all_finite], outputs, attributes=bodies)
    return node.outputs[0], node.outputs[1]


def _on_device(
    editor: Editor, gradients: Sequence[ir.Value], all_finite: ir.Value, pass_name: str
) -> tuple[ir.Value, ir.Value]:
    def make(op_type: str, inputs: list[ir.Value], dtype: ir.DataType, shape: object, **attributes: object) -> ir.Value:
        outputs = [(f"telemetry.{op_type.lower()}", dtype, shape)]
        return editor.node(pass_name, op_type, inputs, outputs, attributes=attributes).outputs[0]  # type: ignore[arg-type]

    found = _search(make, gradients)
    results = []
    for name, value, nothing in zip(("skip_cause", "first_offender"), found, (0, -1), strict=True):
        constant = editor.constant(f"graphscale/telemetry.no_{name}", np.asarray(nothing, dtype=np.int64))
        outputs = [(name, _INDEX, ir.Shape([]))]
        results.append(editor.node(pass_name, "Where", [all_finite, constant, value], outputs).outputs[0])
    return results[0], results[1]


def _body(editor: Editor, pass_name: str, name: str, build: Callable[[_Make], tuple[ir.Value, ir.Value]]) -> ir.Graph:
    """A branch of an If: it has no inputs, and reads the gradients from the graph around it."""
    nodes: list[ir.Node] = []

    def make(op_type: str, inputs: list[ir.Value], dtype: ir.DataType, shape: object, **attributes: object) -> ir.Value:
        value = ir.Value(
            name=editor.unique(f"{name}.{op_type.lower()}"),
            type=ir.TensorType(dtype),
            shape=None if shape is None else ir.Shape(shape),  # type: ignore[arg-type]
        )
        node = ir.node(op_type, inputs, attributes=attributes, outputs=[value], metadata_props={PASS_KEY: pass_name})  # type: ignore[arg-type]
        node.name = editor.unique(f"graphscale/{pass_name}/{value.name}")
        nodes.append(node)
        return value

    # No opset imports of its own: a body has those of the model.
    return ir.Graph([], list(build(make)), nodes=nodes, name=f"{pass_name}.{name}")


def _none(make: _Make) -> tuple[ir.Value, ir.Value]:
    return _constant(make, 0), _constant(make, -1)


def _search(make: _Make, gradients: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The cause and index of the first gradient that is not finite, if there is one."""
    row = make("Constant", [], _INDEX, [1], value=ir.tensor(np.asarray([-1], dtype=np.int64)))
    count = len(gradients)
    zeros = {kind: ir.tensor(np.zeros((), dtype=kind.numpy())) for kind in (_REAL, ir.DataType.DOUBLE)}
    nothing = make("Constant", [], _REAL, [], value=zeros[_REAL])
    bad, nan = [], []
    for i, gradient in enumerate(gradients):
        dtype = dtype_of(gradient)
        flat = make("Reshape", [gradient, row], dtype, [None])
        if dtype is not ir.DataType.FLOAT:
            # An infinity of float64 stays one; a finite number that float32 cannot hold would become one.
            wide = dtype if dtype is ir.DataType.DOUBLE else _REAL
            flat = flat if dtype is wide else make("Cast", [flat], wide, [None], to=wide)
            dtype = wide
        zero = make("Constant", [], dtype, [], value=zeros[dtype])
        # 0*x is NaN for an x that is not finite.
        probe = make("ReduceSum", [make("Mul", [flat, zero], dtype, [None])], dtype, [], keepdims=0)
        own = make("Constant", [], _REAL, [], value=ir.tensor(np.asarray(count - i, dtype=np.float32)))
        bad.append(make("Where", [make("IsNaN", [probe], _FLAG, []), own, nothing], _REAL, []))
        flags = make("Cast", [make("IsNaN", [flat], _FLAG, [None])], _REAL, [None], to=_REAL)
        nan.append(make("ReduceSum", [flags], _REAL, [1], keepdims=1))
    # The first one at fault has the most weight. ArgMax and ReduceMax have no CUDA kernels in every opset and release.
    weight = make("Max", bad, _REAL, [])
    number = make("Constant", [], _REAL, [], value=ir.tensor(np.asarray(count, dtype=np.float32)))
    position = make("Min", [make("Sub", [number, weight], _REAL, []), _last(make, count)], _REAL, [])
    index = make("Cast", [position], _INDEX, [], to=_INDEX)
    nans = make("Gather", [make("Concat", nan, _REAL, [count], axis=0), index], _REAL, [], axis=0)
    has_nan = make("Greater", [nans, nothing], _FLAG, [])
    return make("Where", [has_nan, _constant(make, _NAN), _constant(make, _INF)], _INDEX, []), index


def _last(make: _Make, count: int) -> ir.Value:
    """The last position: what comes out where no gradient is at fault, so that it is a position at all."""
    return make("Constant", [], _REAL, [], value=ir.tensor(np.asarray(count - 1, dtype=np.float32)))


def _constant(make: _Make, number: int) -> ir.Value:
    return make("Constant", [], _INDEX, [], value=ir.tensor(np.asarray(number, dtype=np.int64)))
