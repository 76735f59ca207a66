"""What it takes to undo a rewrite: a snapshot of the graph before, and the record that is kept in the metadata.

Most of it needs no record: an inserted node that stands for one of its operands (a product with the scale, a quotient,
a select, a cast) is bypassed. The record holds the rest: names that were taken over, outputs that are gone, the opset.
It is checked against the snapshot when it is made, so that what it leads to is the original.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from graphscale.graph.marks import PASS_KEY
from graphscale.graph.values import subgraphs

__all__ = ["UNDO_KEY", "Record", "Snapshot", "own_nodes", "stands_for", "unpack"]

# The metadata property of a rewritten model that holds the record.
UNDO_KEY = "graphscale.undo"

_LONGEST = 64  # inserted nodes in a row: more are a cycle
_KEY = "graphscale.snapshot"  # in `model.meta`, while a rewrite is under way

# The types that a rewrite may put nodes into.
_SMALL = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
# The operand that the result of an inserted node stands for, by pass and operator.
_STANDS_FOR = {
    ("scale-loss", "Mul"): 0,
    ("scale-loss", "Cast"): 0,
    ("unscale-gradients", "Div"): 0,
    ("unscale-gradients", "Cast"): 0,
    ("guard-updates", "Where"): 1,
    ("guard-updates", "Cast"): 0,
    ("guard-updates", "Sum"): 0,
    ("order-writes", "Where"): 2,
    ("autocast", "Cast"): 0,
}


@dataclasses.dataclass(frozen=True)
class Record:
    """How a rewritten model differs from its original, beyond the nodes that were inserted.

    Attributes:
        outputs: the names of the original's outputs.
        inputs: the names of the original's inputs.
        renames: `{name in the rewritten model: name in the original}`.
        edges: `{index of the node in the original: names of its inputs}`, where bypassing inserted nodes is not enough.
        results: `{index of the node in the original: how many outputs it has}`, where some were added.
        order: for each of the original's nodes, in the order of the rewritten model, its place; None if the same.
        added: the initializers that were added.
        functions: how many functions the original has; those that follow were added.
        opsets: the original's opset imports.
        ir_version: the original's IR version.
        metadata: the original's metadata properties that are graphscale's own.
        marked: the names of the original's nodes that a rewrite before had inserted.
        small: the small type, if the rewrite put the model into mixed precision; else None.
        was_small: the names of values that had that type before.
        untyped: the names of values that had no type before.
        shapeless: the names of values that had no shape before.
        whole: the original itself without the content of its initializers, where nodes of it were replaced.
    """

    outputs: list[str]
    inputs: list[str]
    renames: dict[str, str]
    edges: dict[str, list[str | None]]
    results: dict[str, int]
    order: list[int] | None
    added: list[str]
    functions: int
    opsets: dict[str, int]
    ir_version: int
    metadata: dict[str, str]
    marked: list[str]
    small: str | None
    was_small: list[str]
    untyped: list[str]
    shapeless: list[str]
    whole: str | None = None

    def write(self, model: ir.Model) -> None:
        """Put the record into a model's metadata."""
        text = json.dumps(vars(self), separators=(",", ":"))
        model.metadata_props[UNDO_KEY] = base64.b64encode(zlib.compress(text.encode())).decode()

    @staticmethod
    def read(metadata: Mapping[str, str]) -> Record:
        """The record in a model's metadata.

        Raises:
            KeyError, ValueError, TypeError, zlib.error: there is none, or it is damaged.
        """
        return Record(**json.loads(zlib.decompress(base64.b64decode(metadata[UNDO_KEY], validate=True))))


