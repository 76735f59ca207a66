"""The kinds of degree rules: the effect of an operator on the degree of the values that flow through it.

The *degree* of a value is the power of a symbol S > 0 that it is multiplied by when some values of the graph are
multiplied by S: 0 for values that S does not touch, 1 for a gradient of a scaled loss. Positive homogeneity counts:
since S > 0, Relu, Abs, Max and pooling keep the degree of their operands.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["ALL", "FIRST", "LINEAR", "NONLINEAR", "Kind", "Rule"]

# Stands for "all inputs" (or "all outputs") of an operator with a variable number of them.
ALL: tuple[int, ...] = (-1,)


class Kind(enum.Enum):
    """The effect of an operator on degrees."""

    LINEAR = "the data operands must agree in degree, and the result has it"
    PRODUCT = "the degrees of the factors add up"
    QUOTIENT = "the degree of the divisor is subtracted"
    POWER = "the degree of the operand is multiplied by a number"
    COMPARE = "the operands must agree in degree; the result has degree 0"
    SHAPE = "the result depends on the shapes of the operands alone"
    DEGREE_0 = "the result has degree 0, whatever goes in"
    NONLINEAR = "everything that goes in must have degree 0"
    BODY = "the degrees follow from the operator's subgraphs"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The degree rule of an operator.

    Attributes:
        kind: its effect on degrees.
        data: the operands that the rule speaks of; all others must have degree 0.
        addends: operands that are added to the result of a product, such as the bias of Gemm.
        ignored: operands whose numbers have no effect, such as the second one of CastLike.
        outputs: the outputs that have the resulting degree; all others have degree 0.
        contraction: sums products over an axis (MatMul, Conv): where float16 gains, and where coverage is measured.
        gradient: an operator of a backward pass; `data` is its cotangent, known for certain.
        power: the factor of a `POWER`.
        unscaled_first: a plan takes the scale out of the operands, although the operator keeps it.
    """

    kind: Kind
    data: tuple[int, ...] = ALL
    addends: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ALL
    contraction: bool = False
    gradient: bool = False
    power: float = 1.0
    unscaled_first: bool = False

    def operands(self, count: int) -> tuple[int, ...]:
        """Return the indices of the data operands of a node with `count` inputs."""
        return tuple(range(count)) if self.data == ALL else tuple(i for i in self.data if i < count)

    @property
    def bends(self) -> bool:
        """True if the results are no linear function of the operands together."""
        return self.kind in (Kind.NONLINEAR, Kind.POWER)

    def has_degree(self, output: int) -> bool:
        """Return whether the output of this index has the resulting degree."""
        return self.outputs == ALL or output in self.outputs


FIRST = Rule(Kind.LINEAR, data=(0,))
LINEAR = Rule(Kind.LINEAR)
NONLINEAR = Rule(Kind.NONLINEAR)
