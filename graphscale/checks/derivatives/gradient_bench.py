"""A bench for a training graph's loss and gradients at any weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.analysis.roles.naming import likeness
from graphscale.analysis.roles.role_table import Role
from graphscale.checks.derivatives.differences import AGREES, DISAGREES, UNSURE, Precision, Slopes, compare, slopes
from graphscale.checks.derivatives.evaluators import Evaluator, find_dtypes
from graphscale.checks.derivatives.gradient_report import UNCHECKED, WeightCheck, judge
from graphscale.checks.running.private import Copy, extract, find_unseeded, give_seed
from graphscale.checks.running.random_feeds import Feeder
from graphscale.errors import VerifyError
from graphscale.files.tensor_files import Arrays
from graphscale.graph.values import is_float, is_scalar
from graphscale.graph.walks import ancestors, reach, source_by_trait
from graphscale.operators import Trait, has_trait
from graphscale.step.training_step import Step

__all__ = ["GradientBench", "open_bench"]

_Array = np.ndarray[Any, Any]
# A gradient with a larger relative distance from a slope is wrong, or belongs to another weight.
_FAR = 0.1
_VIEWS = Trait.RESHAPE | Trait.CAST | Trait.PERMUTE
_CHANGES = ("Add", "Mul", "Slice", "Split", "Sum", "Where")
# Number of feeds in each style: the root of a difference of statistics is real only for some.
_DRAWS = 4


def open_bench(step: Step, given: Arrays, dims: Mapping[str, int], seed: int) -> GradientBench:
    """Return the most precise bench that can evaluate a step.

    Raises:
        VerifyError: no bench can.
    """
    failures = []
    for dtype in find_dtypes(step.model):
        try:
            return GradientBench(step, given, dims, seed, dtype)
        except VerifyError as error:
            failures.append(str(error))
    raise VerifyError(f"the gradients cannot be checked: {'; '.join(dict.fromkeys(failures))}")


class GradientBench:
    """A graph in one floating-point type, for evaluations at any weights.

    Attributes:
        dtype: the name of the type.
        notes: facts for the user.

    Raises:
        VerifyError: the graph cannot be evaluated.
    """

    def __init__(self, step: Step, given: Arrays, dims: Mapping[str, int], seed: int, dtype: ir.DataType) -> None:
        self._random, self._limits = np.random.default_rng(seed), Precision.of(dtype.numpy())
        graph, self._loss = step.graph, step.loss.name or ""
        self._dtype, self.dtype = dtype, str(dtype.numpy())
        forward = ancestors([step.loss])
        sources = dict.fromkeys((*graph.inputs, *graph.initializers.values()))
        reached = [value for value in sources if value in forward]
        self._sources = [value for value in reached if is_float(value)]
        weights = {v for v, each in step.roles.inputs.items() if each.role in (Role.WEIGHT, Role.STATE)}
        self._known = [value for value in reached if value in weights]
        self._weights = self._known or [value for value in self._sources if not is_scalar(value)]
        self._forms = {each.value: find_forms(each.value, *each.wholes) for each in step.unscalings}
        copy = Copy(step.model, (value.name or "" for value in self._sources))
        for i, node in enumerate(find_unseeded(copy.graph.all_nodes()), 1):
            give_seed(node, i)
        shown = [form.name or "" for forms in self._forms.values() for form in forms]
        outputs = [copy.values[name] for name in dict.fromkeys((self._loss, *shown))]
        self._copy, self._step = copy, step
        is_random = any(has_trait(node, Trait.RANDOM) for node in copy.graph.all_nodes())
        self._everything = Evaluator(extract(copy.model, outputs), dtype, is_random)
        self._forward = Evaluator(extract(copy.model, outputs[:1]), dtype, is_random)
        states = {update.input.name or "" for update in step.states}
        feeder = Feeder(step.model, states, step.loss, given, dims, lambda part: Evaluator(part, dtype))
        self.notes = list(feeder.notes)
        if is_random:
            self.notes.append("random numbers, such as those of dropout, are drawn from the same seeds in each run")
        try:
            (self._feeds,) = feeder.search(self._random, self._are_finite, rounds=_DRAWS)
        except VerifyError as error:
            raise VerifyError(f"{error}; give real values as feeds") from error
        values = self._everything.run(self._feeds).outputs
        self._arrays = {g: [values[form.name or ""] for form in forms] for g, forms in self._forms.items()}
        self._here = self._loss_at({})
        rounding = 16 * float(np.finfo(dtype.numpy()).eps)
        others = [(values[self._loss].item(), self._limits.tolerance), (self._loss_at({}), rounding)]
        if any(abs(self._here - other) > tolerance * abs(self._here) for other, tolerance in others):
            raise VerifyError("the loss differs from run to run on the same feeds")

    def close(self) -> None:
        """Free the evaluator."""
        self._everything.close()
        self._forward.close()

    def _are_finite(self, feeds: Arrays) -> bool:
        return all(np.isfinite(array).all() for array in self._everything.run(feeds).outputs.values())

    def _center(self, value: ir.Value) -> _Array:
        array = self._feeds.get(value.name or "")
        if array is None and value.const_value is not None:
            array = value.const_value.numpy()
        return np.asarray(array).astype(self._everything.dtype)

    def _loss_at(self, moved: Arrays) -> float:
        return float(self._forward.run({**self._feeds, **moved}).outputs[self._loss].item())

    def _slopes(self, value: ir.Value, direction: _Array) -> Iterator[Slopes]:
        name, center = value.name or "", self._center(value)
        return slopes(lambda array: self._loss_at({name: array}), self._here, center, direction, self._limits)

    # --- pairs of a weight and its gradient -------------------------------------------------------------------------

    def check(self, directions: int) -> list[WeightCheck]:
        """Check each gradient along random directions and along itself; add the weights without a gradient."""
        pairs = self._pair()
        checks = [self._check(gradient, pairs.get(gradient), directions) for gradient in self._forms]
        for value in self._known:
            if value not in pairs.values():
                reason = "no gradient of its shape was found" if is_float(value) else "it is not floating point"
                checks.append(WeightCheck(value.name, None, UNCHECKED, detail=reason))
        return checks

    def _pair(self) -> dict[ir.Value, ir.Value]:
        """Pair gradients with weights: by shape, then by the slopes along one direction, then by names."""
        ranked: list[tuple[tuple[Any, ...], ir.Value, ir.Value]] = []
        for shape in dict.fromkeys(array.shape for arrays in self._arrays.values() for array in arrays):
            alike = [value for value in self._sources if self._center(value).shape == shape]
            gradients = [g for g, arrays in self._arrays.items() if any(array.shape == shape for array in arrays)]
            direction = self._random.standard_normal(shape)
            for value in alike:
                tried = [*self._slopes(value, direction)] if len(alike) > 1 or value not in self._weights else []
                for gradient in gradients:
                    products = (np.vdot(a, direction) for a in self._arrays[gradient] if a.shape == shape)
                    distance = min((_distance(p, slope) for p in products for slope in tried), default=0.0)
                    share, length = likeness(value, gradient)
                    rank = max(distance, self._limits.tolerance) if distance < _FAR else 1.0
                    # A gradient that fits no input here is wrong, or has no input among these.
                    if value in self._weights or rank == self._limits.tolerance:
                        ranked.append(((rank, value not in self._weights, -share, -length), gradient, value))
        pairs: dict[ir.Value, ir.Value] = {}
        for _, gradient, value in sorted(ranked, key=lambda each: each[0]):
            if gradient not in pairs and value not in pairs.values():
                pairs[gradient] = value
        return pairs

    # --- one gradient -----------------------------------------------------------------------------------------------

    def _check(self, gradient: ir.Value, value: ir.Value | None, directions: int) -> WeightCheck:
        if value is None:
            return WeightCheck(None, gradient.name, UNCHECKED, detail="it fits no weight by its shape")
        shape = self._center(value).shape
        forms = zip(self._forms[gradient], self._arrays[gradient], strict=True)
        checks = [self._compare(value, form, array, directions) for form, array in forms if array.shape == shape]
        best = min(checks, key=lambda each: (AGREES, UNSURE, DISAGREES).index(each.verdict))
        if best.verdict != DISAGREES:
            return best
        inside = self._find_inside(value, directions)
        if inside is None or not gradient.is_graph_output():
            return inside or best
        detail = f"{best.detail}; the derivative is {inside.gradient!r}, which the graph changes afterwards"
        return dataclasses.replace(best, detail=detail)

    def _find_inside(self, value: ir.Value, directions: int) -> WeightCheck | None:
        """Find the derivative by a weight among all values that scale with the loss, and their products and parts."""
        weight = self._center(value)
        direction = np.asarray(self._random.standard_normal(weight.shape))
        tried = [*self._slopes(value, direction)]
        for form, array in self._inside.items():
            if array.shape == weight.shape:
                distance = min((_distance(np.vdot(array, direction), slope) for slope in tried), default=1.0)
                if distance <= self._limits.tolerance:
                    found = self._compare(value, form, array, directions)
                    if found.verdict == AGREES:
                        return found
        return None

    @functools.cached_property
    def _inside(self) -> dict[ir.Value, _Array]:
        """All values that may be gradients by their shapes."""
        shapes = {self._center(value).shape for value in self._sources}
        values = dict.fromkeys((*self._step.degrees, *_find_changed(self._forms)))
        fitting = [v for v in values if v.shape is None or not v.shape.is_static() or v.shape.numpy() in shapes]
        outputs = [self._copy.values[v.name or ""] for v in fitting if v.name in self._copy.values]
        evaluator = Evaluator(extract(self._copy.model, outputs), self._dtype)
        with contextlib.closing(evaluator):
            arrays = evaluator.run(self._feeds).outputs
        return {value: arrays[value.name or ""] for value in fitting if value.name in arrays}

    def _compare(self, value: ir.Value, form: ir.Value, gradient: _Array, count: int) -> WeightCheck:
        random = [np.asarray(self._random.standard_normal(gradient.shape)) for _ in range(count)]
        found = [compare(self._slopes(value, each), gradient, each, self._limits, "random") for each in random]
        if gradient.any():
            found.append(compare(self._slopes(value, gradient), gradient, gradient, self._limits, "gradient"))
        return judge(value.name or "", form.name or "", tuple(found))


def _distance(product: float, slope: Slopes) -> float:
    """Return the relative distance of a product with a gradient from a slope, apart from rounding."""
    return float(abs(product - slope.central) / max(abs(product), abs(slope.central), slope.noise, 1e-300))


def find_forms(*gradients: ir.Value) -> list[ir.Value]:
    """Return gradients in the form for their readers: behind nodes that move, cast, sum or negate; whole, no slices."""

    def below(value: ir.Value) -> list[ir.Value]:
        results = [node.outputs[0] for node, index in value.uses() if _hands_on(value, node, index)]
        return [] if len(results) < len(value.uses()) or value.is_graph_output() else results

    read = [value for value in reach(gradients, below) if not below(value)]
    return [*dict.fromkeys((*read, *(source_by_trait(value, Trait.PART) for value in gradients)))]


def _find_changed(gradients: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """Yield sums and products with gradients, and their parts: the gradient of `t` in `exp(t)` is a product."""

    def below(value: ir.Value) -> list[ir.Value]:
        found = (node.outputs for node, index in value.uses() if _hands_on(value, node, index, _CHANGES))
        return [output for outputs in found for output in outputs]

    return reach(gradients, below)


def _hands_on(value: ir.Value, node: ir.Node, index: int, others: Collection[str] = ()) -> bool:
    """Return whether the results of a reader are another form of a value, or computed from it by such an operator."""
    views = not index and (node.op_type in ("Neg", "ReduceSum") or has_trait(node, _VIEWS))
    return node.graph is value.graph and (views or node.op_type in others)
