"""Training graphs for all operators that may run in the small type, one each.

The operator stands in the forward pass between two matrix products, or, where it belongs there, in the backward pass.
Its operands `m` and `n` (forward values) and `g` (a gradient), each 8 x 6, equal the inputs `s`, `r` and `u`, which are
multiplied by 1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import onnx

from tests.build import feeds_for, parse
from tests.conftest import Arrays
from tests.passes.casting.rounding import RARE

MICROSOFT = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class OpCase:
    """An operator in use.

    Attributes:
        text: the nodes that compute `a` from `m`, `n`, `g` and the constants; the operator's node is called `op`.
        op: the operator.
        domain: its domain.
        shape: the shape of `a`.
        backward: it stands in the backward pass.
        opset: the version of the ai.onnx opset.
        runs: the builds of ONNX Runtime that have it: "any", "training" or "stock".
    """

    text: str
    op: str
    domain: str = ""
    shape: tuple[int, ...] = (8, 6)
    backward: bool = False
    opset: int = 20
    runs: str = "any"

    def __str__(self) -> str:
        return self.op if self.opset == 20 else f"{self.op}-{self.opset}"


def _op(text: str, shape: tuple[int, ...] = (8, 6), **options: Any) -> OpCase:
    """A case whose operator is marked by a `!`, which becomes the node's name."""
    before, _, after = text.rpartition("!")
    results, _, call = after.partition("=")
    spelled = call.replace("<", "(").partition("(")[0].strip()
    domain, _, name = spelled.rpartition(".")
    return OpCase(f"{before}[op] {results}={call}", name, domain, shape, **options)


def _each(call: str, names: str, **options: Any) -> list[OpCase]:
    return [_op(f"!a = {call.replace('OP', name)}", **options) for name in names.split()]


def _image(text: str, shape: tuple[int, ...] = (1, 3, 4, 4), **options: Any) -> OpCase:
    return _op(f"i = Reshape(m, image) {text}", shape, **options)


def _gradient(text: str, shape: tuple[int, ...] = (8, 6), **options: Any) -> OpCase:
    return _op(text, shape, **{"backward": True, "runs": "training", **options})


