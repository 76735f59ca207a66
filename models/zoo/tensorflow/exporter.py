"""Export steps that are written in TensorFlow, by tf2onnx with the lowerings of `graphscale.exporters.tensorflow`."""

import importlib
import logging
import zlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from graphscale.exporters.tensorflow.conversion import convert
from models.zoo import styles
from models.zoo.steps import Arrays, Step, Truth

logging.getLogger("onnx_ir").setLevel(logging.ERROR)
# The newest that tf2onnx writes.
NEWEST_OPSET = 18


def prepare(kind: str) -> None:
    """Seed the random numbers by the kind's name, so that each kind is the same however many are exported."""
    np.random.seed(zlib.crc32(kind.encode()))


def export(step: Step) -> tuple[ir.Model, Truth, styles.Feeds, list[np.ndarray]]:
    """Return the model, the truth under its names, a value for each input, and the outputs that TensorFlow computes."""
    style, values = step.style, {name: tf.constant(np.asarray(value)) for name, value in step.inputs.flat().items()}
    for _ in range(step.warm):
        outputs = step.run(values)
        values |= outputs.states | outputs.kept
    outputs = step.run(values)
    computed = outputs.flat()
    for name, value in (outputs.states | outputs.kept).items():
        if (value.dtype, value.shape) != (values[name].dtype, values[name].shape):
            raise ValueError(f"{name} is {values[name].dtype}{values[name].shape}, next {value.dtype}{value.shape}")
    inputs = styles.permute(list(values), style.order, f"{step.name} in")
    results = styles.permute(list(computed), style.order, f"{step.name} out")
    model = to_model(step, {name: values[name] for name in inputs}, results)
    renamed = dict(zip(inputs, (value.name for value in model.graph.inputs), strict=True))
    renamed |= dict(zip(results, (value.name for value in model.graph.outputs), strict=True))
    feeds = {renamed[name]: np.asarray(values[name]) for name in inputs}
    return model, step.truth(outputs).renamed(renamed), feeds, [np.asarray(computed[name]) for name in results]


def to_model(step: Step, values: Arrays, results: list[str]) -> ir.Model:
    """Trace and export a step with these inputs and outputs, in this order."""
    style, names = step.style, list(values)

    def flat(*flat_values: tf.Tensor) -> list[tf.Tensor]:
        computed = step.run(dict(zip(names, flat_values, strict=True))).flat()
        return [tf.identity(computed[name]) for name in results]

    plain = style.names != "exporter"
    given = [
        tf.TensorSpec(value.shape, value.dtype, name=name if plain else f"args_{index}")
        for index, (name, value) in enumerate(values.items())
    ]
    model = ir.from_proto(convert(flat, given, min(style.opset, NEWEST_OPSET)))
    styles.separate_outputs(model.graph)
    if plain:
        styles.name_interface(model.graph, names, results)
    return model


# The kinds register themselves when their modules are imported.
for path in sorted(Path(__file__).parent.glob("kinds_*.py")):
    importlib.import_module(f"models.zoo.tensorflow.{path.stem}")
