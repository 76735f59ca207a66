"""The table of operators: one row for each, with all that is known of it.

A row is added by `row`, in the module of its subject. To teach graphscale a new operator, add a line there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import onnx_ir as ir

from graphscale.operators.columns import ALL, LOST, UNREAD, CastRule, Kind, Rule, Survival, Trait

__all__ = [
    "MICROSOFT",
    "OPERATORS",
    "Operator",
    "Optimizer",
    "attribute",
    "constant_tensor",
    "has_trait",
    "may_bend",
    "nodes_with",
    "operators_with",
    "optimizer_of",
    "overwritten_inputs",
    "row",
    "rule_of",
    "survival_of",
    "writing_nodes",
    "written_inputs",
]

MICROSOFT = "com.microsoft"
# The domain of the optimizers that ONNX defines.
PREVIEW_TRAINING = "ai.onnx.preview.training"

# Gives the rule of one node, from its attributes and types and from the rule of its operator.
Resolver = Callable[[ir.Node, Rule], Rule]

# For each operand, or for all that the degree rule speaks of; a function gives it where attributes or constants matter.
Survivals = Survival | Mapping[int, Survival]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An operator that updates weights.

    Attributes:
        states: `{output: input}`: each output that is the next value of an input.
        update_signal: the input that, if false, makes a step do nothing.
        signal_shape: the shape of that input.
        ignores_signal: the CPU kernel updates the weights whatever that input says.
        group: from this output on, states come in groups of `(inputs from, group size)`, as in LambOptimizer.
        inputs: the names of the inputs in an optimizer model of ONNX Runtime.
    """

    states: Mapping[int, int] = dataclasses.field(default_factory=dict)
    update_signal: int | None = None
    signal_shape: tuple[int, ...] = ()
    ignores_signal: bool = False
    group: tuple[int, int, int] | None = None
    inputs: tuple[str, ...] = ()

    def source(self, output: int) -> int | None:
        """Return the input that an output is the next value of, or None."""
        if self.group is not None and output >= self.group[0]:
            first_output, first_input, size = self.group
            member = output - first_output
            # The second of a group is the gradient.
            return None if member % size == 1 else first_input + member
        return self.states.get(output)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
        rule: the degree rule.
        traits: its other properties.
        casting: its treatment in mixed precision; None if it stays float32 for lack of knowledge.
        resolve: gives the degree rule of a node whose attributes or types change it.
        dtype: the type of its results, where it follows from the operator alone.
        like: the operand whose type the results have, where it is not that of the data.
        optimizer: the roles of its inputs and outputs, if it updates weights.
        written: `{input: output}`: the running statistics that it writes into the buffer of an input.
        overwritten: the inputs where kernels of ONNX Runtime put running statistics if `training_mode` is set, though
            the operator's definition says nothing of it.
        survival: the survival of infinities and NaN in its operands; those without one lose them.
        class_axis: for a loss whose second input holds class numbers: the axis of the first input that they index.
    """

    rule: Rule
    traits: Trait = Trait.NONE
    casting: CastRule | None = None
    resolve: Resolver | None = None
    dtype: ir.DataType | None = None
    like: int | None = None
    optimizer: Optimizer | None = None
    written: Mapping[int, int] = dataclasses.field(default_factory=dict)
    overwritten: tuple[int, ...] = ()
    survival: Survivals | Callable[[ir.Node], Survivals] = LOST
    class_axis: int | None = None


# By domain and name; onnx_ir calls the domain ai.onnx "".
OPERATORS: dict[tuple[str, str], Operator] = {}


def row(
    names: str,
    rule: Rule,
    traits: Trait = Trait.NONE,
    casting: CastRule | None = None,
    *,
    domain: str = "",
    **facts: Any,
) -> None:
    """Add a row for each of some operators that have everything in common.

    Raises:
        ValueError: an operator has a row already.
    """
    for name in names.split():
        if (domain, name) in OPERATORS:
            raise ValueError(f"two rows for {domain or 'ai.onnx'}.{name}")
        OPERATORS[domain, name] = Operator(rule, traits, casting, **facts)


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of a constant: an initializer that is no graph input, or the output of a Constant node."""
    if value is None:
        return None
    if value.is_initializer():
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain:
        return None
    held = node.attributes.get("value")
    # `get_const_tensor` names this tensor, also in a ModelProto that shares it.
    return ir.convenience.get_const_tensor(value) if held is None or held.is_ref() else held.as_tensor()


