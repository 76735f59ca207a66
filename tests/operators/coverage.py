"""Rules that no case runs, with the reasons."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators import ALL, MICROSOFT, OPERATORS, Kind
from tests.operators.claims import CHECKED_TRAITS, Claim, claim_degrees, ruled_operators, traits_of
from tests.operators.recipes import RECIPES

_NUMBERLESS = "reads no floating-point numbers, or their count alone"
_NUMBERLESS_OPERATORS = (
    "BlackmanWindow ConstantOfShape HammingWindow HannWindow OptionalHasElement SequenceEmpty SequenceLength "
    "StringNormalizer"
)
# Operators whose rules and traits claim something, and that nothing here can run, by the reason.
_UNTRIED = {
    "onnxruntime-training has no kernel of it for a CPU": (
        "BatchScale BiasDropout BiasSoftmaxDropout BitmaskBiasDropout BitmaskDropout BitmaskDropoutGrad "
        "ConvTransposeGrad FakeQuantGrad FlattenAndUnpad IsAllFinite IsFinite LambOptimizer PadAndUnflatten "
        "ResizeGrad ScaledSum SoftmaxDropoutGrad View"
    ),
    _NUMBERLESS: "All BroadcastGradientArgs Group",
    "needs several GPUs": "NcclAllGather NcclAllReduce NcclReduceScatter",
    "its results must be its operands' memory, which they are not where a graph begins": "PassThrough",
}
UNTRIED: dict[tuple[str, str], str] = {
    ("", "Upsample"): "deprecated before opset 10",
    **dict.fromkeys((("", name) for name in _NUMBERLESS_OPERATORS.split()), _NUMBERLESS),
    **{(MICROSOFT, name): reason for reason, names in _UNTRIED.items() for name in names.split()},
}


def claims_something(operator: tuple[str, str], claim: Claim = claim_degrees) -> bool:
    """Return whether the table allows some operand of an operator to be scaled."""
    inputs = [ir.Value(name=f"x{i}") for i in range(16)]
    node = ir.Node(operator[0], operator[1], inputs, num_outputs=4)
    ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 20, MICROSOFT: 1})
    return any(claim(node, {str(value.name): 1}) is not None for value in inputs)


def may_be_scaled(operator: tuple[str, str], index: int) -> bool:
    """Return whether an operand of an operator may have a degree, with some attributes."""
    row = OPERATORS.get(operator)
    if row is None or row.rule.kind in (Kind.NONLINEAR, Kind.DEGREE_0, Kind.SHAPE, Kind.BODY):
        return False
    return row.rule.data == ALL or index in row.rule.data or index in row.rule.addends


def find_uncovered() -> list[str]:
    """Return what is wrong with the recipes and reasons: each rule that claims something has one of the two."""
    ruled = ruled_operators()
    problems = []
    for operator in sorted(ruled - RECIPES.keys() - UNTRIED.keys()):
        if claims_something(operator) or traits_of(operator) & CHECKED_TRAITS:
            problems.append(f"{'::'.join(operator)} has a rule or traits, and neither a recipe nor a reason")
    for operator in sorted(UNTRIED.keys() - ruled):
        problems.append(f"{'::'.join(operator)} has a reason, and no rule")
    for operator in sorted(UNTRIED.keys() & RECIPES.keys()):
        problems.append(f"{'::'.join(operator)} has both a recipe and a reason")
    return problems
