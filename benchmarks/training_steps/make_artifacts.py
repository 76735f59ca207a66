"""Make artifact folders of the workloads: run by an interpreter that has onnxruntime-training and PyTorch.

    python benchmarks/training_steps/make_artifacts.py FOLDER [--quick] NAME ...

FOLDER has NAME.forward.onnx from `export_graphs.py`, and gets NAME.artifacts/, of `generate_artifacts`. It imports
PyTorch, and does not use it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnx
from onnxruntime.training import artifacts, onnxblock

sys.path[0] = str(Path(__file__).resolve().parents[1])

from training_steps.workloads import BETAS, EPSILON, WEIGHT_DECAY, Workload, workloads  # noqa: E402

LOADABLE_IR_VERSION = 10  # onnx gives the optimizer model its newest one, which onnxruntime-training refuses


def make(workload: Workload, folder: Path) -> None:
    """Make the folder of a workload."""
    model = onnx.load(folder / f"{workload.name}.forward.onnx")
    weights = workload.weights()
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":  # its gradient needs the mean and the inverse standard deviation
            node.output.extend(f"{node.output[0]}.{part}" for part in ("mean", "inverse"))
    adamw = onnxblock.optim.AdamW(betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    out = folder / f"{workload.name}.artifacts"
    out.mkdir(exist_ok=True)
    artifacts.generate_artifacts(
        model,
        requires_grad=list(weights),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=adamw if workload.optimizer == "adamw" else artifacts.OptimType.SGD,
        artifact_directory=out,
    )
    optimizer = onnx.load(out / "optimizer_model.onnx")
    optimizer.ir_version = LOADABLE_IR_VERSION
    onnx.save(optimizer, out / "optimizer_model.onnx")


def main() -> None:
    """Make the folders of the workloads that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    known = workloads(options.quick)
    for name in options.names:
        make(known[name], options.folder)


if __name__ == "__main__":
    main()
