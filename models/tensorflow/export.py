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
import onnx
import onnxruntime as ort
import tensorflow as tf

import graphscale.exporters.tensorflow
from graphscale.exporters.tensorflow.keras_step import make_keras_step
from models.tensorflow.exporter import export_step
from models.tensorflow.networks import keras_dense
from models.tensorflow.steps import STEPS

# The step of the docs, as graphscale itself exports it.
EXPORTED = "keras_step"
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


def export_by_graphscale(folder: Path = HERE) -> str:
    """Write the files of `keras_step`, which has the values of its state inside."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    task, path = keras_dense(), folder / f"{EXPORTED}.onnx"
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task.model.compile(keras.optimizers.Adam(0.01), cross_entropy)
    batch = tuple(task.batch.values())
    # As above: not from zero moments.
    for _ in range(3):
        task.model.train_on_batch(*batch)
    report = graphscale.exporters.tensorflow.export_step(task.model, batch, path=path)
    step = make_keras_step(task.model, batch)
    first = step.values()
    with step.unchanged():
        outputs = step.run_eagerly(step.batch)
    stored = onnx.load(path)
    expected = {each.name: outputs[each.name.removesuffix(".next")] for each in stored.graph.output}
    feeds = {each.name: (step.batch | first)[each.name] for each in stored.graph.input}
    np.savez(folder / f"{EXPORTED}.npz", **feeds, **{f"expected/{key}": value for key, value in expected.items()})
    return f"{EXPORTED}: {report.nodes} nodes, {path.stat().st_size / 1000:.0f} kB"


def main() -> None:
    """Export the steps that are named."""
    parser = argparse.ArgumentParser(description="Export TensorFlow training steps to ONNX.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join((*STEPS, EXPORTED))}; default: all"
    )
    names = parser.parse_args().names
    if unknown := set(names) - {*STEPS, EXPORTED}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in names or (*STEPS, EXPORTED):
        print(export_by_graphscale() if name == EXPORTED else export(name), flush=True)


if __name__ == "__main__":
    main()
