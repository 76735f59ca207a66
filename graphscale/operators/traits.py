"""The properties of operators that graphscale asks for, besides degrees and casting."""

from __future__ import annotations

import enum

__all__ = ["Trait"]


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
