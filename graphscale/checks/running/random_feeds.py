"""Random feeds for a training graph, by the types and the uses of its inputs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphscale.checks.running.private import Runner, extract
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import Arrays
from graphscale.flow.resets import find_reset_flags
from graphscale.graph.values import constant_tensor
from graphscale.graph.walks import ancestors, reach
from graphscale.operators import OPERATORS, Trait, attribute, has_trait, rule_of
from graphscale.session.interface import InputSpec

__all__ = ["SIZE", "Feeder", "find_index_limit"]

SIZE = 4
_MOST_AXES = 64  # of an array of numpy
_FEW = 2  # limit of numbers that are valid indices of nearly every axis
# Operators on whole numbers: a sum of indices is an index with an offset.
_WHOLE_MOVES = {"Add": (0, 1), "Max": (0, 1), "Min": (0, 1), "Sub": (0,)}


class _Style(NamedTuple):
    """A way to draw numbers; styles are tried in turn until the original computes finite gradients."""

    normal: bool
    size: float
    few: bool = False


_STYLES = (_Style(True, 0.5), _Style(False, 0.5), _Style(True, 0.05), _Style(True, 0.5, True), _Style(False, 0.5, True))


class Feeder:
    """A source of feeds for the inputs of an original graph, carried state included.

    Args:
        model: the original.
        states: the names of the inputs and initializers with its carried state.
        loss: the loss of the model.
        given: arrays in place of random ones.
        dims: sizes of symbolic axes.
        make_runner: makes a runner of a part of the model.
        size: the default size of symbolic axes.

    Attributes:
        notes: facts for the user.
        chosen: the default sizes of symbolic axes, by name.

    Raises:
        VerifyError: a given array does not fit its input, or an input is no tensor of numbers.
    """

    def __init__(
        self,
        model: ir.Model,
        states: Collection[str],
        loss: ir.Value,
        given: Mapping[str, np.ndarray[Any, Any]],
        dims: Mapping[str, int],
        make_runner: Callable[[ir.Model], Any] = lambda model: Runner(model, None, "the forward pass of the original"),
        size: int = SIZE,
    ) -> None:
        graph = model.graph
        states = set(states)
        self._states, self._size = states, size
        self._first = {
            name: np.array(value.const_value.numpy())
            for name, value in graph.initializers.items()
            if name in states and value.const_value is not None
        }
        inputs = {value.name or "": value for value in graph.inputs}
        inputs.update({name: graph.initializers[name] for name in self._first})
        optional = {name for name in inputs if name in graph.initializers and name not in states}
        self._values = {name: value for name, value in inputs.items() if name not in optional or name in given}
        arrays = {name: np.asarray(array) for name, array in given.items() if name in self._values}
        self._given = {n: array.astype(object) if array.dtype.kind == "U" else array for n, array in arrays.items()}
        self._sizes = self._known_sizes(dims)
        self._resets = find_reset_flags(graph)
        # The loss does not depend on moments, and a second moment is never negative.
        self._positive = states - {value.name for value in ancestors([loss])}
        self._limits = self._index_limits()
        self._measure_labels(model, dims, make_runner)
        self._limits = self._index_limits()
        self.notes = tuple(self._notes(given, dims))

    def without_resets(self, feeds: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """Return the feeds without resets of in-place accumulators, since a reset is no carried state."""
        return {name: np.zeros_like(array) if name in self._resets else array for name, array in feeds.items()}

    def multiply(self, feeds: Mapping[str, np.ndarray[Any, Any]], factor: float) -> Arrays | None:
        """Return feeds with random numbers, except carried state, times a factor; None if there are none."""
        names = [n for n, a in feeds.items() if a.dtype.kind == "f" and n not in self._states and n not in self._given]
        changed = {name: (feeds[name] * factor).astype(feeds[name].dtype) for name in names}
        return {**feeds, **changed} if changed else None

    def search(
        self, random: np.random.Generator, accept: Callable[[Arrays], bool], count: int = 1, rounds: int = 1
    ) -> list[Arrays]:
        """Draw feeds for every input, style by style, until all of them are accepted.

        Args:
            random: the source of numbers.
            accept: runs a graph on feeds, and returns whether its values are finite.
            count: the number of feeds.
            rounds: the number of times that each style is tried.

        Raises:
            VerifyError: no feeds are accepted; the message has the last reason.
        """
        for style in _STYLES * rounds:
            found = [self._draw_all(random, style) for _ in range(count)]
            reason = "it computes a loss or gradients that are not finite on random feeds"
            try:
                if all(map(accept, found)):
                    return found
            except VerifyError as error:  # for example an index out of range
                reason = str(error)
        raise VerifyError(reason)

    def _draw_all(self, random: np.random.Generator, style: _Style) -> Arrays:
        return {name: self._draw(name, value, random, style) for name, value in self._values.items()}

    def _draw(self, name: str, value: ir.Value, random: np.random.Generator, style: _Style) -> Any:
        if name in self._given:
            return self._given[name].copy()
        if name in self._first:
            return _vary(self._first[name], random)
        dtype, shape = _numpy_dtype(value), self._shape(value)
        limit = self._limits[name]
        if value.dtype is ir.DataType.STRING:  # texts that are numbers as well
            return np.asarray(random.integers(0, _FEW, shape)).astype(str).astype(object)
        if dtype == np.bool_:
            return random.integers(0, 2, shape).astype(np.bool_)
        if limit is not None:
            return random.integers(0, min(limit, _FEW) if style.few else limit, shape).astype(dtype)
        if value.dtype is not None and not value.dtype.is_floating_point():
            # Numbers that are no indices: a scalar is a count, for example of steps.
            return (random.integers(1, 5, shape) if not shape else random.integers(0, _FEW, shape)).astype(dtype)
        if name in self._positive or not style.normal:
            return np.asarray(random.uniform(0.1, 0.1 + 1.6 * style.size, shape)).astype(dtype)
        return np.asarray(style.size * random.standard_normal(shape)).astype(dtype)

    def _shape(self, value: ir.Value) -> tuple[int, ...]:
        if value.shape is None:
            raise VerifyError(
                f"the input {value.name!r} has no shape; give it a value with --feeds FILE.npz (an array of that name)"
            )
        if len(value.shape) > _MOST_AXES:
            raise VerifyError(
                f"the input {value.name!r} has {len(value.shape)} axes; an array has at most {_MOST_AXES}"
            )
        axes = (axis if isinstance(axis, int) else self._sizes.get(axis.value or "") for axis in value.shape)
        return tuple(self._size if axis is None else axis for axis in axes)

    def _known_sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Return the size of every symbolic axis: the user's, that of given arrays, or a small one."""
        sizes = dict(dims)
        for name, array in self._given.items():
            value = self._values[name]
            shape = array.shape if value.shape is None else [a if isinstance(a, int) else a.value for a in value.shape]
            spec = InputSpec(np.dtype(_numpy_dtype(value)), tuple(shape))
            problem = spec.find_misfit(array.dtype, array.shape)
            if problem is not None:
                raise VerifyError(f"--feeds: the array {name!r} {problem.replace('the step', 'the graph')}")
            for axis, length in zip(_axis_names(value), array.shape, strict=False):
                if axis and sizes.setdefault(axis, length) != length:
                    raise VerifyError(
                        f"--feeds: the array {name!r} has {length} along {axis!r}, and another has {sizes[axis]}"
                    )
        names = (axis for value in self._values.values() for axis in _axis_names(value) if axis)
        return {**dict.fromkeys(names, self._size), **sizes}

    def _index_limits(self) -> dict[str, int | None]:
        return {name: find_index_limit(value, self._sizes) for name, value in self._values.items()}

    def _measure_labels(self, model: ir.Model, dims: Mapping[str, int], make_runner: Callable[[ir.Model], Any]) -> None:
        """Measure the scores of labels with an axis of their own, such as batch times tokens."""
        axes = {name: set(filter(None, _axis_names(value))) for name, value in self._values.items()}
        counts = Counter(itertools.chain.from_iterable(axes.values()))
        for name, value in self._values.items():
            free = axes[name]
            if name in self._given or not free or any(counts[axis] > 1 for axis in free) or free & set(dims):
                continue
            for node, index in value.uses():
                axis, scores = _class_axis(node), node.inputs[0]
                if axis is None or index != 1 or scores is None:
                    continue
                runner = make_runner(extract(model, [scores]))
                feeds = self._draw_all(np.random.default_rng(0), _STYLES[0])
                shape = list(runner.run(feeds).outputs[scores.name or ""].shape)
                del shape[axis]
                self._sizes.update({a: n for a, n in zip(_axis_names(value), shape, strict=False) if a})

    def _notes(self, given: Mapping[str, Any], dims: Mapping[str, int]) -> Iterator[str]:
        unknown = sorted(set(dims).difference(*map(_axis_names, self._values.values())))
        if unknown:
            raise VerifyError(f"--dim {unknown[0]}: no input has an axis of this name")
        others = [name for name in given if name not in self._values and "/" not in name]
        if others:
            yield f"the feeds given hold {', '.join(map(repr, others[:5]))}, which are no inputs of the original"
        self.chosen = {} if self._given else {n: size for n, size in self._sizes.items() if n not in dims}
        if self.chosen:
            text = ", ".join(f"{name}={size}" for name, size in self.chosen.items())
            yield f"axes of unknown size were given one: {text} (--dim NAME=SIZE chooses)"


