"""The shared facts of lint's rules about a model, each found once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir

from graphscale.analysis.loss import find_loss_candidates
from graphscale.analysis.topology import Topology
from graphscale.checks.linting.check import Check, find_flag
from graphscale.checks.linting.lint_report import Finding
from graphscale.checks.linting.scale_search import find_named_scale, find_scale
from graphscale.checks.linting.state_search import find_states
from graphscale.checks.linting.view import View
from graphscale.checks.patterns import input_at
from graphscale.errors import GraphscaleError, ModelFileError
from graphscale.files.contents import parse_json
from graphscale.flow.outcome import Outcomes
from graphscale.graph.stamp import SPLIT_KEY, is_scaled
from graphscale.operators import Trait, has_trait, optimizer_of
from graphscale.step.scaled_step import read
from graphscale.step.training_step import Step
from graphscale.step.understanding import understand

__all__ = ["RULES", "LintContext", "rule"]


class LintContext(View):
    """A model under lint: the facts that its `Step` does not hold, since it may be wrong or not scaled.

    Attributes:
        model: it.
        step: the step of a scaled file, by its metadata or its original; of others, by the graph alone.
        stamp: the metadata; None for a file without any.
        half: the half of a split step: "gradients", a "stage" of several for them, or "update"; else None.
        named: the values in the metadata, by role.
        loss: the loss, one without an effect of the loss scale where there is a choice; None if there is none.
        states: the carried state, without that of the loss scale.
        scale_states: the state of the loss scale.
        scale: the loss scale, or None.
        nexts: the next values of its state.
        unscaled: the gradients where the scale comes out, each with its node.
        roots: origins of gradients: the scale; without one, results of backward contractions, or inputs.
        sources: values that depend on the roots.
        check: the finite check, or None.
        window_check: the check of the accumulated gradients, if the scale follows it instead.
    """

    def __init__(self, model: ir.Model, name: str, scale: str | None = None, step: Step | None = None) -> None:
        super().__init__(model, name)
        self.model = model
        self.stamp = None
        if is_scaled(model):
            step = read(model, name)
            self.stamp = step.stamp
        self.step = step = self.understood if step is None else step
        self.half, cut = _read_half(model, name)
        self.named = named = step.named if step.scales else {}
        # Further state of the loss scale: the counts of its policy and of telemetry.
        counts = [value for value in step.added if value is not step.scale.value] if step.scales else []
        found = find_states(self, step)
        given = named.get("loss_scale") if scale is None else find_named_scale(self, scale)
        losses = [value for value in step.losses if value.graph is not None]
        self.scale = None
        if given is not None or not step.scales or "loss_scale" not in step.stamp.names:
            self.scale = find_scale(self, found, given, counts, losses)
        touched = set() if self.scale is None or step.scales else self.scale.touched
        self.loss = next((loss for loss in losses if loss not in touched), losses[0] if losses else None)
        self.nexts = {} if self.scale is None else self.scale.nexts
        own = {*self.nexts, *(() if self.scale is None else counts)}
        self.states = [state for state in found if state.value not in own]
        self.scale_states = [state for state in found if state.value in own]
        self.unscaled = {} if self.scale is None else self.scale.unscaled
        # Gradients enter the second half unscaled, as inputs, or in buckets.
        reduced = {v for g in cut for end in ("", ".reduced") if (v := self.values.get(f"{g}{end}")) is not None}
        self.roots = reduced or self._find_roots()
        self.sources = self.descendants(self.roots) if reduced or self.scale is None else self.scale.touched
        self.check = self.window_check = None
        # With a fixed scale, a step with a loss has a check only by the metadata, not by its own comparisons.
        is_fixed = bool(step.scales) and step.scale.is_fixed
        if self.half not in ("gradients", "stage") and (not is_fixed or "all_finite" in named or "loss" not in named):
            self.check = self._find_check(named.get("all_finite"), {state.value for state in found})
        numbers = self.nexts.values()
        if self.check is not None and numbers and self.check.dependent.isdisjoint(numbers):
            self.window_check = self._find_check(None, ())

    def _find_check(self, given: ir.Value | None, states: Collection[ir.Value]) -> Check | None:
        flag = given or find_flag(self, self.sources, states, self.nexts.values())
        return None if flag is None else Check(self, flag, self.sources)

    def has_gradients_in(self, dtype: ir.DataType) -> bool:
        """Return whether a multiple of the loss scale has a type."""
        scale = self.scale
        return scale is not None and any(self.dtypes.get(v) is dtype and scale.carries(v) for v in scale.touched)

    def is_bookkeeping(self, value: ir.Value) -> bool:
        """Return whether a value is computed only from the state of the loss scale, constants and flags."""
        return self.scale is not None and value in self.scale.scalars.values

    @functools.cached_property
    def understood(self) -> Step:
        """The step by its graph alone, as for scaling; with no more than a loss if the graph cannot be scaled."""
        try:
            return understand(self.model, asking=False)
        except GraphscaleError:
            losses = find_loss_candidates(self.graph, set())
            return Step(graph=self.graph, loss=losses[0] if losses else ir.val(""), model=self.model)

    @functools.cached_property
    def topology(self) -> Topology | None:
        """The forward and the backward part; None without a loss."""
        return None if self.loss is None else Topology(self.graph, self.loss)

    @functools.cached_property
    def backward_operators(self) -> list[ir.Node]:
        """The nodes of the backward pass that sum products or read a cotangent, with operands of the forward pass."""
        if (topology := self.topology) is None:
            return []
        nodes = (node for node in topology.nodes if node in topology.backward and node in topology.propagating)
        return [node for node in nodes if any(v in topology.activation_dependent for v in topology.operands(node))]

    @property
    def is_inference(self) -> bool:
        """True if nothing in the model belongs to training: no gradient, no state, no loss scale, no check."""
        known = (self.half, self.scale, self.check)
        if self.states or self.roots or self.step.scales or any(each is not None for each in known):
            return False
        return not self.backward_operators and not self.step.gradients

    @functools.cached_property
    def outcomes(self) -> tuple[Outcomes, Outcomes] | None:
        """The outcomes of a step if the check holds, and if it fails; None without a check."""
        if self.check is None:
            return None
        flag, fails_as, dependent = self.check.value, self.check.fails_as, self.check.dependent
        good, bad = (
            Outcomes(self.nodes, {flag: result}, risky=risky, dependent=dependent)
            for result, risky in ((not fails_as, ()), (fails_as, self.sources))
        )
        return good, bad

    def _find_roots(self) -> set[ir.Value]:
        if self.scale is not None:
            return self.scale.scalars.multiples
        # A graph without a loss scale may be meant for one if it has a finite check or a small type.
        is_tested = any(has_trait(node, Trait.FINITENESS_TEST) for node in self.nodes)
        is_small = not {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}.isdisjoint(self.dtypes.values())
        if (is_tested or is_small) and self.topology is not None:
            return {value for node in self.backward_operators for value in node.outputs}
        return self._gradient_inputs()

    def _gradient_inputs(self) -> set[ir.Value]:
        """Return the gradients among the inputs of an optimizer model."""
        optimizers = ((node, optimizer_of(node)) for node in self.nodes)
        places = [(node, roles.inputs.index("gradients")) for node, roles in optimizers if roles and roles.inputs]
        gradients = [input_at(node, index) for node, index in places]
        above = self.ancestors(value for value in gradients if value is not None)
        return {v for v in above if v.is_graph_input() and isinstance(v.type, ir.SequenceType)}


def _read_half(model: ir.Model, name: str) -> tuple[str | None, tuple[str, ...]]:
    """Return a model's half of a split step, None for a whole one, and the gradients among the second half's inputs.

    Raises:
        ModelFileError: the metadata of the half are damaged.
    """
    if SPLIT_KEY not in model.metadata_props:
        return None, ()
    try:
        claims = parse_json(model.metadata_props[SPLIT_KEY])
        if claims["half"] == "update":
            return "update", tuple(claims["gradients"])
        return "stage" if claims["stages"] > 1 else "gradients", ()
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelFileError(f"{name} has a damaged property {SPLIT_KEY}") from error


Find = Callable[[LintContext], Iterable[Finding]]

# The rules, in the order of their modules' imports: the codes of findings, and the function that finds them.
RULES: list[tuple[tuple[str, ...], Find]] = []


def rule(*codes: str) -> Callable[[Find], Find]:
    """Register a function as a rule, with the codes of its findings."""

    def add(find: Find) -> Find:
        RULES.append((codes, find))
        return find

    return add
