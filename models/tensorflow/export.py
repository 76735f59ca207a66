"""Export TensorFlow training steps to ONNX, each with one sample batch and the outputs that TensorFlow computes.

    pip install tensorflow-cpu==2.19.0 tf2onnx==1.17.0 onnx==1.22.0 onnxruntime
    python -m models.tensorflow.export [NAME ...]        # no NAME: every step

NAME.onnx is what tf2onnx makes of the step. NAME.npz holds a value for every graph input under its name, and under
`expected/OUTPUT` every output as TensorFlow computed it.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import onnxruntime as ort
import tensorflow as tf

from models.tensorflow.exporter import export_step
from models.tensorflow.steps import STEPS

HERE = Path(__file__).resolve().parent


def export(name: str, folder: Path = HERE) -> str:
    """Write NAME.onnx and NAME.npz if ONNX Runtime computes what TensorFlow computes; return a line of summary."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    step = STEPS[name]()
    batch = {key: tf.constant(value) for key, value in step.task.batch.items()}
    # From zero moments, Adam's first update is the gradient's sign: no value to compare runtimes by.
    for _ in range(3):
        step.run(*batch.values())
    model, pure = export_step(step.run, step.task.batch, step.state)
    outputs = step.run(*batch.values())
    expected = {
        output: outputs[output].numpy() if output in outputs else step.state[output.removesuffix(".next")].numpy()
        for output in pure.outputs
    }
    content = model.SerializeToString()
    feeds = step.task.batch | pure.first
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    for output, actual in zip(pure.outputs, session.run(pure.outputs, feeds), strict=True):
        largest = np.abs(expected[output]).max()
        np.testing.assert_allclose(actual, expected[output], 0, 1e-5 * largest, err_msg=f"{name}: {output}")
    (folder / f"{name}.onnx").write_bytes(content)
    np.savez(folder / f"{name}.npz", **feeds, **{f"expected/{key}": value for key, value in expected.items()})
    return f"{name}: {len(model.graph.node)} nodes, {len(content) / 1000:.0f} kB"


def main() -> None:
    """Export the steps that are named."""
    parser = argparse.ArgumentParser(description="Export TensorFlow training steps to ONNX.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(STEPS)}; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - set(STEPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in names or STEPS:
        print(export(name), flush=True)


if __name__ == "__main__":
    main()
