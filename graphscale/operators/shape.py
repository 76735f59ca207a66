"""ai.onnx: operators that move numbers: views, casts, parts, gathering and scattering."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.operators.casting import CLEAR, deny
from graphscale.operators.rules import FIRST, LINEAR, NONLINEAR, Kind, Rule
from graphscale.operators.table import attribute, row
from graphscale.operators.traits import Trait

_KEPT = Trait.MOVE | Trait.NONFINITE_OF_FIRST
_CONTRIBUTIONS = deny("many contributions add up in the result's type")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_FLOAT8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2FNUZ)


def _resolve_cast(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a cast to the type that the attribute `to` names."""
    dtype = attribute(node, "to", 0)
    return rule if dtype in _FLOATS else _resolve_conversion(node, rule, ir.DataType(dtype))


def _resolve_cast_like(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a cast to the type of the second operand, which may not be known."""
    for value in (node.outputs[0], node.inputs[1]):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        dtype = None if value is None else value.dtype or (None if tensor is None else tensor.dtype)
        if dtype is not None:
            return _resolve_conversion(node, rule, dtype)
    return NONLINEAR


def _resolve_conversion(node: ir.Node, rule: Rule, dtype: ir.DataType) -> Rule:
    """Return the rule of a cast: integers, text and saturated numbers have no degree, flags have degree 0."""
    if dtype is ir.DataType.BOOL:
        return Rule(Kind.DEGREE_0, ignored=rule.ignored)
    if dtype in _FLOATS or (dtype in _FLOAT8 and not attribute(node, "saturate", 1)):
        return rule
    return NONLINEAR


def _resolve_pad(node: ir.Node, rule: Rule) -> Rule:
    """Return Pad's rule: below opset 11 its number is an attribute, of degree 0."""
    fills = attribute(node, "mode", "constant") == "constant"
    return NONLINEAR if fills and attribute(node, "value", 0.0) else rule


def _resolve_scatter(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of scattering: by a product the factors have degree 0, else the numbers that of the data."""
    return FIRST if attribute(node, "reduction", "none") == "mul" else rule


# --- the same numbers -------------------------------------------------------------------------------------------------
_VIEW = Trait.RESHAPE | Trait.SHARES_BUFFER | _KEPT
row("Identity", FIRST, _VIEW | Trait.TOTAL | Trait.ELEMENTWISE, CLEAR)
row("Reshape Flatten Squeeze Unsqueeze", FIRST, _VIEW, CLEAR)
row("Transpose", FIRST, Trait.PERMUTE | Trait.SHARES_BUFFER | Trait.TOTAL | _KEPT, CLEAR)
row("DepthToSpace SpaceToDepth ReverseSequence", FIRST, Trait.PERMUTE | _KEPT, CLEAR)
row("Expand Tile", FIRST, Trait.REPEAT | Trait.REMOVABLE | _KEPT, CLEAR)
_CAST = Trait.CAST | Trait.ELEMENTWISE | Trait.TOTAL | _KEPT
row("Cast", FIRST, _CAST | Trait.REMOVABLE, resolve=_resolve_cast)
row("CastLike", Rule(Kind.LINEAR, data=(0,), ignored=(1,)), _CAST | Trait.REMOVABLE, resolve=_resolve_cast_like)
row("BitCast", NONLINEAR)

# --- parts and wholes -------------------------------------------------------------------------------------------------
row("Slice", FIRST, Trait.PART | Trait.MOVE | Trait.REMOVABLE, CLEAR)
row("Split", FIRST, Trait.MOVE | Trait.REMOVABLE, CLEAR)
row("Trilu Compress", FIRST, Trait.PART | Trait.MOVE, CLEAR)
row("CenterCropPad", FIRST, Trait.PART | Trait.MOVE)
row("Unique", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.MOVE)
row("TopK", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.PART | Trait.LOSES_NAN, CLEAR)
row("Concat", LINEAR, Trait.MOVE | Trait.NONFINITE_OF_ALL | Trait.REMOVABLE, CLEAR)
row("Pad", Rule(Kind.LINEAR, data=(0, 2)), Trait.MOVE | Trait.REMOVABLE, CLEAR, resolve=_resolve_pad)

# --- by index ---------------------------------------------------------------------------------------------------------
row("Gather GatherElements", FIRST, Trait.PART | Trait.MOVE | Trait.INDEXES_AXIS, CLEAR)
row("GatherND", FIRST, Trait.PART | Trait.MOVE | Trait.INDEXES_AXES, CLEAR)
_scattered = Rule(Kind.LINEAR, data=(0, 2))
row("ScatterElements Scatter", _scattered, Trait.INDEXES_AXIS, _CONTRIBUTIONS, resolve=_resolve_scatter)
row("ScatterND", _scattered, Trait.INDEXES_AXES, _CONTRIBUTIONS, resolve=_resolve_scatter)
row("TensorScatter", Rule(Kind.LINEAR, data=(0, 1)))
row("OneHot", Rule(Kind.LINEAR, data=(2,)))
row("MaxUnpool Col2Im", FIRST, casting=_CONTRIBUTIONS)
