"""A training step: all that is known of a training graph, before, between and after the passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir

from graphscale.analysis import proof
from graphscale.analysis.report import Report
from graphscale.analysis.roles.role_table import Role
from graphscale.analysis.training_result import TrainingGraph
from graphscale.analysis.updates import Update
from graphscale.errors import ProofError
from graphscale.graph.builder import Editor
from graphscale.graph.stamp import Stamp
from graphscale.graph.values import node_name
from graphscale.policy.loss_scale import FixedLossScale, LossScale
from graphscale.policy.names import Kind, ScaledValue
from graphscale.process.stages import report_stage
from graphscale.targets import Target

__all__ = ["Carried", "Quotient", "Scale", "Step"]

# The end of the name of a quotient that does not take over the name of its gradient.
UNSCALED = ".unscaled"


@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
    """A loss scale in a graph.

    Attributes:
        policy: its policy.
        target: the runtime that executes the graph.
        value: the scale, a scalar float32 value.
        states: its state by role, including `loss_scale`; none of a fixed scale.
        next: the next value of each state, by role, once the update rule is in the graph.
        stuck: the flag of a stuck scale; None for a policy without a reaction to one.
    """

    policy: LossScale
    target: Target
    value: ir.Value
    states: Mapping[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    next: Mapping[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    stuck: ir.Value | None = None

    @property
    def is_fixed(self) -> bool:
        """True for a fixed scale, which has no state."""
        return isinstance(self.policy, FixedLossScale)


@dataclasses.dataclass(frozen=True, eq=False)
class Quotient:
    """A gradient after its division by the scale.

    Attributes:
        name: the gradient's name in the original graph.
        value: the quotient, in float32 or wider.
        checked: the values of the finite check: the quotient, or the sum around it; of a scaled file, none.
    """

    name: str
    value: ir.Value
    checked: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """A piece of carried state of a scaled step.

    Attributes:
        input: its present value.
        next: its next value.
        in_place: True if the graph writes the state in place; else `next` is an output to be fed back.
        how: its origin in the report: `analysis.report.StateReport.how`.
        guarded: True if a skipped step keeps the state; of a scaled file, if the state is the original's.
    """

    input: ir.Value
    next: ir.Value
    in_place: bool
    how: str
    guarded: bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Step(TrainingGraph):
    """A training step, as values and nodes of its graph. The passes turn one into the next.

    Attributes:
        model: the model.
        metadata: the metadata of a scaled file; None for a step under way.
        report: the same for the user, with the names of the original; None before `scale-loss`.
        editor: the editor of the graph, which knows its names; None before `scale-loss`.
        scales: the loss scales of the graph; `scale-loss` adds one.
        skips: True if a step with a non-finite gradient is skipped.
        products: the values where the scale enters, each with its product; of `scale-loss`.
        exposed: the outputs with the loss times the scale; of `scale-loss`.
        quotients: the gradients after their division; of `unscale-gradients`.
        sums: the values past the gradients in which finite gradients can overflow, and `terms`; of `unscale-gradients`.
        all_finite: the flag of the finite check of `checked`, a scalar bool value; of `check-finite`.
        guard: the flag that decides whether the step is applied: `all_finite`, unless the policy accepts a non-finite
            step; of `check-finite` and `update-loss-scale`. Of a scaled file, the finite flag after the nodes that it
            waits for; in a window of accumulated gradients, the flag so far.
        carried: the carried state of the scaled step; of `update-loss-scale`, `telemetry` and `guard-updates`.
        telemetry: counters and outputs by their role; of `telemetry`.
        activations: the values of the forward pass that telemetry checks, with dtypes; of `telemetry`.
        done: the names of the passes that ran.
        modified: True if the last of them changed the graph.
    """

    model: ir.Model
    metadata: Stamp | None = None
    report: Report | None = None
    editor: Editor | None = None
    scales: tuple[Scale, ...] = ()
    skips: bool = True
    products: Mapping[ir.Value, ir.Value] = dataclasses.field(default_factory=dict)
    exposed: tuple[ir.Value, ...] = ()
    quotients: tuple[Quotient, ...] = ()
    sums: tuple[ir.Value, ...] = ()
    all_finite: ir.Value | None = None
    guard: ir.Value | None = None
    carried: tuple[Carried, ...] = ()
    telemetry: Mapping[ScaledValue, ir.Value] = dataclasses.field(default_factory=dict)
    activations: Mapping[ir.Value, ir.DataType] = dataclasses.field(default_factory=dict)
    done: frozenset[str] = frozenset()
    modified: bool = False

    @property
    def stamp(self) -> Stamp:
        """The metadata of a scaled file."""
        assert self.metadata is not None
        return self.metadata

    @property
    def losses(self) -> tuple[ir.Value, ...]:
        """The losses; the first names the step's."""
        others = (value for value, each in self.roles.outputs.items() if each.role is Role.LOSS)
        return tuple(dict.fromkeys((self.loss, *others)))

    @property
    def states(self) -> tuple[Update, ...]:
        """The certain carried state of the original: input, next value, and whether it advances on skipped steps."""
        return self.updates

    @property
    def scale(self) -> Scale:
        """The loss scale, after `scale-loss`."""
        (scale,) = self.scales
        return scale

    @property
    def named(self) -> dict[str, ir.Value]:
        """The values that a scaled file names, by role."""
        (scale,), values = self.scales, dict[ScaledValue, ir.Value | None]()
        values |= {ScaledValue.LOSS: self.loss, ScaledValue.LOSS_SCALE: scale.value, **scale.states}
        values |= {ScaledValue.STUCK: scale.stuck, ScaledValue.ALL_FINITE: self.all_finite, **self.telemetry}
        return {role.value: value for role, value in values.items() if value and value.graph is not None}

    @property
    def added(self) -> tuple[ir.Value, ...]:
        """The state that scaling adds: that of the loss scale, and of telemetry."""
        counted = (value for role, value in self.telemetry.items() if role.kind is Kind.TELEMETRY)
        return (*self.scale.states.values(), *counted)

    @property
    def checked(self) -> tuple[ir.Value, ...]:
        """The values of the finite check, each once."""
        gradients = (value for quotient in self.quotients for value in quotient.checked)
        return tuple(dict.fromkeys((*gradients, *self.sums)))

    @property
    def parameters(self) -> tuple[ir.Value, ...]:
        """The inputs whose gradient leaves the graph; other weights are among the states."""
        return self._inputs(Role.WEIGHT)

    @property
    def batches(self) -> tuple[ir.Value, ...]:
        """The inputs with data of a batch."""
        return self._inputs(Role.BATCH)

    @property
    def hyperparameters(self) -> tuple[ir.Value, ...]:
        """The inputs with numbers such as a learning rate."""
        return self._inputs(Role.HYPERPARAMETER)

    @property
    def metrics(self) -> tuple[ir.Value, ...]:
        """The outputs that are metrics."""
        return tuple(value for value, each in self.roles.outputs.items() if each.role is Role.METRIC)

    def prove(self, rule_nodes: frozenset[ir.Node]) -> None:
        """Prove the graph, after all passes.

        Args:
            rule_nodes: the nodes that give the next loss scale, or order writes.

        Raises:
            ProofError: the graph is wrong.
        """
        report_stage("proving the new graph")
        degrees = proof.prove(
            self.graph,
            self.scale.value,
            self.loss,
            guarded={carried.next: carried.input for carried in self.carried if carried.guarded},
            checked=self.checked,
            all_finite=self.all_finite,
            applies=self.guard,
            exempt=self.exposed,
            rule_nodes=rule_nodes,
        )
        covered = {node_name(node) for node in self.coverage.nodes} - {node_name(n) for n in self.coverage.missed}
        lacking = covered.difference(proof.scaled_contractions(self.coverage.nodes, degrees))
        if lacking:
            raise ProofError(f"the scale was planned to reach {sorted(lacking)[0]!r}, and does not")

    def _inputs(self, role: Role) -> tuple[ir.Value, ...]:
        return tuple(value for value, each in self.roles.inputs.items() if each.role is role)
