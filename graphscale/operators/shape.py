"""ai.onnx: operators that move numbers: views, casts, parts, gathering and scattering."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphscale.operators.columns import (
    BOUNDED,
    CLEAR,
    FIRST,
    GREATEST,
    KEPT,
    LEAST,
    LINEAR,
    LOST,
    MULTIPLIED,
    NONLINEAR,
    PICKED,
    SUMMED,
    UNDEFINED,
    WEIGHTED,
    Kind,
    Rule,
    Survival,
    Trait,
    deny,
)
from graphscale.operators.table import Survivals, attribute, row

_CONTRIBUTIONS = deny("many contributions add up in the result's type")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
# Those of them without infinity have NaN in its place, unless a cast saturates.
_FLOAT8 = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2FNUZ)


def _resolve_cast(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a cast to the type that the attribute `to` names."""
    dtype = attribute(node, "to", 0)
    return rule if dtype in _FLOATS else _resolve_conversion(node, rule, ir.DataType(dtype))


def _resolve_cast_like(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of a cast to the type of the second operand, which may not be known."""
    dtype = _dtype_like(node)
    return NONLINEAR if dtype is None else _resolve_conversion(node, rule, dtype)


def _dtype_like(node: ir.Node) -> ir.DataType | None:
    """Return the target type of a CastLike, None if unknown."""
    for value in (node.outputs[0], node.inputs[1]):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        dtype = None if value is None else value.dtype or (None if tensor is None else tensor.dtype)
        if dtype is not None:
            return dtype
    return None


def _resolve_conversion(node: ir.Node, rule: Rule, dtype: ir.DataType) -> Rule:
    """Return the rule of a cast: integers, text and saturated numbers have no degree, flags have degree 0."""
    if dtype is ir.DataType.BOOL:
        return Rule(Kind.DEGREE_0, ignored=rule.ignored)
    if dtype in _FLOATS or (dtype in _FLOAT8 and not attribute(node, "saturate", 1)):
        return rule
    return NONLINEAR


def _survive_cast(node: ir.Node) -> Survivals:
    """Return the survival in a cast: integers and flags have neither infinity nor NaN."""
    dtype = _dtype_like(node) if node.op_type == "CastLike" else ir.DataType(attribute(node, "to", 0))
    if dtype is None or dtype in _FLOATS:
        return KEPT
    if dtype not in _FLOAT8:
        return LOST
    if attribute(node, "saturate", 1):
        return BOUNDED
    return KEPT if dtype is ir.DataType.FLOAT8E5M2 else UNDEFINED


def _resolve_pad(node: ir.Node, rule: Rule) -> Rule:
    """Return Pad's rule: below opset 11 its number is an attribute, of degree 0."""
    fills = attribute(node, "mode", "constant") == "constant"
    return NONLINEAR if fills and attribute(node, "value", 0.0) else rule


def _resolve_scatter(node: ir.Node, rule: Rule) -> Rule:
    """Return the rule of scattering: by a product the factors have degree 0, else the numbers that of the data."""
    return FIRST if attribute(node, "reduction", "none") == "mul" else rule


_REDUCED = {"add": SUMMED, "mul": MULTIPLIED, "max": GREATEST, "min": LEAST}


def _survive_scatter(node: ir.Node) -> Survivals:
    """Return the survival in scattering, by the reduction; without one, numbers are overwritten."""
    survival: Survival = _REDUCED.get(attribute(node, "reduction", "none"), PICKED)
    return {0: survival, 2: survival}


# --- the same numbers -------------------------------------------------------------------------------------------------
_VIEW = Trait.RESHAPE | Trait.SHARES_BUFFER | Trait.MOVE
row("Identity", FIRST, _VIEW | Trait.TOTAL | Trait.ELEMENTWISE, CLEAR, survival=KEPT)
row("Reshape Flatten Squeeze Unsqueeze", FIRST, _VIEW, CLEAR, survival=KEPT)
_PERMUTED = Trait.PERMUTE | Trait.MOVE
row("Transpose", FIRST, _PERMUTED | Trait.SHARES_BUFFER | Trait.TOTAL, CLEAR, survival=KEPT)
row("DepthToSpace SpaceToDepth ReverseSequence", FIRST, _PERMUTED, CLEAR, survival=KEPT)
row("Expand Tile", FIRST, Trait.REPEAT | Trait.REMOVABLE | Trait.MOVE, CLEAR, survival=KEPT)
_CAST = Trait.CAST | Trait.ELEMENTWISE | Trait.TOTAL | Trait.MOVE | Trait.REMOVABLE
row("Cast", FIRST, _CAST, resolve=_resolve_cast, survival=_survive_cast)
_like = Rule(Kind.LINEAR, data=(0,), ignored=(1,))
row("CastLike", _like, _CAST, like=1, resolve=_resolve_cast_like, survival=_survive_cast)
row("BitCast", NONLINEAR)

# --- parts and wholes -------------------------------------------------------------------------------------------------
row("Slice", FIRST, Trait.WINDOW | Trait.PART | Trait.MOVE | Trait.REMOVABLE, CLEAR, survival=PICKED)
row("Split", FIRST, Trait.WINDOW | Trait.MOVE | Trait.REMOVABLE, CLEAR, survival=KEPT)
row("Trilu Compress", FIRST, Trait.PART | Trait.MOVE, CLEAR, survival=PICKED)
row("CenterCropPad", FIRST, Trait.PART | Trait.MOVE, survival=PICKED)
row("Unique", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.MOVE)
row("TopK", Rule(Kind.LINEAR, data=(0,), outputs=(0,)), Trait.PART, CLEAR)
row("Concat", LINEAR, Trait.MOVE | Trait.REMOVABLE, CLEAR, survival=KEPT)
row("Pad", Rule(Kind.LINEAR, data=(0, 2)), Trait.MOVE | Trait.REMOVABLE, CLEAR, resolve=_resolve_pad, survival=PICKED)

# --- by index ---------------------------------------------------------------------------------------------------------
_gathered = Trait.PART | Trait.MOVE | Trait.INDEXES_AXIS
row("Gather", FIRST, _gathered | Trait.WINDOW, CLEAR, survival=PICKED)
row("GatherElements", FIRST, _gathered, CLEAR, survival=PICKED)
row("GatherND", FIRST, Trait.PART | Trait.MOVE | Trait.INDEXES_AXES, CLEAR, survival=PICKED)
_scattered = Rule(Kind.LINEAR, data=(0, 2))
_facts: dict[str, Any] = {"resolve": _resolve_scatter, "survival": _survive_scatter}
row("ScatterElements Scatter", _scattered, Trait.INDEXES_AXIS, _CONTRIBUTIONS, **_facts)
row("ScatterND", _scattered, Trait.INDEXES_AXES, _CONTRIBUTIONS, **_facts)
row("TensorScatter", Rule(Kind.LINEAR, data=(0, 1)), survival=PICKED)
row("OneHot", Rule(Kind.LINEAR, data=(2,)), survival=WEIGHTED)
row("MaxUnpool Col2Im", FIRST, casting=_CONTRIBUTIONS, survival=WEIGHTED)