class Snapshot:
    """The state of a model before a rewrite.

    Args:
        model: the model; the rewrite works on these very objects.
        whole: nodes of the original will be replaced: keep all of it but the content of its initializers.
    """

    def __init__(self, model: ir.Model, *, whole: bool = False) -> None:
        graph = model.graph
        self._nodes = tuple(graph)
        self._has_bodies = any(map(subgraphs, self._nodes))
        if self._has_bodies:
            self._nodes = tuple(own_nodes(graph))
        self._reads = [node.inputs for node in self._nodes]
        self._results = [len(node.outputs) for node in self._nodes]
        self._values = list(dict.fromkeys((*graph.inputs, *graph.initializers.values())))
        for node in self._nodes:
            self._values += node.outputs
            for body in subgraphs(node) if self._has_bodies else ():
                self._values.extend(body.inputs)
        self._names: list[str] = []
        self._small: list[tuple[ir.Value, ir.DataType]] = []
        self._untyped: list[ir.Value] = []
        self._shapeless: list[ir.Value] = []
        for value in self._values:
            self._names.append(value.name or "")
            kind = value.type
            if kind is None:
                self._untyped.append(value)
            elif kind.dtype in _SMALL:
                self._small.append((value, kind.dtype))
            if value.shape is None:
                self._shapeless.append(value)
        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._initializers = set(graph.initializers)
        self._marked = [node.name or "" for node in self._nodes if PASS_KEY in node.metadata_props]
        self._opsets, self._ir_version = dict(graph.opset_imports), model.ir_version
        self._functions = len(model.functions)
        own = (item for item in model.metadata_props.items() if item[0].startswith("graphscale."))
        self._metadata = dict(own)
        self._whole = _pack(model) if whole else None

    @staticmethod
    def begin(model: ir.Model, *, whole: bool = False) -> Snapshot | None:
        """Take a snapshot, unless one is taken already by who runs this pass among others; None then."""
        if _KEY in model.meta:
            return None
        snapshot = model.meta[_KEY] = Snapshot(model, whole=whole)
        return snapshot

    @staticmethod
    @contextlib.contextmanager
    def begun(model: ir.Model) -> Iterator[Snapshot | None]:
        """What `begin` gives, for a `with` block; if the block raises, whoever tries again begins anew."""
        snapshot = Snapshot.begin(model)
        try:
            yield snapshot
        except BaseException:
            if snapshot is not None:
                del model.meta[_KEY]
            raise

    def finish(self, model: ir.Model, small: ir.DataType | None = None) -> None:
        """Put the record of what was done since the snapshot into the model's metadata."""
        del model.meta[_KEY]
        self.record(model, small).write(model)

    def record(self, model: ir.Model, small: ir.DataType | None = None) -> Record:
        """The record of what was done to the model since.

        Args:
            model: the rewritten model.
            small: the small type, if the model was put into mixed precision.
        """
        record = Record(
            outputs=[],
            inputs=[],
            renames={},
            edges={},
            results={},
            order=None,
            added=[name for name in model.graph.initializers if name not in self._initializers],
            functions=self._functions,
            opsets=self._opsets,
            ir_version=self._ir_version,
            metadata=self._metadata,
            marked=self._marked,
            small=None if small is None else small.name,
            was_small=[],
            untyped=[],
            shapeless=[],
            whole=self._whole,
        )
        return record if self._whole is not None else self._details(record, model, small)

    def _details(self, record: Record, model: ir.Model, small: ir.DataType | None) -> Record:
        # Few are renamed: a dictionary of all names would cost more than all the rest.
        renamed = {value: name for value, name in zip(self._values, self._names, strict=True) if value.name != name}

        def name_of(value: ir.Value) -> str:
            return renamed.get(value, value.name or "")

        return dataclasses.replace(
            record,
            outputs=[name_of(value) for value in self._outputs],
            inputs=[name_of(value) for value in self._inputs],
            renames={now: name for value, name in renamed.items() if (now := value.name or "") != name},
            edges=self._edges(name_of),
            results={
                str(i): count
                for i, (node, count) in enumerate(zip(self._nodes, self._results, strict=True))
                if len(node.outputs) != count
            },
            order=self._order(own_nodes(model.graph) if self._has_bodies else model.graph),
            was_small=[name_of(value) for value, dtype in self._small if dtype is small],
            untyped=[name_of(value) for value in self._untyped if value.type is not None],
            shapeless=[name_of(value) for value in self._shapeless if value.shape is not None],
        )

    def _order(self, nodes: Iterable[ir.Node]) -> list[int] | None:
        """The places that the nodes before had, in their order now; None if that is the same."""
        nodes, place = tuple(nodes), 0
        for node in nodes:
            place += place < len(self._nodes) and node is self._nodes[place]
        if place == len(self._nodes):
            return None
        index = {node: i for i, node in enumerate(self._nodes)}
        order = [index[node] for node in nodes if node in index]
        return None if order == sorted(order) else order

    def _edges(self, name_of: Callable[[ir.Value], str]) -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for i, (node, before) in enumerate(zip(self._nodes, self._reads, strict=True)):
            now = node.inputs
            if now is before:
                continue
            if len(now) != len(before) or any(stands_for(a) is not b for a, b in zip(now, before, strict=True)):
                found[str(i)] = [None if value is None else name_of(value) for value in before]
        return found


def stands_for(value: ir.Value | None, kept: Container[str] = ()) -> ir.Value | None:
    """What a value that an inserted node gives stands for in the original; another value stands for itself.

    Args:
        value: the value that a node of the original reads.
        kept: the names of nodes that a rewrite before had inserted, which belong to the original.

    Raises:
        ValueError: the inserted nodes are a cycle.
    """
    for _ in range(_LONGEST):
        node = None if value is None else value.producer()
        if node is None or PASS_KEY not in node.metadata_props or node.name in kept:
            return value
        operand = _STANDS_FOR.get((node.metadata_props[PASS_KEY], node.op_type))
        if operand is None:
            return value
        value = node.inputs[operand]
    raise ValueError(f"what {None if value is None else value.name!r} stands for has no end")


def own_nodes(graph: ir.Graph, kept: Container[str] | None = None) -> Iterator[ir.Node]:
    """The nodes of the original in a graph, those of bodies after the node that has them.

    Args:
        graph: the main graph.
        kept: the names of inserted nodes that belong to the original; None for all.
    """
    for node in graph:
        if kept is None or PASS_KEY not in node.metadata_props or node.name in kept:
            yield node
            for body in subgraphs(node):
                yield from own_nodes(body, kept)


def _pack(model: ir.Model) -> str:
    """A model without the content of its initializers, as text."""
    skeleton = model.clone()
    for value in skeleton.graph.initializers.values():
        value.const_value = ir.tensor(np.zeros(0, dtype=np.float32), name=value.name)
    data: bytes = ir.to_proto(skeleton).SerializeToString()
    return base64.b64encode(zlib.compress(data)).decode()


def unpack(text: str) -> ir.Model:
    """What `_pack` has packed.

    Raises:
        ValueError, zlib.error: the text is damaged.
    """
    proto = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(text, validate=True)))
    return ir.serde.deserialize_model(proto)
