"""Export the PyTorch training graphs that the tests and the demo use.

    pip install torch==2.13.0 onnx onnxscript onnxruntime numpy
    python models/pytorch/export.py [NAME ...]

Each graph is a whole training step (forward, backward, in some the optimizer) as `torch.onnx.export` makes
it, with the weights as bare inputs. Beside NAME.onnx, NAME.npz holds one sample value for every input, and
under `expected/OUTPUT` what PyTorch itself computed from it; ONNX Runtime has to agree with that here.
"""

import argparse
from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime
import torch
from steps import Step
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_graphs import GRAPHS

HERE = Path(__file__).parent
DEMO = HERE.parent.parent / "graphscale" / "demo"
ELSEWHERE = {"digits_step": DEMO, "reversal_step": DEMO}
OPSET = 20
# The exporter's debugging metadata on every node is most of a file: kept in two, as real examples of it.
WITH_METADATA = {"bce", "mlp_gelu_layernorm"}
# Expected values of larger outputs are checked here, but not stored.
MAX_STORED_ELEMENTS = 4096

# The exporter fakes the second output of nll_loss_forward, the number of targets, as 1, and the backward pass divides
# by it: the gradients of a mean cross-entropy come out too large by the batch size. Decomposed before the export, they
# are right.
DECOMPOSITIONS = get_decompositions([torch.ops.aten.nll_loss_forward])


def trace(step: Step, names: list[str]) -> torch.fx.GraphModule:
    """Trace the step, backward pass included, to one graph of ATen operators."""

    def flat(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(step.run(dict(zip(names, values, strict=True))).values())

    mode = "symbolic" if step.dynamic else "real"
    return make_fx(flat, DECOMPOSITIONS, tracing_mode=mode)(*step.inputs.values())


def export(step: Step, outputs: list[str]) -> ir.Model:
    """Return the ONNX model of a step."""
    names, values = list(step.inputs), tuple(step.inputs.values())
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} if name in step.dynamic else None for name in names)
    program = torch.export.export(trace(step, names), values, dynamic_shapes=shapes)
    exported = torch.onnx.export(
        program,
        dynamo=True,
        input_names=names,
        output_names=outputs,
        opset_version=OPSET,
        dynamic_shapes=shapes if step.dynamic else None,
        verbose=False,
    )
    return exported.model


def largest_error(path: Path, feeds: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest error of ONNX Runtime's outputs, relative to the largest value of each output."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(list(expected), feeds)
    errors = []
    for actual, wanted in zip(outputs, expected.values(), strict=True):
        if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
            raise ValueError(f"{path.name}: expected {wanted.dtype}{wanted.shape}")
        wanted = wanted.astype(np.float64)
        errors.append(np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 1e-6))
    return float(max(errors))


def without_inferred_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the declared types of inner values, a fifth of a compressed graph, if inference restores them."""
    known = {tensor.name for tensor in model.graph.initializer}
    declared = {value.name: value.type for value in model.graph.value_info if value.name not in known}
    model.graph.ClearField("value_info")
    inferred = {value.name: value.type for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    lost = [name for name, type_ in declared.items() if inferred.get(name) != type_]
    if lost:
        raise ValueError(f"the types of {lost} cannot be inferred")
    return model


def build(name: str) -> str:
    """Export and check one graph; return one line of summary."""
    torch.manual_seed(0)
    # The fused attention kernels have no ONNX counterpart for their backward pass.
    with sdpa_kernel(SDPBackend.MATH):
        step = GRAPHS[name]()
        expected = {key: value.detach().numpy() for key, value in step.run(step.inputs).items()}
        model = export(step, list(expected))
    feeds = {key: value.numpy() for key, value in step.inputs.items()}
    path = ELSEWHERE.get(name, HERE) / f"{name}.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    if name not in WITH_METADATA:
        ir.passes.common.ClearMetadataAndDocStringPass()(model)
    ir.save(model, path)
    if name in ELSEWHERE and not step.dynamic:
        onnx.save(without_inferred_types(onnx.load(path)), path)
    error = largest_error(path, feeds, expected)
    half = any(value.dtype == np.float16 for value in expected.values())
    if error > (1e-2 if half else 1e-5):
        raise ValueError(f"{name}: ONNX Runtime differs from PyTorch by {error:.1e}")
    stored = {f"expected/{key}": value for key, value in expected.items() if value.size <= MAX_STORED_ELEMENTS}
    np.savez_compressed(HERE / f"{name}.npz", **feeds, **stored)
    return f"{name}: {len(model.graph)} nodes, {path.stat().st_size} bytes, largest error {error:.1e}"


def main() -> None:
    """Export the graphs named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description="Export the PyTorch training graphs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(GRAPHS)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(GRAPHS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(GRAPHS)}")
    for name in names or GRAPHS:
        print(build(name), flush=True)


if __name__ == "__main__":
    main()
