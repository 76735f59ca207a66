"""A jaxpr in terms of fewer primitives: calls inlined, keys as words, the mistakes of jax2onnx avoided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from graphscale.errors import ExportError

__all__ = ["KeyWords", "called", "fold", "is_number", "rewrite", "rule"]

Rule = Callable[..., Any]
# A scan of no more equations in all becomes copies of its body; one that carries random keys has to.
_UNROLLED, _UNROLLED_KEYS = 50, 20_000
_FOLDED = 4096  # elements of the largest constant that is computed at once
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
}
_RULES: dict[str, Rule] = {}


class KeyWords(NamedTuple):
    """Random keys as two arrays of 32-bit words, each of the shape of the keys."""

    high: Any
    low: Any


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the replacement of primitives: a function of their operands and parameters."""

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def is_number(value: Any) -> bool:
    """Report whether a value is known while the step is traced."""
    return isinstance(value, np.ndarray | np.generic | int | float | bool)


def rewrite(closed: Any, *values: Any) -> list[Any]:
    """Evaluate a closed jaxpr by the rules; a value is an array, a tracer or `KeyWords`.

    Raises:
        ExportError: the step has an effect, such as a print.
    """
    jaxpr = closed.jaxpr
    environment: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else environment[atom]

    environment.update(zip(jaxpr.constvars, map(_known, closed.consts), strict=True))
    environment.update(zip(jaxpr.invars, values, strict=True))
    for equation in _live(jaxpr):
        results = _evaluate(equation, [read(atom) for atom in equation.invars])
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _known(constant: Any) -> Any:
    if isinstance(constant, jax.Array) and jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(constant))
        return KeyWords(words[..., 0], words[..., 1])
    return constant if isinstance(constant, jax.core.Tracer) else np.asarray(constant)