_ALLOW = (
    _op("!a = MatMul(m, k66)"),
    _op("!a = Gemm(m, k66, k6)"),
    _image("!a = Conv<pads = [1, 1, 1, 1]>(i, kernel)", (1, 2, 4, 4)),
    _image("!a = ConvTranspose<pads = [1, 1, 1, 1]>(i, back_kernel)", (1, 2, 4, 4)),
    _op('!a = Einsum<equation = "ij,kj->ik">(m, n)', (8, 8)),
    _op("!a = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(m, n)", (8, 8)),
    _op("!a = com.microsoft.TransposeMatMul<transB = 1>(m, n)", (8, 8)),
    _op('!a = com.microsoft.FusedGemm<activation = "Relu">(m, k66, k6)'),
    _image('!a = com.microsoft.FusedConv<activation = "Relu", pads = [1, 1, 1, 1]>(i, kernel)', (1, 2, 4, 4)),
    _gradient(
        "i = Reshape(m, image) j = Reshape(g, image) "
        "!a, dk, db = com.microsoft.ConvGrad<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(j, i, kernel33)",
        (1, 3, 4, 4),
    ),
)
_INFER = (
    *_each("OP(m, n)", "Add Sub Mul Div"),
    *_each("OP(m, n, m)", "Sum Mean"),
    *_each("OP(m)", "Sqrt Reciprocal Tanh Sigmoid Erf Elu Selu Softplus Softsign HardSigmoid HardSwish Gelu"),
    *_each("OP(m)", "Mish LeakyRelu ThresholdedRelu Sin Cos"),
    *_each("OP(m)", "Swish", opset=24, runs="stock"),
    _op("!a = PRelu(m, k6)"),
    _image("!a = AveragePool<kernel_shape = [2, 2]>(i)", (1, 3, 3, 3)),
    _image("!a = GlobalAveragePool(i)", (1, 3, 1, 1)),
    _image('!a = Resize<mode = "linear">(i, , twice)', (1, 3, 8, 8)),
    _image('!a = Resize<mode = "linear">(i, twice)', (1, 3, 8, 8), opset=10),
    _op("!a = ReduceSum<keepdims = 0>(m, columns)", (8,)),
    _op("!a = ReduceL1<keepdims = 0>(m, columns)", (8,)),
    *(_image("!a = BatchNormalization(i, positive3, k3, k3, positive3)", opset=opset) for opset in (13, 14, 20)),
    _op("!a, mean, spread = LayerNormalization(m, k6, k6)"),
    _op("!a = SimplifiedLayerNormalization<axis = -1, epsilon = 1e-5>(m, k6)"),
    _image("!a = GroupNormalization<num_groups = 1>(i, k3, k3)", opset=21),
    _op("!a = RMSNormalization(m, k6)", opset=23, runs="stock"),
    *_each("com.microsoft.OP(m)", "Gelu QuickGelu"),
    *_each("com.microsoft.OP(m, k6)", "FastGelu BiasGelu"),
    *_each(
        "com.microsoft.OP(g, m)",
        "GeluGrad FastGeluGrad QuickGeluGrad TanhGrad SigmoidGrad LeakyReluGrad",
        backward=True,
        runs="training",
    ),
    *_each("com.microsoft.OP(g, m, k6)", "BiasGeluGrad_dX BiasFastGeluGrad_dX", backward=True, runs="training"),
    _gradient("!a, other = com.microsoft.DivGrad(g, m, n)"),
    _gradient("!a = com.microsoft.ReduceSumTraining<keepdims = 0>(g, columns)", (8,)),
    _gradient(
        "j = Reshape(g, image) js = Slice(j, zeros2, threes, image_axes) "
        "!a = AveragePoolGrad<kernel_shape = [2, 2]>(js)",
        (1, 3, 4, 4),
    ),
    _gradient("!a, dscale, dbias = com.microsoft.LayerNormalizationGrad(g, m, k6, mean8, spread8)"),
    _gradient("!a, dscale = com.microsoft.SimplifiedLayerNormalizationGrad(g, m, k6, spread8)"),
    _gradient(
        "i = Reshape(m, image) j = Reshape(g, image) "
        "!a, dscale, dbias = com.microsoft.BatchNormalizationGrad<epsilon = 1e-5>(j, i, positive3, k3, positive3)",
        (1, 3, 4, 4),
    ),
    _image(
        "!a, rm, rv, sm, sv = com.microsoft.BatchNormInternal<epsilon = 1e-5, training_mode = 1>"
        "(i, positive3, k3, k3, positive3)",
        runs="training",
    ),
    _gradient("!a = com.microsoft.Scale(g, third)"),
)
_CLEAR = (
    *_each("OP(m)", "Identity Relu Abs Neg Sign Flatten Trilu"),
    _op("!a = Reshape(m, back)"),
    _op("!a = Transpose<perm = [1, 0]>(m)", (6, 8)),
    _op("l = Unsqueeze(m, rows) !a = Squeeze(l, rows)"),
    _op("!a = Unsqueeze(m, rows)", (1, 8, 6)),
    _op("!a = Expand(m, deep)", (2, 8, 6)),
    _op("!a = Tile(m, repeats)", (8, 12)),
    _op("!a = Slice(m, one_index, five_index, columns)", (8, 4)),
    _op("!a, rest = Split<num_outputs = 2>(m)", (4, 6)),
    _op("!a = Gather(m, picks)", (3, 6)),
    _op("!a = GatherND(m, pairs)", (2,)),
    _op("!a = GatherElements<axis = 0>(m, elements)", (1, 6)),
    _op("!a = Concat<axis = 0>(m, n)", (16, 6)),
    _op("!a = Pad(m, borders, third)", (10, 7)),
    _op("!a = Pad<pads = [1, 0, 1, 1], value = 0.333>(m)", (10, 7), opset=10),
    _op("!a = Where(mask, m, third)"),
    *_each("OP(m, n, third)", "Max Min"),
    _op("!a = Clip(m, minus_third, third)"),
    _op("!a = Clip<min = -0.333, max = 0.333>(m)", opset=10),
    _image("!a = MaxPool<kernel_shape = [2, 2]>(i)", (1, 3, 3, 3)),
    _image("!a = GlobalMaxPool(i)", (1, 3, 1, 1)),
    _op("i = Reshape(m, deep_image) !a = DepthToSpace<blocksize = 2>(i)", (1, 1, 8, 6)),
    _image("!a = SpaceToDepth<blocksize = 2>(i)", (1, 12, 2, 2)),
    _op("!a = Compress<axis = 0>(m, chosen)", (3, 6)),
    _op("!a = ReverseSequence(m, lengths)"),
    *_each("OP<keepdims = 0>(m, columns)", "ReduceMax ReduceMin", shape=(8,)),
    _op("!a, places = TopK(m, two)", (8, 2)),
    *(_op(f"!less = {name}(m, n) a = Where(less, m, n)") for name in ("Equal", "Greater", "GreaterOrEqual")),
    *(_op(f"!less = {name}(m, n) a = Where(less, m, n)") for name in ("Less", "LessOrEqual")),
    *(
        _op(f"!best = {name}<axis = 0>(m) a = GatherElements<axis = 0>(m, best)", (1, 6))
        for name in ("ArgMax", "ArgMin")
    ),
    _op("!a, kept = Dropout<seed = 3>(m, third, training)"),
    _gradient("!a = com.microsoft.DropoutGrad(g, mask, third, training)"),
    _gradient("!a = com.microsoft.ReluGrad(g, m)"),
    _gradient("!a, rest = com.microsoft.SplitTraining<axis = 0>(g, halves)", (4, 6)),
    _gradient("!a, sizes = com.microsoft.ConcatTraining<axis = 0>(g, g)", (16, 6)),
    _gradient("!a = com.microsoft.SliceGrad(g, shape107, zeros2, shape86, both, ones2)", (10, 7)),
    _gradient(
        "i = Reshape(m, image) highest, places = MaxPool<kernel_shape = [2, 2]>(i) j = Reshape(g, image) "
        "js = Slice(j, zeros2, threes, image_axes) "
        "!a = MaxPoolGrad<kernel_shape = [2, 2]>(js, places)",
        (1, 3, 4, 4),
    ),
)
CASES: tuple[OpCase, ...] = (*_ALLOW, *_INFER, *_CLEAR)
# Operators on the lists without a float32 kernel on the CPU in any build of ONNX Runtime.
NO_RUNTIME = {
    ("", "Celu"): "ONNX defines it for float32 alone",
    ("", "SwiGLU"): "no CPU provider has a kernel up to onnxruntime 1.32",
    **{
        (MICROSOFT, name): "CUDA alone has a kernel"
        for name in ("BatchScale", "BiasDropout", "BitmaskDropout", "BitmaskDropoutGrad", "ConvTransposeGrad")
    },
    **{(MICROSOFT, name): "CUDA alone has a kernel" for name in ("ResizeGrad", "ScaledSum", "View")},
}

