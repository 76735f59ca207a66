"""A step function of the user as one of flat arrays, with names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graphscale.errors import ExportError, one_line
from graphscale.exporters.jax.state_tree import Tree, words
from graphscale.exporters.step_file import next_name
from graphscale.files.tensor_files import Arrays

__all__ = ["FlatStep"]

_SWAPPED = "the step returns (loss, new state): return (new state, loss)"


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """A step of flat arrays: those of the batch, the hyperparameters and the state go in, in this order.

    Attributes:
        function: the step function of the user.
        batch: the batch.
        options: hyperparameters, keyword arguments of the function.
        state: the state.
        results: names of the losses and metrics.
        losses: names of the losses.
    """

    function: Callable[..., Any]
    batch: Tree
    options: Tree
    state: Tree
    results: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        function: Callable[..., Any],
        state: Any,
        batch: Any,
        hyperparameters: Mapping[str, Any],
        losses: Sequence[str],
    ) -> FlatStep:
        """Name the arrays of a step, and evaluate the shapes of its results.

        Raises:
            ExportError: the function fails, or returns something else than a state and a loss.
        """
        tree = Tree.make(state, "state")
        options = Tree.make(dict(hyperparameters), "hyperparameter", tree.names)
        fed = Tree.make(batch, "batch", [*tree.names, *options.names])
        if not tree.leaves:
            raise ExportError("the state has no arrays: pass the weights and the state of the optimizer")
        step = cls(function, fed, options, tree)
        names: list[str] = []

        def flat(*values: Any) -> Any:
            following, results = step.call(values)
            names.extend(results)
            return following, list(results.values())

        try:
            following, results = jax.eval_shape(flat, *step.arrays.values())
        except ExportError as error:
            raise ExportError(str(error)) from None  # without the lines that JAX appends
        except Exception as error:  # of the user's code
            text = one_line(next(iter(str(error).splitlines()), ""))
            raise ExportError(f"the step function fails: {type(error).__name__}: {text}") from error
        for leaf, shape in zip(tree.leaves, following, strict=True):
            if (leaf.value.shape, leaf.value.dtype) != (shape.shape, shape.dtype):
                if [leaf.value.shape] == [result.shape for result in results]:
                    raise ExportError(_SWAPPED)
                raise ExportError(
                    f"{leaf.name} is {leaf.value.dtype}{list(leaf.value.shape)}, its next value is {shape.dtype}"
                    f"{list(shape.shape)}: a state keeps its type and shape"
                )
        missing = [name for name in losses if name not in names]
        if missing:
            raise ExportError(f"the step returns no loss {missing[0]!r}, but {', '.join(names)}: name its losses")
        for name, shape in zip(names, results, strict=True):
            if name in losses and (shape.shape or not jax.numpy.issubdtype(shape.dtype, np.floating)):
                raise ExportError(f"{name} is {shape.dtype}{list(shape.shape)}: a loss is one floating-point number")
        return dataclasses.replace(step, results=tuple(names), losses=tuple(losses))

    @property
    def fed(self) -> Arrays:
        """The inputs without the state."""
        return self.batch.arrays | self.options.arrays

    @property
    def notes(self) -> list[str]:
        """Facts that a user should know."""
        return [
            f"feed {leaf.name} as {leaf.value.dtype}: JAX makes that of {leaf.given}"
            for leaf in (*self.batch.leaves, *self.options.leaves)
            if leaf.given is not None and leaf.given != leaf.value.dtype
        ]

    @property
    def arrays(self) -> Arrays:
        """All inputs."""
        return self.fed | self.state.arrays

    @property
    def pairs(self) -> dict[str, str]:
        """The output with the next value of each carried input."""
        return {next_name(name): name for name in self.state.names}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of all outputs."""
        return (*self.results, *self.pairs)

    def call(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the next state, array by array, and the losses and metrics by name."""
        first, last = len(self.batch.leaves), len(self.batch.leaves) + len(self.options.leaves)
        options = self.options.build(values[first:last])
        returned = self.function(self.state.build(values[last:]), self.batch.build(values[:first]), **options)
        if not isinstance(returned, tuple) or len(returned) not in (2, 3):
            raise ExportError("the step must return (new state, loss), or (new state, loss, metrics)")
        following, *rest = returned
        if len(rest) == 1 and isinstance(rest[0], tuple) and len(rest[0]) == 2:
            rest = list(rest[0])
        if len(self.state.leaves) > 1 and jax.tree.structure(rest[0]) == self.state.structure:
            raise ExportError(_SWAPPED)
        results = rest[0] if len(rest) == 1 and isinstance(rest[0], Mapping) else {"loss": rest[0]}
        named = self._name(results)
        if len(rest) == 2:
            named |= self._name(rest[1] if isinstance(rest[1], Mapping) else {"metric": rest[1]}, taken=named)
        return self.state.take_apart(following), named

    def _name(self, results: Any, taken: Sequence[str] | Mapping[str, Any] = ()) -> dict[str, Any]:
        paths, _ = jax.tree.flatten_with_path(results)
        return {
            f"metric.{name}" if name in taken else name: jax.numpy.asarray(words(value))
            for name, value in ((_path(path), value) for path, value in paths)
        }

    def run(self, *values: Any) -> tuple[Any, ...]:
        """Run the step on flat arrays; return the losses, the metrics and the next state."""
        following, results = self.call(values)
        return (*results.values(), *following)


def _path(path: Any) -> str:
    return ".".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", "")))) for entry in path)
