"""Random weights and data as numpy arrays, for the exporters whose frameworks take those."""

from itertools import pairwise

import numpy as np

from models.zoo.steps import Arrays


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Return random numbers; the exporter seeds them by the kind's name."""
    return (scale * np.random.standard_normal(shape)).astype(np.float32)


def layers(*sizes: int, bias: bool = True) -> Arrays:
    """Return the weights of dense layers: w1, b1, w2, ..."""
    weights = {}
    for index, (rows, columns) in enumerate(pairwise(sizes), start=1):
        weights[f"w{index}"] = normal(rows, columns, scale=rows**-0.5)
        if bias:
            weights[f"b{index}"] = normal(columns, scale=0.1)
    return weights
