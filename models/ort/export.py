"""Make the training graphs of ONNX Runtime's own gradient builder that the tests use.

    pip install onnxruntime-training==1.19.2 torch onnx numpy    (Python 3.11 at most; any CPU build of torch)
    python models/ort/export.py [NAME ...]

NAME.onnx is a `training_model.onnx` as `onnxruntime.training.artifacts.generate_artifacts` writes it;
gradbuilder_NAME.onnx comes straight from the GradientGraphBuilder underneath. Beside each, the .npz holds a
sample value for every graph input (key: its name), `expected/OUTPUT` for every graph output, and, for every
input that the run changes in place, `after/INPUT`: the accumulated gradients are found there.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from builder import Network
from gradients import gradient_graph, training_model
from networks import bce, conv, digits_mlp, opset12, regression, transformer
from operators import activations, indexing, recurrent

HERE = Path(__file__).parent
MODELS: dict[str, tuple[Callable[[], Network], Callable[[Network], onnx.ModelProto]]] = {
    "digits_mlp": (digits_mlp, training_model),
    "bce": (bce, training_model),
    "opset12": (opset12, training_model),
    "conv": (conv, training_model),
    "transformer": (transformer, training_model),
    "activations": (activations, training_model),
    "indexing": (indexing, training_model),
    "recurrent": (recurrent, training_model),
    "gradbuilder_mlp": (digits_mlp, gradient_graph),
    "gradbuilder_regression": (regression, gradient_graph),
}
ACCUMULATION_BUFFER = ".accumulation.buffer"


def sample_inputs(model: onnx.ModelProto, network: Network) -> dict[str, np.ndarray]:
    """Return a value for every graph input: batch, parameters, empty accumulation buffers, reset flag."""
    known = network.sample | network.parameters | network.frozen | {"lazy_reset_grad": np.array([True])}
    values = {}
    for value in model.graph.input:
        name = value.name
        if name.endswith(ACCUMULATION_BUFFER):
            parameter = name.removesuffix("_grad" + ACCUMULATION_BUFFER)
            values[name] = np.zeros_like(network.parameters[parameter])
        else:
            values[name] = known[name]
    return values


def run(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the model once in a fresh session; return its outputs and the inputs it changed in place."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    # On the CPU the session works in the memory of the arrays it is fed, so an in-place write shows there.
    feeds = {name: value.copy() for name, value in inputs.items()}
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feeds), strict=True))
    results = {f"expected/{name}": value for name, value in outputs.items()}
    changed = [name for name in inputs if not np.array_equal(feeds[name], inputs[name])]
    return results | {f"after/{name}": feeds[name] for name in changed}


def export(name: str) -> None:
    """Write NAME.onnx and NAME.npz."""
    build, differentiate = MODELS[name]
    network = build()
    model = differentiate(network)
    path = HERE / f"{name}.onnx"
    onnx.save(model, path)
    inputs = sample_inputs(model, network)
    results, again = run(path, inputs), run(path, inputs)
    for key, value in results.items():
        np.testing.assert_array_equal(value, again[key], err_msg=f"{name}: {key} differs from run to run")
    np.savez_compressed(path.with_suffix(".npz"), **inputs, **results)
    size = path.stat().st_size + path.with_suffix(".npz").stat().st_size
    print(f"{name}: {len(model.graph.node)} nodes, {size / 1000:.0f} kB")


def main() -> None:
    """Export the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    if unknown := set(names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    for name in names or MODELS:
        export(name)


if __name__ == "__main__":
    main()
