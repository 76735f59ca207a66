"""Facts about ONNX Runtime's CUDA kernels for inserted operators, and a check of a scaled graph by them.

ONNX Runtime puts a node on the GPU if its CUDA execution provider has a kernel for the operator, the opset and the
dtypes, else on the CPU, and inserts a Memcpy node, which may wait for the host, wherever a value is made on one side
and read on the other.

The facts are those of two releases, `Release`. They were read in docs/OperatorKernels.md (section
CUDAExecutionProvider; commit 001d12d) and in the kernels' sources (core/providers/cuda and
orttraining/training_ops/cuda) of microsoft/onnxruntime, and agree with the placement of single nodes by the released
builds, for each dtype and each opset from 10 on. IsAllFinite and InPlaceAccumulatorV2 have kernels in training builds
only, even though the schema of the former is in every build.

The table holds the operators that graphscale inserts. Others have to be looked up in these sources.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from graphscale.graph.builder import PASS_KEY
from graphscale.graph.types import dtype_of
from graphscale.graph.values import subgraphs
from graphscale.passes import LowerTrainingOps


class Release(enum.Enum):
    """A release of ONNX Runtime with a CUDA execution provider."""

    GPU = "onnxruntime-gpu 1.31.1"
    TRAINING = "onnxruntime-training 1.19.2"


# At opset 21 the older release lacks the CUDA kernels of Cast, Identity, Reshape, Transpose and others: a graph of that
# opset runs in pieces there, some on each side, whatever is inserted.
NEWEST_OPSET = {Release.GPU: 26, Release.TRAINING: 20}

Dtypes = frozenset[ir.DataType]
BOOL, INT64 = frozenset({ir.DataType.BOOL}), frozenset({ir.DataType.INT64})
SINGLE_OR_DOUBLE = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})
FLOATS = SINGLE_OR_DOUBLE | {ir.DataType.FLOAT16}
NUMBERS = FLOATS | {ir.DataType.INT32, ir.DataType.INT64}
ANY = NUMBERS | {ir.DataType.BFLOAT16, ir.DataType.BOOL}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The CUDA kernels of an operator, from opset 10 on.

    Attributes:
        reads: the dtypes of each input; the last for all further ones.
        gives: the dtype of the outputs; None for that of an input.
        like: that input.
        until: a release whose kernels end before its `NEWEST_OPSET`, with their last opset; 0 where it has none.
        host_inputs: the inputs that are read in CPU memory.
        host_output: the outputs are left in CPU memory.
    """

    reads: tuple[Dtypes, ...]
    gives: ir.DataType | None = None
    like: int = 0
    until: Mapping[Release, int] = dataclasses.field(default_factory=dict)
    host_inputs: frozenset[int] = frozenset()
    host_output: bool = False

    def runs(self, release: Release, opset: int, dtypes: Iterable[ir.DataType | None]) -> bool:
        """Return whether a release has a kernel for inputs of these dtypes; None for an input that is left out."""
        last = len(self.reads) - 1
        known = opset <= self.until.get(release, NEWEST_OPSET[release])
        return known and all(dtype is None or dtype in self.reads[min(i, last)] for i, dtype in enumerate(dtypes))


# Where has kernels for uint8 too, Max and Min from opset 12 on for whole numbers, IsInf from opset 20 on for float16.
KERNELS: dict[tuple[str, str], Kernel] = {
    **{("", name): Kernel((BOOL,)) for name in ("And", "Not", "Or")},
    **{("", name): Kernel((NUMBERS,)) for name in ("Add", "Div", "Mul", "ReduceSum", "Sub")},
    **{("", name): Kernel((FLOATS,)) for name in ("MatMul", "Max", "Min", "Pow", "Sqrt", "Sum")},
    **{("", name): Kernel((NUMBERS,), ir.DataType.BOOL) for name in ("Greater", "Less")},
    **{("", name): Kernel((ANY,)) for name in ("Cast", "Concat")},
    ("", "ArgMax"): Kernel((FLOATS,), ir.DataType.INT64, until={Release.TRAINING: 11}),
    ("", "Gather"): Kernel((ANY, INT64)),
    # An If that graphscale inserts gives indices.
    ("", "If"): Kernel((BOOL,), ir.DataType.INT64, host_inputs=frozenset({0})),
    ("", "IsInf"): Kernel((SINGLE_OR_DOUBLE,), ir.DataType.BOOL),
    ("", "IsNaN"): Kernel((FLOATS,), ir.DataType.BOOL),
    ("", "Reshape"): Kernel((ANY, INT64), host_inputs=frozenset({1})),
    ("", "Size"): Kernel((ANY,), ir.DataType.INT64, until={Release.TRAINING: 18}, host_output=True),
    ("", "Slice"): Kernel((ANY, INT64), host_inputs=frozenset({1, 2, 3, 4})),
    ("", "Where"): Kernel((BOOL, NUMBERS | {ir.DataType.BFLOAT16}), like=1),
    ("com.microsoft", "InPlaceAccumulatorV2"): Kernel(
        (frozenset({ir.DataType.FLOAT}), frozenset({ir.DataType.FLOAT}), BOOL),
        ir.DataType.BOOL,
        until={Release.GPU: 0},
        host_inputs=frozenset({2}),
        host_output=True,
    ),
    ("com.microsoft", "IsAllFinite"): Kernel((FLOATS,), ir.DataType.BOOL, until={Release.GPU: 0}),
}