def _live(jaxpr: Any) -> list[Any]:
    """Return the equations that an output depends on."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects and _is_print(equation):
            raise ExportError(
                f"the step calls the host ({equation.primitive.name}), which no ONNX graph can: leave it out of the "
                "exported step"
            )
        if needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return kept[::-1]


def _is_print(equation: Any) -> bool:
    return "callback" in equation.primitive.name or equation.primitive.name == "debug_print"


def _evaluate(equation: Any, values: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if (inner := called(equation)) is not None:
        return rewrite(inner, *values)
    if folded := fold(equation, values):
        return folded
    if name in _CONTROL:
        return _CONTROL[name](values, params)
    if name in _RULES:
        results = _RULES[name](*values, **params)
    elif any(isinstance(value, KeyWords) for value in values):
        # Shapes change word by word.
        results = KeyWords(*(_bind(equation, [_word(value, index) for value in values]) for index in (0, 1)))
    else:
        results = _bind(equation, values)
    return results if equation.primitive.multiple_results else [results]


def called(equation: Any) -> Any:
    """Return the jaxpr that an equation calls; None for one that is no call."""
    inner = equation.params[_CALLS[equation.primitive.name]] if equation.primitive.name in _CALLS else None
    return ClosedJaxpr(inner, ()) if isinstance(inner, Jaxpr) else inner


def _word(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, KeyWords) else value


def _bind(equation: Any, values: list[Any]) -> Any:
    return equation.primitive.bind(*values, **equation.params)


def fold(equation: Any, values: list[Any]) -> list[Any] | None:
    """Compute a small constant in its own type; None where an operand is no constant."""
    shapes = [variable.aval.shape for variable in equation.outvars]
    if not all(is_number(value) for value in values) or equation.effects:
        return None
    if not all(isinstance(size, int) for shape in shapes for size in shape) or max(map(_size, shapes)) > _FOLDED:
        return None
    if any(jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key) for variable in equation.outvars):
        return None
    if equation.primitive.name == "dim_as_value":
        return None
    with jax.ensure_compile_time_eval():
        results = _bind(equation, values)
    return [np.asarray(result) for result in (results if equation.primitive.multiple_results else [results])]


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _scan(values: list[Any], params: dict[str, Any]) -> list[Any]:
    closed, length = params["jaxpr"], params["length"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    constants, carried, scanned = values[:first], list(values[first:last]), values[last:]
    has_keys = any(isinstance(value, KeyWords) for value in values)
    if not isinstance(length, int):
        return _keep_scan(values, params)
    if length * _count(closed.jaxpr) > (_UNROLLED_KEYS if has_keys else _UNROLLED):
        return _keep_scan(values, params)
    slices = []
    for step in reversed(range(length)) if params["reverse"] else range(length):
        parts = [jax.tree.map(lambda value, step=step: _item(value, step), value) for value in scanned]
        results = rewrite(closed, *constants, *carried, *parts)
        carried, outputs = results[: len(carried)], results[len(carried) :]
        slices.append(outputs)
    if params["reverse"]:
        slices.reverse()
    if not slices:
        return _keep_scan(values, params)
    stacked = [jax.tree.map(lambda *parts: _stack(parts), *column) for column in zip(*slices, strict=True)]
    return [*carried, *stacked]


def _item(value: Any, index: int) -> Any:
    return value[index] if is_number(value) else jax.lax.index_in_dim(value, index, keepdims=False)


def _stack(parts: Sequence[Any]) -> Any:
    return jax.lax.concatenate([jax.lax.expand_dims(part, (0,)) for part in parts], 0)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * max(1, sum(_count(getattr(part, "jaxpr", part)) for part in inner))
    return total


def _keep_scan(values: list[Any], params: dict[str, Any]) -> list[Any]:
    """Keep a scan as a loop, forwards: jax2onnx has none that goes backwards.

    jax2onnx declares scanned slices of float16 as of another type: they go in as float32.
    """
    if any(isinstance(value, KeyWords) for value in values):
        raise ExportError("a long scan carries random keys: split them before it, or make the scan shorter")
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def turn(value: Any) -> Any:
        return jax.lax.rev(value, (0,)) if params["reverse"] else value

    values = [jax.numpy.asarray(value) for value in values]
    scanned = [turn(value) for value in values[last:]]
    types = [value.dtype for value in scanned]
    slices = [jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for value in scanned]
    examples = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values[:last]]
    body = jax.make_jaxpr(lambda *inner: rewrite(params["jaxpr"], *inner))(*examples, *slices)

    def run(carried: Any, parts: Any) -> Any:
        parts = [jax.lax.convert_element_type(part, dtype) for part, dtype in zip(parts, types, strict=True)]
        results = jaxpr_as_fun(body)(*values[:first], *carried, *parts)
        return results[: last - first], results[last - first :]

    scanned = [value.astype(np.float32) if value.dtype == np.float16 else value for value in scanned]
    carried, stacked = jax.lax.scan(run, values[first:last], scanned, length=params["length"])
    return [*carried, *map(turn, stacked)]


def _while(values: list[Any], params: dict[str, Any]) -> list[Any]:
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    constants, state = values[tests : tests + bodies], list(values[tests + bodies :])
    flat, tree = jax.tree.flatten(state)

    def test(leaves: Any) -> Any:
        return rewrite(params["cond_jaxpr"], *values[:tests], *jax.tree.unflatten(tree, leaves))[0]

    def advance(leaves: Any) -> Any:
        return jax.tree.leaves(rewrite(params["body_jaxpr"], *constants, *jax.tree.unflatten(tree, leaves)))

    return list(jax.tree.unflatten(tree, jax.lax.while_loop(test, advance, [jax.numpy.asarray(leaf) for leaf in flat])))


def _cond(values: list[Any], params: dict[str, Any]) -> list[Any]:
    """Compute all branches, and select: the branches of a training step are cheap."""
    index, operands = values[0], values[1:]
    branches = params["branches"]
    if is_number(index):
        return rewrite(branches[int(np.clip(index, 0, len(branches) - 1))], *operands)
    results = [rewrite(branch, *operands) for branch in branches]
    chosen = results[0]
    for number, other in enumerate(results[1:], start=1):
        reached = jax.lax.ge(index.astype(np.int32), np.int32(number))
        select = functools.partial(_select, reached)
        chosen = [jax.tree.map(select, x, y) for x, y in zip(chosen, other, strict=True)]
    return chosen


def _select(reached: Any, before: Any, value: Any) -> Any:
    return jax.numpy.where(reached, value, before)


_CONTROL: dict[str, Callable[[list[Any], dict[str, Any]], list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
