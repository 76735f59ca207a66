"""The costs of `gs.Session`, against loops by hand on ONNX Runtime, and of telemetry in the graph.

    python benchmarks/session_cost.py [--rounds 21] [--graphs small medium large] [--only c]

    (a) Session.step against a loop on run_with_iobinding as an expert writes it: two prepared bindings that take turns,
        the state on the device; only the batch and the outputs are bound again in each step
    (b) Session.step against session.run with the state as numpy arrays in and out
    (c) Session.step on a step scaled with telemetry, in each form, against one without

Both jobs of a ratio run in one process on the same scaled graph with the same batches, in turns, many rounds of many
steps each, in alternating order. A ratio is the median over the rounds' ratios of CPU times (one thread: other
processes disturb CPU time less than wall time), with the quartiles beside it. At the end both must hold the same state,
to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from loops import ByBinding, first_values, options
from pass_cost import Builder, constant, variable

import graphscale as gs

Arrays = dict[str, np.ndarray]
Step = Callable[[Mapping[str, Any]], Arrays]
MODELS = Path(__file__).resolve().parents[1] / "models"
LAYERS, WIDTH, BATCH = 6, 2048, 16  # 25 million weights, and as many moments
BATCHES = 4
FORMS: tuple[bool | str, ...] = (True, "ranges", "activations", "ranges,activations")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step to run.

    Attributes:
        name: of the graph.
        model: the unscaled step.
        state: first values of the carried inputs.
        batches: the feeds, in turn.
        steps: number of steps in a round.
    """

    name: str
    model: onnx.ModelProto
    state: Arrays
    batches: list[Arrays]
    steps: int


def small() -> Workload:
    """The demo's step: an MLP on digits with momentum, batches of 64."""
    model = onnx.ModelProto.FromString(files("graphscale.demo").joinpath("digits_step.onnx").read_bytes())
    random, state = np.random.default_rng(0), {}
    for value in model.graph.input:
        if value.name not in ("images", "labels", "learning_rate"):
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            state[value.name] = (0.1 * random.standard_normal(shape)).astype(np.float32)
    batches = [
        {
            "images": random.random((64, 64)).astype(np.float32),
            "labels": random.integers(0, 10, 64),
            "learning_rate": np.array(0.001, np.float32),
        }
        for _ in range(BATCHES)
    ]
    return Workload("small: digits, momentum", model, state, batches, 300)


def medium() -> Workload:
    """A transformer block of models/, with clipping by global norm and AdamW inside."""
    path = MODELS / "pytorch" / "attention_adamw_clip.onnx"
    sample = np.load(path.with_suffix(".npz"))
    feeds = {key: sample[key] for key in sample.files if "/" not in key}
    batch = {name: feeds.pop(name) for name in ("tokens", "target")}
    return Workload("medium: transformer block, clipping, AdamW", onnx.load(path), feeds, [batch] * BATCHES, 60)


def large() -> Workload:
    """A deep ReLU network of 25 million weights, mean squared error, SGD with momentum."""
    build, rows, square = Builder(), (BATCH, WIDTH), (WIDTH, WIDTH)
    x, target = variable("x", rows), variable("target", rows)
    numbers = {"seed": 2 / (BATCH * WIDTH), "momentum": 0.9, "rate": 0.01, "zero": 0.0}
    scalars = {name: constant(name, np.asarray(value, np.float32)) for name, value in numbers.items()}
    weights = [variable(f"weight{i}", square) for i in range(LAYERS)]
    moments = [variable(f"moment{i}", square) for i in range(LAYERS)]
    saved, y = [], x
    for weight in weights:
        z = build.op("MatMul", y, weight, shape=rows)
        saved.append((y, z))
        y = build.op("Relu", z, shape=rows)
    difference = build.op("Sub", y, target, shape=rows)
    loss = build.op("ReduceMean", build.op("Mul", difference, difference, shape=rows), shape=(), keepdims=0)
    loss.name = "loss"
    dy, outputs = build.op("Mul", difference, scalars["seed"], shape=rows), []
    for i in reversed(range(LAYERS)):
        y, z = saved[i]
        mask = build.op("Cast", build.op("Greater", z, scalars["zero"], shape=rows), shape=rows, to=ir.DataType.FLOAT)
        dz = build.op("Mul", dy, mask, shape=rows)
        gradient = build.op("MatMul", build.op("Transpose", y, shape=rows[::-1], perm=[1, 0]), dz, shape=square)
        if i:
            dy = build.op("MatMul", dz, build.op("Transpose", weights[i], shape=square, perm=[1, 0]), shape=rows)
        old = build.op("Mul", moments[i], scalars["momentum"], shape=square)
        moment = build.op("Add", old, gradient, shape=square)
        weight = build.op("Sub", weights[i], build.op("Mul", scalars["rate"], moment, shape=square), shape=square)
        moment.name, weight.name = f"moment{i}.next", f"weight{i}.next"
        outputs += [moment, weight]
    graph = ir.Graph(
        [x, target, *weights, *moments],
        [loss, *outputs],
        nodes=build.nodes,
        initializers=list(scalars.values()),
        opset_imports={"": 20},
        name="large",
    )
    random = np.random.default_rng(0)

    def normal(shape: tuple[int, ...], deviation: float) -> np.ndarray:
        return (deviation * random.standard_normal(shape)).astype(np.float32)

    state = {f"weight{i}": normal(square, np.sqrt(2 / WIDTH)) for i in range(LAYERS)}
    state |= {f"moment{i}": np.zeros(square, np.float32) for i in range(LAYERS)}
    batches = [{"x": normal(rows, 1), "target": normal(rows, 1)} for _ in range(BATCHES)]
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    return Workload("large: 25 million weights, momentum", model, state, batches, 2)


