"""Former rules with wrong gradients, restored: the checks of degrees, traits and survivals report each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

import onnx_ir as ir
import pytest

from graphscale.flow.degree import ZERO, Degree
from graphscale.operators import LOST, MICROSOFT, Fate, Survival, survival_of
from graphscale.operators.columns import (
    BOUNDED,
    BOUNDED_BELOW,
    KEPT,
    MULTIPLIED,
    PICKED,
    SUMMED,
    UNDEFINED,
    UNREAD,
)
from tests.operators.claims import Claim, Claimed, claim_degrees
from tests.operators.drawn import each_draw
from tests.operators.properties import try_traits
from tests.operators.recipes import draw_case
from tests.operators.runtimes import RefusedError
from tests.operators.scaling import try_case
from tests.operators.survival import try_survival

pytestmark = pytest.mark.sample(3)


def _forget_attributes(*names: str) -> Claim:
    """Make the claims as if a node had not these attributes."""

    def claim(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
        held = {name: node.attributes.pop(name) for name in names if name in node.attributes}
        try:
            return claim_degrees(node, operands)
        finally:
            node.attributes.update(held)

    return claim


def _forget_operand(index: int) -> Claim:
    """Make the claims as if a node had not this operand."""

    def claim(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            return claim_degrees(node, operands)
        node.replace_input_with(index, None)
        try:
            return claim_degrees(node, {name: degree for name, degree in operands.items() if name != value.name})
        finally:
            node.replace_input_with(index, value)

    return claim


def _keep_first(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
    """Claim the degree of the first operand for nodes without types, whatever they cast to."""
    if node.outputs[0].type is not None:
        return claim_degrees(node, operands)
    return (operands.get("x0", 0),) if operands.keys() <= {"x0"} else None


def _lose_addend(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
    """Claim zeros for a product with zeros, whatever is added."""
    zero = any(operands.get(name, 0) is ZERO for name in ("x0", "x1"))
    return (ZERO,) if zero else claim_degrees(node, operands)


def _ignore_rounds(node: ir.Node, operands: Mapping[str, Degree]) -> Claimed:
    """Claim for a loop what its body makes of captured zeros, as if it ran at least once."""
    return (ZERO, ZERO) if operands.get("x", 0) is ZERO else claim_degrees(node, operands)


_OLD_RULES: Mapping[tuple[str, str, str], Claim] = {
    ("", "Clip", "bounds below opset 11"): _forget_attributes("min", "max"),
    ("", "Pad", "value below opset 11"): _forget_attributes("value"),
    ("", "ScatterND", "reduction"): _forget_attributes("reduction"),
    ("", "ScatterElements", "reduction"): _forget_attributes("reduction"),
    ("", "Cast", "target type"): _keep_first,
    ("", "CastLike", "target type"): _keep_first,
    ("", "Resize", "extrapolation_value"): _forget_attributes("extrapolation_value"),
    ("", "DeformConv", "bias"): _forget_operand(3),
    ("", "Gemm", "addend of zeros"): _lose_addend,
    ("", "Conv", "addend of zeros"): _lose_addend,
    ("", "Loop", "no rounds"): _ignore_rounds,
    (MICROSOFT, "FusedGemm", "activation"): _forget_attributes("activation"),
    (MICROSOFT, "FusedConv", "activation"): _forget_attributes("activation"),
    (MICROSOFT, "FusedConv", "second addend"): _forget_operand(3),
    (MICROSOFT, "Scale", "scale_down"): _forget_attributes("scale_down"),
}


def _any_wrong(domain: str, name: str, check: Callable[..., list[object]]) -> bool:
    for draw in each_draw((domain, name)):
        with contextlib.suppress(RefusedError):
            if check(draw_case((domain, name), *draw)):
                return True
    return False


@pytest.mark.parametrize(
    ("domain", "name", "claim"),
    [
        pytest.param(domain, name, claim, id=f"{name}-{defect}", marks=[pytest.mark.training] if domain else [])
        for (domain, name, defect), claim in _OLD_RULES.items()
    ],
)
def test_an_old_rule_is_reported(domain: str, name: str, claim: Claim) -> None:
    assert _any_wrong(domain, name, lambda case: try_case(case, claim).wrong)


@pytest.mark.parametrize(
    ("name", "trait"),
    [
        ("Max", "REPEAT"),
        ("Softmax", "ELEMENTWISE"),
        ("Sub", "COMMUTATIVE"),
        ("Resize", "MOVE"),
        ("Transpose", "RESHAPE"),
    ],
)
def test_a_wrong_trait_is_reported(name: str, trait: str) -> None:
    check = functools.partial(try_traits, claimed=frozenset({trait}))
    assert _any_wrong("", name, lambda case: check(case).wrong)


@pytest.mark.parametrize(
    ("domain", "name", "index", "survival"),
    [
        # Former rules of the table and of lint.
        ("", "Erf", 0, BOUNDED),
        ("", "Sign", 0, BOUNDED),
        ("", "Shrink", 0, KEPT),
        ("", "ThresholdedRelu", 0, BOUNDED_BELOW),
        # Clip without a bound, as if it kept infinity; a selection and a part, as if they took everything.
        ("", "Clip", 0, KEPT),
        ("", "Where", 1, KEPT),
        ("", "Slice", 0, KEPT),
        ("", "Compress", 0, LOST._replace(plus=Fate.BENT)),
        # Each of them bends what the rule keeps.
        ("", "Relu", 0, KEPT),
        ("", "Max", 0, KEPT),
        ("", "ReduceMin", 0, BOUNDED),
        ("", "Div", 1, MULTIPLIED),
        ("", "Reciprocal", 0, UNDEFINED),
        ("", "Softmax", 0, UNDEFINED),
        ("", "LogSoftmax", 0, SUMMED),
        ("", "TopK", 0, PICKED),
        ("", "Greater", 0, UNREAD),
        # Another number than the rule says.
        ("", "Neg", 0, KEPT),
        ("", "Abs", 0, KEPT),
        ("", "Sub", 1, SUMMED),
        ("", "Mul", 0, SUMMED),
        ("", "Sqrt", 0, KEPT),
        (MICROSOFT, "ReluGrad", 0, MULTIPLIED),
        (MICROSOFT, "FusedGemm", 0, MULTIPLIED),
    ],
)
@pytest.mark.training
def test_a_wrong_survival_is_reported(domain: str, name: str, index: int, survival: Survival) -> None:
    def claim(node: ir.Node, operand: int) -> Survival:
        return survival if operand == index else survival_of(node, operand)

    assert _any_wrong(domain, name, lambda case: try_survival(case, claim).wrong)


def test_a_node_that_fails_is_reported() -> None:
    check = functools.partial(try_traits, claimed=frozenset({"TOTAL"}), never_fails=lambda _: True)
    assert _any_wrong("", "Gather", lambda case: check(case).wrong)


@pytest.mark.parametrize(
    ("domain", "name"), [("", "Dropout"), pytest.param(MICROSOFT, "SGDOptimizerV2", marks=pytest.mark.training)]
)
def test_a_missing_trait_is_reported(domain: str, name: str) -> None:
    assert _any_wrong(domain, name, lambda case: try_traits(case, claimed=frozenset()).wrong)