def _axis_names(value: ir.Value) -> list[str | None]:
    """Return the name of each axis, None for one of a known size or without a name."""
    return [None if isinstance(axis, int) else axis.value for axis in value.shape or ()]


def _numpy_dtype(value: ir.Value) -> Any:
    if value.dtype is None:
        raise VerifyError(f"the input {value.name!r} is no tensor, which cannot be drawn")
    return value.dtype.numpy()


def _vary(first: np.ndarray[Any, Any], random: np.random.Generator) -> Any:
    """Change an initial value slightly."""
    if first.dtype.kind in "biu":
        return first.copy()
    noise = 1 + 0.1 * random.standard_normal(first.shape)
    return np.asarray(first.astype(np.float64) * noise).astype(first.dtype)


def find_index_limit(value: ir.Value, sizes: Mapping[str, int]) -> int | None:
    """Return the upper bound of an input's whole numbers as valid indices, None if they are no indices."""

    def moved(value: ir.Value) -> list[ir.Value]:
        return [output for node, index in value.uses() if _moves(node, index, value) for output in node.outputs]

    uses = (use for same in reach([value], moved) for use in same.uses())
    limits = (limit for node, index in uses for limit in _limits(node, index, sizes))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def _class_axis(node: ir.Node) -> int | None:
    """Return the axis of a loss's first input that its second input, the labels, lacks; None for other operators."""
    operator = OPERATORS.get((node.domain, node.op_type))
    return None if operator is None else operator.class_axis


