"""The refusals of bodies: a plan of edits that is right in the first round of a body must be so in all of them."""

from __future__ import annotations

import onnx_ir as ir

from graphscale.analysis.edits import Plan, Unscaling
from graphscale.errors import LossError, UnsupportedModelError
from graphscale.flow.degree import ZERO, Conflict
from graphscale.flow.flat_graph import FlatGraph
from graphscale.graph.values import is_float, is_scalar, node_name, op_name, value_label

__all__ = ["check_bodies", "refuse_losses"]

_REMEDY = "let the gradients leave the body, and export their readers behind it, one step per run"


def check_bodies(flat: FlatGraph, plan: Plan) -> None:
    """Check that the scale comes out in the main graph, and evaluate all degrees in any number of rounds.

    Raises:
        UnsupportedModelError: the scale would come out inside of a body, or does not cancel in later rounds.
    """
    for unscaling in sorted(plan.unscaled.values(), key=lambda unscaling: flat.position(unscaling.value)):
        _check_unscaling(flat, unscaling)
    for node in flat.graph:
        result = plan.evaluate(node)
        if isinstance(result, Conflict):
            raise _refuse(node, f"{_describe(node, result)}; {_REMEDY}")
        for value, degree in zip(node.outputs, result, strict=True):
            plan.flow.elements[value] = plan.write(value, degree)
    for value in flat.graph.outputs:
        if plan.output(value) not in (0, ZERO):
            raise UnsupportedModelError(f"output {value.name!r} would be scaled by a body; {_REMEDY}")


def _check_unscaling(flat: FlatGraph, unscaling: Unscaling) -> None:
    value = unscaling.value
    if (owner := _owner(flat, value)) is not None:
        reader = next((node for node in flat.consumers(value) if node not in flat.entries), None)
        where = "" if reader is None else f" at node {node_name(reader)!r}"
        raise _refuse(owner, f"uses the gradient {value.name!r} itself{where}, where no step can be skipped; {_REMEDY}")
    for owner in filter(None, (_owner(flat, whole) for whole in unscaling.wholes)):
        raise _refuse(owner, f"adds to the gradient {value.name!r}; {_REMEDY}")


def _owner(flat: FlatGraph, value: ir.Value) -> ir.Node | None:
    return flat.owners.get(value.graph) if isinstance(value.graph, ir.Graph) else None


def _refuse(node: ir.Node, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the body of {op_name(node)} node {node_name(node)!r} {what}")


def _describe(node: ir.Node, conflict: Conflict) -> str:
    """Describe a conflict in a node from rounds after the first, or from branches."""
    if conflict.node is not node:
        return f"does not keep the loss scale: {conflict}"
    if node.op_type == "If":
        return "gives a scaled gradient by one branch, and by the other one numbers that do not scale"
    return "carries a scaled gradient in a value that does not begin with zeros"


def refuse_losses(flat: FlatGraph) -> None:
    """Refuse a graph whose body gives a loss for each round.

    Raises:
        LossError: the graph has such an output.
    """
    for value in flat.graph.outputs:
        node, result = value.producer(), flat.across.get(value)
        if node is not None and result is not None and is_float(result) and is_scalar(result) and not is_scalar(value):
            raise LossError(
                f"no output is one number that could be the loss; {value_label(value)} has one for each round of "
                f"the body of {op_name(node)} node {node_name(node)!r}: export their mean beside it, and {_REMEDY}"
            )