def misplaced(model: ir.Model, release: Release) -> list[str]:
    """List the reasons for copies of values of inserted nodes between the CPU and the GPU: one line each.

    Looked at are all inserted nodes, in subgraphs and in model-local functions as well. Where values of the original
    graph are is not judged.

    Raises:
        LookupError: an inserted operator is not in the table.
    """
    check = _Check(model, release)
    check.walk(model.graph, {}, inserted=False)
    both = [value.name for value, sides in check.sides.items() if len(sides) > 1]
    return [*check.found, *(f"{name} is fed to one side, and read on both" for name in both)]


STANDARD_FORMS = LowerTrainingOps.name


class _Side(enum.Enum):
    CONSTANT = enum.auto()  # wherever it is wanted; what is computed from constants alone is folded into one
    GPU = enum.auto()
    CPU = enum.auto()
    OPEN = enum.auto()  # fed, or made by the original graph


@dataclasses.dataclass(frozen=True)
class _Seen:
    dtype: ir.DataType
    side: _Side


_Scope = dict[ir.Value, _Seen]


class _Check:
    def __init__(self, model: ir.Model, release: Release) -> None:
        self.model = model
        self.release = release
        self.found: list[str] = []
        self.sides: dict[ir.Value, set[bool]] = {}

    def walk(self, nodes: Iterable[ir.Node], scope: _Scope, inserted: bool) -> None:
        for node in nodes:
            # The standard forms of training operators are the original's computation.
            mine = inserted or node.metadata_props.get(PASS_KEY, STANDARD_FORMS) != STANDARD_FORMS
            if mine:
                self._node(node, scope)
            for body in subgraphs(node):
                self.walk(body, scope, mine)

    def _node(self, node: ir.Node, scope: _Scope) -> None:
        function = self.model.functions.get(node.op_identifier())
        inputs = [None if value is None else _seen(value, scope) for value in node.inputs]
        if function is not None:
            body = {name: seen for name, seen in zip(function.inputs, inputs, strict=True) if seen is not None}
            self.walk(function, body, inserted=True)
            scope.update(zip(node.outputs, [body[value] for value in function.outputs], strict=True))
        elif node.op_type == "Constant":
            scope[node.outputs[0]] = _Seen(_constant_dtype(node), _Side.CONSTANT)
        else:
            self._operator(node, inputs, scope)

    def _operator(self, node: ir.Node, inputs: Sequence[_Seen | None], scope: _Scope) -> None:
        kernel = KERNELS.get((node.domain, node.op_type))
        if kernel is None:
            raise LookupError(
                f"no facts about the CUDA kernels of {node.domain or 'ai.onnx'} {node.op_type} ({node.name}): look "
                f"them up where the docstring of {__name__} says, and add them"
            )
        side = _Side.CPU if kernel.host_output else _Side.GPU
        dtypes = [None if seen is None else seen.dtype for seen in inputs]
        opset = self.model.opset_imports[""]
        if inputs and all(seen is not None and seen.side is _Side.CONSTANT for seen in inputs):
            side = _Side.CONSTANT
        elif kernel.runs(self.release, opset, dtypes):
            self._reads(node, kernel, inputs)
        else:
            names = ", ".join("-" if dtype is None else dtype.name for dtype in dtypes)
            self._note(node, f"{self.release.value} has no CUDA kernel for {node.op_type}({names}) at opset {opset}")
            side = _Side.CPU
        dtype = ir.DataType(node.attributes["to"].as_int()) if node.op_type == "Cast" else kernel.gives
        if dtype is None:
            like = inputs[kernel.like]
            assert like is not None
            dtype = like.dtype
        for output in node.outputs:
            if output.dtype is not None and output.dtype is not dtype:
                self._note(node, f"{output.name} is declared as {output.dtype.name}, and {dtype.name} is computed")
            scope[output] = _Seen(dtype, side)

    def _reads(self, node: ir.Node, kernel: Kernel, inputs: Sequence[_Seen | None]) -> None:
        for i, (value, seen) in enumerate(zip(node.inputs, inputs, strict=True)):
            on_host = i in kernel.host_inputs
            if value is None or seen is None:
                continue
            if seen.side is (_Side.GPU if on_host else _Side.CPU):
                where = ("in CPU memory", "on the GPU") if on_host else ("on the GPU", "in CPU memory")
                self._note(node, f"{node.op_type} reads {value.name} {where[0]}, and it is made {where[1]}")
            if seen.side is _Side.OPEN and value.is_graph_input():
                self.sides.setdefault(value, set()).add(on_host)

    def _note(self, node: ir.Node, text: str) -> None:
        self.found.append(f"{node.name}: {text}")


def _seen(value: ir.Value, scope: _Scope) -> _Seen:
    if value in scope:
        return scope[value]
    constant = value.is_initializer() and not value.is_graph_input()
    return _Seen(dtype_of(value), _Side.CONSTANT if constant else _Side.OPEN)


def _constant_dtype(node: ir.Node) -> ir.DataType:
    (key,) = node.attributes
    if key == "value":
        return node.attributes[key].as_tensor().dtype
    return {"value_int": ir.DataType.INT64, "value_float": ir.DataType.FLOAT}[key]
