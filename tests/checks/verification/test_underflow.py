"""Gradients below the normal numbers of float32: a correct step is verified, and damage to it is noticed by runs alone.

The original rounds such gradients to multiples of 2**-149 on the way, and the scaled graph only at the end. An update
that divides by an epsilon enlarges the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import graphscale as gs
from graphscale.checks.verification.bench import FLOAT32_UNDERFLOW
from tests.build import EXACT, feeds_for, step
from tests.conftest import run_once

VALUES = "values as in the original"
LEAST_NORMAL = 2.0**-126

# Centered RMSprop with momentum, as in PyTorch.
RMSPROP = """
    square{i} = Mul(dw{i}, dw{i})
    fresh{i} = Mul(square{i}, rest)
    old{i} = Mul(s{i}, decay)
    s{i}n = Add(old{i}, fresh{i})
    part{i} = Mul(dw{i}, rest)
    mean{i} = Mul(a{i}, decay)
    a{i}n = Add(mean{i}, part{i})
    offset{i} = Mul(a{i}n, a{i}n)
    variance{i} = Sub(s{i}n, offset{i})
    root{i} = Sqrt(variance{i})
    lower{i} = Add(root{i}, epsilon)
    quotient{i} = Div(dw{i}, lower{i})
    kept{i} = Mul(m{i}, momentum)
    m{i}n = Add(kept{i}, quotient{i})
    change{i} = Mul(m{i}n, rate)
    w{i}n = Sub(w{i}, change{i})
"""
TYPES = {1: "float[4,5]", 2: "float[5,3]"}
STATES = [f"{kind}{i}" for i in TYPES for kind in "wsam"]
UPDATES = {f"{name}n": name for name in STATES}
CONSTANTS = {"rest": 0.01, "decay": 0.99, "epsilon": 1e-8, "momentum": 0.9, "rate": 0.01}


def listed(names: list[str]) -> str:
    return ", ".join(f"{TYPES[int(name[1])]} {name}" for name in names)


ORIGINAL = step(
    "".join(RMSPROP.format(i=i) for i in TYPES),
    inputs=listed([name for name in STATES if name[0] != "w"]),
    outputs=listed([*UPDATES]),
    constants=", ".join(f"float {name} = {{{number}}}" for name, number in CONSTANTS.items()),
)
FEEDS = feeds_for(ORIGINAL)
FEEDS["w2"] *= np.float32(1e-20)  # dw1 is of the order of w2 * w2
FEEDS["t"][:] = 0
for i in TYPES:
    FEEDS[f"m{i}"] *= np.float32(1e-33)
    FEEDS[f"a{i}"] *= np.float32(1e-25)
    FEEDS[f"s{i}"][:] = 1e-40


def verify(scaled: onnx.ModelProto, **options: bool) -> gs.VerifyReport:
    return gs.verify(ORIGINAL, scaled, runs=1, feeds=FEEDS, updates=UPDATES, **options)


def scaled(target: str = "onnx") -> onnx.ModelProto:
    model = gs.scale(ORIGINAL, updates=UPDATES, target=target).model
    assert isinstance(model, onnx.ModelProto)
    return model


def test_the_step_loses_digits_without_a_scale() -> None:
    shown = onnx.ModelProto()
    shown.CopyFrom(ORIGINAL)
    shown.graph.output.append(onnx.helper.make_tensor_value_info("dw1", onnx.TensorProto.FLOAT, [4, 5]))
    before, _ = run_once(shown, FEEDS, EXACT)
    after, _ = run_once(scaled(), FEEDS, EXACT)
    assert 0 < np.abs(before["dw1"]).max() < LEAST_NORMAL
    assert np.abs(before["m1n"] - after["m1n"]).max() > FLOAT32_UNDERFLOW


def test_a_correct_step_is_verified() -> None:
    report = verify(scaled())
    assert report.verdict == "verified, exact", report.failures


def node_of(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    return next(node for node in graph.node if output in node.output)


def reads(graph: onnx.GraphProto, output: str, index: int, name: str) -> None:
    node_of(graph, output).input[index] = name


def constant(graph: onnx.GraphProto, name: str, number: float) -> str:
    graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(number, np.float32), name))
    return name


def other_constant(output: str, index: int, number: float) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: reads(graph, output, index, constant(graph, "other", number))


def added(output: str, index: int, number: float) -> Callable[[onnx.GraphProto], None]:
    """Add a number to an operand of the node of an output."""

    def edit(graph: onnx.GraphProto) -> None:
        node = node_of(graph, output)
        total = onnx.helper.make_node("Add", [node.input[index], constant(graph, "more", number)], ["total"])
        graph.node.insert(list(graph.node).index(node), total)
        node.input[index] = "total"

    return edit


def keep_the_scale(*outputs: str) -> Callable[[onnx.GraphProto], None]:
    """Let the first operand of the nodes of some outputs carry the loss scale."""

    def edit(graph: onnx.GraphProto) -> None:
        for output in outputs:
            reads(graph, output, 0, node_of(graph, node_of(graph, output).input[0]).input[0])

    return edit


def write_always(graph: onnx.GraphProto) -> None:
    guard = node_of(graph, "m1n")
    assert guard.op_type == "Where"
    new = guard.input[1]
    guard.CopyFrom(onnx.helper.make_node("Identity", [new], ["m1n"], guard.name))


DAMAGE = {
    "another epsilon": (other_constant("lower1", 1, 1.0000001e-8), VALUES),
    "another momentum": (other_constant("kept1", 1, 0.90000004), VALUES),
    "another share of the gradient": (other_constant("part2", 1, 0.010000001), VALUES),
    "another decay": (other_constant("mean1", 1, 0.5), VALUES),
    "a gradient with the scale, throughout": (keep_the_scale("square1", "part1", "quotient1"), VALUES),
    "a gradient with the scale in the quotient": (keep_the_scale("quotient1"), VALUES),
    "the other gradient with the scale": (keep_the_scale("quotient2"), VALUES),
    "a small number more in the quotient": (added("quotient1", 0, 1e-30), VALUES),
    "the smallest number more in the quotient": (added("quotient1", 0, 1e-45), VALUES),
    "a small number more in the moment": (added("kept1", 0, 1e-30), VALUES),
    "an unguarded moment": (write_always, "a non-finite gradient is skipped"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed(kind: str) -> None:
    edit, name = DAMAGE[kind]
    model = scaled()
    edit(model.graph)
    onnx.checker.check_model(model)
    report = verify(model, numeric=True)
    assert name in {check.name for check in report.failures}, report.checks
