"""Constants that a small type cannot hold, and values with only their numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from graphscale.graph.values import constant_tensor
from graphscale.passes.casting.precision_plan import PrecisionPlan

__all__ = ["Misfit", "find_misfits"]

# Limit of elements; larger constants are read only from memory: weights are never loaded for a check.
_LOOK = 2**16


@dataclasses.dataclass(frozen=True)
class Misfit:
    """The reason why a constant must not be rounded to a small type.

    Attributes:
        reason: a sentence for the report.
        overflows: True if a finite number would become infinite; else a nonzero number would become zero.
    """

    reason: str
    overflows: bool


def find_misfits(plan: PrecisionPlan, moving: set[ir.Node], dtype: ir.DataType) -> dict[ir.Value, Misfit]:
    """Find the constants that do not fit into a small type, and values with only their numbers.

    Args:
        plan: the plan.
        moving: the nodes that move numbers without changing them.
        dtype: float16 or bfloat16. An infinity is exact in both, and fits.
    """
    unfit: dict[ir.Value, Misfit] = {}
    derived: set[ir.Value] = set()  # values with only numbers of constants

    def look(value: ir.Value, tensor: ir.TensorProtocol) -> None:
        derived.add(value)
        problem = _misfit(value, tensor, dtype)
        if problem is not None:
            unfit[value] = problem

    for value, tensor in plan.constants.items():
        look(value, tensor)
    for node, operator in plan.operators.items():
        if operator == ("", "ConstantOfShape") and "value" in node.attributes:
            look(node.outputs[0], node.attributes["value"].as_tensor())
        elif operator == ("", "Cast") and node.outputs[0] in plan.floats:
            cast = constant_tensor(node.inputs[0])
            if cast is not None:
                look(node.outputs[0], cast)
        elif node in moving and (operands := plan.floats.intersection(node.inputs)) and derived.issuperset(operands):
            derived.update(node.outputs)
            problem = next((unfit[v] for v in node.inputs if v in operands and v in unfit), None)
            if problem is not None:
                unfit.update(dict.fromkeys(node.outputs, problem))
    return unfit


def _misfit(value: ir.Value, tensor: ir.TensorProtocol, dtype: ir.DataType) -> Misfit | None:
    if isinstance(tensor, ir.ExternalTensor) and tensor.size > _LOOK:
        return None
    array = tensor.numpy()
    if array.dtype.kind not in "fiu":
        return None
    array = array.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = array.astype(dtype.numpy()).astype(np.float32)
    over = np.isfinite(array) & np.isinf(rounded)
    under = (rounded == 0) & (array != 0)
    if not (over.any() or under.any()):
        return None
    number = float(array[over if over.any() else under].flat[0])
    reason = f"the constant {value.name!r} holds {number:g}, which {dtype.name.lower()} cannot hold"
    return Misfit(reason, bool(over.any()))
