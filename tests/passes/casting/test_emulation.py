"""Emulation is faithful: on each operator that may run in the small type, and at every optimization level.

They equal numpy's: operands rounded by `.astype(float16).astype(float32)`, the operator in float32 on
them, its result rounded in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.operators import Colour
from graphscale.passes.casting.settings import default_rules
from tests.build import linear_step
from tests.conftest import HAS_TRAINING, OPTIMIZATION_LEVELS, Level, make_session, run_session
from tests.passes.casting.operators import CASES, NO_RUNTIME, OpCase, feeds_of, model_of
from tests.passes.casting.rounding import KINDS, assert_same_numbers, is_rounded, rounded, run_all_values, run_node

pytestmark = pytest.mark.sample(3)
RULES = default_rules()
RUNS = {"any": True, "training": HAS_TRAINING, "stock": not HAS_TRAINING}
each_dtype = pytest.mark.parametrize("dtype", KINDS)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_operator_has_a_case() -> None:
    listed = {operator for operator, rule in RULES.items() if rule.colour is not Colour.DENY}
    cases = {(case.domain, case.op) for case in CASES}
    assert cases <= listed
    assert listed - cases == set(NO_RUNTIME)


@functools.cache
def emulated(case: OpCase, dtype: str) -> gs.AutocastModel:
    if not RUNS[case.runs]:
        pytest.skip(f"this build of ONNX Runtime does not have {case.op}")
    return gs.autocast(model_of(case), dtype, emulate=True, target=target_of(case))


def target_of(case: OpCase) -> str:
    """The target that leaves the operator unchanged."""
    return "ort-training" if case.domain == "com.microsoft" or not onnx.defs.has(case.op) else "onnx"


def node_of(model: onnx.ModelProto) -> onnx.NodeProto:
    (node,) = (node for node in model.graph.node if node.name == "op")
    return node


@each_dtype
@each_case
def test_operands_and_results_are_those_of_the_small_type(case: OpCase, dtype: str) -> None:
    result = emulated(case, dtype)
    entry = next(op for op in result.report.ops if op.op == "::".join(filter(None, (case.domain, case.op))))
    if not entry.low:
        (reason,) = entry.reasons
        assert "opset" in reason or "attributes" in reason
        pytest.skip(reason)
    node, rule = node_of(result.model), RULES[case.domain, case.op]
    values = run_all_values(result.model, feeds_of(case, model_of(case)), Level.ORT_DISABLE_ALL)
    operands = [values[name] if name else None for name in node.input]
    for i, operand in enumerate(operands):
        if operand is not None and operand.dtype == np.float32 and i not in rule.wide_inputs:
            assert is_rounded(operand, dtype), node.input[i]
    rare = [operand for operand in operands if operand is not None and operand.dtype == np.float32 and operand.size > 9]
    assert any(not np.isfinite(operand).all() for operand in rare)
    if "Dropout" not in case.op or "Grad" in case.op:  # Else it draws other numbers.
        for name, array in run_node(node, values, result.model.opset_import).items():
            assert_same_numbers(values[name], array, name)
    for i, name in enumerate(node.output):
        if name and values[name].dtype == np.float32 and i not in rule.wide_outputs:
            assert_rounded_for_readers(result.model, name, values, dtype)


def assert_rounded_for_readers(model: onnx.ModelProto, name: str, values: dict[str, np.ndarray], dtype: str) -> None:
    """All readers of a result get what numpy rounds it to: it is that already, or a pair of casts makes it so."""
    if is_rounded(values[name], dtype):
        return
    readers = [node for node in model.graph.node if name in node.input]
    assert [node.op_type for node in readers] == ["Cast"], name
    (pair,) = (node for node in model.graph.node if readers[0].output[0] in node.input)
    assert pair.op_type == "Cast"
    assert_same_numbers(values[pair.output[0]], rounded(values[name], dtype), name)


@each_dtype
@each_case
def test_all_values_of_the_graph(case: OpCase, dtype: str) -> None:
    """Each pair of casts, wherever it stands, does what numpy does; also when ONNX Runtime has optimized the graph."""
    model, feeds = emulated(case, dtype).model, feeds_of(case, model_of(case))
    for level in (Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL):
        values = run_all_values(model, feeds, level)
        pairs = 0
        for node in model.graph.node:
            first = next((n for n in model.graph.node if n.output[0] == node.input[0]), None)
            if node.op_type == "Cast" and first is not None and first.op_type == "Cast":
                assert_same_numbers(values[node.output[0]], rounded(values[first.input[0]], dtype), node.output[0])
                pairs += 1
        assert pairs >= 4 or (dtype == "bfloat16" and case.opset < 13)  # which has no bfloat16


@each_case
def test_the_typed_graph_takes_the_same_nodes(case: OpCase) -> None:
    """For a target that has kernels for all; and where it loads on the CPU, its dtypes are right."""
    result = emulated(case, "float16")
    target = "ort-cuda" if case.opset > 21 else "ort-training-cuda"
    typed = gs.autocast(model_of(case), target=target)
    assert (typed.report.ops, typed.report.low_nodes) == (result.report.ops, result.report.low_nodes)
    known_to_onnx = onnx.defs.has(case.op, case.domain)
    onnx.shape_inference.infer_shapes(typed.model, check_type=True, strict_mode=known_to_onnx)
    on_the_cpu = gs.autocast(model_of(case), target=target_of(case))
    feeds = feeds_of(case, model_of(case))
    for level in (Level.ORT_DISABLE_ALL, Level.ORT_ENABLE_ALL):
        outputs, _ = run_session(make_session(on_the_cpu.model, level), feeds)
        assert {array.dtype for array in outputs.values()} == {np.dtype(np.float32)}


# --- the casts survive ONNX Runtime's optimizer -----------------------------------------------------------------------


def network(operations: str) -> onnx.ModelProto:
    """`z`, an output, is what the operations make of `h`, `s` and `r`; it lies between two products."""
    forward = f"""
        h = MatMul(x, w)
        {operations}
        y = MatMul(z, unit)
        d = Sub(y, t)
        square = Mul(d, d)
        loss = ReduceMean<keepdims = 0>(square)
    """
    backward = """
        dy = Mul(d, two_over_n)
        zt = Transpose<perm = [1, 0]>(z)
        dunit = MatMul(zt, dy)
    """
    inputs = "float[4,3] w, float[3,3] unit, float[8,3] s, float[8,3] r"
    outputs = "float[3,3] dunit, float[8,3] z"
    return linear_step(
        forward=forward, backward=backward, inputs=inputs, outputs=outputs, constants="float tenth = {0.1}"
    )


# The nodes from `h`, which is 1, `s` and `r` to `z`; the numbers in `s` and `r`, and the same in numpy. The small type
# loses what float32 keeps.
LOSSES: dict[str, tuple[str, float, float, Callable[[Any, Any], Any]]] = {
    "overflow": ("a = Mul(h, s) z = Mul(a, r)", 300, 300, lambda s, r: s * r),
    "overflow and back": ("a = Mul(h, s) b = Add(a, a) z = Mul(b, r)", 6e4, 2**-10, lambda s, r: (s + s) * r),
    "infinity - infinity": (
        "a = Mul(h, s) b = Add(a, a) c = Add(s, s) z = Sub(b, c)",
        6e4,
        1,
        lambda s, r: (s + s) - (s + s),
    ),
    "underflow": ("a = Mul(h, s) b = Mul(a, r) z = Div(b, r)", 1e-4, 1e-4, lambda s, r: s * r / r),
    "subnormal": ("a = Mul(h, s) b = Mul(a, r) z = Div(b, r)", 2**-10, 3 * 2**-15, lambda s, r: s * r / r),
    "rounding": ("a = Add(h, s) b = Sub(a, h) z = Mul(b, r)", 4e-4, 1, lambda s, r: (1 + s - 1) * r),
    "what comes in": ("a = Mul(h, s) z = Mul(a, r)", 1e6, 0.5, lambda s, r: s * r),
    "a constant": ("a = Mul(h, tenth) z = Mul(a, s)", 1, 1, lambda s, r: np.float16(0.1) * s),
    "moved about": (
        "a = Mul(h, s) b = Mul(a, r) c = Transpose(b) e = Transpose(c) z = Identity(e)",
        300,
        300,
        lambda s, r: s * r,
    ),
    "bfloat16": ("a = Add(h, s) b = Sub(a, h) z = Mul(b, r)", 3e-3, 1, lambda s, r: (1 + s - 1) * r),
    "no overflow in bfloat16": ("a = Mul(h, s) z = Mul(a, r)", 300.3, 300, lambda s, r: s * r),
}


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_lost_is_lost_at_every_optimization_level(name: str, level: Level) -> None:
    operations, s, r, formula = LOSSES[name]
    dtype = "bfloat16" if "bfloat16" in name else "float16"
    model, kind = network(operations), KINDS[dtype]
    feeds = {"x": np.eye(1, 4).repeat(8, 0), "w": np.ones((4, 3)), "unit": np.eye(3), "t": np.zeros((8, 3))}
    feeds |= {"s": np.full((8, 3), s), "r": np.full((8, 3), r)}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    with np.errstate(all="ignore"):
        expected = np.float32(formula(kind(s), kind(r)))
    result = gs.autocast(model, dtype, emulate=True, roles={"metrics": ["z"]})
    actual, _ = run_session(make_session(result.model, level), feeds)
    np.testing.assert_array_equal(actual["z"], np.full((8, 3), expected))
    free, _ = run_session(make_session(model, level), feeds)
    assert not np.isclose(free["z"], actual["z"], rtol=1e-4, atol=0).any()
