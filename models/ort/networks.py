"""The networks of the exported training graphs: perceptrons, a convolutional network, a transformer."""

import numpy as np
from builder import Network

BATCH = 8


def digits(network: Network, shape: list) -> str:
    """Add a batch of 8 x 8 images with 17 levels of grey, as in scikit-learn's digits, and their labels."""
    images = network.rng.integers(0, 17, [BATCH, *shape[1:]]) / 16
    network.target("labels", network.rng.integers(0, 10, BATCH))
    return network.input("input", shape, images.astype(np.float32))


def digits_mlp() -> Network:
    """64-64-10, ReLU, cross-entropy."""
    net = Network("digits_mlp", seed=1)
    x = digits(net, ["batch", 64])
    x = net.op("Relu", net.linear(x, "fc1", 64, 64))
    net.result(net.linear(x, "fc2", 64, 10), ["batch", 10])
    return net


def bce() -> Network:
    """12-16-1, tanh, binary cross-entropy that is spelled out in elementary operators."""
    net = Network("bce", seed=7, loss="BCEWithLogitsLoss")
    x = net.input("input", ["batch", 12], net.rng.standard_normal([BATCH, 12]).astype(np.float32))
    net.target("target", net.rng.integers(0, 2, [BATCH, 1]).astype(np.float32))
    x = net.op("Tanh", net.linear(x, "fc1", 12, 16))
    net.result(net.linear(x, "fc2", 16, 1), ["batch", 1])
    return net


def regression() -> Network:
    """12-16-3, sine, with a sum of squares as its output: nothing here has a gradient operator of its own."""
    net = Network("regression", seed=9, loss="")
    x = net.input("input", ["batch", 12], net.rng.standard_normal([BATCH, 12]).astype(np.float32))
    target = net.input("target", ["batch", 3], net.rng.standard_normal([BATCH, 3]).astype(np.float32))
    x = net.linear(net.op("Sin", net.linear(x, "fc1", 12, 16)), "fc2", 16, 3)
    error = net.op("Sub", x, target)
    net.result(net.op("ReduceSum", net.op("Mul", error, error), keepdims=0), [])
    return net


def opset12() -> Network:
    """Features gated by a softmax, then a log-softmax, in an old opset with its own gradient operators."""
    net = Network("opset12", seed=8, opset=12, loss="MSELoss")
    x = net.input("input", ["batch", 12], net.rng.standard_normal([BATCH, 12]).astype(np.float32))
    net.target("target", net.rng.standard_normal([BATCH, 6]).astype(np.float32))
    gate = net.op("Softmax", net.linear(x, "gate", 12, 12), axis=1)
    x = net.op("Div", net.op("Mul", x, gate), net.parameter("scale", 12, around=2.0))
    net.result(net.op("LogSoftmax", net.linear(x, "fc", 12, 6), axis=1), ["batch", 6])
    return net


def batch_norm(net: Network, x: str, name: str, channels: int) -> str:
    """Normalize over the batch, in training mode."""
    scale = net.parameter(f"{name}.weight", channels, around=1.0)
    bias = net.parameter(f"{name}.bias", channels)
    mean = net.buffer(f"{name}.running_mean", np.zeros(channels))
    variance = net.buffer(f"{name}.running_var", np.ones(channels))
    return net.op("BatchNormalization", x, scale, bias, mean, variance, outputs=3, training_mode=1)[0]


def convolution(net: Network, x: str, name: str, channels: int, filters: int) -> str:
    """Apply a 3 x 3 convolution that keeps the size."""
    weight = net.parameter(f"{name}.weight", filters, channels, 3, 3)
    bias = net.parameter(f"{name}.bias", filters)
    return net.op("Conv", x, weight, bias, kernel_shape=[3, 3], pads=[1, 1, 1, 1])


