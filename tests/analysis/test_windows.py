"""What an output is computed from, by position: stacked, joined, cut and taken apart again."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from graphscale.analysis.updates import find_coefficients
from graphscale.operators import Trait
from tests.analysis.roles.steps import roles_of, states, update_step
from tests.analysis.roles.test_carried_state import TWO
from tests.build import parse
from tests.expressions import nodes

THROUGH = Trait.VIEW | Trait.PERMUTE | Trait.MOVE | Trait.PART
SHAPE = (2, 3)
INPUTS = ("a", "b", "c")


class Program:
    """A graph that is written node by node, and computed at once: each element of an input is another number."""

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
        """Return the inputs that the elements of a value are taken from, and those that the analysis finds."""
        infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "parts", infos[:3], [i for i in infos if i.name == name], self.constants)
        graph.value_info.extend(infos[3:])
        read = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])).graph
        found = find_coefficients(read.outputs[0], {*read.inputs}, through=THROUGH)
        return {INPUTS[int(each) // 100] for each in self.arrays[name].flat}, {value.name or "" for value in found}


def draw_program(draw: st.DrawFn, is_leading: bool) -> tuple[Program, str]:
    """Draw a program and its last value; if it is leading, all is joined and cut along the first axis alone."""
    program = Program()
    names = [*INPUTS, *program.add("Concat", [*INPUTS], axis=0)]
    for _ in range(draw(st.integers(2, 6))):
        name = draw(st.sampled_from([*names, names[-1], names[-1], names[-1]]))
        array = program.arrays[name]
        axis = 0 if is_leading else draw(st.integers(-array.ndim, array.ndim - 1))
        size = array.shape[axis]
        kind = draw(st.sampled_from(["Concat", "Concat", "Slice", "Split", "Gather", "Reshape", "Neg", "Transpose"]))
        if kind == "Concat":
            alike = [n for n in names if program.arrays[n].ndim == array.ndim]
            rest = np.delete(array.shape, axis).tolist()
            # What is joined with itself is not known by position.
            alike = [n for n in alike if n != name or not is_leading]
            fits = [n for n in alike if np.delete(program.arrays[n].shape, axis).tolist() == rest]
            names += program.add(
                kind,
                [name, *draw(st.lists(st.sampled_from(fits), max_size=2, unique=is_leading) if fits else st.just([]))],
                axis=axis,
            )
        elif kind == "Slice":
            first, last = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
            step = 1 if is_leading else draw(st.sampled_from([1, 1, 2, -1]))
            ends = (first, last) if step > 0 else (last - 1, first - 1 if first else -size - 1)
            given = [program.constant([each]) for each in (*ends, axis, step)]
            names += program.add(kind, [name, *given])
        elif kind == "Split" and size > 1:
            first = draw(st.integers(1, size - 1))
            parts = program.add(kind, [name, program.constant([first, size - first])], outputs=2, axis=axis)
            names += draw(st.permutations(parts))
        elif kind == "Gather" and array.ndim > 1:
            names += program.add(kind, [name, program.constant(draw(st.integers(-size, size - 1)))], axis=axis)
        elif kind == "Reshape":
            shape = draw(st.sampled_from([[-1], [1, *array.shape], [array.size // array.shape[-1], array.shape[-1]]]))
            names += program.add(kind, [name, program.constant(shape)])
        elif kind == "Transpose" and not is_leading:
            names += program.add(kind, [name])
        else:
            names += program.add("Identity", [name])
    return program, names[-1]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_no_source_is_left_out(data: st.DataObject) -> None:
    program, name = draw_program(data.draw, is_leading=False)
    taken, found = program.sources(name)
    assert taken <= found


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_stretches_along_the_first_axis_are_known(data: st.DataObject) -> None:
    program, name = draw_program(data.draw, is_leading=True)
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
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph
    found = find_coefficients(graph.outputs[0], {*graph.inputs}, through=THROUGH)
    assert {value.name for value in found} == {*expected}


@pytest.mark.parametrize(
    "text",
    [
        "out = Slice<axes = [0], ends = [4], starts = [2]>(both)",  # opset 9
        "out = Gather<axis = 7>(both, n1)",
        "out = Gather(both, half)",
        "out = Gather(number, n1)",
        "one = Concat<axis = 9>(a, b) out = Slice(one, k2, k4)",
        "first, out = Split<axis = 5, num_outputs = 2>(both)",
    ],
)
def test_what_is_not_known_or_damaged_is_all_followed(text: str) -> None:
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


@pytest.mark.parametrize(
    ("places", "expected"), [((0, 1), states("w", "a", "b")), ((1, 0), {"a_next": "next b", "b_next": "next a"})]
)
def test_moments_that_are_stacked(places: tuple[int, int], expected: dict[str, str]) -> None:
    stack = "Concat(Unsqueeze({}, axes), Unsqueeze({}, axes), axis=0)".format
    text = f"both = {stack('a', 'b')} * beta + {stack('dw', 'dw')};"
    text += "; ".join(f"{name}_next = Gather(both, at{i}, axis=0)" for name, i in zip("ab", places, strict=True))
    model = update_step(text, TWO, constants="int64 at0 = {0}, int64 at1 = {-1}")
    assert roles_of(onnx.shape_inference.infer_shapes(model)) == states("w") | expected
