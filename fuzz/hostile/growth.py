"""Small models for which the time of a naive analysis grows with the square, or exponentially."""

from __future__ import annotations

import itertools

import onnx
from onnx import TensorProto, helper

from tests.cli.bad_graphs import sgd

__all__ = [
    "all_zeros",
    "chained_flag",
    "deep_body",
    "doubled_shape",
    "equal_names",
    "identities",
    "many_numbers",
    "many_readers",
    "nested_flow",
    "shift_register",
    "wide_sum",
]

_NUMBERS = {
    "zero": helper.make_tensor("zero", TensorProto.FLOAT, [4, 5], [0.0] * 20),
    "yes": helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
    "rounds": helper.make_tensor("rounds", TensorProto.INT64, [], [3]),
}


def _insert(nodes: list[onnx.NodeProto], read: str, given: str) -> onnx.ModelProto:
    """Insert nodes before the readers of a value of the step, and give these another value."""
    model = sgd()
    model.graph.initializer.extend(_NUMBERS.values())
    places = [i for i, node in enumerate(model.graph.node) if read in node.input]
    for i in places:
        node = model.graph.node[i]
        node.input[:] = [given if name == read else name for name in node.input]
    for node in reversed(nodes):
        model.graph.node.insert(places[0], node)
    return model


def _typed(
    names: list[str], dtype: int = TensorProto.FLOAT, dims: list[int] | None = None
) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, dtype, dims) for name in names]


def _loop(
    name: str, nodes: list[onnx.NodeProto], start: list[str], carried: list[str], leaving: list[str]
) -> onnx.NodeProto:
    """Return a Loop with the outputs `name0`, `name1`, and so on."""
    going = helper.make_node("Identity", [f"{name}.more"], [f"{name}.on"])
    control = [*_typed([f"{name}.round"], TensorProto.INT64, []), *_typed([f"{name}.more"], TensorProto.BOOL, [])]
    ends = [*_typed([f"{name}.on"], TensorProto.BOOL, []), *_typed(leaving)]
    body = helper.make_graph([going, *nodes], name, [*control, *_typed(carried)], ends)
    return helper.make_node("Loop", ["rounds", "yes", *start], [f"{name}{i}" for i in range(len(leaving))], body=body)


def all_zeros(levels: int, operands: int) -> onnx.ModelProto:
    """Add zeros to a gradient: sums of sums, with the same sum for all operands."""
    names = ["zero", *(f"sum{i}" for i in range(levels))]
    nodes = [helper.make_node("Sum", [above] * operands, [name]) for above, name in itertools.pairwise(names)]
    return _insert([*nodes, helper.make_node("Add", ["dw1", names[-1]], ["more"])], "dw1", "more")


def nested_flow(operator: str, levels: int, width: int, read: str) -> onnx.ModelProto:
    """Nest If or Loop of several outputs, each a sum of all outputs of the node within."""

    def level(depth: int, given: list[str]) -> tuple[list[onnx.NodeProto], list[str]]:
        outputs, leaving = [f"q{depth}_{i}" for i in range(width)], [f"r{depth}_{i}" for i in range(width)]
        if depth == levels:
            return [helper.make_node("Sum", given, [name]) for name in outputs], outputs
        carried = [f"c{depth}_{i}" for i in range(width)] if operator == "Loop" else given
        nodes, inner = level(depth + 1, carried)
        nodes += [helper.make_node("Sum", inner, [name]) for name in leaving]
        if operator == "Loop":
            return [_loop(f"q{depth}_", nodes, (given * width)[:width], carried, leaving)], outputs
        others = [f"e{depth}_{i}" for i in range(width)]
        branches = {
            "then_branch": helper.make_graph(nodes, "then", [], _typed(leaving)),
            "else_branch": helper.make_graph(
                [helper.make_node("Sum", given, [name]) for name in others], "else", [], _typed(others)
            ),
        }
        return [helper.make_node("If", ["yes"], outputs, **branches)], outputs

    nodes, outputs = level(0, [read])
    return _insert(nodes, read, outputs[0])