_INPUTS = """
    float[8,4] x, float[1,3] t, float[4,6] w1, float[SIZE,3] w2, float[4,1] c, float[8,6] s, float[8,6] r, float[8,6] u,
    bool[8,6] mask, bool training, float[6,6] k66, float[6] k6, float[3] k3, float[3] positive3,
    float[2,3,3,3] kernel, float[3,2,3,3] back_kernel, float[3,3,3,3] kernel33, float[8,1] mean8, float[8,1] spread8
"""
_CONSTANTS = """
    float one = {1}, float third = {0.333}, float minus_third = {-0.333}, float[4] twice = {1, 1, 2, 2},
    int64[4] image = {1, 3, 4, 4}, int64[4] deep_image = {1, 4, 4, 3}, int64[2] image_axes = {2, 3},
    int64[2] back = {8, 6}, int64[3] deep = {2, 8, 6}, int64[2] flat = {1, -1}, int64[1] rows = {0},
    int64[1] columns = {1}, int64[2] repeats = {1, 2}, int64[1] one_index = {1}, int64[1] five_index = {5},
    int64[3] picks = {2, 7, 2}, int64[2,2] pairs = {0, 0, 5, 3}, int64[1,6] elements = {1, 2, 3, 4, 5, 6},
    int64[4] borders = {1, 0, 1, 1}, bool[3] chosen = {1, 1, 1}, int64[6] lengths = {1, 2, 3, 4, 5, 6},
    int64[1] two = {2}, int64[2] halves = {4, 4}, int64[2] shape86 = {8, 6},
    int64[2] shape107 = {10, 7}, int64[2] zeros2 = {0, 0}, int64[2] ones2 = {1, 1}, int64[2] both = {0, 1},
    int64[2] threes = {3, 3}
"""
_FORWARD = """
    h = MatMul(x, w1)
    m = Mul(h, s)
    OTHER
    INNER
    y = MatMul(row, w2)
    d = Sub(y, t)
    square = Mul(d, d)
    loss = ReduceMean<keepdims = 0>(square)
    dy = Mul(d, one)
    row_t = Transpose<perm = [1, 0]>(row)
    dw2 = MatMul(row_t, dy)
"""
_BACKWARD = """
    w2_t = Transpose<perm = [1, 0]>(w2)
    da = MatMul(dy, w2_t)
    ga = Reshape(da, back)
    g = Mul(ga, u)
    OPERATOR
    dz = Reshape(a, flat)
    dw1 = MatMul(c, dz)
"""


