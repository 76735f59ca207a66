"""The properties of operators that graphscale asks for, besides degrees and casting."""

from __future__ import annotations

import enum

__all__ = ["Trait"]


class Trait(enum.Flag):
    """A property of an operator.

    The result, compared with the first operand:
        RESHAPE: its elements in their order, whatever the shape.
        CAST: its elements in another type.
        PERMUTE: its elements in another order.
        REPEAT: its elements, each at least once.
        SIGN: its elements or their negatives, element by element.
        PART: a part of its elements, others are left out.
        MOVE: numbers of the data operands, in whatever arrangement.
        ELEMENTWISE: each element follows from the elements at its place alone, broadcasting included.
        COMMUTATIVE: the same, whatever the order of the operands.
        BOUND: the numbers of an operand, or bounds that they exceed.
        REDUCTION: one number for all numbers along some axes.

    Numbers that are not finite:
        NONFINITE_OF_FIRST: each such element of the first operand makes an element of the result not finite.
        NONFINITE_OF_ALL: each such element of any operand does.
        LOSES_NAN: the kernels of ONNX Runtime may return another number where an operand holds a NaN.
        LOSES_INFINITY: an infinite element of an operand may give a finite result.
        FINITENESS_TEST: the result says whether its operand is finite.

    Effects:
        RANDOM: draws random numbers.
        WRITES_INPUT: writes into the buffer of an input.
        EFFECT: its effect is on its inputs: it takes part in a step even if nothing reads its outputs.
        ACCUMULATOR: adds to a buffer, or assigns to it.
        TOTAL: gives a result for all operands of its types, whatever their shapes.
        TOTAL_BY_AXES: gives a result if its axes are valid.
        TOTAL_BY_SHAPES: gives a result if the shapes of its operands agree.

    Buffers in ONNX Runtime:
        SHARES_BUFFER: the result may be in the buffer of an operand.
        REMOVABLE: the runtime removes nodes of it that change nothing: casts to the same type, slices of everything.
        REMOVABLE_BY_CONDITION: it does so if the condition is a constant.
        REMOVABLE_BY_FACTOR: it does so if the other operand is a constant.
        READS_FIRST: the kernels read an element of each operand before they write that element of the result, and
            never again.

    Indices:
        INDEXES_AXIS: the second input holds indices into the attribute `axis` of the first.
        INDEXES_AXES: it holds indices into several axes of the first, after `batch_dims`.
    """

    NONE = 0
    RESHAPE = enum.auto()
    CAST = enum.auto()
    PERMUTE = enum.auto()
    REPEAT = enum.auto()
    SIGN = enum.auto()
    PART = enum.auto()
    MOVE = enum.auto()
    ELEMENTWISE = enum.auto()
    COMMUTATIVE = enum.auto()
    BOUND = enum.auto()
    REDUCTION = enum.auto()
    NONFINITE_OF_FIRST = enum.auto()
    NONFINITE_OF_ALL = enum.auto()
    LOSES_NAN = enum.auto()
    LOSES_INFINITY = enum.auto()
    FINITENESS_TEST = enum.auto()
    RANDOM = enum.auto()
    WRITES_INPUT = enum.auto()
    EFFECT = enum.auto()
    ACCUMULATOR = enum.auto()
    TOTAL = enum.auto()
    TOTAL_BY_AXES = enum.auto()
    TOTAL_BY_SHAPES = enum.auto()
    SHARES_BUFFER = enum.auto()
    REMOVABLE = enum.auto()
    REMOVABLE_BY_CONDITION = enum.auto()
    REMOVABLE_BY_FACTOR = enum.auto()
    READS_FIRST = enum.auto()
    INDEXES_AXIS = enum.auto()
    INDEXES_AXES = enum.auto()

    # The same elements: no number becomes finite or stops being so.
    VIEW = RESHAPE | CAST
    EXACT = RESHAPE | CAST | PERMUTE | REPEAT | SIGN