def _moves(node: ir.Node, index: int, value: ir.Value) -> bool:
    if has_trait(node, Trait.MOVE):
        rule = rule_of(node)
        return rule is not None and index in rule.operands(len(node.inputs))
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return not is_float and index in _WHOLE_MOVES.get(node.op_type, ())


def _limits(node: ir.Node, index: int, sizes: Mapping[str, int]) -> Iterator[int | None]:
    data = node.inputs[0]
    if data is None:
        return
    if has_trait(node, Trait.INDEXES_AXIS) and index == 1:
        yield _length(data, attribute(node, "axis", 0), sizes)
    elif has_trait(node, Trait.INDEXES_AXES) and index == 1:
        first = attribute(node, "batch_dims", 0)
        depth = _length(node.inputs[1], -1, sizes) if node.inputs[1] is not None else None
        yield from (_length(data, axis, sizes) for axis in range(first, first + (depth or 1)))
    elif node.op_type == "OneHot" and index == 0:
        depths = constant_tensor(node.inputs[1])
        yield None if depths is None or depths.size != 1 else int(np.ravel(depths.numpy())[0])
    elif (labels := _class_axis(node)) is not None and index == 1:
        yield _length(data, labels, sizes)
    elif node.op_type == "Equal":
        yield _compared(node.inputs[1 - index])


def _compared(value: ir.Value | None) -> int | None:
    """Return the limit from a comparison with 0, 1, 2, ..., as in a one-hot code."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size < 2 or not tensor.dtype.is_integer():
        return None
    array = tensor.numpy()
    return int(array.max()) + 1 if int(array.min()) == 0 else None


def _length(value: ir.Value, axis: int, sizes: Mapping[str, int]) -> int | None:
    tensor = value.const_value
    shape = list(value.shape) if value.shape is not None else None if tensor is None else list(tensor.shape)
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    found = shape[axis]
    return found if isinstance(found, int) else sizes.get(found.value or "")
