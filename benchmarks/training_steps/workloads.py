"""Workloads: sizes, first weights, batches and optimizers, the same for every framework. Needs numpy alone."""

from __future__ import annotations

import dataclasses

import numpy as np

Arrays = dict[str, np.ndarray]

INITIAL_LOSS_SCALE = 2.0**15
INCREMENT_PERIOD = 2000
BATCHES = 4
SGD_RATE = 0.01
# Not AdamW's default epsilon of 1e-8: PyTorch's ONNX exporter takes adding that for adding zero, and drops it.
ADAMW_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-6, 0.01
RATES = {"sgd": SGD_RATE, "adamw": ADAMW_RATE}


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A perceptron with ReLU and softmax cross-entropy.

    Attributes:
        sizes: features, the hidden layers, classes.
    """

    sizes: tuple[int, ...] = (784, 2048, 2048, 10)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights, as PyTorch names and lays them out: [fan_out, fan_in]."""
        found: dict[str, tuple[int, ...]] = {}
        for index in range(1, len(self.sizes)):
            fan_in, fan_out = self.sizes[index - 1], self.sizes[index]
            found |= {f"fc{index}.weight": (fan_out, fan_in), f"fc{index}.bias": (fan_out,)}
        return found

    def batch(self, random: np.random.Generator, size: int) -> Arrays:
        """Features float32 [size, sizes[0]] and classes int64 [size]."""
        return {
            "x": random.standard_normal((size, self.sizes[0])).astype(np.float32),
            "target": random.integers(self.sizes[-1], size=size),
        }


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A pre-norm, causal transformer with GELU, learned positions and a head of its own: 25.2 million weights.

    Attributes:
        vocabulary: the number of tokens.
        length: tokens of a sequence.
        width: of the residual stream; the feed-forward layers are four times as wide.
        heads: of each attention.
        layers: blocks.
    """

    vocabulary: int = 6144
    length: int = 64
    width: int = 512
    heads: int = 8
    layers: int = 6

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights, as PyTorch names and lays them out."""
        width = self.width
        found: dict[str, tuple[int, ...]] = {
            "positions": (self.length, width),
            "tokens.weight": (self.vocabulary, width),
        }
        for index in range(self.layers):
            block = {
                "norm1.weight": (width,),
                "norm1.bias": (width,),
                "attention.qkv.weight": (3 * width, width),
                "attention.out.weight": (width, width),
                "attention.out.bias": (width,),
                "norm2.weight": (width,),
                "norm2.bias": (width,),
                "up.weight": (4 * width, width),
                "up.bias": (4 * width,),
                "down.weight": (width, 4 * width),
                "down.bias": (width,),
            }
            found |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
        last = {"norm.weight": (width,), "norm.bias": (width,)}
        return found | last | {"head.weight": (self.vocabulary, width), "head.bias": (self.vocabulary,)}

    def batch(self, random: np.random.Generator, size: int) -> Arrays:
        """Tokens int64 [size, length], and those one later as targets."""
        text = random.integers(self.vocabulary, size=(size, self.length + 1))
        return {"tokens": np.ascontiguousarray(text[:, :-1]), "target": np.ascontiguousarray(text[:, 1:])}


