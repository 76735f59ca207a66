"""Make the artifact folders of ONNX Runtime training sessions that the tests use.

    pip install onnxruntime-training==1.19.2 torch onnx==1.23.2 numpy    (Python 3.11 at most; any CPU build of torch)
    python models/ort/artifacts.py [NAME ...]

artifacts/NAME/ holds what `onnxruntime.training.artifacts.generate_artifacts` writes: training_model.onnx,
eval_model.onnx, optimizer_model.onnx and checkpoint. The sample.npz beside them holds two batches, a value for
every user input of the training model (keys `first/INPUT` and `second/INPUT`).

generate_artifacts lets the onnx package choose the IR version of the optimizer model. That of onnx 1.23 is 14,
which the runtime it is made for refuses to load, so the script lowers it to 10, as a user has to. In
digits_adamw_ir14 it is left exactly as written. Nor does the runtime load the eval model that generate_artifacts
makes of a batch normalization: the node leaves training mode and keeps the outputs of training. They go too.
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
        repair(path)


def repair(path: Path) -> None:
    """Change what keeps the runtime from loading the artifacts."""
    optimizer = onnx.load(path / "optimizer_model.onnx")
    optimizer.ir_version = LOADABLE_IR_VERSION
    onnx.save(optimizer, path / "optimizer_model.onnx")
    evaluation = onnx.load(path / "eval_model.onnx")
    for node in evaluation.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
    onnx.save(evaluation, path / "eval_model.onnx")


def batches(network: Network) -> dict[str, dict[str, np.ndarray]]:
    """Return the network's sample batch, and one with the same rows in another order and other targets."""
    order = network.rng.permutation(len(next(iter(network.sample.values()))))
    first = network.sample
    *names, target = first
    second = {name: first[name][order] for name in names} | {target: np.roll(first[target], 1, axis=0)}
    return {"first": first, "second": second}


def check(path: Path, samples: dict[str, dict[str, np.ndarray]]) -> None:
    """Take two optimizer steps in a training session: the loss stays finite and every parameter moves."""
    state = api.CheckpointState.load_checkpoint(path / "checkpoint")
    module = api.Module(path / "training_model.onnx", state, path / "eval_model.onnx")
    before = {name: parameter.data.copy() for name, parameter in state.parameters if parameter.requires_grad}
    optimizer = api.Optimizer(path / "optimizer_model.onnx", module)
    for sample in samples.values():
        assert np.isfinite(module(*(sample[name] for name in module.input_names())))
        optimizer.step()
        module.lazy_reset_grad()
    for name, value in before.items():
        assert not np.array_equal(value, state.parameters[name].data), f"{path.name}: {name} is not trained"
    module.eval()
    assert np.isfinite(module(*(samples["first"][name] for name in module.input_names())))


def export(name: str) -> None:
    """Write the folder NAME."""
    folder, path = FOLDERS[name], HERE / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    generate(folder, path)
    samples = batches(folder.network())
    arrays = {f"{which}/{key}": value for which, sample in samples.items() for key, value in sample.items()}
    np.savez_compressed(path / "sample.npz", **arrays)
    if not folder.as_written:
        check(path, samples)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"artifacts/{name}: {size / 1000:.0f} kB")


def main() -> None:
    """Write the folders named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := set(names) - set(FOLDERS):
        parser.error(f"no such folder: {', '.join(sorted(unknown))}; there are {', '.join(FOLDERS)}")
    for name in names or FOLDERS:
        export(name)


if __name__ == "__main__":
    main()
