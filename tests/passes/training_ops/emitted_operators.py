"""The recorded operators and gradient graphs of onnxruntime-training 1.19.2."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import onnx

from tests.passes.training_ops import forward

_FOLDER = Path(__file__).parent / "emitted"
OPERATORS = _FOLDER / "operators.json"
GRAPHS = _FOLDER / "gradients.zip"


class Emitted(NamedTuple):
    """Operators that onnxruntime-training emits.

    Attributes:
        differentiable: the forward operators that its gradient builder is registered for.
        sources: the forward operators for which each operator that stock ONNX Runtime lacks is emitted.
        undone: the forward cases without a gradient graph.
    """

    differentiable: list[str]
    sources: dict[str, list[str]]
    undone: list[str]


@functools.cache
def read_emitted() -> Emitted:
    """Read the record."""
    return Emitted(**json.loads(OPERATORS.read_text()))


@functools.cache
def read_graphs() -> dict[str, onnx.ModelProto]:
    """Read the gradient graphs, by the name of the forward case."""
    with zipfile.ZipFile(GRAPHS) as archive:
        return {name: onnx.load_from_string(archive.read(name)) for name in archive.namelist()}


def load_forward_operators() -> None:
    """Import all modules of `forward/`, to enter their cases."""
    for module in pkgutil.iter_modules(forward.__path__):
        importlib.import_module(f"{forward.__name__}.{module.name}")