def model_of(case: OpCase) -> onnx.ModelProto:
    """The training graph of a case; the dtypes and shapes of all values are known."""
    size = math.prod(case.shape)
    outputs = (
        f"float loss, float[48,3] dw2, float[4,{size}] dw1" if case.backward else f"float loss, float[{size},3] dw2"
    )
    inputs = _INPUTS.replace("SIZE", "48" if case.backward else str(size))
    if case.backward:
        nodes = _FORWARD.replace("INNER", "row = Reshape(h, flat)") + _BACKWARD.replace("OPERATOR", case.text)
    else:
        nodes = _FORWARD.replace("INNER", f"{case.text} row = Reshape(a, flat)")
    nodes = nodes.replace("OTHER", "n = Mul(h, r)" if re.search(r"\bn\b", case.text) else "")
    model = parse(f"""
        <ir_version: 10, opset_import: ["" : {case.opset}, "{MICROSOFT}" : 1]>
        sandwich ({inputs}) => ({outputs}) <{_CONSTANTS}> {{ {nodes} }}
    """)
    _drop_unread(model)
    inferred = onnx.shape_inference.infer_shapes(model)
    if not any(value.name == "a" for value in inferred.graph.value_info):
        inferred.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, case.shape))
    return inferred


def feeds_of(case: OpCase, model: onnx.ModelProto, seed: int = 0) -> Arrays:
    """Numbers for a case: `m`, `n` and `g` hold rare ones among ordinary ones, the other operands ordinary ones."""
    random = np.random.default_rng(seed)
    feeds = feeds_for(model, seed)
    for name in ("s", "r", "u"):
        numbers = np.concatenate([RARE, random.standard_normal(48 - RARE.size)]).astype(np.float32)
        feeds[name] = random.permutation(numbers).reshape(8, 6)
    feeds["x"][:], feeds["w1"][:], feeds["w2"][:], feeds["t"][:] = np.eye(1, 4), 1, np.eye(1, 3), 0
    if case.backward:
        feeds["t"][0, 0] = 47  # `y` is 48 there, `dy` 1, and so is every number of the gradient before `g`.
    positive = {name: np.abs(feeds[name]) + 0.1 for name in ("positive3", "spread8") if name in feeds}
    flags = {"mask": random.random((8, 6)) < 0.5, "training": np.array(True)}
    feeds |= {name: value.astype(np.float32) for name, value in positive.items()} | flags
    return {value.name: feeds[value.name] for value in model.graph.input}


def _drop_unread(model: onnx.ModelProto) -> None:
    """Leave out the inputs and constants that belong to other cases."""
    read = {name for node in model.graph.node for name in node.input}
    for values in (model.graph.input, model.graph.initializer):
        kept = [value for value in values if value.name in read]
        del values[:]
        values.extend(kept)
    if not any(node.domain for node in model.graph.node):
        del model.opset_import[1:]