def conv() -> Network:
    """Two convolutions with batch normalization and max pooling; cross-entropy."""
    net = Network("conv", seed=2)
    x = digits(net, ["batch", 1, 8, 8])
    x = net.op("Relu", batch_norm(net, convolution(net, x, "conv1", 1, 8), "norm1", 8))
    x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.op("Relu", batch_norm(net, convolution(net, x, "conv2", 8, 16), "norm2", 16))
    x = net.op("Flatten", net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    net.result(net.linear(x, "fc", 64, 10), ["batch", 10])
    return net


class Transformer(Network):
    """The layers of a transformer of a given width; a batch of token sequences goes through."""

    width = 16
    heads = 2
    length = 8
    vocabulary = 32
    dropout = 0.1

    def dense(self, x: str, name: str, fan_in: int, fan_out: int, bias: bool = True) -> str:
        """Apply a fully connected layer to the last axis, as MatMul and Add."""
        x = self.op("MatMul", x, self.parameter(f"{name}.weight", fan_in, fan_out))
        return self.op("Add", x, self.parameter(f"{name}.bias", fan_out)) if bias else x

    def norm(self, x: str, name: str) -> str:
        """Normalize each token."""
        scale = self.parameter(f"{name}.weight", self.width, around=1.0)
        bias = self.parameter(f"{name}.bias", self.width)
        # The gradient needs the mean and the inverse standard deviation too.
        return self.op("LayerNormalization", x, scale, bias, outputs=3, axis=-1)[0]

    def drop(self, x: str) -> str:
        """Drop out at random: with a seed of its own, a new session always drops the same."""
        ratio, training = self.constant(self.dropout), self.constant(True, bool)
        return self.op("Dropout", x, ratio, training, outputs=2, seed=len(self.nodes))[0]

    def gelu(self, x: str) -> str:
        """Apply the exact GELU, spelled out with Erf as exporters write it."""
        erf = self.op("Erf", self.op("Div", x, self.constant(np.sqrt(2))))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.constant(1))), self.constant(0.5))

    def attention(self, x: str, name: str) -> str:
        """Apply causal multi-head attention."""
        size = self.width // self.heads
        split = self.ints(0, self.length, self.heads, size)
        heads = []
        for part in ("query", "key", "value"):
            y = self.op("Reshape", self.dense(x, f"{name}.{part}", self.width, self.width), split)
            heads.append(self.op("Transpose", y, perm=[0, 2, 3, 1] if part == "key" else [0, 2, 1, 3]))
        query, key, value = heads
        scores = self.op("Mul", self.op("MatMul", query, key), self.constant(1 / np.sqrt(size)))
        mask = np.triu(np.full([self.length, self.length], -1e9), 1)[None, None]
        scores = self.op("Add", scores, self.constant(mask))
        weights = self.drop(self.op("Softmax", scores, axis=-1))
        y = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        y = self.op("Reshape", y, self.ints(0, self.length, self.width))
        return self.dense(y, f"{name}.out", self.width, self.width)

    def block(self, x: str, name: str, bias: bool = True) -> str:
        """Attention and a feed-forward layer, each with a residual connection around."""
        wide = 2 * self.width
        x = self.op("Add", x, self.drop(self.attention(self.norm(x, f"{name}.norm1"), f"{name}.attention")))
        y = self.gelu(self.dense(self.norm(x, f"{name}.norm2"), f"{name}.up", self.width, wide, bias))
        return self.op("Add", x, self.drop(self.dense(y, f"{name}.down", wide, self.width, bias)))


def transformer() -> Network:
    """A language model of two pre-norm blocks with dropout; cross-entropy of the next token."""
    net = Transformer("transformer", seed=3)
    text = net.rng.integers(0, net.vocabulary, [BATCH, net.length + 1])
    tokens = net.input("tokens", ["batch", net.length], text[:, :-1])
    net.target("labels", text[:, 1:].reshape(-1))
    embedding = net.parameter("embedding.weight", net.vocabulary, net.width, spread=0.5)
    position = net.parameter("position.weight", net.length, net.width, spread=0.5)
    x = net.drop(net.op("Add", net.op("Gather", embedding, tokens), position))
    # With a bias the runtime fuses it into BiasGelu, without it makes a plain Gelu: have both.
    x = net.norm(net.block(net.block(x, "block1"), "block2", bias=False), "norm")
    # The loss wants the classes on axis 1.
    x = net.op("Reshape", net.dense(x, "head", net.width, net.vocabulary), net.ints(-1, net.vocabulary))
    net.result(x, ["tokens", net.vocabulary])
    return net