WORKLOADS = {"small": small, "medium": medium, "large": large}


class ByRun:
    """A loop on session.run, by hand: the state is numpy arrays, in and out."""

    def __init__(self, result: gs.ScaledModel, state: Arrays) -> None:
        self._session = ort.InferenceSession(result.model.SerializeToString(), options())
        self._carried = {s.input: s.output for s in result.report.state}
        self._names = [output.name for output in self._session.get_outputs()]
        self._state = {name: value.copy() for name, value in first_values(result, state).items()}

    def step(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        outputs = dict(zip(self._names, self._session.run(self._names, {**feeds, **self._state}), strict=True))
        self._state = {name: outputs.pop(output) for name, output in self._carried.items()}
        return outputs

    def state_dict(self) -> Arrays:
        return self._state


Runner = gs.Session | ByBinding | ByRun


def rounds(workload: Workload, one: Runner, other: Runner, count: int) -> Iterator[tuple[float, float]]:
    """The CPU seconds of a step, of either one, in each round."""
    for number in range(-1, count):
        pair: dict[int, float] = {}
        for index, runner in ((0, one), (1, other))[:: 1 if number % 2 else -1]:
            pair[index] = seconds(runner.step, workload)
        if number >= 0:  # the first makes bindings and memory ready
            yield pair[0], pair[1]


def seconds(step: Callable[..., Any], workload: Workload) -> float:
    gc.collect()
    batches = [workload.batches[number % BATCHES] for number in range(workload.steps)]
    begin = time.process_time()
    for batch in batches:
        step(batch)
    return (time.process_time() - begin) / workload.steps


def compared(workload: Workload, one: Runner, other: Runner, count: int) -> str:
    """A row of the table: the medians of both, and of their ratio, with its quartiles."""
    times = list(rounds(workload, one, other, count))
    ratios = [first / second for first, second in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    middle = statistics.median(ratios)
    return f"{text(ours)} | {text(theirs)} | {middle:.3f} | {low:.3f} to {high:.3f}"


def text(duration: float) -> str:
    return f"{1e6 * duration:,.0f} µs" if duration < 0.01 else f"{1e3 * duration:,.1f} ms"


def assert_same_state(one: Runner, other: Runner) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    for name, value in theirs.items():
        assert ours[name].tobytes() == value.tobytes(), name


def session_on(result: gs.ScaledModel, state: Arrays) -> gs.Session:
    return gs.Session(result, state=state, session_options=options())


def by_binding(result: gs.ScaledModel, state: Arrays) -> ByBinding:
    carried = {s.input: s.output for s in result.report.state}
    return ByBinding(result.model, carried, first_values(result, state))


def with_telemetry(workload: Workload, form: bool | str) -> gs.Session:
    return session_on(gs.scale(workload.model, telemetry=form), workload.state)


def measure(workload: Workload, count: int, only: str) -> None:
    """Print the rows of one graph."""
    result = gs.scale(workload.model)
    assert result.report.coverage == 1.0
    comparisons = {
        "(a) run_with_iobinding by hand": lambda: (
            session_on(result, workload.state),
            by_binding(result, workload.state),
        ),
        "(b) session.run, state in numpy": lambda: (session_on(result, workload.state), ByRun(result, workload.state)),
    }
    for form in FORMS:
        what = "telemetry" if form is True else f"telemetry of {form}"
        make = functools.partial(with_telemetry, workload, form)
        comparisons[f"(c) with {what} against without"] = lambda make=make: (make(), session_on(result, workload.state))
    for what, make in comparisons.items():
        if only not in what[:3]:
            continue
        one, other = make()
        row = compared(workload, one, other, count)
        assert_same_state(one, other)
        print(f"| {workload.name} | {what} | {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--graphs", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--only", default="", choices=["a", "b", "c"])
    arguments = parser.parse_args()
    print("| graph | against | Session.step | the other | ratio | quartiles |")
    print("|---|---|---:|---:|---:|---:|")
    for name in arguments.graphs:
        measure(WORKLOADS[name](), arguments.rounds, arguments.only)


if __name__ == "__main__":
    main()
