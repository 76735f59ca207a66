"""The columns of the table of operators: degree rules, traits, the lists of mixed precision, and survival."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

__all__ = [
    "ALL",
    "ALLOW",
    "CLEAR",
    "FIRST",
    "INFER",
    "KINDS",
    "LINEAR",
    "LOST",
    "NONLINEAR",
    "CastRule",
    "Colour",
    "Fate",
    "Kind",
    "Rule",
    "Survival",
    "Trait",
    "deny",
    "infer",
]

# --- degrees ----------------------------------------------------------------------------------------------------------

# The *degree* of a value is the power of a symbol S > 0 that it is multiplied by when some values of the graph are
# multiplied by S: 0 for values that S does not touch, 1 for a gradient of a scaled loss. Positive homogeneity counts:
# since S > 0, Relu, Abs, Max and pooling keep the degree of their operands.

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


# --- traits -----------------------------------------------------------------------------------------------------------


class Trait(enum.Flag):
    """A property of an operator."""

    NONE = 0

    # --- the result, compared with the first operand ---
    RESHAPE = enum.auto()  # its elements in their order, whatever the shape
    CAST = enum.auto()  # its elements in another type
    PERMUTE = enum.auto()  # its elements in another order
    REPEAT = enum.auto()  # its elements, each at least once
    SIGN = enum.auto()  # its elements or their negatives, element by element
    WINDOW = enum.auto()  # neighbours along an axis, as an attribute or other operands say
    PART = enum.auto()  # a part of its elements, others are left out
    MOVE = enum.auto()  # numbers of the data operands, in whatever arrangement
    ELEMENTWISE = enum.auto()  # each element follows from the elements at its place alone, broadcasting included
    COMMUTATIVE = enum.auto()  # the same, whatever the order of the operands
    BOUND = enum.auto()  # the numbers of an operand, or bounds that they exceed
    FINITENESS_TEST = enum.auto()  # the result says whether the operand is finite
    REDUCTION = enum.auto()  # one number for all numbers along some axes

    # --- effects ---
    RANDOM = enum.auto()  # draws random numbers
    WRITES_INPUT = enum.auto()  # writes into the buffer of an input
    EFFECT = enum.auto()  # takes part in a step even if nothing reads its outputs: its effect is on its inputs
    ACCUMULATOR = enum.auto()  # adds to a buffer, or assigns to it
    TOTAL = enum.auto()  # gives a result for all operands of its types, whatever their shapes
    TOTAL_BY_AXES = enum.auto()  # gives a result if its axes are valid
    TOTAL_BY_SHAPES = enum.auto()  # gives a result if the shapes of its operands agree

    # --- buffers in ONNX Runtime ---
    SHARES_BUFFER = enum.auto()  # the result may be in the buffer of an operand
    REMOVABLE = enum.auto()  # nodes that change nothing are removed: casts to the same type, slices of everything
    REMOVABLE_BY_CONDITION = enum.auto()  # they are if the condition is a constant
    REMOVABLE_BY_FACTOR = enum.auto()  # they are if the other operand is a constant
    READS_FIRST = enum.auto()  # kernels read an element of each operand before they write it, and never again

    # --- the second input holds indices ---
    INDEXES_AXIS = enum.auto()  # into the axis of the first that an attribute names
    INDEXES_AXES = enum.auto()  # into several axes of the first, after `batch_dims`

    VIEW = RESHAPE | CAST
    EXACT = RESHAPE | CAST | PERMUTE | REPEAT | SIGN  # no number becomes finite or stops being so


# --- mixed precision --------------------------------------------------------------------------------------------------

# The lists are those of TensorFlow's graph rewrite (grappler's auto_mixed_precision), carried over to ONNX and to the
# gradient operators of ONNX Runtime:
#
# - allow: always in float16. They are where the time goes, and hardware adds up their products in float32.
# - infer: safe in float16, but not worth a cast; in float16 between allowed operators, unless the result of a denied
#   one reaches them.
# - clear: they move, select or compare numbers and round none; in float16 wherever that saves a cast.
# - deny: never in float16, each for a reason.


class Colour(enum.Enum):
    """The list that an operator is on."""

    ALLOW = "allow"
    INFER = "infer"
    CLEAR = "clear"
    DENY = "deny"


@dataclasses.dataclass(frozen=True)
class CastRule:
    """The treatment of an operator by mixed precision.

    Attributes:
        colour: its list.
        reason: for a denied one, why.
        wide_inputs: operands that stay float32 where the operator is in float16: statistics, ratios.
        wide_outputs: results that do.
    """

    colour: Colour
    reason: str = ""
    wide_inputs: tuple[int, ...] = ()
    wide_outputs: tuple[int, ...] = ()


ALLOW = CastRule(Colour.ALLOW)
INFER = CastRule(Colour.INFER)
CLEAR = CastRule(Colour.CLEAR)


def infer(wide_inputs: tuple[int, ...] = (), wide_outputs: tuple[int, ...] = ()) -> CastRule:
    """Return the treatment of an operator on the infer list some of whose operands or results stay float32."""
    return CastRule(Colour.INFER, wide_inputs=wide_inputs, wide_outputs=wide_outputs)


def deny(reason: str) -> CastRule:
    """Return the treatment of an operator that stays float32."""
    return CastRule(Colour.DENY, reason)


# --- survival ---------------------------------------------------------------------------------------------------------

# The numbers that a result may hold where an operand holds an infinity or NaN. An overflow is harmless as long as every
# number that depends on it is non-finite, so that the finite check fails, or is the number that it would be without the
# overflow. A result may also leave the number out, as Slice does. The claims hold for the kernels of ONNX Runtime and
# for the reference evaluator of ONNX.


class Fate(enum.Flag):
    """A possible effect of a number that is not finite on a result."""

    NONE = 0
    PLUS = enum.auto()  # an element is infinity
    MINUS = enum.auto()  # an element is minus infinity
    NAN = enum.auto()  # an element is NaN
    GONE = enum.auto()  # no element is one of these: the number is left out, or lost
    BENT = enum.auto()  # a finite element depends on the number
    TOLD = enum.auto()  # a flag or an index depends on the number


KINDS = Fate.PLUS | Fate.MINUS | Fate.NAN
_LOST = Fate.GONE | Fate.BENT


class Survival(NamedTuple):
    """The possible effects of a single infinity, minus infinity or NaN in an operand, whatever the other operands."""

    plus: Fate
    minus: Fate
    nan: Fate

    def through(self, kinds: Fate) -> Fate:
        """Return the possible effects of some kinds of numbers."""
        fate = Fate.NONE
        if Fate.PLUS in kinds:
            fate |= self.plus
        if Fate.MINUS in kinds:
            fate |= self.minus
        return fate | self.nan if Fate.NAN in kinds else fate

    @property
    def bends(self) -> bool:
        """True if a finite element may depend on some kind of number."""
        return any(Fate.BENT in fate for fate in self)

    @property
    def shows(self) -> bool:
        """True if an element of the result is not finite, whatever the kind of number."""
        return all(fate & KINDS and Fate.GONE not in fate for fate in self)

    def with_fate(self, fate: Fate) -> Survival:
        """Return the survival with a further possible effect of each kind."""
        return Survival(self.plus | fate, self.minus | fate, self.nan | fate)


# Anything may become of a lost number.
LOST = Survival(_LOST, _LOST, _LOST)
UNREAD = Survival(Fate.GONE, Fate.GONE, Fate.GONE)
KEPT = Survival(Fate.PLUS, Fate.MINUS, Fate.NAN)
NEGATED = Survival(Fate.MINUS, Fate.PLUS, Fate.NAN)
SIZE = Survival(Fate.PLUS, Fate.PLUS, Fate.NAN)
UNDEFINED = Survival(Fate.NAN, Fate.NAN, Fate.NAN)
# Terms of a sum: infinity minus infinity is NaN. Factors: so is infinity times zero.
SUMMED = KEPT.with_fate(Fate.NAN)
SUBTRACTED = NEGATED.with_fate(Fate.NAN)
MULTIPLIED = Survival(KINDS, KINDS, Fate.NAN)
TESTED = Survival(Fate.TOLD, Fate.TOLD, Fate.TOLD)
# Bounds on both sides, or on one; kernels of Max, Min and pooling may return another number in place of NaN.
BOUNDED = Survival(_LOST, _LOST, Fate.NAN)
BOUNDED_BELOW = Survival(Fate.PLUS, _LOST, Fate.NAN)
GREATEST = Survival(Fate.PLUS | Fate.NAN, _LOST, _LOST)
LEAST = Survival(_LOST, Fate.MINUS | Fate.NAN, _LOST)
# An element that may be left out.
PICKED = KEPT.with_fate(Fate.GONE)
WEIGHTED = MULTIPLIED.with_fate(Fate.GONE)