def shift_register(count: int, levels: int = 1, *, summed: bool = False) -> onnx.ModelProto:
    """Shift a gradient by one carried value in each round of nested Loops.

    Args:
        count: number of values that each Loop carries.
        levels: number of nested Loops.
        summed: whether each round also sums up all carried values, and gives them to the Loop within.
    """

    def level(depth: int, given: list[str]) -> tuple[list[onnx.NodeProto], str]:
        carried = [f"c{depth}_{i}" for i in range(count)]
        read = carried if summed else carried[:1]
        nodes, inner = ([], read[0]) if depth == levels - 1 else level(depth + 1, read)
        nodes.append(helper.make_node("Sum", [*given, inner, *read], [f"r{depth}"]))
        loop = _loop(f"q{depth}_", nodes, ["zero"] * count, carried, [f"r{depth}", *carried[:-1]])
        return [loop], loop.output[count - 1]

    nodes, output = level(0, ["dw1"])
    return _insert(nodes, "dw1", output)


def equal_names(count: int) -> onnx.ModelProto:
    """Stack one product many times in a Loop: as many inserted values of one wanted name."""
    product = helper.make_node("MatMul", ["x", "w1"], ["product"])
    loop = _loop("stacked", [product], [], [], ["product"] * count)
    return _insert([loop, helper.make_node("Identity", ["x"], ["same"])], "x", "same")


def doubled_shape(levels: int) -> onnx.ModelProto:
    """Join a shape with itself again and again, for an output of unknown shape."""
    model = sgd()
    model.graph.initializer.append(helper.make_tensor("s0", TensorProto.INT64, [1], [1]))
    for i in range(levels):
        model.graph.node.append(helper.make_node("Concat", [f"s{i}"] * 2, [f"s{i + 1}"], axis=0))
    model.graph.node.append(helper.make_node("ConstantOfShape", [f"s{levels}"], ["filled"]))
    model.graph.output.extend(_typed(["filled"]))
    return model


def many_numbers(count: int) -> onnx.ModelProto:
    """Give a step as many inputs and outputs of one number."""
    model = sgd()
    for i in range(count):
        model.graph.node.append(helper.make_node("Neg", [f"s{i}"], [f"n{i}"]))
        model.graph.input.extend(_typed([f"s{i}"], dims=[]))
        model.graph.output.extend(_typed([f"n{i}"], dims=[]))
    return model


def identities(count: int) -> onnx.ModelProto:
    """Hand a gradient on, again and again."""
    names = ["dw1", *(f"same{i}" for i in range(count))]
    nodes = [helper.make_node("Identity", [above], [name]) for above, name in itertools.pairwise(names)]
    return _insert(nodes, "dw1", names[-1])


def deep_body(count: int) -> onnx.ModelProto:
    """Negate a gradient many times in a Loop."""
    names = ["k", *(f"n{i}" for i in range(count))]
    nodes = [helper.make_node("Neg", [above], [name]) for above, name in itertools.pairwise(names)]
    return _insert([_loop("deep", nodes, ["dw1"], ["k"], [names[-1]])], "dw1", "deep0")


def wide_sum(count: int) -> onnx.ModelProto:
    """Add many values that follow from one gradient in one node."""
    names = [f"term{i}" for i in range(count)]
    nodes = [helper.make_node("Neg", ["dw1"], [name]) for name in names]
    return _insert([*nodes, helper.make_node("Sum", names, ["wide"])], "dw1", "wide")


def chained_flag(scaled: onnx.ModelProto, operator: str, count: int) -> None:
    """Put a chain of nodes behind the finite check of a scaled step; And and Or read one flag twice."""
    at = next(i for i, node in enumerate(scaled.graph.node) if "all_finite" in node.output)
    scaled.graph.node[at].output[list(scaled.graph.node[at].output).index("all_finite")] = "flag0"
    names = [*(f"flag{i}" for i in range(count)), "all_finite"]
    operands = 2 if operator in ("And", "Or") else 1
    for i, (above, name) in enumerate(itertools.pairwise(names)):
        scaled.graph.node.insert(at + 1 + i, helper.make_node(operator, [above] * operands, [name]))


def many_readers(count: int) -> onnx.ModelProto:
    """Give a step many outputs that follow from one gradient."""
    model = sgd()
    names = [f"seen{i}" for i in range(count)]
    model.graph.node.extend(helper.make_node("Neg", ["dw1"], [name]) for name in names)
    model.graph.output.extend(_typed(names, dims=[4, 5]))
    return model
