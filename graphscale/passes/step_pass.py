"""The base class of passes from one step to the next, and the step between two passes of a sequence."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes import PassResult

from graphscale.errors import PassOrderError
from graphscale.graph.builder import Builder
from graphscale.passes.graph_pass import GraphPass
from graphscale.step.training_step import Carried, Step

__all__ = ["StepPass", "carry", "hold_step", "is_under_way"]

# In the `meta` of a model, which onnx_ir never writes to a file: the step after the last pass. A sequence gives its
# passes nothing but the model. graphscale's own functions pass steps as arguments and results.
_KEY = "graphscale.step"


def hold_step(step: Step) -> None:
    """Keep a step for the next pass of a sequence."""
    step.model.meta[_KEY] = step


def is_under_way(model: ir.Model) -> bool:
    """Return whether `ScaleLoss` has run on a model in a sequence."""
    return _KEY in model.meta


class StepPass(GraphPass):
    """A pass that continues the step of `ScaleLoss`.

    Attributes:
        after: the pass that must run before.
    """

    after: ClassVar[type[GraphPass]]

    def call(self, model: ir.Model) -> PassResult:
        step = model.meta.get(_KEY)
        # The step of a copied model is that of its original.
        if not isinstance(step, Step) or step.model is not model:
            raise self._refuse()
        if step.editor is not None:
            step.editor.refresh()  # another pass may have added names
        step = self.run(step)
        hold_step(step)
        return PassResult(model, modified=step.modified)

    def run(self, step: Step) -> Step:
        """Return the step after this pass, whose graph is changed in place.

        Raises:
            PassOrderError: the pass before has not run, or this one has.
        """
        editor = step.editor
        if self.after.name not in step.done or editor is None:
            raise self._refuse()
        if self.name in step.done:
            raise PassOrderError(f"{self.name} has run on this model already; run it once")
        step = dataclasses.replace(step, done=step.done | {self.name}, modified=False)
        return self.apply(step, self.builder(editor))

    def _refuse(self) -> PassOrderError:
        before = self.after.name
        return PassOrderError(f"{self.name} needs the results of {before}; run {before} on this model first")

    @abc.abstractmethod
    def apply(self, step: Step, build: Builder) -> Step:
        """Change the graph of a step with a builder of this pass's nodes, and return the next step.

        The next step has `modified` if the graph changed.
        """


def carry(build: Builder, state: ir.Value, value: ir.Value, how: str, *, in_place: bool, guarded: bool) -> Carried:
    """Return a piece of carried state, and write it in place on request; see `Carried`."""
    if in_place:
        from graphscale.passes.nodes.write_order import write_in_place  # few targets do

        write_in_place(build, state, value)
    return Carried(state, value, in_place, how, guarded)
