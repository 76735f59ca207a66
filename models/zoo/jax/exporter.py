"""Export steps that are written in JAX, by jax2onnx."""

import importlib
import importlib.util
import logging
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import onnx_ir as ir
from jax2onnx import to_onnx

from models.zoo import styles
from models.zoo.steps import Arrays, Outputs, Step, Truth

logging.getLogger("onnx_ir").setLevel(logging.ERROR)
# The oldest opset that jax2onnx is tested with.
OLDEST_OPSET = 21


def prepare(kind: str) -> None:
    """Seed the random numbers by the kind's name, so that each kind is the same however many are exported."""
    np.random.seed(zlib.crc32(kind.encode()))
    if keras := sys.modules.get("keras"):
        keras.utils.clear_session()  # which numbers its names


def export(step: Step) -> tuple[ir.Model, Truth, styles.Feeds, list[np.ndarray]]:
    """Return the model, the truth under its names, a value for each input, and the outputs that JAX computes."""
    style, values = step.style, {name: jax.numpy.asarray(value) for name, value in step.inputs.flat().items()}
    run = jax.jit(lambda values: step.run(values).flat())
    sample = shapes_of(step, values)
    for _ in range(step.warm):
        computed = run(values)
        values |= {name: computed[f"{name}_next"] for name in sample.states | sample.kept}
    computed = run(values)
    inputs = styles.permute(list(values), style.order, f"{step.name} in")
    results = styles.permute(list(sample.flat()), style.order, f"{step.name} out")
    model = to_model(step, {name: values[name] for name in inputs}, results)
    renamed = dict(zip(inputs, (value.name for value in model.graph.inputs), strict=True))
    renamed |= dict(zip(results, (value.name for value in model.graph.outputs), strict=True))
    if len(set(renamed.values())) < len(renamed):
        raise ValueError("an output shares its name with another, or with an input")
    feeds = {renamed[name]: np.asarray(values[name]) for name in inputs}
    expected = [np.asarray(computed[name]) for name in results]
    for name, array in zip(results, expected, strict=True):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite in JAX")
    return model, step.truth(sample).renamed(renamed), feeds, expected


def shapes_of(step: Step, values: Arrays) -> Outputs:
    """Return the outputs of a step by role, as shapes; raise a ValueError if a state would change its own."""
    names: list[Outputs] = []

    def run(values: Arrays) -> Arrays:
        names.append(step.run(values))
        return names[0].flat()

    shapes = jax.eval_shape(run, values)
    for name in names[0].states | names[0].kept:
        old, new = values[name], shapes[f"{name}_next"]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise ValueError(f"{name} is {old.dtype}{old.shape}, next {new.dtype}{new.shape}")
    return names[0]


def to_model(step: Step, values: Arrays, results: list[str]) -> ir.Model:
    """Trace and export a step with these inputs and outputs, in this order."""
    style, names = step.style, list(values)

    def flat(*flat_values: jax.Array) -> tuple[jax.Array, ...]:
        computed = step.run(dict(zip(names, flat_values, strict=True))).flat()
        return tuple(computed[name] for name in results)

    proto = to_onnx(
        flat,
        [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values.values()],
        model_name=step.kind,
        opset=max(style.opset, OLDEST_OPSET),
    )
    model = ir.from_proto(proto)
    styles.separate_outputs(model.graph)
    if style.names != "exporter":
        styles.name_interface(model.graph, names, results)
    return model


# The kinds register themselves when their modules are imported.
for path in sorted(Path(__file__).parent.glob("kinds_*.py")):
    if not path.stem.startswith("kinds_keras") or importlib.util.find_spec("keras"):
        importlib.import_module(f"models.zoo.jax.{path.stem}")
