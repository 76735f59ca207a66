"""The way from a traced step to a ModelProto, in many presentations: names, order, constants, places of weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.tape.trace import Node, Var

# Names that a scaled graph uses itself stand beside plain and odd ones.
_TEMPTING = ("current_loss_scale", "good_steps", "all_finite", "loss", "grad", "1.0", "seed", "scaled_loss", "a b/ü")


@dataclasses.dataclass(frozen=True)
class Presentation:
    """The looks of a graph, which do not make it another one.

    Attributes:
        seed: of the names, and of the order of nodes, inputs and outputs.
        shuffled: whether nodes, inputs and outputs come in another order than they were written in.
        names: "plain", "random", or "tempting" ones.
        constants: "shared" initializers, one for each use ("copies"), or Constant nodes ("nodes").
        weights: graph inputs ("input"), with an initializer too ("both"), or initializers alone ("initializer").
        value_info: whether the types of intermediate values are written down.
        opset: the version of the ai.onnx opset.
    """

    seed: int = 0
    shuffled: bool = False
    names: str = "plain"
    constants: str = "shared"
    weights: str = "input"
    value_info: bool = True
    opset: int = 20


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A model, and the name that each value has in it."""

    model: onnx.ModelProto
    names: dict[Var, str]


def render(nodes: Sequence[Node], leaves: Sequence[Var], outputs: Sequence[Var], how: Presentation) -> Rendered:
    return _Writer(nodes, leaves, outputs, how).write()


class _Writer:
    def __init__(self, nodes: Sequence[Node], leaves: Sequence[Var], outputs: Sequence[Var], how: Presentation) -> None:
        self.how = how
        self.random = random.Random(how.seed)
        self.nodes = _shuffled(nodes, self.random) if how.shuffled else list(nodes)
        self.leaves, self.outputs = list(leaves), list(outputs)
        if how.shuffled:
            self.random.shuffle(self.leaves)
            self.random.shuffle(self.outputs)
        self.names = self._names([*leaves, *(node.output for node in nodes)])
        self.initializers: dict[str, TensorProto] = {}
        self.constants: dict[tuple[Any, ...], str] = {}
        self.constant_nodes: list[onnx.NodeProto] = []

    def write(self) -> Rendered:
        written = [self._node(i, node) for i, node in enumerate(self.nodes)]
        bare, kept = [], []
        for value in self.leaves:
            if value.kind == "input" or self.how.weights != "initializer":
                bare.append(self._info(value))
            if value.kind != "input" and self.how.weights != "input":
                kept.append(_tensor(value, self.names[value]))
        infos = [self._info(n.output) for n in self.nodes if n.output not in self.outputs]
        graph = helper.make_graph(
            [*self.constant_nodes, *written],
            "step",
            bare,
            [self._info(value) for value in self.outputs],
            [*kept, *self.initializers.values()],
            value_info=infos if self.how.value_info else [],
        )
        imports = [helper.make_opsetid("", self.how.opset)]
        return Rendered(helper.make_model(graph, opset_imports=imports, ir_version=10), self.names)

    def _names(self, values: Iterable[Var]) -> dict[Var, str]:
        names = {value: f"v{i}" for i, value in enumerate(values)}
        if self.how.names != "plain":
            for value in names:
                names[value] = f"n{self.random.getrandbits(40):x}"
        if self.how.names == "tempting":
            chosen = self.random.sample(list(names), min(len(names), len(_TEMPTING)))
            names.update(zip(chosen, _TEMPTING, strict=False))
        return names

    def _node(self, index: int, node: Node) -> onnx.NodeProto:
        inputs = [self._constant(v) if v.kind == "constant" else self.names[v] for v in node.inputs]
        attributes = dict(node.attributes)
        if "axes" in attributes and (node.op_type == "ReduceSum" or self.how.opset >= 18):
            inputs.append(self._constant(Var(np.asarray(attributes.pop("axes"), dtype=np.int64), "constant")))
        name = "" if self.how.names == "random" else f"node_{index}"
        return helper.make_node(node.op_type, inputs, [self.names[node.output]], name=name, **attributes)

    def _constant(self, value: Var) -> str:
        tensor = _tensor(value, "")
        key = (tensor.data_type, tuple(tensor.dims), tensor.raw_data)
        if self.how.constants != "copies" and key in self.constants:
            return self.constants[key]
        name = tensor.name = f"c{len(self.initializers) + len(self.constant_nodes)}"
        self.constants[key] = name
        if self.how.constants == "nodes":
            self.constant_nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.initializers[name] = tensor
        return name

    def _info(self, value: Var) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.names[value], _element_type(value), value.shape)


def _shuffled(nodes: Sequence[Node], choices: random.Random) -> list[Node]:
    """A random topological order."""
    waiting = {node: {v.node for v in node.inputs if v.node is not None} for node in nodes}
    readers: dict[Node, list[Node]] = {}
    for node, needed in waiting.items():
        for other in needed:
            readers.setdefault(other, []).append(node)
    ready = [node for node, needed in waiting.items() if not needed]
    order = []
    while ready:
        node = ready.pop(choices.randrange(len(ready)))
        order.append(node)
        for reader in readers.get(node, ()):
            waiting[reader].discard(node)
            if not waiting[reader]:
                ready.append(reader)
    return order


def _element_type(value: Var) -> int:
    return {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}[value.array.dtype.kind]


def _tensor(value: Var, name: str) -> TensorProto:
    dtype = helper.tensor_dtype_to_np_dtype(_element_type(value))
    return numpy_helper.from_array(np.ascontiguousarray(value.array.astype(dtype)).reshape(value.shape), name)
