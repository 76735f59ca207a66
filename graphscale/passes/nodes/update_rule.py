"""The rule of the dynamic loss scale as ONNX nodes; `graphscale.policy.dynamic_rule` defines it.

As a model-local function `graphscale::UpdateLossScale` it is one node whose attributes show the policy's numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.graph.builder import Builder
from graphscale.graph.types import dtype_of
from graphscale.passes.nodes.rule_nodes import RuleNodes
from graphscale.policy import dynamic_rule
from graphscale.policy.dynamic_rule import DynamicRule
from graphscale.policy.names import ScaledValue

__all__ = ["DOMAIN", "FUNCTION", "UpdatedScale", "add_update_rule"]

DOMAIN, FUNCTION = "graphscale", "UpdateLossScale"

# Functions came with this IR version; the operators of the rule have their present form since this opset.
_FUNCTION_IR_VERSION, _FUNCTION_OPSET = 8, 12


@dataclasses.dataclass(frozen=True)
class UpdatedScale:
    """The results of the rule in a graph.

    Attributes:
        node: the node that computes the rule.
        next: the next value of each state, by its role.
        stuck: a scalar bool value, true if the scale is stuck; None for a policy without a reaction.
    """

    node: ir.Node
    next: dict[ScaledValue, ir.Value]
    stuck: ir.Value | None


def add_update_rule(
    build: Builder,
    model: ir.Model | None,
    rule: DynamicRule,
    states: Mapping[ScaledValue, ir.Value],
    finite: ir.Value,
    *,
    in_place: bool,
) -> UpdatedScale:
    """Add the rule to a graph: as one call of a model-local function, or as nodes.

    Args:
        build: the builder of nodes in the main graph.
        model: the model, which gets the function if its IR version and opset have functions; None for a bare graph.
        rule: the rule.
        states: the present values of the roles of `rule.carried`: scalars, float32 the scale, int64 or float32
            the counts.
        finite: the result of the finite check, a scalar bool value.
        in_place: True for states written in place. Then a function's body, where order-writes does not search, may not
            read them: the next state need not depend on the flag of a stuck scale.
    """
    hides_readers = in_place and rule.on_stuck != "hold"
    opset = 0 if model is None else model.opset_imports.get("", 0)
    if model is None or model.ir_version < _FUNCTION_IR_VERSION or opset < _FUNCTION_OPSET or hides_readers:
        build = dataclasses.replace(build, prefix="update", shape=())
        nodes = RuleNodes(build.op, lambda name, dtype: build.number(getattr(rule, name), dtype), rule)
        results: Sequence[ir.Value] = nodes.results(states, finite)
    else:
        results = _call(build, model, rule, states, finite)
    node = results[0].producer()
    assert node is not None
    stuck = None if rule.on_stuck == "hold" else results[-1]
    return UpdatedScale(node, dict(zip(states, results, strict=False)), stuck)


def _call(
    build: Builder, model: ir.Model, rule: DynamicRule, states: Mapping[ScaledValue, ir.Value], finite: ir.Value
) -> Sequence[ir.Value]:
    """Add a call of the function, and the function itself if the model lacks it."""
    if (DOMAIN, FUNCTION, "") not in model.functions:
        model.functions[DOMAIN, FUNCTION, ""] = _function(rule, states, model.opset_imports[""])
    names: dict[ScaledValue, str] = {ScaledValue.LOSS_SCALE: "next_scale", ScaledValue.GOOD_STEPS: "next_count"}
    outputs = [(names.get(role, f"next_{role}"), dtype_of(state), ()) for role, state in states.items()]
    if rule.on_stuck != "hold":
        outputs.append((ScaledValue.STUCK.wanted, ir.DataType.BOOL, ()))
    operands = [*states.values(), finite]
    return build.node(FUNCTION, operands, outputs, domain=DOMAIN, attributes=_numbers(rule)).outputs


def _numbers(rule: DynamicRule) -> dict[str, int | float]:
    """Return the numbers of the policy that the rule needs, as attributes of the node."""
    needed = {
        "increment_period": True,
        "multiplier": True,
        "growth_factor": rule.growth_factor is not None,
        "backoff_factor": rule.backoff_factor is not None,
        "min_loss_scale": rule.min_loss_scale != 1,
        "max_loss_scale": rule.max_loss_scale is not None,
        "hysteresis": rule.counts_hysteresis,
        "max_consecutive_skips": rule.counts_bad_steps,
        "initial_loss_scale": rule.on_stuck == "reset",
    }
    return {name: getattr(rule, name) for name, is_needed in needed.items() if is_needed}


def _function(rule: DynamicRule, states: Mapping[ScaledValue, ir.Value], opset: int) -> ir.Function:
    numbers, nodes = _numbers(rule), list[ir.Node]()

    # The nodes of a function carry no mark, and their names need to be unique only in the function.
    def make(op_type: str, inputs: Sequence[ir.Value], *, dtype: ir.DataType, **attributes: Any) -> ir.Value:
        value = ir.val(f"{op_type.lower()}_{len(nodes)}", dtype, [])
        nodes.append(ir.node(op_type, inputs, attributes=attributes, outputs=[value], name=f"{op_type}_{len(nodes)}"))
        return value

    def attribute(name: str, dtype: ir.DataType) -> ir.Value:
        if dtype is ir.DataType.DOUBLE:
            # An attribute is float32: a float64 number is part of the function's body.
            return make("Constant", [], dtype=dtype, value=ir.tensor(np.asarray(numbers[name], np.float64)))
        kind, key, held = _kind(numbers[name])
        value = make("Constant", [], dtype=held)
        nodes[-1].attributes[key] = ir.RefAttr(key, name, kind)
        return value if dtype is held else make("Cast", [value], dtype=dtype, to=dtype)

    inputs = [ir.val(role, dtype_of(state), []) for role, state in states.items()]
    finite = ir.val(ScaledValue.ALL_FINITE.wanted, ir.DataType.BOOL, [])
    results = RuleNodes(make, attribute, rule).results(dict(zip(states, inputs, strict=True)), finite)
    for name, value in zip((*(f"next_{role}" for role in states), ScaledValue.STUCK.wanted), results, strict=False):
        value.name = name
    graph = ir.Graph([*inputs, finite], results, nodes=nodes, opset_imports={"": opset}, name=FUNCTION)
    graph.doc_string = dynamic_rule.__doc__
    attributes = [ir.Attr(name, _kind(number)[0], None) for name, number in numbers.items()]
    return ir.Function(DOMAIN, FUNCTION, graph=graph, attributes=attributes)


def _kind(number: float) -> tuple[ir.AttributeType, str, ir.DataType]:
    """Return the kind of an attribute with a number, Constant's attribute for it, and the dtype of the result."""
    if isinstance(number, int):
        return ir.AttributeType.INT, "value_int", ir.DataType.INT64
    return ir.AttributeType.FLOAT, "value_float", ir.DataType.FLOAT
