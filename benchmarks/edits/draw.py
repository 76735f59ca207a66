"""A seeded draw of kinds and places, and the places of a ModelProto."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

__all__ = ["KINDS", "Draw", "Scope", "kind", "scopes_of", "tensors_of"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Scope:
    """The main graph, the body of a node, or a function.

    Attributes:
        holder: the graph or function.
        name: its place.
        outer: the scope around a body.
    """

    holder: Any
    name: str
    outer: Scope | None = None

    @property
    def is_graph(self) -> bool:
        return isinstance(self.holder, GraphProto)

    def inputs(self) -> list[str]:
        return [value.name if self.is_graph else value for value in self.holder.input]

    def names(self) -> list[str]:
        """All values that a node in here can read, and those that come too late for it."""
        own = self.inputs() + [name for node in self.holder.node for name in node.output if name]
        if self.is_graph:
            own += [tensor.name for tensor in self.holder.initializer]
        return list(dict.fromkeys(own + (self.outer.names() if self.outer else [])))


def scopes_of(model: ModelProto) -> list[Scope]:
    """All scopes, the main graph first."""
    roots = [Scope(model.graph, "graph"), *(Scope(f, f"function {f.name}") for f in model.functions)]
    return [scope for root in roots for scope in (root, *_bodies(root))]


def _bodies(scope: Scope) -> Iterator[Scope]:
    for i, node in enumerate(scope.holder.node):
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                inner = Scope(body, f"{scope.name}/{i}:{node.op_type}.{attribute.name}", scope)
                yield inner
                yield from _bodies(inner)


def tensors_of(model: ModelProto) -> list[tuple[str, TensorProto]]:
    """All tensors, with their places: initializers, attributes and defaults of attributes."""
    found = []
    for scope in scopes_of(model):
        if scope.is_graph:
            found += [(f"{scope.name} initializer {t.name}", t) for t in scope.holder.initializer]
        else:
            found += _of_attributes(scope.holder.attribute_proto, scope.name)
        for node in scope.holder.node:
            found += _of_attributes(node.attribute, f"{scope.name} node {node.name or node.output[:1]}")
    return found


def _of_attributes(attributes: Sequence[AttributeProto], where: str) -> list[tuple[str, TensorProto]]:
    return [(f"{where} {a.name}", t) for a in attributes for t in (*([a.t] if a.HasField("t") else []), *a.tensors)]


class Draw:
    """A random choice of everything an edit needs.

    Args:
        model: the model, to be edited in place.
        rng: the generator.
        donors: other models, whose parts may be put into this one.
    """

    def __init__(self, model: ModelProto, rng: np.random.Generator, donors: Sequence[ModelProto] = ()) -> None:
        self.model, self.rng, self.donors = model, rng, donors

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def below(self, count: int) -> int:
        return int(self.rng.integers(count))

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def two(self, count: int) -> tuple[int, int]:
        """Two different positions below `count`."""
        first, second = self.rng.choice(count, 2, replace=False)
        return int(first), int(second)

    def scope(self, suits: Callable[[Scope], Any] = lambda scope: scope.holder.node) -> Scope | None:
        """A scope that suits; by half of all draws in proportion to its nodes, so that each node is as likely."""
        suitable = [scope for scope in scopes_of(self.model) if suits(scope)]
        if not suitable:
            return None
        if self.chance(0.5):
            return self.pick(suitable)
        sizes = np.array([1 + len(scope.holder.node) for scope in suitable], float)
        return suitable[int(self.rng.choice(len(suitable), p=sizes / sizes.sum()))]

    def node(self, suits: Callable[[NodeProto], Any] = lambda node: True) -> tuple[Scope, int, NodeProto] | None:
        """A node that suits, with its scope and its position."""
        scope = self.scope(lambda scope: any(map(suits, scope.holder.node)))
        if scope is None:
            return None
        i = self.pick([i for i, node in enumerate(scope.holder.node) if suits(node)])
        return scope, i, scope.holder.node[i]

    def name(self, scope: Scope) -> str:
        """The name of any value; seldom one that does not exist."""
        names = scope.names()
        return "nowhere" if not names or self.chance(0.03) else self.pick(names)

    def number(self, value: float) -> float:
        """Another number, often one nearby."""
        near = float(np.nextafter(np.float32(value), np.float32(np.inf)))
        others = [near, -value, 2 * value, value / 2, value + 1, value - 1, 0.0, 1.0, float("nan"), float("inf"), 3e-5]
        return self.pick([other for other in others if other != value])

    def integer(self, value: int) -> int:
        others = [value + 1, value - 1, -value, 0, 1, 2, 7, 10, 2 * value, value + 1000]
        return self.pick([other for other in others if other != value])

    def text(self, text: str) -> str:
        """Another text."""
        i = self.below(len(text)) if text else 0
        others = [text + "x", text[:-1], text[:i] + "_" + text[i + 1 :], text.swapcase(), "", text + " ", "constant"]
        return self.pick([other for other in others if other != text])


KINDS: dict[str, Callable[[Draw], str | None]] = {}


def kind(name: str) -> Callable[[Callable[[Draw], str | None]], Callable[[Draw], str | None]]:
    """Enter a kind of edit: it edits the model of a draw and returns where, or None if there is no place for it."""

    def enter(edit: Callable[[Draw], str | None]) -> Callable[[Draw], str | None]:
        assert name not in KINDS
        KINDS[name] = edit
        return edit

    return enter


def fill(message: Any, other: Any) -> None:
    """Replace the content of a repeated field."""
    content = [
        type(item).FromString(item.SerializeToString()) if hasattr(item, "ListFields") else item for item in other
    ]
    del message[:]
    message.extend(content)


def exchange(items: Any, i: int, j: int) -> None:
    """Exchange two items of a repeated field."""
    order = list(range(len(items)))
    order[i], order[j] = order[j], order[i]
    fill(items, [items[k] for k in order])


def move(items: Any, i: int, j: int) -> None:
    """Move an item of a repeated field to another position."""
    order = [k for k in range(len(items)) if k != i]
    order.insert(j, i)
    fill(items, [items[k] for k in order])


def rename(scope: Scope, old: str, new: str) -> None:
    """Rename all uses of a value in a scope and its bodies, its producer excepted."""
    for node in scope.holder.node:
        for k, name in enumerate(node.input):
            if name == old:
                node.input[k] = new
    for inner in _bodies(scope):
        for node in inner.holder.node:
            for k, name in enumerate(node.input):
                if name == old:
                    node.input[k] = new
        for value in inner.holder.output:
            if value.name == old:
                value.name = new


DTYPES = [
    *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT32),
    *(TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8, TensorProto.STRING, TensorProto.UNDEFINED),
]

SCHEMAS = [schema for schema in onnx.defs.get_all_schemas() if schema.domain == ""]
