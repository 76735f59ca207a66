"""Networks whose point is the gradient operators.

Many small branches of one hidden layer, each with an operator of its own, and a recurrent network. Every
branch gives one number per example; the loss is the mean square of their distance to a target.
"""

from collections.abc import Callable

import numpy as np
from builder import Network

BATCH = 8
WIDTH = 12
MICROSOFT = "com.microsoft"
Branch = Callable[[Network, str], str]


def positive(net: Network, x: str) -> str:
    """Make every element greater than 1."""
    return net.op("Add", net.op("Mul", x, x), net.constant(1))


def apply(op_type: str, **attributes) -> Branch:
    """Return a branch that is one operator of one operand."""
    return lambda net, x: net.op(op_type, x, **attributes)


def apply_positive(op_type: str) -> Branch:
    """Return a branch that is one operator of one positive operand."""
    return lambda net, x: net.op(op_type, positive(net, x))


def with_parameter(op_type: str, **attributes) -> Branch:
    """Return a branch that is one operator of the hidden layer and a parameter, which is not near 0."""

    def branch(net: Network, x: str) -> str:
        name = f"{op_type.lower()}.weight"
        return net.op(op_type, x, net.parameter(name, WIDTH, around=1.0), **attributes)

    return branch


def with_constant(op_type: str, *values) -> Branch:
    """Return a branch that is one operator of the hidden layer and constants."""
    return lambda net, x: net.op(op_type, x, *[net.constant(value) for value in values])


def bias_fast_gelu(net: Network, x: str) -> str:
    """Apply the tanh form of GELU after adding a bias."""
    # Of a value with several consumers, the gradient builder would take the bias gradient from all of them.
    x = net.op("Sub", net.constant(1), x)
    return net.op("FastGelu", x, net.parameter("fast_gelu.bias", WIDTH), domain=MICROSOFT)


def where(net: Network, x: str) -> str:
    """Choose by sign between two computed values."""
    return net.op("Where", net.op("Greater", x, net.constant(0)), x, net.op("Mul", x, x))


def root_mean_square_norm(net: Network, x: str) -> str:
    """Normalize by the root of the mean square, spelled out as exporters write it."""
    mean = net.op("ReduceMean", net.op("Pow", x, net.constant(2)), axes=[-1])
    root = net.op("Sqrt", net.op("Add", mean, net.constant(1e-5)))
    return net.op("Mul", net.op("Div", x, root), net.parameter("norm.weight", WIDTH, around=1.0))


def unknown_broadcast(net: Network, x: str) -> str:
    """Multiply by an input that may or may not be broadcast: which, only the run can tell."""
    factor = net.input("factor", [None, WIDTH], net.rng.random([1, WIDTH], np.float32))
    return net.op("Mul", net.op("Sigmoid", x), factor)


def fake_quantised(net: Network, x: str) -> str:
    """Round to 8 bits, with a straight-through gradient."""
    scale, zero = net.constant(0.1), net.constant(128)
    return net.op("FakeQuant", x, scale, zero, outputs=2, domain=MICROSOFT)[0]


def inner_loss(net: Network, x: str) -> str:
    """A loss per example, as the fused operator that ORTModule graphs have."""
    classes = net.input("classes", ["batch"], net.rng.integers(0, WIDTH, BATCH))
    op_type = "SoftmaxCrossEntropyLossInternal"
    loss = net.op(op_type, x, classes, outputs=2, domain=MICROSOFT, reduction="none")[0]
    return net.op("Unsqueeze", loss, net.ints(1))


ACTIVATIONS: dict[str, Branch] = {
    "sigmoid": apply("Sigmoid"),
    "tanh": apply("Tanh"),
    "leaky_relu": apply("LeakyRelu", alpha=0.1),
    "gelu": apply("Gelu", domain=MICROSOFT),
    "fast_gelu": apply("FastGelu", domain=MICROSOFT),
    "bias_fast_gelu": bias_fast_gelu,
    "quick_gelu": apply("QuickGelu", domain=MICROSOFT),
    "softmax": apply("Softmax", axis=-1),
    "log_softmax": apply("LogSoftmax", axis=-1),
    "erf": apply("Erf"),
    "exp": apply("Exp"),
    "sin": apply("Sin"),
    "cos": apply("Cos"),
    "abs": apply("Abs"),
    "neg": apply("Neg"),
    "log": apply_positive("Log"),
    "sqrt": apply_positive("Sqrt"),
    "reciprocal": apply_positive("Reciprocal"),
    "cube": with_constant("Pow", 3),
    "clip": with_constant("Clip", -0.5, 0.5),
    "divide": with_parameter("Div"),
    "multiply": with_parameter("Mul"),
    "subtract": with_parameter("Sub"),
    "minimum": with_parameter("Min"),
    "maximum": with_parameter("Max"),
    "where": where,
    "norm": root_mean_square_norm,
    "unknown_broadcast": unknown_broadcast,
    "fake_quantised": fake_quantised,
    "reduce_l2": apply("ReduceL2", axes=[1]),
    "reduce_log_sum_exp": apply("ReduceLogSumExp", axes=[1]),
    "inner_loss": inner_loss,
}


def rows(values: np.ndarray) -> np.ndarray:
    """Repeat a row of indices for every example."""
    return np.tile(values, (BATCH, 1))


def gather_elements(net: Network, x: str) -> str:
    """Pick elements of each row, one of them twice."""
    return net.op("GatherElements", x, net.constant(rows([0, 3, 3, 5]), np.int64), axis=1)


