"""Make the artifact folders of ONNX Runtime training sessions that the tests use.

    pip install onnxruntime-training==1.19.2 torch onnx numpy    (Python 3.11 at most; any CPU build of torch)
    python models/ort/artifacts.py [NAME ...]

artifacts/NAME/ holds what `onnxruntime.training.artifacts.generate_artifacts` writes: training_model.onnx,
eval_model.onnx, optimizer_model.onnx and checkpoint. The sample.npz beside them holds two batches, a value for
every user input of the training model (keys `first/INPUT` and `second/INPUT`, in the order of `module(...)`).

generate_artifacts lets the onnx package choose the IR version of the optimizer model. That of onnx 1.23 is 14,
which the runtime it is made for refuses to load, so the script lowers it to 10, as a user has to. In
digits_adamw_ir14 it is left exactly as written.
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from builder import Network
from networks import conv, digits_mlp, transformer
from onnxruntime.training import api, artifacts, onnxblock
from onnxruntime.training.onnxblock import _graph_utils

HERE = Path(__file__).parent / "artifacts"
LOADABLE_IR_VERSION = 10


@dataclass(frozen=True)
class Folder:
    """An artifact folder: a network, an optimizer (a block is built afresh each time), and what to do about its IR."""

    network: Callable[[], Network]
    optimizer: Callable[[], artifacts.OptimType | onnxblock.Block]
    as_written: bool = False


def adamw() -> artifacts.OptimType:
    """AdamW with the default options."""
    return artifacts.OptimType.AdamW


def sgd() -> artifacts.OptimType:
    """SGD without momentum, the only kind there is."""
    return artifacts.OptimType.SGD


def adamw_clip() -> onnxblock.Block:
    """AdamW with weight decay, the gradients clipped by their global norm before."""
    return onnxblock.optim.AdamW(weight_decay=0.01, clip_grad=onnxblock.optim.ClipGradNorm(1.0))


FOLDERS = {
    "digits_adamw": Folder(digits_mlp, adamw),
    "digits_adamw_ir14": Folder(digits_mlp, adamw, as_written=True),
    "digits_adamw_clip": Folder(digits_mlp, adamw_clip),
    "digits_sgd": Folder(digits_mlp, sgd),
    "conv_adamw": Folder(conv, adamw),
    "transformer_adamw": Folder(transformer, adamw),
}


def generate(folder: Folder, path: Path) -> None:
    """Write the four artifacts."""
    network = folder.network()
    # Generated names count up over the whole process: start again, so that each folder is reproducible.
    _graph_utils._GRAPH_TOKEN = 0
    artifacts.generate_artifacts(
        network.model(),
        requires_grad=list(network.parameters),
        frozen_params=list(network.frozen),
        loss=artifacts.LossType[network.loss],
        optimizer=folder.optimizer(),
        artifact_directory=path,
    )
    if not folder.as_written:
        optimizer = onnx.load(path / "optimizer_model.onnx")
        optimizer.ir_version = LOADABLE_IR_VERSION
        onnx.save(optimizer, path / "optimizer_model.onnx")


def batches(network: Network) -> dict[str, dict[str, np.ndarray]]:
    """Return the network's sample batch, and one with the same rows in another order and other targets."""
    order = network.rng.permutation(len(next(iter(network.sample.values()))))
    first = network.sample
    *names, target = first
    second = {name: first[name][order] for name in names} | {target: np.roll(first[target], 1, axis=0)}
    return {"first": first, "second": second}
