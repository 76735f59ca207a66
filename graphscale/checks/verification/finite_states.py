"""The states that stay finite where one number of the batch is not, whatever the file's own check says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphscale.checks.verification.verify_report import Difference, is_finite
from graphscale.files.tensor_files import Arrays
from graphscale.flow.support import reach
from graphscale.graph.values import is_float, is_scalar
from graphscale.graph.walks import ancestors
from graphscale.process.summary import few

__all__ = ["FiniteStates", "poisoned"]


def poisoned(feeds: Arrays, names: Collection[str], number: float) -> Arrays:
    """Return feeds with a number in the middle of some of them."""
    copies = {name: feeds[name].copy() for name in names}
    for array in copies.values():
        array.reshape(-1)[array.size // 2] = number
    return {**feeds, **copies}


class FiniteStates:
    """The states that a number in the batch must not make non-finite.

    A number above a loss must not reach a state that depends on a gradient. Nor must it change a parameter where the
    original shows it in a scalar. Other states only store their batch: this is the original's own doing.

    Args:
        graph: the graph of the original.
        states: `{input: output}` of its carried state, None for state written in place.
        kept: the states that advance on skipped steps, too.
        losses: its losses.
        gradients: its gradients.
        batches: its inputs with data of a batch.

    Attributes:
        stored: the states that the original itself makes non-finite, with the inputs behind them.
    """

    def __init__(
        self,
        graph: ir.Graph,
        states: Mapping[str, str | None],
        kept: Collection[str],
        losses: Sequence[ir.Value],
        gradients: Sequence[ir.Value],
        batches: Collection[ir.Value],
    ) -> None:
        self._graph, self._states, self._gradients = graph, states, gradients
        self.stored: dict[str, str] = {}
        self._guarded = [state for state in states if state not in kept]
        self._trained = {value.name for value in ancestors(losses)}
        following = {*states.values()}
        scalars = (v for v in graph.outputs if is_float(v) and is_scalar(v) and v.name not in following)
        # The ends of the forward pass: the losses, and further scalars, such as the loss of a validation batch.
        above = ancestors(dict.fromkeys((*losses, *scalars)))
        nexts = (value for value in graph.outputs if value.name in following)
        read = above | ancestors(dict.fromkeys(nexts))
        self._fed = self._trained | {value.name for value in read.intersection(batches)}
        # Above a scalar that may be a loss, tensors: other scalars may be its average.
        self._parameters = self._trained | {value.name for value in above if not is_scalar(value)}

    def inputs(self, feeds: Arrays) -> list[str]:
        """Return the fed floating-point inputs above a loss, and batches, that are no carried state."""
        fed = (name for name in feeds if name in self._fed and name not in self._states)
        return [name for name in fed if feeds[name].dtype.kind not in "biuO" and feeds[name].size]

    def find_infected(
        self, feeds: Arrays, following: Callable[[str], Any], run: Callable[[], Arrays]
    ) -> Iterator[Difference]:
        """Yield the states that were finite and are not by a number of the batch; note those of the original itself.

        Args:
            feeds: the feeds of the step.
            following: returns the next value of a state in the scaled step; None if it has none.
            run: runs the original on the feeds; returns its outputs.
        """
        names = [name for name, array in feeds.items() if not is_finite(array)]
        if not {*names} <= {*self.inputs(feeds)}:
            return
        show = functools.cache(lambda: any(array.ndim == 0 and not is_finite(array) for array in run().values()))
        # A number behind the forward pass of training, such as a validation batch, is behind the finite check.
        reached = self._reached if self._trained.intersection(names) else set[str]()
        for state in self._guarded:
            array = following(state)
            if array is None or is_finite(array) or not is_finite(feeds.get(state, np.zeros(0))):
                continue
            if state in reached or (state in self._parameters and show()):
                finite = np.where(np.isfinite(array.astype(np.float64)), array, feeds.get(state, 0))
                yield Difference(f"{state}.next", finite.astype(array.dtype), array, "finite before the step")
            else:
                self.stored.setdefault(state, few([*map(repr, names)], 1))

    @functools.cached_property
    def _reached(self) -> set[str]:
        """The states whose next value depends on a gradient; one written in place depends on it at its reader."""
        behind = {value.name for value in reach(self._graph, self._gradients)}
        sources = {value.name: value for value in (*self._graph.inputs, *self._graph.initializers.values())}
        written = {
            state: {v.name for use in sources[state].uses() for v in use.node.outputs}
            for state, output in self._states.items()
            if output is None and state in sources
        }
        return {state for state, output in self._states.items() if behind & written.get(state, {output})}
