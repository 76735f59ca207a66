"""Everything the rules of lint ask of a model, worked out once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import onnx_ir as ir

from graphscale.analysis.degrees import ZERO
from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.topology import Topology, contains_contraction
from graphscale.analysis.training_graph import analyse
from graphscale.checks.linting.check_search import find_check
from graphscale.checks.linting.flow import Flow
from graphscale.checks.linting.lint_report import Finding
from graphscale.checks.linting.scale_search import find_scale, named_scale
from graphscale.checks.linting.state_search import find_states
from graphscale.checks.linting.steps import Outcomes
from graphscale.checks.linting.view import View
from graphscale.errors import GraphscaleError
from graphscale.graph.stamp import is_scaled, read_stamp
from graphscale.operators import Trait, has_trait, optimizer_of, rule_of

__all__ = ["Rule", "Subject", "is_backward_operator"]

# What a stamp names that is no state of the loss scale.
_OUTPUTS = frozenset({"loss", "loss_scale", "all_finite", "stuck", "cause", "offender", "zero_fraction"})


class Subject:
    """A model under lint.

    Args:
        model: the model, with no calls of model-local functions in it.
        name: what to call it in messages.
        scale: the name of the loss scale, or None to find it.

    Attributes:
        view: its main graph.
        stamp: what graphscale wrote into its metadata, if it did.
        states: the carried state, that of the loss scale not among it.
        scale_states: the state of the loss scale.
        scale: the loss scale, or None.
        flow: how the scale flows; None without one.
        roots: what gradients begin with: the scale; without one, what backward contractions give.
        sources: what depends on these.
        check: the finite check, or None.
        window_check: where the scale does not follow that check but one of what was accumulated, that one.
    """

    def __init__(self, model: ir.Model, name: str, scale: str | None = None) -> None:
        self.view = View(model, name)
        self.stamp = read_stamp(model.metadata_props, name) if is_scaled(model) else None
        stamped = None if self.stamp is None else self.stamp.state
        self._losses = self._named("loss") or self._loss_candidates()
        found = find_states(self.view, stamped, self._named("loss", "all_finite"), self._losses)
        given = named_scale(self.view, scale) if scale is not None else next(iter(self._named("loss_scale")), None)
        self.scale = None
        if given is not None or self.stamp is None or "loss_scale" not in self.stamp.names:
            self.scale = find_scale(self.view, found, given, self._roles(), self._losses)
        own = set() if self.scale is None else {*self.scale.nexts, *self._roles()}
        self.states = [state for state in found if state.value not in own]
        self.scale_states = [state for state in found if state.value in own]
        self.flow = None
        if self.scale is not None:
            self.flow = Flow(self.view, self.scale.scalars, self._exempt())
        self.roots = self._find_roots()
        self.sources = self._find_sources()
        numbers = () if self.scale is None else tuple(self.scale.nexts.values())
        given = next(iter(self._named("all_finite")), None)
        self.check = find_check(self.view, given, self.sources, found, numbers)
        self.window_check = None
        if self.check is not None and numbers and not self.check.dependent.intersection(numbers):
            self.window_check = find_check(self.view, None, self.sources, (), numbers)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The dtype of a value, if it can be told."""
        return None if value is None else self.view.dtypes.get(value)

    def carries_scale(self, value: ir.Value | None) -> bool:
        """Whether a value is multiplied by the loss scale."""
        return self.flow is not None and self.flow.degree(value) not in (0, ZERO)

    @functools.cached_property
    def topology(self) -> Topology | None:
        """Forward and backward; None where no loss was found."""
        loss = self.loss
        return None if loss is None else Topology(self.view.graph, loss)

    @functools.cached_property
    def loss(self) -> ir.Value | None:
        """The loss: that of the metadata, or of the analysis, or a scalar output that the scale does not reach."""
        if self.stamp is not None or self.flow is not None:
            reached = set() if self.flow is None else self.flow.touched
            losses = [loss for loss in self._losses if self.stamp is not None or loss not in reached]
            if losses:
                return losses[0]
            return next((loss for loss in self._losses), None)
        return self._analysed_loss()

    @functools.cached_property
    def good(self) -> Outcomes | None:
        """The step on which the check holds."""
        return self._outcomes(fails=False)

    @functools.cached_property
    def bad(self) -> Outcomes | None:
        """The step on which the check fails."""
        return self._outcomes(fails=True)

    def _outcomes(self, fails: bool) -> Outcomes | None:
        if self.check is None:
            return None
        holds = self.check.fails_as if fails else not self.check.fails_as
        return Outcomes(self.view, self.check.value, holds, self.sources if fails else ())

    def _named(self, *roles: str) -> list[ir.Value]:
        names = {} if self.stamp is None else self.stamp.names
        values = (self.view.value(names.get(role)) for role in roles)
        return [value for value in values if value is not None]

    def _roles(self) -> list[ir.Value]:
        names = {} if self.stamp is None else self.stamp.names
        return [v for role in names if role not in _OUTPUTS for v in self._named(role)]

    def _exempt(self) -> list[ir.Value]:
        """Outputs that may carry the scale: its next values, and the scaled loss where it is called that."""
        assert self.scale is not None
        nexts = list(self.scale.nexts.values())
        return nexts + [v for v in self.view.graph.outputs if v.name and v.name.startswith("scaled_loss")]

    def _loss_candidates(self) -> list[ir.Value]:
        return find_loss_candidates(self.view.graph, set())

    def _analysed_loss(self) -> ir.Value | None:
        try:
            return analyse(self.view.graph).loss if self._losses else None
        except GraphscaleError:
            # A graph that cannot be scaled may still have a loss.
            return self._losses[0]

    def _find_roots(self) -> set[ir.Value]:
        if self.scale is not None:
            scalars = self.scale.scalars
            return {value for value in scalars.values if scalars.degree(value) not in (0, ZERO)}
        topology = self.topology if self._may_concern else None
        if topology is None:
            return self._gradient_inputs()
        return {
            value
            for node in topology.nodes
            if node in topology.backward and is_backward_operator(node)
            if any(operand in topology.activation_dependent for operand in topology.operands(node))
            for value in node.outputs
        }

    def _find_sources(self) -> set[ir.Value]:
        return self.view.descendants(self.roots, shapes=False) if self.flow is None else self.flow.touched

    @property
    def _may_concern(self) -> bool:
        """Whether a graph without a loss scale has anything to do with one: a test for finiteness, a small type."""
        small = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
        return any(has_trait(node, Trait.FINITENESS_TEST) for node in self.view.nodes) or not small.isdisjoint(
            self.view.dtypes.values()
        )

    def _gradient_inputs(self) -> set[ir.Value]:
        """Of an optimizer model: the gradients that it is fed."""
        fed: set[ir.Value] = set()
        for node in self.view.nodes:
            optimizer = optimizer_of(node)
            index = optimizer.inputs.index("gradients") if optimizer is not None and optimizer.inputs else None
            gradients = None if index is None or index >= len(node.inputs) else node.inputs[index]
            if gradients is not None:
                above = self.view.ancestors([gradients])
                fed.update(v for v in above if v.is_graph_input() and isinstance(v.type, ir.SequenceType))
        return fed


def is_backward_operator(node: ir.Node) -> bool:
    """Whether a node of a backward pass sums products, or takes an upstream gradient by definition."""
    rule = rule_of(node)
    return contains_contraction(node) or (rule is not None and rule.gradient)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of lint.

    Attributes:
        codes: the codes of what it finds.
        find: gives the findings on a subject.
    """

    codes: tuple[str, ...]
    find: Callable[[Subject], Iterable[Finding]]