@dataclasses.dataclass(frozen=True)
class Convnet:
    """3 x 3 convolutions without bias, each with batch norm and ReLU; the mean over the image; a linear layer.

    Every convolution but the first halves the image. The norm is by the batch alone: without running statistics.

    Attributes:
        size: of the square images, which have three channels.
        channels: of each convolution.
        classes: of the images.
    """

    size: int = 32
    channels: tuple[int, ...] = (32, 64, 128)
    classes: int = 10

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights, as PyTorch names and lays them out."""
        found: dict[str, tuple[int, ...]] = {}
        before = 3
        for index, channels in enumerate(self.channels, start=1):
            found |= {f"conv{index}.weight": (channels, before, 3, 3)}
            found |= {f"norm{index}.weight": (channels,), f"norm{index}.bias": (channels,)}
            before = channels
        return found | {"head.weight": (self.classes, before), "head.bias": (self.classes,)}

    def batch(self, random: np.random.Generator, size: int) -> Arrays:
        """Images float32 [size, 3, self.size, self.size] and classes int64 [size]."""
        return {
            "x": random.standard_normal((size, 3, self.size, self.size)).astype(np.float32),
            "target": random.integers(self.classes, size=size),
        }


@dataclasses.dataclass(frozen=True)
class Lstm:
    """An LSTM, unrolled over a sequence, and a linear layer on its last hidden state.

    Attributes:
        length: of a sequence.
        features: of each of its elements.
        width: of the hidden state.
        classes: of the sequences.
    """

    length: int = 16
    features: int = 128
    width: int = 256
    classes: int = 10

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights, as PyTorch lays them out: the input, forget, cell and output gates one below the other."""
        return {
            "input.weight": (4 * self.width, self.features),
            "input.bias": (4 * self.width,),
            "hidden.weight": (4 * self.width, self.width),
            "head.weight": (self.classes, self.width),
            "head.bias": (self.classes,),
        }

    def batch(self, random: np.random.Generator, size: int) -> Arrays:
        """Sequences float32 [size, length, features] and classes int64 [size]."""
        return {
            "x": random.standard_normal((size, self.length, self.features)).astype(np.float32),
            "target": random.integers(self.classes, size=size),
        }


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, a batch size and an optimizer, `sgd` or `adamw`."""

    name: str
    model: Mlp | Decoder | Convnet | Lstm
    batch: int
    optimizer: str

    def weights(self) -> Arrays:
        """The first weights, float32, drawn anew in each call from one seed."""
        random, made = np.random.default_rng(0), {}
        for name, shape in self.model.shapes().items():
            if "norm" in name:
                made[name] = np.full(shape, name.endswith("weight"), np.float32)
            elif name.endswith("bias"):
                made[name] = np.zeros(shape, np.float32)
            else:
                made[name] = (random.standard_normal(shape) * np.prod(shape[1:]) ** -0.5).astype(np.float32)
        return made

    def batches(self) -> list[Arrays]:
        """Return the batches, to be fed in turn."""
        random = np.random.default_rng(1)
        return [self.model.batch(random, self.batch) for _ in range(BATCHES)]

    def size(self) -> int:
        """The number of weights."""
        return sum(int(np.prod(shape)) for shape in self.model.shapes().values())


def workloads(quick: bool) -> dict[str, Workload]:
    """All workloads by name; `quick` makes the models tiny, for a smoke test."""
    mlp = Mlp((16, 32, 32, 10)) if quick else Mlp()
    decoder = Decoder(vocabulary=64, length=8, width=16, heads=2, layers=1) if quick else Decoder()
    convnet = Convnet(size=8, channels=(4, 8)) if quick else Convnet()
    lstm = Lstm(length=3, features=8, width=8) if quick else Lstm()
    made = {}
    for kind, model, sizes in (
        ("mlp", mlp, (8, 64, 256)),
        ("transformer", decoder, (4,)),
        ("convnet", convnet, (32,)),
        ("lstm", lstm, (16,)),
    ):
        for optimizer in ("sgd", "adamw"):
            for size in sizes:
                name = f"{kind}-{size}-{optimizer}"
                made[name] = Workload(name, model, size, optimizer)
    return made


def large_workloads(quick: bool, batch: int = 8, length: int = 512) -> dict[str, Workload]:
    """The workloads of cuda_step.py by name: 100 million weights each.

    Args:
        quick: take tiny ones of `workloads` instead.
        batch: sequences of a batch of the transformer; the perceptron's batches are 1024 rows.
        length: tokens of a sequence.
    """
    if quick:
        small = workloads(True)
        return {name: small[name] for name in small if name.startswith(("transformer-4-", "mlp-8-"))}
    decoder = Decoder(vocabulary=9472, length=length, width=768, heads=12, layers=12)  # 99,980,032 weights at 512
    mlp = Mlp((784, 6880, 6880, 6880, 10))  # 100,152,170 weights
    made = {}
    for optimizer in ("sgd", "adamw"):
        for name, model, size in ((f"transformer-{batch}x{length}", decoder, batch), ("mlp-1024", mlp, 1024)):
            made[f"{name}-{optimizer}"] = Workload(f"{name}-{optimizer}", model, size, optimizer)
    return made
