"""The reference: a loop of `InferenceSession.run` with the state as numpy arrays, in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import graphscale as gs
from graphscale.lowering.lower_model import lower_step
from graphscale.lowering.thresholds import Thresholds
from graphscale.session.loading import open_model
from tests.conftest import Arrays, Example, Level, assert_same_bits, initial_values

# Up to here ONNX Runtime computes equal graphs with equal bits, whatever stands beside them.
EXACT = Level.ORT_ENABLE_BASIC

# Every rewrite for a CPU, however small a state or a gradient is; and sums of gradients by rows.
ALWAYS = Thresholds(branch_elements=0, probe_elements=0, bound_elements=0, unbounded_passes=10**6, bound_share=10**6)
BY_ROWS = dataclasses.replace(ALWAYS, row_sum_elements=0, row_elements=0)


def options(level: Level | None = EXACT) -> ort.SessionOptions:
    """Session options: one thread, silent, and a level of graph optimization (None: the default)."""
    made = ort.SessionOptions()
    made.log_severity_level = 4
    made.intra_op_num_threads = 1
    if level is not None:
        made.graph_optimization_level = level
    return made


def lowered_graph(result: gs.ScaledModel, lowering: Thresholds = ALWAYS) -> ir.Graph:
    """The main graph that a session on a CPU runs."""
    model = open_model(result)[0].clone()
    lower_step(model, "cpu", lowering)
    return model.graph


class PlainLoop:
    """A scaled step, run by hand.

    Args:
        result: the scaled step, with a ModelProto.
        state: first values of carried inputs without an initializer.
        level: the level of graph optimization.

    Attributes:
        state: all carried state, by input.
    """

    def __init__(self, result: gs.ScaledModel, state: Mapping[str, np.ndarray], level: Level | None = EXACT) -> None:
        assert isinstance(result.model, onnx.ModelProto)
        self._session = ort.InferenceSession(
            result.model.SerializeToString(), options(level), providers=["CPUExecutionProvider"]
        )
        self._next = {s.input: s.output for s in result.report.state}
        first = {**initial_values(result.model), **state}
        # A write in place goes into the array that is fed.
        self.state = {name: np.array(first[name]) for name in self._next}

    def step(self, feeds: Mapping[str, Any]) -> Arrays:
        """Run a step; return the outputs without the carried state."""
        names = [output.name for output in self._session.get_outputs()]
        values = self._session.run(names, {**feeds, **self.state})
        outputs = dict(zip(names, (np.array(value) for value in values), strict=True))
        self.state = {
            name: self.state[name] if output is None else outputs[output] for name, output in self._next.items()
        }
        carried = {*self._next.values(), *(f"{name}.next" for name in self._next)}
        return {name: value for name, value in outputs.items() if name not in carried}


def carried_inputs(result: gs.ScaledModel) -> set[str]:
    """The names of all carried state."""
    return {state.input for state in result.report.state}


def first_state(result: gs.ScaledModel, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """The sample values of the carried inputs."""
    return {name: feeds[name] for name in carried_inputs(result) if name in feeds}


def session_and_plain(
    result: gs.ScaledModel, state: Mapping[str, np.ndarray], level: Level | None = EXACT
) -> tuple[gs.Session, PlainLoop]:
    """A session on a step and the loop by hand, from the same state."""
    return gs.Session(result, session_options=options(level), state=state), PlainLoop(result, state, level)


def assert_same_run(
    session: gs.Session, plain: PlainLoop, steps: Iterator[Mapping[str, np.ndarray]] | list[Arrays]
) -> list[bool]:
    """Run both over the same batches, and compare all bits after each step; return which steps were applied."""
    applied = []
    for number, feeds in enumerate(steps):
        # Both own their feeds: buffers of accumulated gradients are written in place.
        ours, theirs = ({name: np.array(value) for name, value in feeds.items()} for _ in range(2))
        expected, actual = plain.step(theirs), session.step(ours)
        assert set(actual) == set(expected)
        for name, value in expected.items():
            assert_same_bits(actual[name], value, f"step {number}, output {name}")
        for name, value in theirs.items():
            assert_same_bits(ours[name], value, f"step {number}, feed {name}")
        for name, value in session.state_dict().items():
            assert_same_bits(value, plain.state[name], f"step {number}, state {name}")
        assert set(session.state_dict()) == set(plain.state)
        assert session.loss_scale == plain.state["current_loss_scale"]
        assert session.good_steps == plain.state["good_steps"]
        applied.append(actual.applied)
    return applied


def buffers(session: gs.Session) -> tuple[dict[str, Any], dict[str, Any]]:
    """The buffers of ONNX Runtime that hold the present state, and those that the next one is written to."""
    now, then, _ = session._carried.buffers
    return now, then


def shared_states(session: gs.Session) -> set[str]:
    """The states that go through an output and have one buffer alone."""
    now, then = buffers(session)
    return {name for name in session._carried.outputs if then[name] is now[name]}


def batches(example: Example, carried: set[str], count: int, seed: int = 0) -> Iterator[Arrays]:
    """Batches like the sample one: floating-point numbers moved a little, whole numbers in another order.

    Every seventh has an infinity in it, where there are floating-point numbers to put it in.
    """
    random = np.random.default_rng(seed)
    floats = [n for n, a in example.feeds.items() if a.dtype.kind == "f" and n not in carried | set(example.after)]
    spoiled = next((name for name in ("x", "input") if name in floats), floats[0] if floats else None)
    for number in range(count):
        feeds = {}
        for name, sample in example.feeds.items():
            if name in carried:
                continue
            array = np.array(sample)
            if name in example.after or name == "lazy_reset_grad":
                pass
            elif array.dtype.kind == "f":
                array = (array + 0.05 * random.standard_normal(array.shape)).astype(array.dtype)
            elif array.dtype.kind == "i":
                array = random.permutation(array.ravel()).reshape(array.shape)
            if number % 7 == 3 and name == spoiled:
                array.flat[array.size // 2] = np.inf
            feeds[name] = array
        yield feeds
