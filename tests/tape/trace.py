"""Tracing: values with their numbers, the nodes that compute them, and the record that the backward pass reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.tape.derivatives import DIFFERENTIABLE, pull_of
from tests.tape.evaluate import evaluate


@dataclasses.dataclass(eq=False, repr=False)
class Var:
    """A value: its numbers, what kind of thing it is, and the node that computes it.

    Attributes:
        array: the numbers, float64 for what is float32 in the model.
        kind: "input", "weight", "state", "constant" or "computed".
        node: the node that computes it.
        needs: whether it depends on a weight that is trained.
    """

    array: np.ndarray[Any, Any]
    kind: str = "computed"
    node: Node | None = None
    needs: bool = False

    def __repr__(self) -> str:
        return f"Var({self.node.op_type if self.node else self.kind} {list(self.shape)})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def largest(self) -> float:
        return float(np.abs(self.array).max())


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the graph to be; every operator here has one output."""

    op_type: str
    inputs: tuple[Var, ...]
    attributes: dict[str, Any]
    output: Var


@dataclasses.dataclass(frozen=True)
class Style:
    """The manner of an exporter in the backward pass.

    Attributes:
        seed: "one" is a constant 1.0 that the chain rule starts from; "folded" multiplies constants with each other;
            "simplified" drops factors of 1 as well, so that a cotangent may be a forward value itself.
        sums: the operator that adds several cotangents of one value.
        transposed_gemm: Gemm with transA or transB in place of Transpose and MatMul.
        recompute: share of the forward pass that is computed again instead of kept: "none", "some" or "all".
    """

    seed: str = "one"
    sums: str = "Add"
    transposed_gemm: bool = False
    recompute: str = "none"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One differentiable step: `pull(cotangent, index)` is the cotangent of input `index`."""

    inputs: tuple[Var, ...]
    output: Var
    pull: Callable[[Var, int], Var]


class Tape:
    """Writes nodes, evaluates them at once, and differentiates what it has recorded.

    Attributes:
        nodes: all nodes, in the order they were written.
        leaves: inputs, weights and state, in the order they were made.
        forward: the values that the forward pass computes.
        cotangents: results of the chain rule: for each value with a cotangent, that cotangent.
        contractions: the results of all products over an axis that have a cotangent for a factor.
        bare: whether such a cotangent is an input of the graph itself.
    """

    def __init__(self, choices: random.Random, numbers: np.random.Generator, style: Style) -> None:
        self.choices = choices
        self.numbers = numbers
        self.style = style
        self.nodes: list[Node] = []
        self.leaves: list[Var] = []
        self.forward: frozenset[Var] = frozenset()
        self.cotangents: dict[Var, Var] = {}
        self.contractions: list[Var] = []
        self.bare = False
        self.in_backward = False
        self._entries: list[Entry] = []
        self._recording = True
        self._simplifying = True
        self._recomputed: dict[Var, Var] = {}

    def flag(self, one_in: int = 2) -> bool:
        return self.choices.randrange(one_in) == one_in - 1

    # --- writing ----------------------------------------------------------------------------------------------------

    def leaf(self, array: Any, kind: str, needs: bool = False) -> Var:
        """An input of the graph."""
        value = Var(_as_array(array), kind, needs=needs)
        self.leaves.append(value)
        return value

    def op(self, op_type: str, *inputs: Any, **attributes: Any) -> Var:
        """Write one node; numbers and arrays among the inputs are constants."""
        operands = tuple(i if isinstance(i, Var) else Var(_as_array(i), "constant") for i in inputs)
        array = evaluate(op_type, [v.array for v in operands], attributes)
        if self.in_backward and self._simplifying and self.style.seed != "one":
            if all(v.kind == "constant" for v in operands):
                return Var(array, "constant")
            if self.style.seed == "simplified" and (same := _without_effect(op_type, operands, array)):
                return same
        result = Var(array, needs=any(v.needs for v in operands))
        result.node = Node(op_type, operands, attributes, result)
        self.nodes.append(result.node)
        if self._recording and result.needs and op_type in DIFFERENTIABLE:
            self._entries.append(Entry(operands, result, pull_of(self, result.node)))
        return result

    def stop(self, value: Var) -> Var:
        """A value that the chain rule takes as a constant."""
        value.needs = False
        return value

    def mul(self, a: Any, b: Any) -> Var:
        """A product, in either order."""
        return self.op("Mul", b, a) if self.flag() else self.op("Mul", a, b)

    def reduce(self, op_type: str, x: Var, axes: tuple[int, ...] | None = None, keepdims: int = 0) -> Var:
        """A reduction; None for all axes."""
        given = {} if axes is None else {"axes": axes}
        return self.op(op_type, x, keepdims=keepdims, **given)

    def transpose(self, x: Var) -> Var:
        """Swap the last two axes."""
        order = list(range(x.array.ndim))
        order[-2:] = order[-1], order[-2]
        return self.op("Transpose", x, perm=order)

    @contextmanager
    def custom(self) -> Iterator[Callable[[tuple[Var, ...], Var, Callable[[Var, int], Var]], Var]]:
        """Nodes with a derivative of their own: `record(inputs, output, pull)` within the block says which."""
        outer, self._recording = self._recording, False

        def record(inputs: tuple[Var, ...], output: Var, pull: Callable[[Var, int], Var]) -> Var:
            if outer and output.needs:
                self._entries.append(Entry(inputs, output, pull))
            return output

        try:
            yield record
        finally:
            self._recording = outer

    # --- the backward pass ------------------------------------------------------------------------------------------

    def contract(self, op_type: str, *inputs: Any, **attributes: Any) -> Var:
        """A product over an axis with a cotangent in it."""
        result = self.op(op_type, *inputs, **attributes)
        if result.node is not None and result.node.op_type == op_type:
            self.contractions.append(result)
        return result

    def saved(self, value: Var) -> Var:
        """A forward value for use in the backward pass: the one that was kept, or computed again."""
        how = self.style.recompute
        if how == "none" or value.node is None or (how == "some" and self.flag()):
            return value
        if value not in self._recomputed:
            node = value.node
            operands = [self.saved(operand) for operand in node.inputs]
            self._simplifying = False  # The same node again, unchanged.
            self._recomputed[value] = self.op(node.op_type, *operands, **node.attributes)
            self._simplifying = True
        return self._recomputed[value]

    def backward(self, loss: Var) -> None:
        """Write the backward pass of a scalar loss; `cotangents` has the result."""
        self.in_backward, self._recording = True, False
        self.forward = frozenset(node.output for node in self.nodes)
        pending: dict[Var, list[Var]] = {loss: [Var(np.ones(loss.shape), "constant")]}
        for entry in reversed(self._entries):
            if entry.output not in pending:
                continue
            cotangent = self._total(pending.pop(entry.output))
            self.bare |= cotangent.kind == "input"
            self.cotangents[entry.output] = cotangent
            for i, operand in enumerate(entry.inputs):
                if operand.needs:
                    share = entry.pull(cotangent, i)
                    assert share.shape == operand.shape, (entry.output.node, i, share.shape, operand.shape)
                    pending.setdefault(operand, []).append(share)
        self.cotangents.update((value, self._total(shares)) for value, shares in pending.items())
        self.in_backward = False

    def _total(self, shares: list[Var]) -> Var:
        if len(shares) > 1 and self.style.sums == "Sum":
            return self.op("Sum", *shares)
        total = shares[0]
        for share in shares[1:]:
            total = self.op("Add", total, share)
        return total


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.kind == "f":
        # Numbers that float32 holds: what is evaluated here is what the runtime evaluates, to within rounding.
        array = array.astype(np.float32).astype(np.float64)
    return array


def _without_effect(op_type: str, operands: tuple[Var, ...], result: np.ndarray[Any, Any]) -> Var | None:
    """The operand that a product with 1, or a sum with 0, leaves unchanged."""
    if op_type in ("Mul", "Div", "Add", "Sub"):
        neutral = 1.0 if op_type in ("Mul", "Div") else 0.0
        for value, other in ((operands[0], operands[1]), (operands[1], operands[0])):
            commutes = op_type in ("Mul", "Add") or value is operands[0]
            if commutes and other.kind == "constant" and (other.array == neutral).all() and value.shape == result.shape:
                return value
    if op_type in ("Expand", "Reshape") and operands[0].shape == result.shape:
        return operands[0]
    return None
