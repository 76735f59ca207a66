"""Positions in stacked, joined and split values."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from graphscale.analysis.updates import find_coefficients
from graphscale.operators import Trait
from tests.analysis.roles.steps import roles_of, states, update_step
from tests.analysis.roles.test_carried_state import TWO
from tests.build import parse
from tests.expressions import nodes
from tests.random_cases import random_cases

pytestmark = pytest.mark.static

THROUGH = Trait.VIEW | Trait.PERMUTE | Trait.MOVE | Trait.PART
SHAPE = (2, 3)
INPUTS = ("a", "b", "c")


class Program:
    """A graph under construction, with the array of each value; no two elements of the inputs are equal."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.arrays = {name: np.arange(6.0).reshape(SHAPE) + 100 * i for i, name in enumerate(INPUTS)}

    def add(self, op_type: str, inputs: list[str], outputs: int = 1, **attributes: int) -> list[str]:
        """Append a node, and return the names of its outputs."""
        names = [f"v{len(self.arrays) + i}" for i in range(outputs)]
        node = helper.make_node(op_type, inputs, names, **attributes)
        self.nodes.append(node)
        values = {**self.arrays, **{t.name: numpy_helper.to_array(t) for t in self.constants}}
        found = ReferenceEvaluator(node, opsets={"": 20}).run(None, {name: values[name] for name in inputs})
        self.arrays |= dict(zip(names, found, strict=True))
        return names

    def constant(self, value: int | list[int]) -> str:
        """Append whole numbers as an initializer, and return its name."""
        self.constants.append(numpy_helper.from_array(np.array(value, np.int64), f"k{len(self.constants)}"))
        return self.constants[-1].name

    def sources(self, name: str) -> tuple[set[str], set[str]]:
        """Return the inputs behind the elements of a value, by its numbers and by the analysis."""
        infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "parts", infos[:3], [i for i in infos if i.name == name], self.constants)
        graph.value_info.extend(infos[3:])
        read = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])).graph
        found = find_coefficients(read.outputs[0], {*read.inputs}, through=THROUGH)
        return {INPUTS[int(each) // 100] for each in self.arrays[name].flat}, {value.name or "" for value in found}


def random_program(choices: random.Random, is_leading: bool) -> tuple[Program, str]:
    """Draw a program and its last value; a leading one joins and splits along the first axis alone."""
    program = Program()
    names = [*INPUTS, *program.add("Concat", [*INPUTS], axis=0)]
    for _ in range(choices.randint(2, 6)):
        name = choices.choice([*names, names[-1], names[-1], names[-1]])
        array = program.arrays[name]
        axis = 0 if is_leading else choices.randrange(-array.ndim, array.ndim)
        size = array.shape[axis]
        kind = choices.choice(["Concat", "Concat", "Slice", "Split", "Gather", "Reshape", "Neg", "Transpose"])
        if kind == "Concat":
            names += program.add(kind, [name, *_fitting(choices, program, name, axis, is_leading)], axis=axis)
        elif kind == "Slice":
            first, last = sorted(choices.sample(range(size + 1), 2))
            step = 1 if is_leading else choices.choice([1, 1, 2, -1])
            ends = (first, last) if step > 0 else (last - 1, first - 1 if first else -size - 1)
            names += program.add(kind, [name, *(program.constant([each]) for each in (*ends, axis, step))])
        elif kind == "Split" and size > 1:
            first = choices.randrange(1, size)
            parts = program.add(kind, [name, program.constant([first, size - first])], outputs=2, axis=axis)
            names += choices.sample(parts, 2)
        elif kind == "Gather" and array.ndim > 1:
            names += program.add(kind, [name, program.constant(choices.randrange(-size, size))], axis=axis)
        elif kind == "Reshape":
            shapes = [[-1], [1, *array.shape], [array.size // array.shape[-1], array.shape[-1]]]
            names += program.add(kind, [name, program.constant(choices.choice(shapes))])
        elif kind == "Transpose" and not is_leading:
            names += program.add(kind, [name])
        else:
            names += program.add("Identity", [name])
    return program, names[-1]


def _fitting(choices: random.Random, program: Program, name: str, axis: int, is_leading: bool) -> list[str]:
    """Draw up to two values to join with one; a value joined with itself has no single position."""

    def shape(each: str) -> list[int]:
        return np.delete(program.arrays[each].shape, axis).tolist()

    alike = [each for each in program.arrays if program.arrays[each].ndim == program.arrays[name].ndim]
    fits = [each for each in alike if shape(each) == shape(name) and (each != name or not is_leading)]
    return choices.sample(fits, min(len(fits), choices.randint(0, 2)))


@random_cases(3000, tried=3000)
def test_no_source_is_left_out(choices: random.Random) -> None:
    program, name = random_program(choices, is_leading=False)
    taken, found = program.sources(name)
    assert taken <= found


@random_cases(3000, tried=3000)
def test_windows_along_the_first_axis_are_exact(choices: random.Random) -> None:
    program, name = random_program(choices, is_leading=True)
    taken, found = program.sources(name)
    assert taken == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Gather(Transpose(Concat(Unsqueeze(a, k0), Unsqueeze(b, k0), axis=0), perm=[1, 0, 2]), n1, axis=0)", "ab"),
        ("Slice(Concat(a, b, axis=0), k0, k4, k0, k2)", "ab"),
        ("Slice(Concat(a, a, b, axis=0), k2, k4)", "a"),
        ("Slice(Concat(a, b, axis=0), k1, k3)", "ab"),
        ("Slice(Concat(Neg(a), b * half, axis=0), k2, k4)", "b"),
        ("Slice(Concat(Reshape(a, k4), Reshape(b, k4), axis=-1), k4, k8, last)", "b"),
        ("Slice(Concat(a, b, axis=0) + Concat(b, c, axis=0), k2, k4)", "bc"),
        ("Slice(Concat(Reshape(a, k4), Reshape(b, k4), axis=-1), k4, k8)", "b"),
        (
            "Gather(Concat(Unsqueeze(a, k0), Unsqueeze(b, k0), axis=0)"
            " + Concat(Slice(c, k0, k1), Slice(b, k0, k1), axis=0), n1, axis=0)",
            "bc",
        ),
    ],
)
def test_parts(text: str, expected: str) -> None:
    counts = ", ".join(f"int64[1] k{i} = {{{i}}}" for i in (0, 1, 2, 3, 4, 8))
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]> parts (float[2,2] a, float[2,2] b, float[2,2] c) => (float[n,m] out)
        <{counts}, int64 n1 = {{1}}, int64[1] last = {{-1}}, float half = {{0.5}}>
        {{ {nodes(f"out = {text}")} }}
    """)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    found = find_coefficients(graph.outputs[0], {*graph.inputs}, through=THROUGH)
    assert {value.name for value in found} == {*expected}


@pytest.mark.parametrize(
    "text",
    [
        "out = Slice<axes = [0], ends = [4], starts = [2]>(both)",  # as below opset 10
        "out = Gather<axis = 7>(both, n1)",
        "out = Gather(both, half)",
        "out = Gather(number, n1)",
        "one = Concat<axis = 9>(a, b) out = Slice(one, k2, k4)",
        "first, out = Split<axis = 5, num_outputs = 2>(both)",
    ],
)
def test_unknown_positions(text: str) -> None:
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        parts (float[2,2] a, float[2,2] b, float number) => (float[2,2] out)
        <float[4,2] both, float[4,2] one, float[2,2] first, int64 n1 = {{1}}, float half = {{0.5}},
         int64[1] k2 = {{2}}, int64[1] k4 = {{4}}>
        {{ both = Concat<axis = 0>(a, b) {text} }}
    """)
    graph = ir.from_proto(model).graph
    found = find_coefficients(graph.outputs[0], {*graph.inputs}, through=THROUGH)
    assert {value.name for value in found} == ({"number"} if "number" in text else {"a", "b"})


@pytest.mark.parametrize(("places", "expected"), [((0, 1), states("w", "a", "b")), ((1, 0), states("a?", "b?"))])
def test_moments_that_are_stacked(places: tuple[int, int], expected: dict[str, str]) -> None:
    stack = "Concat(Unsqueeze({}, axes), Unsqueeze({}, axes), axis=0)".format
    text = f"both = {stack('a', 'b')} * beta + {stack('dw', 'dw')};"
    text += "; ".join(f"{name}_next = Gather(both, at{i}, axis=0)" for name, i in zip("ab", places, strict=True))
    model = update_step(text, TWO, constants="int64 at0 = {0}, int64 at1 = {-1}")
    assert roles_of(onnx.shape_inference.infer_shapes(model)) == states("w") | expected
