"""From a step function to ONNX: traced by JAX, rewritten by rules, lowered by jax2onnx."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import onnx_ir as ir
from jax.extend.core import jaxpr_as_fun

from graphscale.errors import ExportError, one_line
from graphscale.exporters.jax import contractions, elementary, index_rules, random_keys, window_rules  # noqa: F401
from graphscale.exporters.jax.onnx_cleaning import clean
from graphscale.exporters.jax.rewriting import rewrite
from graphscale.exporters.jax.step_function import FlatStep
from graphscale.exporters.scattered_sums import rewrite_scattered_sums

__all__ = ["choose_dynamic", "to_onnx"]

# The newest that onnxruntime-training loads, and the oldest that jax2onnx is tested with.
_OPSET = 21
_PASSES = 2  # what a rule writes is rewritten once
_DYNAMIC = "batch"
_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_TYPES = {"float16", "float32", "float64", "bool"} | _INTEGERS


def choose_dynamic(step: FlatStep, wish: bool | Sequence[str] | None) -> list[str]:
    """Return the batch's arrays whose first axis may have any length.

    Args:
        step: the step.
        wish: their names; or True or None for those of the most frequent length, the largest one of several.

    Raises:
        ExportError: a name is none of the batch, or an array has no axis.
    """
    rows = {leaf.name: leaf.value.shape[0] for leaf in step.batch.leaves if leaf.value.ndim and leaf.key is None}
    if isinstance(wish, Sequence):
        for name in wish:
            if name not in rows:
                raise ExportError(f"dynamic_batch: {name!r} is no array of the batch with an axis: {', '.join(rows)}")
        return list(wish)
    lengths = list(rows.values())
    length = max(lengths, key=lambda size: (lengths.count(size), size), default=0)
    return [] if wish is False else [name for name, size in rows.items() if size == length]


def to_onnx(step: FlatStep, dynamic: Sequence[str]) -> ir.Model:
    """Export a step, under the names of its inputs and outputs.

    Args:
        step: the step.
        dynamic: names of inputs whose first axis may have any length.

    Raises:
        ExportError: JAX cannot trace the step, or jax2onnx has no translation for a primitive.
    """
    from jax2onnx import to_onnx as lower

    specs = _make_specs(step, dynamic)
    with _explained("trace", bool(dynamic)):
        closed = jax.make_jaxpr(step.run)(*specs)
        for _ in range(_PASSES):
            closed = jax.make_jaxpr(lambda *values, inner=closed: _arrays(rewrite(inner, *values)))(*specs)
    _refuse_types(closed.jaxpr)
    with _explained("export", bool(dynamic)), _quiet():
        proto = lower(
            jaxpr_as_fun(closed),
            specs,
            model_name="training_step",
            opset=_OPSET,
            enable_double_precision=_has_doubles(closed.jaxpr),
        )
    model: ir.Model = ir.from_proto(proto)
    clean(model)
    rewrite_scattered_sums(model)
    _name_values(model, step)
    return model


def _arrays(values: Sequence[Any]) -> list[Any]:
    return [jax.numpy.asarray(value) for value in values]


def _make_specs(step: FlatStep, dynamic: Sequence[str]) -> list[Any]:
    (rows,) = jax.export.symbolic_shape(_DYNAMIC)
    return [
        jax.ShapeDtypeStruct((rows, *value.shape[1:]) if name in dynamic else value.shape, value.dtype)
        for name, value in step.arrays.items()
    ]


def _has_doubles(jaxpr: Any) -> bool:
    return any(
        getattr(variable.aval, "dtype", None) == np.float64
        for equation in jaxpr.eqns
        for variable in (*equation.invars, *equation.outvars)
    )


def _refuse_types(jaxpr: Any) -> None:
    """Refuse a step that computes in a type that ONNX Runtime does not have, or not on the CPU."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype, primitive = variable.aval.dtype, equation.primitive.name
            if jax.numpy.issubdtype(dtype, np.complexfloating) and primitive != "convert_element_type":
                raise ExportError(
                    f"jax2onnx has no translation for {primitive}, a primitive of the step, that ONNX Runtime could "
                    "run: it makes complex numbers; write this part of the step with other operations"
                )
            if dtype.name not in _TYPES and not jax.numpy.issubdtype(dtype, np.complexfloating):
                raise ExportError(
                    f"the step computes in {dtype.name} ({primitive}), for which ONNX Runtime has no kernels on the "
                    "CPU: use float32, or float16"
                )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loggers and warnings of jax2onnx."""
    names = ("jax2onnx", "onnx_ir")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _explained(verb: str, dynamic: bool) -> Iterator[None]:
    """Turn an error of JAX or jax2onnx into one line that names the primitive."""
    try:
        yield
    except ExportError as error:
        raise ExportError(str(error)) from None  # without the lines that JAX appends
    except Exception as error:  # those of jax2onnx share no base class
        text = one_line(next(iter(str(error).splitlines()), ""))
        if verb == "trace":
            hint = " for a batch of any length; pass dynamic_batch=False" if dynamic else ""
            raise ExportError(f"JAX cannot trace the step{hint}: {type(error).__name__}: {text}") from error
        raise ExportError(
            f"jax2onnx has no translation for {_failed_primitive(error)}, a primitive of the step, or a wrong one "
            f"({type(error).__name__}: {text}): write this part of the step with other operations"
        ) from error


def _failed_primitive(error: Exception) -> str:
    """Return the name of the primitive that jax2onnx was lowering."""
    known = re.search(r"primitive\s+'([\w.-]+)'", str(error))
    frames = traceback.walk_tb(error.__traceback__)
    equations = [frame.f_locals["eqn"] for frame, _ in frames if hasattr(frame.f_locals.get("eqn"), "primitive")]
    return known[1] if known else equations[-1].primitive.name if equations else "the step"


def _name_values(model: ir.Model, step: FlatStep) -> None:
    """Give inputs and outputs their names."""
    graph, names = model.graph, list(step.arrays)
    if len(graph.inputs) != len(names) or len(graph.outputs) != len(step.outputs):
        raise ExportError("jax2onnx left out an input or an output of the step")
    taken = {*names, *step.outputs}
    for value in [*(v for node in graph.all_nodes() for v in node.outputs), *graph.initializers.values()]:
        if value.name in taken:
            value.name = f"{value.name}.inner"
    _separate_outputs(graph)
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name
    for value, name in zip(graph.outputs, step.outputs, strict=True):
        value.name = name


def _separate_outputs(graph: ir.Graph) -> None:
    """Put an Identity before each output that is an input, an initializer or another output."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value.is_graph_input() or value.is_initializer():
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)
