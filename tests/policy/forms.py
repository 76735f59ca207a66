"""A policy in its two forms, eager and as a graph, run over a sequence of steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

import graphscale as gs
from tests.conftest import make_session
from tests.policy import peers

GOOD = np.asarray([1.0], dtype=np.float32)
BAD = tuple(np.asarray([value], dtype=np.float32) for value in (np.inf, np.nan, -np.inf))


@dataclasses.dataclass
class Trajectory:
    """The record of a sequence of steps: after each the scale, a flag for an applied step, a flag for a stuck scale."""

    scales: list[float] = dataclasses.field(default_factory=list)
    applied: list[bool] = dataclasses.field(default_factory=list)
    stuck: list[bool] = dataclasses.field(default_factory=list)

    def add(self, scale: float, applied: bool, stuck: bool) -> None:
        self.scales.append(scale)
        self.applied.append(applied)
        self.stuck.append(stuck)


def peer_trajectory(peer: peers.Peer, steps: list[bool]) -> Trajectory:
    """Run a project's loss scaler; where it gives up, the sequence ends with a stuck step."""
    result = Trajectory()
    with np.errstate(over="ignore"):
        for finite in steps:
            try:
                peer.update(not finite)
            except peers.GivesUpError:
                result.add(float(peer.scale), False, True)
                break
            result.add(float(peer.scale), finite, False)
    return result


def eager_trajectory(policy: gs.DynamicLossScale, steps: list[bool]) -> Trajectory:
    """Run a policy; as in a graph, a scale that is stuck is reported where the policy says so, not where it holds."""
    result, reports = Trajectory(), policy.rule.on_stuck != "hold"
    for index, finite in enumerate(steps):
        _, applied = policy.update([GOOD if finite else BAD[index % len(BAD)]])
        scale = policy()
        assert scale.dtype == np.float32
        result.add(float(scale), applied, reports and policy.stuck)
    return result


State = tuple[float, ...]


class GraphForm:
    """A policy bound to a graph with one gradient, in a session of ONNX Runtime.

    A step of the graph is a function of the state that is fed and of the gradient, so that each is run only once: the
    ten thousand sequences share their steps.

    Args:
        policy: the policy.
        target: "onnx", or "ort-training": then the state is written into the memory that is fed.
        ir_version: 10 for the rule as a function of the model, 7 for its nodes in the graph.
    """

    def __init__(self, policy: gs.DynamicLossScale, target: str = "onnx", ir_version: int = 10) -> None:
        gradient = ir.Value(name="gradient", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
        graph = ir.Graph([gradient], [], nodes=[], opset_imports={"": 17}, name="step")
        model = ir.Model(graph, ir_version=ir_version)
        bound = policy.bind(model, target)
        _, should_apply = bound.update([gradient])
        assert isinstance(should_apply, ir.Value) and bound.target.in_place == (target == "ort-training")
        # The flag of a stuck scale stands in the graph if the state is written in place.
        spelled_out = bound.target.in_place and policy.rule.on_stuck != "hold"
        assert bool(model.functions) == (ir_version >= 8 and not spelled_out)
        if should_apply not in graph.outputs:
            graph.outputs.append(should_apply)
        self.in_place = bound.target.in_place
        self.applies = should_apply.name
        self.session = make_session(ir.to_proto(model))
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.initial = {value.name: value.const_value.numpy() for value in bound.states.values()}
        self.start: State = tuple(float(array) for array in self.initial.values())
        self.known: dict[tuple[State, bool], tuple[State, bool, bool]] = {}

    def step(self, state: State, finite: bool) -> tuple[State, bool, bool]:
        """Return the next state, whether the step applies, and whether the scale is stuck."""
        if (state, finite) not in self.known:
            self.known[state, finite] = self._run(state, finite)
        return self.known[state, finite]

    def _run(self, state: State, finite: bool) -> tuple[State, bool, bool]:
        fed = {
            name: np.array(number, dtype=initial.dtype)
            for (name, initial), number in zip(self.initial.items(), state, strict=True)
        }
        gradient = GOOD if finite else BAD[len(self.known) % len(BAD)]
        values = dict(zip(self.outputs, self.session.run(self.outputs, {"gradient": gradient, **fed}), strict=True))
        following = fed if self.in_place else {name: values[f"{name}.next"] for name in fed}
        assert all(following[name].dtype == fed[name].dtype for name in fed)
        next_state = tuple(float(array) for array in following.values())
        return next_state, bool(values[self.applies]), bool(values.get("stuck", False))

    def trajectory(self, steps: list[bool]) -> Trajectory:
        result, state = Trajectory(), self.start
        for finite in steps:
            state, applied, stuck = self.step(state, finite)
            result.add(state[0], applied, stuck)
        return result
