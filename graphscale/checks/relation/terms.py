"""Terms: value numbers in a table that two graphs share. Equal terms follow from the same sources in the same way."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Hashable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.flow.degree import Degree

__all__ = ["Number", "Operation", "Shape", "Source", "Terms"]

# Contents of larger constants are known by their hash alone.
_SMALL = 4096

# Sizes and names of axes; None where an axis is unknown.
Shape = tuple[int | str, ...] | None


@dataclasses.dataclass(frozen=True)
class Number:
    """The number of a value: its term, and the power of the loss scale that the value carries beside it."""

    term: int
    degree: Degree = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """A value that no node computes.

    Attributes:
        kind: "input", "constant", "argument" of a body, or "unknown".
        key: the name of an input, the content of a constant, or another identity.
        dtype: its type.
        shape: of a constant, its shape.
    """

    kind: str
    key: Hashable
    dtype: ir.DataType | None = None
    shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operator on terms.

    Attributes:
        domain: its domain; "" for ONNX's.
        op_type: its name.
        attributes: its attributes without those that have their default.
        operands: the terms of its inputs, None for a missing one.
        output: the index of the output.
    """

    domain: str
    op_type: str
    attributes: tuple[tuple[str, Hashable], ...]
    operands: tuple[int | None, ...]
    output: int = 0


class Terms:
    """A table of terms.

    Attributes:
        keys: the source or the operation of each term.
        dtypes: the dtype of each term, None if unknown.
        shapes: the shape of each term, None if unknown.
        true: the term of the scalar True.
        false: the term of the scalar False.
    """

    def __init__(self) -> None:
        self.keys: list[Source | Operation] = []
        self.dtypes: list[ir.DataType | None] = []
        self.shapes: list[Shape] = []
        self._terms: dict[Source | Operation, int] = {}
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._tensors: dict[int, tuple[ir.TensorProtocol, int]] = {}
        self.true, self.false = (self.array_term(np.array(flag)) for flag in (True, False))

    def add(self, key: Source | Operation, dtype: ir.DataType | None, shape: Shape = None) -> int:
        """Return the term of a source or an operation, which is new or known."""
        term = self._terms.setdefault(key, len(self.keys))
        if term == len(self.keys):
            self.keys.append(key)
            self.dtypes.append(dtype)
            self.shapes.append(shape)
        else:
            self.dtypes[term] = self.dtypes[term] or dtype
            self.shapes[term] = shape if self.shapes[term] is None else self.shapes[term]
        return term

    def unknown(self, reason: object, dtype: ir.DataType | None) -> int:
        """Return a term that equals no other one, with the reason why."""
        return self.add(Source("unknown", (len(self.keys), str(reason))), dtype)

    def array_term(self, array: np.ndarray[Any, Any]) -> int:
        """Return the term of a constant by its content."""
        return self.constant(ir.tensor(array))

    def constant(self, tensor: ir.TensorProtocol) -> int:
        """Return the term of a constant: its type, shape and bits."""
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known[1]
        array = tensor.numpy()
        shape = array.shape
        content: Hashable = tuple(array.reshape(-1).tolist())
        if tensor.dtype is not ir.DataType.STRING:
            content = (
                array.tobytes() if array.size <= _SMALL else hashlib.sha256(np.ascontiguousarray(array).data).digest()
            )
        term = self.add(Source("constant", content, tensor.dtype, shape), tensor.dtype, shape)
        if array.size <= _SMALL and tensor.dtype is not ir.DataType.STRING:
            self._arrays[term] = array
        # The tensor stays alive with its identity.
        self._tensors[id(tensor)] = (tensor, term)
        return term

    def wide_constant(self, term: int) -> int:
        """Return the constant of float32 that gives a narrower one when rounded; the first of several."""
        narrow = self._arrays.get(term)
        if narrow is None:
            return term
        known = ((t, array) for t, array in self._arrays.items() if self.dtypes[t] is ir.DataType.FLOAT)
        shaped = ((t, array.astype(narrow.dtype)) for t, array in known if array.shape == narrow.shape)
        fits = (t for t, array in shaped if array.tobytes() == narrow.tobytes())
        return next(fits, None) or self.array_term(narrow.astype(np.float32))

    def array(self, term: int | None) -> np.ndarray[Any, Any] | None:
        """Return the content of a small constant of numbers or flags; None for other terms."""
        return None if term is None else self._arrays.get(term)

    def is_scalar(self, term: int) -> bool:
        """Return whether a term is known to have no axes."""
        return self.shapes[term] == ()

    def holds(self, term: int | None, number: float) -> bool:
        """Return whether a term is a constant with one number in all elements."""
        array = self.array(term)
        return array is not None and array.size > 0 and array.dtype != bool and bool((array == number).all())

    def is_true(self, term: int | None) -> bool:
        """Return whether a term is a constant of flags that are all true."""
        array = self.array(term)
        return array is not None and array.dtype == bool and bool(array.all())

    def operation(self, term: int | None, op_type: str) -> Operation | None:
        """Return the operation of a term if it is one of ONNX's with a name, else None."""
        key = None if term is None else self.keys[term]
        return key if isinstance(key, Operation) and (key.domain, key.op_type) == ("", op_type) else None

    def below(self, roots: Iterable[int], known: Container[int] = ()) -> list[int]:
        """Return the terms from which some follow, operands first; those that are known end the search."""
        found: dict[int, None] = {}
        pending = [(term, False) for term in roots]
        while pending:
            term, is_left = pending.pop()
            if is_left:
                found[term] = None
            elif term not in found and term not in known:
                pending += [(term, True), *((t, False) for t in self.operands(term))]
        return list(found)

    def operands(self, term: int) -> list[int]:
        """Return the terms that an operation reads."""
        key = self.keys[term]
        return [t for t in key.operands if t is not None] if isinstance(key, Operation) else []

    def label(self, term: int) -> str:
        """Return a text for messages."""
        key, array = self.keys[term], self.array(term)
        if isinstance(key, Operation):
            return key.op_type
        if key.kind == "unknown" and isinstance(key.key, tuple):
            return f"no power of the scale ({key.key[-1]})"
        if key.kind != "constant":
            return str(key.key)
        return f"the constant {array}" if array is not None and array.size < 4 else f"a constant of shape {key.shape}"