def gather_nd(net: Network, x: str) -> str:
    """Pick one element of each row."""
    pairs = [[row, row % WIDTH] for row in range(BATCH)]
    return net.op("Unsqueeze", net.op("GatherND", x, net.constant(pairs, np.int64)), net.ints(1))


def scatter_elements(net: Network, x: str) -> str:
    """Overwrite elements of each row with others."""
    index = net.constant(rows([1, 4]), np.int64)
    updates = net.op("Gather", x, net.ints(7, 8), axis=1)
    return net.op("ScatterElements", net.op("Neg", x), index, updates, axis=1)


def scatter_nd(net: Network, x: str) -> str:
    """Overwrite whole rows with others."""
    updates = net.op("Gather", x, net.ints(5, 6))
    return net.op("ScatterND", net.op("Neg", x), net.constant([[0], [2]], np.int64), updates)


def split(net: Network, x: str) -> str:
    """Split in two halves and multiply them."""
    return net.op("Mul", *net.op("Split", x, outputs=2, axis=1))


def concat(net: Network, x: str) -> str:
    """Concatenate two different functions."""
    return net.op("Concat", net.op("Relu", x), net.op("Tanh", x), axis=1)


def squares(branch: Branch) -> Branch:
    """Return a branch that sees each row as a 1 x 3 x 4 image."""
    return lambda net, x: branch(net, net.op("Reshape", x, net.ints(-1, 1, 3, 4)))


INDEXING: dict[str, Branch] = {
    "slice": lambda net, x: net.op("Slice", x, net.ints(2), net.ints(9), net.ints(1), net.ints(2)),
    "gather": lambda net, x: net.op("Gather", x, net.ints(1, 1, 6), axis=1),
    "gather_elements": gather_elements,
    "gather_nd": gather_nd,
    "scatter_elements": scatter_elements,
    "scatter_nd": scatter_nd,
    "concat": concat,
    "split": split,
    "pad": lambda net, x: net.op("Pad", x, net.ints(0, 1, 0, 2)),
    "tile": lambda net, x: net.op("Tile", x, net.ints(1, 2)),
    "top_k": lambda net, x: net.op("TopK", x, net.ints(3), outputs=2, axis=1)[0],
    "squeeze": lambda net, x: net.op("Squeeze", net.op("Unsqueeze", x, net.ints(1)), net.ints(1)),
    "expand": squares(lambda net, x: net.op("Expand", x, net.ints(1, 2, 3, 4))),
    "transpose": squares(apply("Transpose", perm=[0, 3, 2, 1])),
    "trilu": squares(apply("Trilu", upper=1)),
    "average_pool": squares(apply("AveragePool", kernel_shape=[2, 2])),
    "max_pool": squares(apply("MaxPool", kernel_shape=[2, 2])),
    "global_average_pool": squares(apply("GlobalAveragePool")),
    "reduce_mean": squares(apply("ReduceMean", axes=[2], keepdims=0)),
    "reduce_sum": squares(lambda net, x: net.op("ReduceSum", x, net.ints(3), keepdims=0)),
    "cast": lambda net, x: net.op("Cast", net.op("Tanh", net.op("Cast", x, to=11)), to=1),
}


def branches(name: str, seed: int, members: dict[str, Branch], batch: str | int = "batch") -> Network:
    """Return the network of these branches."""
    net = Network(name, seed=seed, loss="MSELoss")
    x = net.input("input", [batch, 6], net.rng.standard_normal([BATCH, 6]).astype(np.float32))
    x = net.linear(x, "fc", 6, WIDTH)
    results = []
    for branch in members.values():
        value = net.op("Flatten", branch(net, x))
        results.append(net.op("ReduceMean", value, axes=[1]))
    net.result(net.op("Concat", *results, axis=1), [batch, len(results)])
    net.target("target", net.rng.random([BATCH, len(results)], np.float32))
    return net


def activations() -> Network:
    """Elementwise operators, normalization and reductions."""
    return branches("activations", 4, ACTIVATIONS)


def indexing() -> Network:
    """Operators that move data, and pooling."""
    # AveragePoolGrad on the CPU takes its output shape from the graph: with a symbolic batch it makes 0 rows.
    return branches("indexing", 5, INDEXING, batch=BATCH)


def recurrent() -> Network:
    """An LSTM, then a GRU, over sequences; the mean squared error of the GRU's last state."""
    net = Network("recurrent", seed=6, loss="MSELoss")
    length, features, hidden = 5, 4, 6
    x = net.rng.standard_normal([length, BATCH, features]).astype(np.float32)
    x = net.input("input", [length, BATCH, features], x)
    start = net.constant(np.zeros([1, BATCH, hidden]))
    for op_type, gates, fan_in, states in (("LSTM", 4, features, 2), ("GRU", 3, hidden, 1)):
        stem = op_type.lower()
        weight = net.parameter(f"{stem}.weight", 1, gates * hidden, fan_in)
        recurrence = net.parameter(f"{stem}.recurrence", 1, gates * hidden, hidden)
        bias = net.parameter(f"{stem}.bias", 1, 2 * gates * hidden)
        # The gradient builder mixes up its operands unless all are there: the initial states, and an empty
        # one for the sequence lengths, which the gradient does not support.
        operands = (x, weight, recurrence, bias, "", *[start] * states)
        outputs = net.op(op_type, *operands, outputs=1 + states, hidden_size=hidden)
        x = net.op("Squeeze", outputs[0], net.ints(1))
    last = net.op("Squeeze", outputs[1], net.ints(0))
    net.result(net.linear(last, "fc", hidden, 3), [BATCH, 3])
    net.target("target", net.rng.random([BATCH, 3], np.float32))
    return net