def rule_of(node: ir.Node) -> Rule | None:
    """Return the degree rule of a node, or None if its operator is unknown."""
    operator = OPERATORS.get((node.domain, node.op_type))
    if operator is None:
        return None
    return operator.rule if operator.resolve is None else operator.resolve(node, operator.rule)


def survival_of(node: ir.Node, index: int) -> Survival:
    """Return the survival of infinities and NaN in an operand of a node; an unknown operator loses them."""
    operator = OPERATORS.get((node.domain, node.op_type))
    if operator is None:
        return LOST
    rule, survival = operator.rule, operator.survival
    if rule.kind is Kind.SHAPE or index in rule.ignored:
        return UNREAD
    if callable(survival):
        survival = survival(node)
    if not isinstance(survival, Survival):
        return survival.get(index, LOST)
    return survival if rule.data == ALL or index in rule.data or index in rule.addends else LOST


def may_bend(node: ir.Node) -> bool:
    """Return whether an overflow in an operand that the degree rule speaks of may become a wrong finite number."""
    rule = rule_of(node)
    return rule is None or any(survival_of(node, i).bends for i in rule.operands(len(node.inputs)))


@functools.cache
def operators_with(traits: Trait) -> frozenset[tuple[str, str]]:
    """Return the operators, by domain and name, that have at least one of some traits."""
    return frozenset(key for key, operator in OPERATORS.items() if operator.traits._value_ & traits._value_)


@functools.cache
def _writing_operators() -> frozenset[tuple[str, str]]:
    rows = OPERATORS.items()
    return frozenset(key for key, row in rows if row.optimizer is not None or row.written or row.overwritten)


def nodes_with(nodes: Iterable[ir.Node], traits: Trait) -> list[ir.Node]:
    """Return the nodes whose operators have at least one of some traits."""
    return _nodes_of(nodes, operators_with(traits))


def writing_nodes(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """Return the nodes that update weights, or may write running statistics into the buffers of their inputs."""
    return _nodes_of(nodes, _writing_operators())


def _nodes_of(nodes: Iterable[ir.Node], operators: Collection[tuple[str, str]]) -> list[ir.Node]:
    names = {name for _, name in operators}  # asked first: few nodes have one of them
    return [node for node in nodes if node.op_type in names and (node.domain, node.op_type) in operators]


def has_trait(node: ir.Node, traits: Trait) -> bool:
    """Return whether a node's operator has at least one of some traits."""
    operator = OPERATORS.get((node.domain, node.op_type))
    # The bits themselves: the operators of enum.Flag take long, and all nodes are asked.
    return operator is not None and operator.traits._value_ & traits._value_ != 0


def optimizer_of(node: ir.Node) -> Optimizer | None:
    """Return the roles of a node's inputs and outputs if it updates weights, else None."""
    operator = OPERATORS.get((node.domain, node.op_type))
    return None if operator is None else operator.optimizer


def written_inputs(node: ir.Node) -> Mapping[int, int]:
    """Return `{input: output}` of the running statistics that a node writes into the buffer of an input."""
    operator = OPERATORS.get((node.domain, node.op_type))
    return {} if operator is None else operator.written


def overwritten_inputs(node: ir.Node) -> tuple[int, ...]:
    """Return the inputs whose buffers a kernel of a node may overwrite with running statistics."""
    operator = OPERATORS.get((node.domain, node.op_type))
    if operator is None or not (operator.written or operator.overwritten):
        return ()
    return (*operator.written, *(operator.overwritten if attribute(node, "training_mode", 0) else ()))


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Return the value of a node's attribute, or the default that its operator prescribes."""
    held = node.attributes.data.get(name)
    return default if held is None else held.value
