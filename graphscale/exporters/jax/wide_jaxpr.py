"""A jaxpr with one floating-point type in place of narrower ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from graphscale.exporters.jax.rewriting import called, fold

__all__ = ["widen_jaxpr"]

# The formulas of these depend on the bits of their type.
_BITS = {"bitcast_convert_type", "nextafter", "reduce_precision"}


class _Widening:
    """The replacement of types by another one."""

    def __init__(self, dtype: Any, replaced: Collection[Any]) -> None:
        self._dtype, self._replaced = np.dtype(dtype), {np.dtype(each) for each in replaced}

    def closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return a closed jaxpr of the other type."""
        specs = [jax.ShapeDtypeStruct(value.shape, self._type(value.dtype)) for value in closed.in_avals]
        return jax.make_jaxpr(lambda *values: [jax.numpy.asarray(x) for x in self._run(closed, values)])(*specs)

    def _type(self, dtype: Any) -> Any:
        return self._dtype if dtype in self._replaced else dtype

    def _wide(self, value: Any) -> Any:
        """Return a value of the other type; keys of random numbers unchanged."""
        return value.astype(self._dtype) if getattr(value, "dtype", None) in self._replaced else value

    def _run(self, closed: ClosedJaxpr, values: Any) -> list[Any]:
        """Evaluate a jaxpr; a constant keeps its type until it meets a value, as in the exported file."""
        jaxpr = closed.jaxpr
        environment = dict(zip(jaxpr.constvars, map(_known, closed.consts), strict=True))
        environment |= dict(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else environment[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            environment.update(zip(equation.outvars, self._evaluate(equation, operands), strict=True))
        return [self._wide(read(atom)) for atom in jaxpr.outvars]

    def _evaluate(self, equation: Any, values: list[Any]) -> list[Any]:
        if (inner := called(equation)) is not None:
            return self._run(inner, values)
        if (folded := fold(equation, values)) is not None:
            return folded
        params = equation.params
        if equation.primitive.name in _BITS:
            values = [x.astype(atom.aval.dtype) for x, atom in zip(values, equation.invars, strict=True)]
        else:
            values = [self._wide(value) for value in values]
            params = {name: None if name == "precision" else self._param(value) for name, value in params.items()}
        results = equation.primitive.bind(*values, **params)
        return [self._wide(x) for x in (results if equation.primitive.multiple_results else [results])]

    def _param(self, value: Any) -> Any:
        """Return a parameter of a primitive with other types: a dtype, or a function as a jaxpr."""
        if isinstance(value, ClosedJaxpr):
            return self.closed(value)
        if isinstance(value, Jaxpr):
            wide = self.closed(ClosedJaxpr(value, ()))
            if wide.consts:  # arrays that a Jaxpr has no place for
                raise NotImplementedError("the function inside a primitive makes an array that depends on no operand")
            return wide.jaxpr
        if isinstance(value, tuple) and any(isinstance(each, ClosedJaxpr) for each in value):
            return tuple(map(self.closed, value))
        return self._type(value) if isinstance(value, np.dtype) else value


def _known(constant: Any) -> Any:
    is_plain = isinstance(constant, np.ndarray | np.generic) or (
        isinstance(constant, jax.Array)
        and not isinstance(constant, jax.core.Tracer)
        and not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key)
    )
    return np.asarray(constant) if is_plain else constant


def widen_jaxpr(closed: ClosedJaxpr, dtype: Any, replaced: Collection[Any]) -> ClosedJaxpr:
    """Return a jaxpr that computes in one floating-point type in place of others.

    Args:
        closed: the jaxpr of a step. float64 as `dtype` needs jax_enable_x64 around this call and those of the result.
        dtype: the type to compute in.
        replaced: the types that it replaces.
    """
    return _Widening(dtype, replaced).closed(closed)
