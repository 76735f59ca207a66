"""Export the training steps of step_cost.py and cuda_step.py: run by the interpreter that has PyTorch.

    python benchmarks/training_steps/export_graphs.py FOLDER [--quick] [--rate constant] NAME ...
    python benchmarks/training_steps/export_graphs.py FOLDER --large BATCH LENGTH NAME ...

For each workload, four graphs whose weights are inputs: NAME.step.onnx is the whole step, optimizer inside. Two are for
the loss scale on the host: NAME.gradients.onnx gives the gradients of the scaled loss, and NAME.update.onnx unscales
gradients and is the optimizer. NAME.forward.onnx gives the logits, for `make_artifacts.py`. The learning rate is an
input, as a schedule needs it, or a constant of the graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "models" / "pytorch"), str(ROOT)]

import export as exporter  # noqa: E402
from export import export  # noqa: E402
from steps import Step, Tensors, differentiate, weights_of, zeros_like  # noqa: E402

from models.zoo.pytorch.decompositions import DECOMPOSITIONS  # noqa: E402
from training_steps.torch_networks import loss_of, network  # noqa: E402
from training_steps.workloads import (  # noqa: E402
    ADAMW_RATE,
    BETAS,
    EPSILON,
    RATES,
    SGD_RATE,
    WEIGHT_DECAY,
    Workload,
    large_workloads,
    workloads,
)

Update = Callable[[Tensors, Tensors], Tensors]


def sgd(values: Tensors, gradients: Tensors) -> Tensors:
    """`torch.optim.SGD`."""
    rate = values.get("learning_rate", SGD_RATE)
    return {f"{name}.next": values[name] - rate * gradient for name, gradient in gradients.items()}


def adamw(values: Tensors, gradients: Tensors) -> Tensors:
    """`torch.optim.AdamW`."""
    count, rate = values["step"] + 1, values.get("learning_rate", ADAMW_RATE)
    correction1 = 1 - BETAS[0] ** count
    correction2 = (1 - BETAS[1] ** count).sqrt()
    weights, firsts, seconds = {}, {}, {}
    for name, gradient in gradients.items():
        first = values[f"{name}.exp_avg"].lerp(gradient, 1 - BETAS[0])
        second = (values[f"{name}.exp_avg_sq"] * BETAS[1]).addcmul(gradient, gradient, value=1 - BETAS[1])
        update = first / (second.sqrt() / correction2 + EPSILON)
        decayed = values[name] * (1 - rate * WEIGHT_DECAY)
        weights[f"{name}.next"] = decayed - rate / correction1 * update
        firsts[f"{name}.exp_avg.next"] = first
        seconds[f"{name}.exp_avg_sq.next"] = second
    return weights | firsts | seconds | {"step.next": count}


OPTIMIZERS: dict[str, Update] = {"sgd": sgd, "adamw": adamw}


def steps_of(workload: Workload, *, constant_rate: bool) -> dict[str, Step]:
    """The four graphs of a workload, by the suffix of the file."""
    net, update = network(workload), OPTIMIZERS[workload.optimizer]
    batch = {name: torch.from_numpy(array) for name, array in workload.batches()[0].items()}
    weights, scale = weights_of(net), {"loss_scale": torch.tensor(1.0)}
    moments: Tensors = {}
    if workload.optimizer == "adamw":
        moments = zeros_like(weights, "exp_avg") | zeros_like(weights, "exp_avg_sq") | {"step": torch.zeros(())}
    rate = {} if constant_rate else {"learning_rate": torch.tensor(RATES[workload.optimizer])}
    zeros = {f"grad.{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    def whole(values: Tensors) -> Tensors:
        outputs, gradients = differentiate(net, lambda apply, data, _: loss_of(apply, data), values)
        return outputs | update(values, gradients)

    def gradients_only(values: Tensors) -> Tensors:
        def scaled(apply: Callable, data: Tensors, _: Tensors) -> tuple[torch.Tensor, Tensors]:
            loss = loss_of(apply, data)
            return loss * data["loss_scale"], {"unscaled": loss}

        outputs, gradients = differentiate(net, scaled, values)
        return {"loss": outputs["unscaled"]} | {f"grad.{name}": gradient for name, gradient in gradients.items()}

    def optimizer(values: Tensors) -> Tensors:
        return update(values, {name: values[f"grad.{name}"] / values["loss_scale"] for name in weights})

    def forward(values: Tensors) -> Tensors:
        data = values["tokens"] if "tokens" in values else values["x"]
        logits = torch.func.functional_call(net, {name: values[name] for name in weights}, data)
        return {"logits": logits.flatten(0, -2)}

    data = {name: value for name, value in batch.items() if name != "target"}
    return {
        "forward": Step(forward, data | weights),
        "step": Step(whole, batch | rate | weights | moments),
        "gradients": Step(gradients_only, batch | weights | scale),
        "update": Step(optimizer, weights | zeros | moments | scale | rate),
    }


def main() -> None:
    """Export the workloads that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", nargs=2, type=int, metavar=("BATCH", "LENGTH"), help="those of cuda_step.py")
    parser.add_argument("--rate", choices=["input", "constant"], default="input")
    options = parser.parse_args()
    known = large_workloads(options.quick, *options.large) if options.large else workloads(options.quick)
    options.folder.mkdir(parents=True, exist_ok=True)
    exporter.DECOMPOSITIONS.update(DECOMPOSITIONS)  # the backward pass of a convolution too
    # The fused attention kernels have no ONNX counterpart for their backward pass.
    with sdpa_kernel(SDPBackend.MATH):
        for name in options.names:
            workload = known[name]
            for suffix, step in steps_of(workload, constant_rate=options.rate == "constant").items():
                model = export(step, list(step.run(step.inputs)))
                ir.passes.common.ClearMetadataAndDocStringPass()(model)
                ir.save(model, options.folder / f"{name}.{suffix}.onnx")


if __name__ == "__main__":
    main()
